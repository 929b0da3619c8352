"""The published schema of a recipe file: its keys and their values.

`schemas/recipe.schema.json` is made from here. A recipe stays a mapping: any further key of
its spec is a placeholder, and Megatron-LM's own reading of it needs no schema.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, NotRequired, TypeAlias, cast

from annotated_types import MinLen
from typing_extensions import TypedDict

from pytest_megatron.base import schema
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.schema import (
    About,
    Count,
    FormatVersion,
    Positive,
    SchemaError,
    SchemaProblem,
    Text,
    Texts,
    closed,
    open_to_others,
)
from pytest_megatron.base.text import one_of
from pytest_megatron.base.yaml import YamlDocument
from pytest_megatron.recipe.findings import Finding, Severity, finding_at

Numbers: TypeAlias = Annotated[tuple[Positive | None, ...], MinLen(1)]


@closed
class QuarantineKeys(TypedDict):
    """The reason that a failure does not count, and the last day of that."""

    reason: Text
    until: Annotated[Text, About("The last day that it holds, such as 2026-12-31.")]


@open_to_others
class RecipeSpec(TypedDict):
    """Keys that all rows of the file share; any further key is a placeholder for the templates."""

    model: Annotated[Text, About("Directory of the test cases, such as gpt.")]
    gpus: Annotated[Count, About("Ranks per node, each with a GPU except on platform cpu.")]
    nodes: NotRequired[Positive]
    name: NotRequired[Annotated[Text, About("Template, filled in from the row.")]]
    build: NotRequired[Annotated[Text, About("Template of the container build.")]]
    platforms: NotRequired[Annotated[Text, About("Where rows without their own run.")]]
    environment: NotRequired[str | None]
    scope: NotRequired[str | None]
    tag: NotRequired[str | None]
    test_case: NotRequired[str | None]
    n_repeat: NotRequired[Positive | None]
    time_limit: NotRequired[Annotated[Positive | None, About("Seconds.")]]
    max_windows: NotRequired[Annotated[Positive | None, About("Windows that a release may take.")]]
    script: NotRequired[Annotated[str | None, About("Template, run under bash.")]]
    script_setup: NotRequired[Annotated[str | None, About("Never run by us.")]]
    artifacts: NotRequired[dict[str, str] | None]
    segment: NotRequired[int | None]
    training_script_path: NotRequired[
        Annotated[str | None, About("Program to launch where there is no script.")]
    ]
    data_path: NotRequired[str | None]
    data_cache_path: NotRequired[str | None]
    checkpoint_load_path: NotRequired[str | None]
    max_attempts: NotRequired[Positive | None]
    transient: NotRequired[Annotated[Texts | None, About("Ids of signatures.")]]
    never_transient: NotRequired[Annotated[Texts | None, About("Ids of signatures.")]]
    quarantine: NotRequired[QuarantineKeys | None]


@open_to_others
class RecipeProduct(TypedDict):
    """Lists whose cartesian product makes rows; a key of `spec` here overrides it."""

    environment: NotRequired[Texts]
    scope: NotRequired[Texts]
    platforms: NotRequired[Texts]
    tag: NotRequired[Texts]
    cadence: NotRequired[Texts]
    model: NotRequired[Texts]
    n_repeat: NotRequired[Numbers]
    time_limit: NotRequired[Numbers]
    max_windows: NotRequired[Numbers]
    nodes: NotRequired[Annotated[tuple[Positive, ...], MinLen(1)]]
    gpus: NotRequired[Annotated[tuple[Count, ...], MinLen(1)]]
    allow_failure: NotRequired[tuple[bool, ...]]
    max_attempts: NotRequired[Numbers]
    transient: NotRequired[Annotated[tuple[Texts, ...], MinLen(1)]]
    never_transient: NotRequired[Annotated[tuple[Texts, ...], MinLen(1)]]
    quarantine: NotRequired[Annotated[tuple[QuarantineKeys, ...], MinLen(1)]]


@closed
class ProductEntry(TypedDict):
    """Some test cases and where they run."""

    test_case: Texts
    products: Annotated[tuple[RecipeProduct, ...], MinLen(1)]
    cadence: NotRequired[Texts]


@closed
class BasicRecipe(TypedDict):
    """A recipe of workloads."""

    type: Literal["basic"]
    format_version: FormatVersion
    maintainers: NotRequired[tuple[str, ...]]
    loggers: NotRequired[tuple[str, ...]]
    spec: RecipeSpec
    products: Annotated[tuple[ProductEntry, ...], MinLen(1)]


@open_to_others
class BuildSource(TypedDict):
    """The source of a build's image."""

    image: str


@open_to_others
class BuildSpec(TypedDict):
    """A container build."""

    name: Text
    platforms: NotRequired[tuple[str, ...]]
    source: NotRequired[BuildSource]


@closed
class BuildRecipe(TypedDict):
    """A recipe of a container build; it gives no workloads."""

    type: Literal["build"]
    format_version: FormatVersion
    maintainers: NotRequired[tuple[str, ...]]
    loggers: NotRequired[tuple[str, ...]]
    spec: BuildSpec


_SIMILAR = 0.8
_TYPES: dict[str, type[BasicRecipe | BuildRecipe]] = {
    "basic": BasicRecipe,
    "build": BuildRecipe,
}


def check(value: Mapping[str, JsonValue]) -> tuple[SchemaProblem, ...]:
    """Return everything in a recipe file that the schema forbids."""
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        found = f"found {kind!r}" if "type" in value else "is missing"
        text = f"{found}, expected {one_of(kind, _TYPES)}"
        return (SchemaProblem(path=("type",), kind="type", text=text),)
    try:
        schema.validate(_TYPES[kind], dict(value))
    except SchemaError as error:
        return error.problems
    return ()


def finding_of(document: YamlDocument, problem: SchemaProblem) -> Finding:
    """Return a departure from the schema under its rule."""
    path, rule = problem.path, "schema"
    if problem.kind in {"missing", "too_short"} and path[:1] + path[2:] == ("products",) * 2:
        rule = "no-products"
    if problem.kind == "tuple_type" and path[0] == "products" and len(path) > 1:
        rule = "bare-string"
    return finding_at(document, path, rule, problem.message)


def similar_keys(document: YamlDocument) -> Iterator[Finding]:
    """Yield the extra keys of `spec` that look like known ones; they may be meant so."""
    spec = document.value.get("spec")
    known = RecipeSpec.__annotations__
    for key in spec if isinstance(spec, dict) and document.value.get("type") == "basic" else ():
        close = difflib.get_close_matches(key, known, 1, _SIMILAR)
        if close and key not in known:
            message = f"spec.{key}: is a placeholder of its own; did you mean {close[0]!r}?"
            yield finding_at(document, ("spec", key), "similar-key", message, Severity.WARNING)


def json_schema() -> dict[str, JsonValue]:
    """Return the JSON schema of a recipe file."""
    return schema.json_schema(cast("type", BasicRecipe | BuildRecipe), "pytest-megatron recipe")
