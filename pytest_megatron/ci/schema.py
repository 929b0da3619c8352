"""The published schema of `[tool.pytest-megatron.ci]`: `docs/reference/ci.schema.json`.

Imported only to check a table of a project's own: pydantic is slow to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NotRequired, TypeAlias, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from pytest_megatron.base.files import JsonValue
from pytest_megatron.recipe.schema import Count, Positive, Text, Texts, dotted, expected, shown
from pytest_megatron.recipe.vocabulary import nearest

Variable: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_CLOSED = ConfigDict(extra="forbid", strict=True)
Cadence: TypeAlias = Literal["mergegroup", "nightly", "pr", "weekly"]


@with_config(_CLOSED)
class WhenKeys(TypedDict):
    """When a rule decides: all keys must hold, each by one of its words."""

    event: NotRequired[Texts]
    label: NotRequired[Texts]
    ref: NotRequired[Annotated[Texts, Field(description="Patterns of refs; ! takes away.")]]
    cadence: NotRequired[Annotated[list[Cadence], Field(min_length=1)]]


@with_config(_CLOSED)
class RuleKeys(TypedDict):
    """One row of the decision; a rule without `when` always decides."""

    name: Text
    when: NotRequired[WhenKeys]
    scope: Texts
    cadence: NotRequired[Annotated[list[Cadence], Field(description="Missing: no filter.")]]
    environment: NotRequired[Annotated[Text, Field(description="Where no label says otherwise.")]]
    n_repeat: Positive
    lightweight: bool


@with_config(_CLOSED)
class LabelKeys(TypedDict):
    """What a label does beside the rules."""

    label: Text
    environment: NotRequired[Text]
    image: NotRequired[Text]
    suites: NotRequired[Texts]
    env: NotRequired[dict[str, str]]


@with_config(_CLOSED)
class MarkKeys(TypedDict):
    """A mark whose tests are left out: in these environments, of these tags, on these platforms."""

    mark: Text
    environment: NotRequired[Texts]
    tag: NotRequired[Texts]
    platform: NotRequired[Texts]


@with_config(_CLOSED)
class PathKeys(TypedDict):
    """A class of changed paths."""

    name: Text
    match: Texts
    status: NotRequired[Annotated[list[Literal["A", "D", "M"]], Field(min_length=1)]]
    label: NotRequired[Text]
    also: NotRequired[Annotated[Texts, Field(description="Labels besides.")]]


@with_config(_CLOSED)
class WorkflowKeys(TypedDict, total=False):
    """What `ci init` writes into the files for CI."""

    branches: Annotated[Texts, Field(description="Pushes to these are tested.")]
    nightly: Annotated[Text, Field(description="When, as cron has it, UTC.")]
    weekly: Annotated[Text, Field(description="The same.")]
    python: Annotated[Text, Field(description="Version for jobs without an image.")]
    setup: Annotated[Texts, Field(description="Shell lines that install what a job needs.")]
    plan_setup: Annotated[Texts, Field(description="The same for plan and verdict.")]
    plan: Annotated[list[Text], Field(description="Further arguments of the plan.")]
    runners: Annotated[dict[str, Texts], Field(description="Platform to labels of its runners.")]
    images: Annotated[dict[str, Text], Field(description="A plan's image to a container's name.")]
    retention_days: Annotated[Positive, Field(description="How long artifacts are kept.")]
    executor: Annotated[Text, Field(description="Engine of workloads, as --executor.")]
    executor_config: Annotated[Text, Field(description="Its settings, as --executor-config.")]
    pytest_arguments: Annotated[list[Text], Field(description="Further arguments of every job.")]
    secrets: Annotated[list[Variable], Field(description="GitHub secrets that tests get.")]
    registry_secrets: Annotated[
        list[Variable],
        Field(min_length=2, max_length=2, description="User and password of the registry."),
    ]
    cache: Annotated[Texts, Field(description="Paths kept from run to run.")]
    keeps_history: Annotated[bool, Field(description="Keep history and durations.")]


@with_config(_CLOSED)
class CiKeys(TypedDict, total=False):
    """What CI runs for which labels and events."""

    rules: Annotated[list[RuleKeys], Field(min_length=1)]
    labels: list[LabelKeys]
    marks: list[MarkKeys]
    paths: list[PathKeys]
    label_strength: Annotated[list[Text], Field(description="The weakest label first.")]
    events: Texts
    environment: Text
    image: Text
    tag: Annotated[str, Field(description="Of unit-test rows; empty: no filter.")]
    recipes: Texts
    recipe_profile: Literal["compat", "strict"]
    unit_tests: Annotated[Texts, Field(description="Folders whose test files buckets share out.")]
    repeats: Annotated[
        Literal["at-most", "exactly"], Field(description="Whether a row may ask for fewer.")
    ]
    default_time_limit: Annotated[Positive, Field(description="Seconds, of rows without one.")]
    job_margin_minutes: Count
    workflow: WorkflowKeys
    opt_in_platforms: Annotated[
        list[Text], Field(description="Where only tests marked launch_on_<platform> run.")
    ]


def check(value: Mapping[str, JsonValue]) -> tuple[tuple[str, str], ...]:
    """Return everything in a table that the schema forbids: dotted key, and what is wrong."""
    try:
        TypeAdapter(CiKeys).validate_python(value)
    except ValidationError as error:
        return tuple(_problem(one) for one in error.errors(include_url=False))
    return ()


def json_schema() -> dict[str, JsonValue]:
    """Return the JSON schema of the table."""
    schema = cast("dict[str, JsonValue]", TypeAdapter[CiKeys](CiKeys).json_schema())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "[tool.pytest-megatron.ci]",
    }


_TABLES: dict[str, type[RuleKeys | LabelKeys | MarkKeys | PathKeys | WorkflowKeys]] = {
    "rules": RuleKeys,
    "labels": LabelKeys,
    "marks": MarkKeys,
    "paths": PathKeys,
    "workflow": WorkflowKeys,
}


def _problem(error: ErrorDetails) -> tuple[str, str]:
    """Put one of pydantic's errors into our words."""
    path, kind = tuple(error["loc"]), error["type"]
    where = dotted(path)
    if kind == "missing":
        return where, "is missing; add it"
    if kind == "extra_forbidden":
        keys = sorted(_keys_beside(path))
        hint = nearest(str(path[-1]), keys)
        return where, f"unknown key, expected one of {', '.join(keys)}{hint}"
    return where, f"found {shown(error['input'])}, expected {expected(error)}"


def _keys_beside(path: tuple[str | int, ...]) -> frozenset[str]:
    """Return the keys that could stand where an unknown one does."""
    if len(path) == 1:
        return frozenset(CiKeys.__annotations__)
    if path[-2] == "when":
        return frozenset(WhenKeys.__annotations__)
    return frozenset(_TABLES[str(path[0])].__annotations__)
