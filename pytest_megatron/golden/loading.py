"""From the text of a golden to a JSON object, whatever Megatron-LM's repository holds. Pure.

What JSON does not know, or what is no object, is named; what the object means is `document.py`'s.
"""

from __future__ import annotations

import json

from pytest_megatron.errors import EmptyGoldenError, GoldenError
from pytest_megatron.files import JsonValue


def load_object(text: str, where: str) -> tuple[dict[str, JsonValue], list[str]]:
    """Return the JSON object in a text, and what was unusual about it.

    The object may stand in a JSON string, as some of Megatron-LM's tools write it.

    Raises:
        EmptyGoldenError: There is nothing in the text.
        GoldenError: The text is no JSON (with line and column), is JSON lines, has a key twice,
            or is no object. `where` names the file.
    """
    notes: list[str] = []
    value = _load(text, where, notes)
    if isinstance(value, str):
        notes.append("JSON inside a JSON string, decoded twice")
        value = _load(value, where, notes)
    if not isinstance(value, dict):
        raise GoldenError(where, f"holds a JSON {kind_of(value)}, expected an object of metrics")
    return value, notes


def kind_of(value: JsonValue) -> str:
    """Return a JSON value for a message: its type and how it begins."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"list of {len(value)}"
    return f"{type(value).__name__} {str(value)[:40]!r}"


def _load(text: str, where: str, notes: list[str]) -> JsonValue:
    if not text.strip():
        size = len(text.encode())
        raise EmptyGoldenError(where, f"empty file ({size} bytes), expected JSON; record it again")
    literals: list[str] = []

    def keep_literal(literal: str) -> float:
        literals.append(literal)
        return float(literal)

    def refuse_duplicates(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise GoldenError(where, f"the key {twice!r} is there twice; keep one of them")
        return found

    try:
        value: JsonValue = json.loads(
            text, parse_constant=keep_literal, object_pairs_hook=refuse_duplicates
        )
    except ValueError as error:
        raise _explain_syntax(error, text, where) from error
    except RecursionError as error:
        raise GoldenError(where, "JSON nested too deeply, expected an object of metrics") from error
    if literals:
        names = ", ".join(sorted(set(literals)))
        notes.append(f"{len(literals)} bare {names} literal(s), which are not JSON")
    return value


def _explain_syntax(error: ValueError, text: str, where: str) -> GoldenError:
    if not isinstance(error, json.JSONDecodeError):  # a whole number of thousands of digits
        return GoldenError(where, f"not JSON of numbers: {error}")
    num_lines = _count_json_lines(text)
    if num_lines is not None:
        return GoldenError(
            where, f"JSON lines ({num_lines} values, one a line), expected one object"
        )
    return GoldenError(
        f"{where}:{error.lineno}:{error.colno}", f"not JSON: {error.msg[:1].lower()}{error.msg[1:]}"
    )


def _count_json_lines(text: str) -> int | None:
    """Return how many JSON values `text` has, one a line, or None if it is no JSON-lines file."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        for line in lines:
            json.loads(line)
    except ValueError:
        return None
    return len(lines) if len(lines) > 1 else None
