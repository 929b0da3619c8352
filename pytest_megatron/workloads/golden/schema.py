"""The published schema of a golden file, of a training or of an inference program.

`schemas/golden.schema.json` is made from here. Readers take more than it allows, and note it.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, cast

from pydantic import WithJsonSchema
from typing_extensions import TypedDict

from pytest_megatron.base import schema
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.schema import About, Count, Positive, closed, open_to_others
from pytest_megatron.workloads.golden.formats.layout import PROVENANCE_KEY
from pytest_megatron.workloads.golden.model import LOGPROBS, REQUEST_METRICS, ROUTING, TEXT, TOKENS

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


@open_to_others
class ProvenanceKeys(TypedDict):
    """The origin of the values; every key is optional."""

    command: NotRequired[tuple[str, ...]]
    commit: NotRequired[str]
    config_hash: NotRequired[str]
    is_dirty: NotRequired[bool]
    image: NotRequired[str]
    gpu: NotRequired[str]
    driver: NotRequired[str]
    host_class: NotRequired[str]
    precision: NotRequired[str]
    versions: NotRequired[dict[str, str]]
    date: NotRequired[str]
    repeats: NotRequired[int]
    deterministic: NotRequired[bool]
    audit: NotRequired[str]
    spread: NotRequired[dict[str, float | dict[str, float]]]
    directions: NotRequired[dict[str, str]]
    layout: NotRequired[str]
    policy: NotRequired[str]
    reason: NotRequired[str]
    run: NotRequired[str]
    seed: NotRequired[int]
    supersedes: NotRequired[str]
    world_size: NotRequired[int]


def json_schema() -> dict[str, JsonValue]:
    """Return the JSON schema of a golden file."""
    kinds = cast("type", MetricBlock | ProvenanceKeys)
    found = schema.json_schema(kinds, "golden of pytest-megatron")
    definitions = found["$defs"]
    assert isinstance(definitions, dict)
    definitions["PromptAnswer"] = _ANSWER
    answer = _reference("PromptAnswer")
    return found | {
        "description": "Metrics of a training by name, or answers of an inference program by id.",
        "type": "object",
        "minProperties": 1,
        "anyOf": [
            _by_name(_reference("MetricBlock"), {"type": "number"}),
            _by_name(answer, _FIGURES),
            answer,
        ],
    }


def _reference(name: str) -> JsonValue:
    return {"$ref": f"#/$defs/{name}"}


def _by_name(*kinds: JsonValue) -> JsonValue:
    """Return the schema of an object whose values are of these kinds, beside the provenance."""
    return {
        "properties": {PROVENANCE_KEY: _reference("ProvenanceKeys")},
        "additionalProperties": {"anyOf": list(kinds)},
    }
