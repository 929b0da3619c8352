"""Writes the tables of `schemas.md` from the JSON Schemas that the wheel has.

    python docs/reference/schema_tables.py

A test compares the page with the schemas.
"""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from generated_page import write_tables

from pytest_megatron.base.files import JsonValue
from pytest_megatron.cli.recipes import SCHEMAS, schema_path

PAGE = Path(__file__).parent / "schemas.md"
_TYPES = {
    "boolean": "true, false",
    "integer": "whole number",
    "null": "null",
    "number": "number",
    "string": "text",
}
_Schema = dict[str, JsonValue]


def tables() -> str:
    """Return the sections of all schemas."""
    return "\n".join(line for name, files in SCHEMAS.items() for line in _section(name, files))


def _section(name: str, files: str) -> Iterator[str]:
    whole = cast("_Schema", json.loads(schema_path(name).read_text(encoding="utf-8")))
    parts = cast("dict[str, _Schema]", whole.get("$defs", {}))
    yield f"\n## {name}\n"
    yield f"Of `{files}`; `pytest-megatron schema {name}` prints the schema."
    if "properties" not in whole:
        yield "\nA file is one of these:\n"
        yield from (f"- {_takes(parts, one)}" for one in cast("list[_Schema]", whole["anyOf"]))
    for title, part in (("the file", whole), *parts.items()):
        if "properties" in part:
            yield from _table(parts, f"{name}: {title}", part)


def _table(parts: dict[str, _Schema], title: str, part: _Schema) -> Iterator[str]:
    yield f"\n### {title}\n"
    if "description" in part:
        yield f"{_text(part)}\n"
    yield "| key | takes | default | meaning |"
    yield "|---|---|---|---|"
    required = cast("list[str]", part.get("required", []))
    for key, value in cast("dict[str, _Schema]", part["properties"]).items():
        default = "required" if key in required else _default(value.get("default"))
        yield f"| `{key}` | {_takes(parts, value)} | {default} | {_text(value)} |"
    others = part.get("additionalProperties", True)
    patterns = cast("dict[str, JsonValue]", part.get("patternProperties", {}))
    for name, kind in (*patterns.items(), ("any other", others)):
        if kind is not False:
            key = f"`{name}`" if name in patterns else name
            yield f"| {key} | {_takes(parts, kind) if isinstance(kind, dict) else 'anything'} | | |"


def _takes(parts: dict[str, _Schema], value: _Schema) -> str:
    """Return what a value may be, in words."""
    if "$ref" in value:
        name = str(value["$ref"]).rpartition("/")[2]
        return f"*{name}*" if "properties" in parts[name] else _takes(parts, parts[name])
    if "enum" in value or "const" in value:
        choices = cast("list[JsonValue]", value.get("enum", [value.get("const")]))
        return ", ".join(f"`{_shown(choice)}`" for choice in choices)
    if isinstance(types := value.get("type"), list):
        value = {"anyOf": [{**value, "type": kind} for kind in types]}
    for several in ("anyOf", "oneOf"):
        if several in value:
            kinds = (_takes(parts, one) for one in cast("list[_Schema]", value[several]))
            return " or ".join(dict.fromkeys(kinds))
    if value.get("type") == "array":
        items = cast("_Schema", value.get("items", {}))
        return f"list of {_takes(parts, items)}" if items else "list"
    if value.get("type") == "object" or "properties" in value:
        return _mapping(parts, value)
    return _TYPES[str(value["type"])] + _bounds(value) if "type" in value else "anything"


def _mapping(parts: dict[str, _Schema], value: _Schema) -> str:
    named = cast("dict[str, _Schema]", value.get("properties", {}))
    texts = [f"of `{key}` to {_takes(parts, kind)}" for key, kind in named.items()]
    patterns = cast("dict[str, JsonValue]", value.get("patternProperties", {}))
    for kind in (*patterns.values(), value.get("additionalProperties")):
        if isinstance(kind, dict):
            texts.append(f"{'of any other key ' if texts else ''}to {_takes(parts, kind)}")
    return " ".join(["mapping", ", ".join(texts)]).strip()


def _bounds(value: _Schema) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return "".join(f" {sign} {value[key]}" for key, sign in signs.items() if key in value)


def _default(value: JsonValue) -> str:
    return "" if value is None or isinstance(value, list | dict) else f"`{_shown(value)}`"


def _shown(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _text(value: _Schema) -> str:
    text = " ".join(str(value.get("description", "")).split())
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "\\<")


def main() -> None:
    """Replace the tables of the page."""
    write_tables(PAGE, __file__, tables())


if __name__ == "__main__":
    main()
