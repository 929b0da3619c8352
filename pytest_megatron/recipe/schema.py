"""The published schema of a recipe file: what keys it has and what they hold.

`docs/reference/recipe.schema.json` is made from here. Only `load.py` imports this module, when a
recipe is read: pydantic costs a quarter of a second that other pytest runs should not pay.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NotRequired, TypeAlias, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import nearest

Count: TypeAlias = Annotated[int, Field(ge=0)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
Texts: TypeAlias = Annotated[list[Text], Field(min_length=1)]
Numbers: TypeAlias = Annotated[list[Positive | None], Field(min_length=1)]

_CLOSED = ConfigDict(extra="forbid", strict=True)
_OPEN = ConfigDict(extra="allow", strict=True)


@with_config(_CLOSED)
class QuarantineKeys(TypedDict):
    """Why a failure does not count, and until which day."""

    reason: Text
    until: Annotated[Text, Field(description="The last day that it holds, such as 2026-12-31.")]


@with_config(_OPEN)
class RecipeSpec(TypedDict):
    """What all rows of the file share; any further key is a placeholder for the templates."""

    model: Annotated[Text, Field(description="Directory of the test cases, such as gpt.")]
    gpus: Annotated[
        Count, Field(description="Ranks per node, each with a GPU except on platform cpu.")
    ]
    nodes: NotRequired[Positive]
    name: NotRequired[Annotated[Text, Field(description="Template, filled in from the row.")]]
    build: NotRequired[Annotated[Text, Field(description="Template of the container build.")]]
    platforms: NotRequired[Annotated[Text, Field(description="Where rows without their own run.")]]
    environment: NotRequired[str | None]
    scope: NotRequired[str | None]
    tag: NotRequired[str | None]
    test_case: NotRequired[str | None]
    n_repeat: NotRequired[Positive | None]
    time_limit: NotRequired[Annotated[Positive | None, Field(description="Seconds.")]]
    max_windows: NotRequired[
        Annotated[Positive | None, Field(description="Windows that a release may take.")]
    ]
    script: NotRequired[Annotated[str | None, Field(description="Template, run under bash.")]]
    script_setup: NotRequired[Annotated[str | None, Field(description="Never run by us.")]]
    artifacts: NotRequired[dict[str, str] | None]
    segment: NotRequired[int | None]
    training_script_path: NotRequired[
        Annotated[str | None, Field(description="Program to launch where there is no script.")]
    ]
    data_path: NotRequired[str | None]
    data_cache_path: NotRequired[str | None]
    checkpoint_load_path: NotRequired[str | None]
    max_attempts: NotRequired[Positive | None]
    transient: NotRequired[Annotated[Texts | None, Field(description="Ids of signatures.")]]
    never_transient: NotRequired[Annotated[Texts | None, Field(description="Ids of signatures.")]]
    quarantine: NotRequired[QuarantineKeys | None]


@with_config(_OPEN)
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
    nodes: NotRequired[Annotated[list[Positive], Field(min_length=1)]]
    gpus: NotRequired[Annotated[list[Count], Field(min_length=1)]]
    allow_failure: NotRequired[list[bool]]
    max_attempts: NotRequired[Numbers]
    transient: NotRequired[Annotated[list[Texts], Field(min_length=1)]]
    never_transient: NotRequired[Annotated[list[Texts], Field(min_length=1)]]
    quarantine: NotRequired[Annotated[list[QuarantineKeys], Field(min_length=1)]]


@with_config(_CLOSED)
class ProductEntry(TypedDict):
    """Some test cases and where they run."""

    test_case: Texts
    products: Annotated[list[RecipeProduct], Field(min_length=1)]
    cadence: NotRequired[Texts]


@with_config(_CLOSED)
class BasicRecipe(TypedDict):
    """A recipe of workloads."""

    type: Literal["basic"]
    format_version: Literal[1]
    maintainers: NotRequired[list[str]]
    loggers: NotRequired[list[str]]
    spec: RecipeSpec
    products: Annotated[list[ProductEntry], Field(min_length=1)]


@with_config(_OPEN)
class BuildSource(TypedDict):
    """Where the image of a build comes from."""

    image: str


@with_config(_OPEN)
class BuildSpec(TypedDict):
    """A container build."""

    name: Text
    platforms: NotRequired[list[str]]
    source: NotRequired[BuildSource]


@with_config(_CLOSED)
class BuildRecipe(TypedDict):
    """A recipe of a container build; it gives no workloads."""

    type: Literal["build"]
    format_version: Literal[1]
    maintainers: NotRequired[list[str]]
    loggers: NotRequired[list[str]]
    spec: BuildSpec


Recipe: TypeAlias = Annotated[BasicRecipe | BuildRecipe, Field(discriminator="type")]

_SIMILAR = 0.8
MAX_SHOWN = 60  # characters of a value in a message

_TYPES: dict[str, type[BasicRecipe | BuildRecipe]] = {
    "basic": BasicRecipe,
    "build": BuildRecipe,
}
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "int_type": "an integer",
    "list_type": "a list",
    "string_too_short": "a word",
    "string_type": "a string",
    "too_short": "a list with at least one element",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaProblem:
    """One place where a file departs from the schema.

    Attributes:
        path: From the top of the document.
        rule: A rule of `findings.RULES`.
        message: Names the place by its keys.
    """

    path: tuple[str | int, ...]
    rule: str
    message: str


def check(value: Mapping[str, JsonValue]) -> tuple[SchemaProblem, ...]:
    """Return everything in a recipe file that the schema forbids."""
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        found = f"found {kind!r}" if "type" in value else "is missing"
        hint = nearest(str(kind), _TYPES)
        message = f"type: {found}, expected one of {', '.join(_TYPES)}{hint}"
        return (SchemaProblem(path=("type",), rule="schema", message=message),)
    try:
        TypeAdapter(_TYPES[kind]).validate_python(value)
    except ValidationError as error:
        return tuple(_problem(e, _TYPES[kind]) for e in error.errors(include_url=False))
    return ()


def similar_keys(value: Mapping[str, JsonValue]) -> Iterator[SchemaProblem]:
    """Yield the extra keys of `spec` that look like known ones; they may be meant so."""
    spec = value.get("spec")
    for key in spec if isinstance(spec, dict) and value.get("type") == "basic" else ():
        close = difflib.get_close_matches(key, RecipeSpec.__annotations__, 1, _SIMILAR)
        if close and key not in RecipeSpec.__annotations__:
            message = f"spec.{key}: is a placeholder of its own; did you mean {close[0]!r}?"
            yield SchemaProblem(path=("spec", key), rule="similar-key", message=message)


def json_schema() -> dict[str, JsonValue]:
    """Return the JSON schema of a recipe file."""
    schema = cast("dict[str, JsonValue]", TypeAdapter[Recipe](Recipe).json_schema())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pytest-megatron recipe",
        **schema,
    }


def _problem(error: ErrorDetails, top: type[BasicRecipe | BuildRecipe]) -> SchemaProblem:
    """Put one of pydantic's errors into our words."""
    path, kind = tuple(error["loc"]), error["type"]
    rule, where, found = "schema", dotted(path), shown(error["input"])
    if kind in {"missing", "too_short"} and (path[0], path[2:]) == ("products", ("products",)):
        rule = "no-products"
    if kind == "missing":
        message = f"{where}: is missing; add it"
    elif kind == "extra_forbidden":
        keys = sorted((ProductEntry if path[0] == "products" else top).__annotations__)
        message = f"{where}: unknown key, expected one of {', '.join(keys)}"
        message += nearest(str(path[-1]), keys)
    else:
        message = f"{where}: found {found}, expected {expected(error)}"
        if kind == "list_type" and path[0] == "products" and len(path) > 1:
            rule = "bare-string"
            message += f"; write [{error['input']}]" if isinstance(error["input"], str) else ""
    return SchemaProblem(path=path, rule=rule, message=message)


def shown(value: object) -> str:
    """Return a value from the file, not too much of it."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def expected(error: ErrorDetails) -> str:
    """Return what pydantic expected, in our words."""
    match error["type"]:
        case "greater_than_equal":
            return f"an integer >= {error['ctx']['ge']}"
        case "literal_error":
            return str(error["ctx"]["expected"])
        case "int_type":
            key = next(step for step in reversed(error["loc"]) if isinstance(step, str))
            return f"an integer >= {0 if key == 'gpus' else 1}"
        case kind:
            return _EXPECTED.get(kind, error["msg"])


def dotted(path: Sequence[str | int]) -> str:
    """Return `products[3].products[0].scope` for a path."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
