"""Makes the tables of keys of `executor-config.md` from the settings, for the site."""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import cast

from pytest_megatron.base.files import JsonValue
from pytest_megatron.engines.config import json_schema

_TYPES = {
    "array": "list",
    "boolean": "true, false",
    "integer": "whole number",
    "number": "number",
    "object": "mapping",
    "string": "text",
}
_TITLES = {
    "SlurmConfig": "slurm",
    "PlaceConfig": "slurm.platforms.NAME",
    "ContainerConfig": "slurm.container",
    "UvSyncConfig": "slurm.uv_sync",
    "DockerConfig": "docker",
}
_Schema = dict[str, JsonValue]


def tables() -> Iterator[str]:
    """Yield the lines of all tables, with their headings."""
    parts = cast("dict[str, _Schema]", json_schema()["$defs"])
    for name, title in _TITLES.items():
        yield from _table(parts, name, title)


def _table(parts: dict[str, _Schema], name: str, title: str) -> Iterator[str]:
    yield f"\n### {title}\n"
    if name == "PlaceConfig":
        own = [key for key in _keys(parts["SlurmConfig"]) if key not in _keys(parts[name])]
        yield f"Every key of `slurm` but {', '.join(f'`{key}`' for key in own)}."
        yield "Variables in `env` and `job_env` are added to those for all platforms; any other key"
        yield "takes the place of the one for all."
        return
    required = cast("list[str]", parts[name].get("required", []))
    yield "| key | takes | default | meaning |"
    yield "|---|---|---|---|"
    for key, value in _keys(parts[name]).items():
        default = "required" if key in required else _default(value.get("default"))
        text = str(value["description"]).replace("|", "\\|")
        yield f"| `{key}` | {_takes(parts, value)} | {default} | {text} |"


def _keys(schema: _Schema) -> dict[str, _Schema]:
    return cast("dict[str, _Schema]", schema["properties"])


def _takes(parts: dict[str, _Schema], value: _Schema) -> str:
    for one in cast("list[_Schema]", value.get("anyOf", [value])):
        kind = parts[str(one["$ref"]).rpartition("/")[2]] if "$ref" in one else one
        if "enum" in kind:
            return ", ".join(f"`{word}`" for word in cast("list[str]", kind["enum"]))
        if kind["type"] != "null":
            return _TYPES[str(kind["type"])]
    raise AssertionError(value)


def _default(value: JsonValue) -> str:
    return "" if value in (None, [], {}) else f"`{json.dumps(value)}`".replace('"', "")
