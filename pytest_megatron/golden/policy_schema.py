"""The published schema of a policy file: what keys it has and what they hold.

`docs/reference/policy.schema.json` is made from here. Only `policy_file.py` imports this module,
when a file is read: pydantic costs a quarter of a second that other runs should not pay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, NotRequired, TypeAlias, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from pytest_megatron.base.files import JsonValue
from pytest_megatron.recipe.schema import dotted, shown
from pytest_megatron.recipe.vocabulary import nearest

_Part: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Fraction: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
_Count: TypeAlias = Annotated[int, Field(ge=0)]
_Patterns: TypeAlias = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
_CLOSED = ConfigDict(extra="forbid", strict=True)


@with_config(_CLOSED)
class MetricKeys(TypedDict):
    """What is changed of one metric; which keys it takes depends on its kind."""

    judged: NotRequired[Annotated[bool, Field(description="False leaves the metric out.")]]
    kind: NotRequired[
        Annotated[
            Literal["loss", "count", "cost", "memory"],
            Field(description="Of a metric that is not what its name says."),
        ]
    ]
    exact: NotRequired[
        Annotated[
            Literal["auto", "always", "never"] | bool,
            Field(description="When every bit counts; under megatron true or false."),
        ]
    ]
    approximate: NotRequired[
        Annotated[_Part, Field(description="Under megatron: relative tolerance of a step.")]
    ]
    step_1: NotRequired[Annotated[_Part, Field(description="Of the first step.")]]
    early_steps: NotRequired[Annotated[_Count, Field(description="Length of the early window.")]]
    early_band: NotRequired[Annotated[_Part, Field(description="Of each step in it.")]]
    band: NotRequired[Annotated[_Part, Field(description="Of each step, where none is learned.")]]
    floor: NotRequired[Annotated[_Part, Field(description="The narrowest band that is learned.")]]
    learned_floor: NotRequired[
        Annotated[_Part, Field(description="The same on the platform of the repeats.")]
    ]
    absolute: NotRequired[
        Annotated[_Part, Field(description="In the metric's own unit, beside every band.")]
    ]
    outside_fraction: NotRequired[
        Annotated[_Fraction, Field(description="Of the steps, those that may be outside.")]
    ]
    outside_factor: NotRequired[
        Annotated[float, Field(ge=1, description="By how many bands each of them.")]
    ]
    mean: NotRequired[Annotated[_Part, Field(description="Of the mean of all steps.")]]
    tail_mean: NotRequired[Annotated[_Part, Field(description="Of that of the last quarter.")]]
    window_mean: NotRequired[
        Annotated[_Part, Field(description="Of that of each twentieth of the steps.")]
    ]
    median: NotRequired[Annotated[_Part, Field(description="Of the median.")]]
    quartile: NotRequired[
        Annotated[_Part, Field(description="Of the border of the worst quarter.")]
    ]
    peak: NotRequired[Annotated[_Part, Field(description="Of the largest value.")]]
    frozen_steps: NotRequired[Annotated[_Count, Field(description="From how many is frozen.")]]
    frozen_fraction: NotRequired[Annotated[_Fraction, Field(description="As a part of all.")]]
    warm_up: NotRequired[Annotated[_Fraction, Field(description="Part that is left out first.")]]
    worse: NotRequired[
        Annotated[
            Literal["higher", "lower", "either"],
            Field(description="The side that fails; either judges both."),
        ]
    ]


Metrics: TypeAlias = Annotated[
    dict[str, MetricKeys],
    Field(description="Name of a metric, or a pattern with * and ?, to its limits."),
]


@with_config(_CLOSED)
class OverrideKeys(TypedDict):
    """Limits for some workloads; without a list for all."""

    cases: NotRequired[
        Annotated[_Patterns, Field(description="<model>/<test_case>, with * and ?.")]
    ]
    platforms: NotRequired[Annotated[_Patterns, Field(description="Such as dgx_h100.")]]
    environments: NotRequired[Annotated[_Patterns, Field(description="Such as dev.")]]
    metrics: Metrics


@with_config(_CLOSED)
class PolicyKeys(TypedDict):
    """A policy of one's own."""

    format_version: Literal[1]
    inherit: Literal["strict", "megatron"]
    metrics: NotRequired[Metrics]
    overrides: NotRequired[Annotated[list[OverrideKeys], Field(min_length=1)]]


_WITHOUT_POINT = re.compile(r"\d+e[-+]?\d+")
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "string_too_short": "a pattern",
    "string_type": "a text",
    "too_short": "a list with at least one element",
}


def check(value: Mapping[str, JsonValue]) -> tuple[tuple[str | int, ...], str] | None:
    """Return the first place where a policy file departs from the schema, and what is wrong."""
    try:
        TypeAdapter(PolicyKeys).validate_python(value)
    except ValidationError as error:
        return _problem(error.errors(include_url=False)[0])
    return None


def json_schema() -> dict[str, JsonValue]:
    """Return the JSON schema of a policy file."""
    schema = cast("dict[str, JsonValue]", TypeAdapter(PolicyKeys).json_schema())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "pytest-megatron golden policy",
    }


def _problem(error: ErrorDetails) -> tuple[tuple[str | int, ...], str]:
    """Put one of pydantic's errors into our words."""
    path, kind = tuple(error["loc"]), error["type"]
    if "exact" in path:  # the union's branch is no place in the file
        path = path[: path.index("exact") + 1]
        return path, f"{dotted(path)}: found {shown(error['input'])}, expected auto, always, never"
    if kind == "missing":
        return path, f"{dotted(path)}: is missing; add it"
    if kind == "extra_forbidden":
        keys = sorted(_keys_at(path[:-1]))
        return path, (
            f"{dotted(path)}: unknown key, expected one of {', '.join(keys)}"
            f"{nearest(str(path[-1]), keys)}"
        )
    found = error["input"]
    hint = ""
    if isinstance(found, str) and _WITHOUT_POINT.fullmatch(found):
        mantissa, exponent = found.split("e")
        hint = f"; YAML 1.1 takes that for a text, write {mantissa}.0e{exponent}"
    return path, f"{dotted(path)}: found {shown(found)}, expected {_expected(error)}{hint}"


def _keys_at(path: tuple[str | int, ...]) -> frozenset[str]:
    if not path:
        return frozenset(PolicyKeys.__annotations__)
    is_metric = len(path) > 1 and path[-2] == "metrics"
    return frozenset((MetricKeys if is_metric else OverrideKeys).__annotations__)


def _expected(error: ErrorDetails) -> str:
    """Return what pydantic expected, in our words."""
    match error["type"]:
        case "greater_than_equal":
            return f"a number from {error['ctx']['ge']:g} up"
        case "less_than":
            return f"a number below {error['ctx']['lt']:g}"
        case "literal_error":
            return str(error["ctx"]["expected"])
        case kind:
            return _EXPECTED.get(kind, error["msg"])
