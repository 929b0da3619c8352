"""The published schema of a golden file, of a training or of an inference program.

`schemas/golden.schema.json` is made from here. Readers take more than it allows, and note it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal, NotRequired

from pydantic import WithJsonSchema
from typing_extensions import TypedDict

from pytest_megatron.base import schema
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.schema import About, Count, Positive, closed
from pytest_megatron.workloads.golden.model import (
    LOGPROBS,
    PROVENANCE_COUNTS,
    PROVENANCE_FLAGS,
    PROVENANCE_TEXTS,
    REQUEST_METRICS,
    ROUTING,
    TEXT,
    TOKENS,
    Provenance,
)
from pytest_megatron.workloads.golden.store import PROVENANCE_KEY

_VALUE: JsonValue = {"type": ["number", "string"]}
_VALUES: dict[str, JsonValue] = {
    "description": "Step to number; a list has the values from start_step on, at equal distances.",
    "anyOf": [
        {
            "type": "object",
            "patternProperties": {"^[0-9]{1,18}$": _VALUE},
            "additionalProperties": False,
        },
        {"type": "array", "items": _VALUE},
    ],
}
_NUMBERS: JsonValue = {"type": ["array", "null"], "items": {"type": "number"}}
_ANSWER: JsonValue = {
    "title": "PromptAnswer",
    "description": "The answer of an inference program to one prompt.",
    "type": "object",
    "properties": {
        TOKENS: {"type": ["array", "null"], "items": {"type": "integer"}},
        TEXT: {"type": ["string", "null"]},
        ROUTING: {"type": ["array", "null"], "items": {"type": "array"}},
        **dict.fromkeys(LOGPROBS, _NUMBERS),
    },
    "anyOf": [{"required": [name]} for name in REQUEST_METRICS],
}
# Of a whole run of an inference program: throughput, peak of memory, a count.
_FIGURES: JsonValue = {"type": ["number", "array", "null"], "items": {"type": "number"}}


@closed
class MetricBlock(TypedDict):
    """The values of one metric."""

    start_step: NotRequired[Count]
    end_step: NotRequired[Count]
    step_interval: NotRequired[Positive]
    value_precision: NotRequired[
        Annotated[Literal["full"], About("Values have all digits; without it, five decimals.")]
    ]
    values: Annotated[object, WithJsonSchema(_VALUES)]


_TEXT_KIND: JsonValue = {"type": "string"}
_TEXTS_KIND: JsonValue = {"type": "object", "additionalProperties": _TEXT_KIND}
_STEPS: JsonValue = {"type": "object", "additionalProperties": {"type": "number"}}
_SPREADS: JsonValue = {"anyOf": [{"type": "number"}, _STEPS]}
_PROVENANCE: dict[str, JsonValue] = {
    **dict.fromkeys(PROVENANCE_TEXTS, _TEXT_KIND),
    **{key: {"type": "boolean"} for key in PROVENANCE_FLAGS},
    **{key: {"type": "integer"} for key in PROVENANCE_COUNTS},
    "command": {"type": "array", "items": _TEXT_KIND},
    "directions": _TEXTS_KIND,
    "spread": {"type": "object", "additionalProperties": _SPREADS},
    "versions": _TEXTS_KIND,
}


def json_schema() -> dict[str, JsonValue]:
    """Return the JSON schema of a golden file."""
    block = schema.json_schema(MetricBlock, "MetricBlock")
    answer = _reference("PromptAnswer")
    return {
        "$schema": block.pop("$schema"),
        "$defs": {"MetricBlock": block, "Provenance": _provenance(), "PromptAnswer": _ANSWER},
        "title": "golden of pytest-megatron",
        "description": "Metrics of a training by name, or answers of an inference program by id.",
        "type": "object",
        "minProperties": 1,
        "anyOf": [
            _by_name(_reference("MetricBlock"), {"type": "number"}),
            _by_name(answer, _FIGURES),
            answer,
        ],
    }


def _provenance() -> JsonValue:
    """Return the JSON Schema of the origin of values."""
    names = [f.name for f in fields(Provenance) if f.name != "extra"]
    return {
        "title": "Provenance",
        "description": "The origin of the values; every key is optional.",
        "type": "object",
        "properties": {name: _PROVENANCE[name] for name in names},
        "additionalProperties": True,
    }


def _reference(name: str) -> JsonValue:
    return {"$ref": f"#/$defs/{name}"}


def _by_name(*kinds: JsonValue) -> JsonValue:
    """Return the schema of an object whose values are of these kinds, beside the provenance."""
    return {
        "properties": {PROVENANCE_KEY: _reference("Provenance")},
        "additionalProperties": {"anyOf": list(kinds)},
    }
