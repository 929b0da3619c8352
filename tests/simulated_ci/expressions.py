"""Expressions of GitHub Actions, as far as workflows of ours use them.

Source: docs.github.com, "Evaluate expressions in workflows and actions"
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import cast

from pytest_megatron.base.files import JsonValue

_TOKEN = re.compile(
    r"\s*(?:(?P<text>'(?:[^']|'')*')|(?P<number>-?\d+(?:\.\d+)?)|(?P<name>[A-Za-z_][\w-]*)"
    r"|(?P<sign>==|!=|>=|<=|&&|\|\||[!<>().,\[\]*]))"
)
_IN_TEXT = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)


def fill(text: str, context: Mapping[str, JsonValue]) -> str:
    """Return a text of a workflow with its expressions replaced by their values."""
    return _IN_TEXT.sub(lambda found: shown(evaluate(found[1], context)), text)


def evaluate(expression: str, context: Mapping[str, JsonValue]) -> JsonValue:
    """Return the value of an expression, with or without its `${{ }}`.

    Raises:
        ValueError: It uses what this does not know.
    """
    whole = _IN_TEXT.fullmatch(expression.strip())
    return _Parser(whole[1] if whole else expression, context).parse()


def shown(value: JsonValue) -> str:
    """Return a value as it becomes part of a text."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case float() if value.is_integer():
            return str(int(value))
        case _:
            return json.dumps(value)


def is_true(value: JsonValue) -> bool:
    """Return whether a value lets a step or a job run."""
    return value not in (None, False, 0, "")


class _Parser:
    """Recursive descent: `||` binds least, then `&&`, comparisons, `!`, and what follows a name."""

    def __init__(self, text: str, context: Mapping[str, JsonValue]) -> None:
        self._context = context
        self._tokens: list[tuple[str, str]] = []
        text = text.strip()
        place = 0
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None or found.lastgroup is None:
                raise ValueError(f"cannot read {text[place:]!r} in {text!r}")
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            place = found.end()

    def parse(self) -> JsonValue:
        value = self._or()
        if self._tokens:
            raise ValueError(f"cannot read {self._tokens!r}")
        return value

    def _takes(self, *signs: str) -> str | None:
        if self._tokens and self._tokens[0][0] == "sign" and self._tokens[0][1] in signs:
            return self._tokens.pop(0)[1]
        return None

    def _or(self) -> JsonValue:
        value = self._and()
        while self._takes("||"):
            other = self._and()
            value = value if is_true(value) else other
        return value

    def _and(self) -> JsonValue:
        value = self._comparison()
        while self._takes("&&"):
            other = self._comparison()
            value = other if is_true(value) else value
        return value

    def _comparison(self) -> JsonValue:
        value = self._not()
        sign = self._takes("==", "!=", ">")
        if sign is None:
            return value
        other = self._not()
        if sign == ">":
            return float(shown(value) or 0) > float(shown(other) or 0)
        is_equal = shown(value).lower() == shown(other).lower()
        return is_equal if sign == "==" else not is_equal

    def _not(self) -> JsonValue:
        return not is_true(self._not()) if self._takes("!") else self._path()

    def _path(self) -> JsonValue:
        value = self._atom()
        while sign := self._takes(".", "["):
            if sign == "[":
                key = shown(self._or())
                assert self._takes("]")
                value = _get(value, key)
            elif self._takes("*"):
                assert self._takes(".")
                name = self._tokens.pop(0)[1]
                value = [_get(one, name) for one in value] if isinstance(value, list) else []
            else:
                value = _get(value, self._tokens.pop(0)[1])
        return value

    def _atom(self) -> JsonValue:
        if self._takes("("):
            value = self._or()
            assert self._takes(")")
            return value
        kind, text = self._tokens.pop(0)
        match kind:
            case "text":
                return text[1:-1].replace("''", "'")
            case "number":
                return float(text)
            case "name" if self._takes("("):
                return self._call(text)
            case "name" if text in self._context:
                return self._context[text]
        raise ValueError(f"does not know {text!r}")

    def _call(self, name: str) -> JsonValue:
        arguments: list[JsonValue] = []
        while not self._takes(")"):
            arguments.append(self._or())
            self._takes(",")
        match name:
            case "always" | "cancelled":
                return name == "always"
            case "fromJSON":
                return cast("JsonValue", json.loads(shown(arguments[0])))
            case "contains":
                container, item = arguments
                if isinstance(container, list):
                    return item in container
                return shown(item) in shown(container)
            case "toJSON":
                return json.dumps(arguments[0])
            case "format":
                return re.sub(
                    r"\{(\d+)\}", lambda m: shown(arguments[int(m[1]) + 1]), shown(arguments[0])
                )
            case _:
                pass
        raise ValueError(f"does not know the function {name!r}")


def _get(value: JsonValue, key: str) -> JsonValue:
    """Return a property; what is not there is null, as GitHub has it."""
    return value.get(key) if isinstance(value, dict) else None
