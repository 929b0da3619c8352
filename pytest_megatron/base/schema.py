"""Validation of data from outside by dataclasses, with an explanation of every error.

A file's keys are the fields of a frozen dataclass (or of a TypedDict, where it matters which keys
are there); limits are `annotated_types` and `Checked`. pydantic does the checking and is imported
only then: it takes a quarter of a second, and tables of the package itself need no check.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar, Union, cast, get_args, get_origin

from annotated_types import Ge, MinLen
from typing_extensions import get_type_hints, override

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import closest, one_of
from pytest_megatron.errors import MegatronError

if TYPE_CHECKING:
    from typing import Never

    from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema, ErrorDetails

    from pytest_megatron.base.yaml import YamlDocument, YamlPath

_T = TypeVar("_T")
_Kind = TypeVar("_Kind", bound=type)
_Schema: TypeAlias = Mapping[str, JsonValue]
_MOST_SHOWN = 60  # characters of a value in a message
_ADD = "; add it"
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # of a key, to pydantic
_WITHOUT_POINT = re.compile(r"(\d+)(e[-+]?\d+)")

Count: TypeAlias = Annotated[int, Ge(0)]
Positive: TypeAlias = Annotated[int, Ge(1)]
Text: TypeAlias = Annotated[str, MinLen(1)]
Texts: TypeAlias = Annotated[tuple[Text, ...], MinLen(1)]


class ExpectedError(ValueError):
    """A key does not take a value; the text names the values that it takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """What pydantic has to know of a type beside it; annotations must not import pydantic.

    Attributes:
        check: Returns a value, or raises a ValueError that has the problem.
        published: Keys for the JSON schema.
        build: Makes pydantic's schema of the type, by its handler; None leaves that to pydantic.
    """

    check: Callable[[Never], object] | None = None
    published: Mapping[str, JsonValue] = field(default_factory=dict)
    build: Callable[[type, GetCoreSchemaHandler], CoreSchema] | None = None

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        from pydantic_core import core_schema  # noqa: PLC0415  slow to import

        schema = handler(source) if self.build is None else self.build(source, handler)
        if self.check is None:
            return schema
        return core_schema.no_info_after_validator_function(self.check, schema)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(schema), **self.published}


def About(text: str) -> Checked:  # noqa: N802 - stands in annotations, as types do
    """Return the description of a key, for the published schema."""
    return Checked(published={"description": text})


def OneOf(choose: Callable[[Mapping[str, JsonValue]], str]) -> Checked:  # noqa: N802 - as above
    """Return that a union of dataclasses has the one whose name `choose` returns for a value."""

    def build(source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema  # noqa: PLC0415  slow to import

        choices = {kind.__name__: handler.generate_schema(kind) for kind in get_args(source)}
        return core_schema.tagged_union_schema(choices, choose)

    return Checked(build=build)


def matches(pattern: str, expected: str = "") -> Checked:
    """Return the limit that a text must match all of a pattern, which `expected` has in words."""

    def check(text: str) -> str:
        """Return the text if the whole of it fits the pattern."""
        if re.fullmatch(pattern, text) is None:
            raise ExpectedError(expected or f"a match of {pattern}")
        return text

    return Checked(check, {"pattern": pattern})


def _check_version(number: int) -> int:
    """Refuse any other version than 1."""
    if number != 1:
        raise ExpectedError("1")
    return number


def _check_finite(number: float) -> float:
    """Refuse nan and infinity."""
    if not math.isfinite(number):
        raise ExpectedError("a finite number")
    return number


def _check_pattern(text: str) -> str:
    """Refuse a text that is no regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        problem = f"pattern {text!r} is no regular expression: {error}"
        raise ValueError(problem) from error
    return text


FINITE = Checked(_check_finite)
# No Literal[1], which takes true as well.
FormatVersion: TypeAlias = Annotated[int, Checked(_check_version, {"const": 1})]
Pattern: TypeAlias = Annotated[str, Checked(_check_pattern)]


def _number(source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
    """Take the texts of numbers that are not finite, as `str` writes them, for these."""
    from pydantic_core import core_schema  # noqa: PLC0415  slow to import

    def from_text(value: object) -> object:
        return float(value) if value in ("inf", "-inf", "nan") else value

    return core_schema.no_info_before_validator_function(from_text, handler(source))


def _any_json(_: type, handler: GetCoreSchemaHandler) -> CoreSchema:
    from pydantic import JsonValue as AnyValue  # noqa: PLC0415  slow to import

    return handler.generate_schema(AnyValue)


Number: TypeAlias = Annotated[float, Checked(build=_number)]
# What pydantic makes of JsonValue has no end.
AnyJson: TypeAlias = Annotated[JsonValue, Checked(build=_any_json)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaProblem:
    """One place where data departs from its schema.

    Attributes:
        path: From the top of the document.
        kind: pydantic's name of the error, such as `missing`.
        text: The value found, the expected one, the remedy.
    """

    path: YamlPath
    kind: str
    text: str

    @property
    def message(self) -> str:
        """The text behind its key."""
        return f"{dotted(self.path)}: {self.text}" if self.path else self.text

    @property
    def in_output(self) -> str:
        """The message for a file that a program wrote, where no user adds a key."""
        return self.message.removesuffix(_ADD)


def key_of(name: str) -> str:
    """Return the key of a file for the name of a field, which has a prefix or a unit besides."""
    return name.removeprefix("is_").removesuffix("_s")


_CLOSED = cast("ConfigDict", {"extra": "forbid", "alias_generator": key_of})
_OPEN = cast("ConfigDict", {"extra": "allow"})


def closed(kind: _Kind) -> _Kind:
    """Mark a dataclass whose keys are all that a mapping may have."""
    kind.__pydantic_config__ = _CLOSED  # type: ignore[attr-defined] # pydantic's own name
    return kind


def open_to_others(kind: _Kind) -> _Kind:
    """Mark a TypedDict beside whose keys a mapping may have others."""
    kind.__pydantic_config__ = _OPEN  # type: ignore[attr-defined] # pydantic's own name
    return kind


class SchemaError(Exception):
    """A value departs from its schema; becomes an error of the caller's kind."""

    def __init__(self, problems: tuple[SchemaProblem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    @override
    def __str__(self) -> str:
        """Return the first problem."""
        return self.problems[0].message


def validate(kind: type[_T], value: JsonValue) -> _T:
    """Return a value as `kind`.

    Args:
        kind: The type of the value.
        value: Plain data, read from YAML, TOML or JSON.

    Raises:
        SchemaError: With everything that is wrong, in the order of the document's keys.
    """
    # As JSON: a list is a tuple there, and a word one of an Enum.
    return parse(kind, json.dumps(value))


def parse(kind: type[_T], text: str | bytes) -> _T:
    """Return the JSON value in a text as `kind`, as `validate`.

    Raises:
        SchemaError: It is no JSON, or departs from the schema.
    """
    from pydantic import ValidationError  # noqa: PLC0415  slow to import

    try:
        return adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise SchemaError(explain(kind, error.errors(include_url=False))) from None


def read(
    kind: type[_T],
    document: YamlDocument,
    error: type[MegatronError],
    value: JsonValue = None,
) -> _T:
    """Return a document, or a `value` with the places of one, as `kind`.

    Raises:
        MegatronError: An `error`, for the first place where it departs from the schema.
    """
    try:
        return validate(kind, document.value if value is None else value)
    except SchemaError as problem:
        first = problem.problems[0]
        raise error(document.where(first.path), first.message) from None


def refuse_duplicates(document: YamlDocument, error: type[MegatronError]) -> None:
    """Raise an error for the first key that a mapping has twice."""
    for twice in document.duplicates:
        where = f"{document.file}:{twice.second_line}"
        raise error(where, f"the key {twice.key!r} is there twice; keep one")


def trusted(kind: type[_T], value: object) -> _T:
    """Return a table of this package, or output of its programs, as `kind`; unchecked."""
    return cast("_T", _built(kind, value))


def json_schema(kind: type, title: str) -> dict[str, JsonValue]:
    """Return the JSON schema that is published for a kind of file."""
    schema = cast("dict[str, JsonValue]", adapter(kind).json_schema())
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **schema, "title": title}


def explain(kind: type, errors: Iterable[ErrorDetails]) -> tuple[SchemaProblem, ...]:
    """Return pydantic's errors in words, one for each place.

    Args:
        kind: The expected type.
        errors: `ValidationError.errors()`.
    """
    schema = cast("_Schema", adapter(kind).json_schema())
    found: dict[YamlPath, SchemaProblem] = {}
    for error in errors:
        problem = _problem(schema, error)
        found.setdefault(problem.path, problem)
    # A list of which an element is wrong is called too short besides, a misspelt key missing.
    outer = {path[:length] for path in found for length in range(len(path))}
    outer |= {(*path[:-1], key) for path in found if (key := _meant_by(path, found)) is not None}
    return tuple(problem for path, problem in found.items() if path not in outer)


def _meant_by(path: YamlPath, found: Mapping[YamlPath, SchemaProblem]) -> str | None:
    """Return the missing key that an unknown one beside it looks like, if there is one."""
    if found[path].kind not in _UNKNOWN:
        return None
    missing = (one for one, problem in found.items() if problem.kind == "missing")
    return closest(str(path[-1]), [str(one[-1]) for one in missing if one[:-1] == path[:-1]])


def shown(value: object) -> str:
    """Return a value of a file, not too much of it."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


def dotted(path: Sequence[str | int]) -> str:
    """Return `products[3].products[0].scope` for a path."""
    text = ""
    for step in path:
        name = f"[{step}]" if isinstance(step, int) else _plain(step)
        text += f".{name}" if text and isinstance(step, str) else name
    return text


def _plain(key: str) -> str:
    return key if key.isprintable() else repr(key)[1:-1]


def adapter(kind: type[_T]) -> TypeAdapter[_T]:
    """Return the validator and serializer of a class; the first use of each costs milliseconds."""
    return cast("TypeAdapter[_T]", _adapter(cast("type", kind)))


@functools.cache
def _adapter(kind: type) -> TypeAdapter[object]:
    """Return pydantic's validator of a class; pydantic is imported late."""
    from pydantic import TypeAdapter  # noqa: PLC0415  slow to import

    return TypeAdapter(kind)


def _problem(schema: _Schema, error: ErrorDetails) -> SchemaProblem:
    """Return one of pydantic's errors in our words."""
    loc, kind, found = tuple(error["loc"]), error["type"], error["input"]
    is_unknown = kind in _UNKNOWN
    if loc[-1:] == ("[key]",) and not is_unknown:
        loc = loc[:-1]  # the key itself is wrong
    node, place = _node_at(schema, loc[:-1] if is_unknown else loc)
    if is_unknown:
        place = (*place, loc[-1])
        text = f"unknown key, expected {one_of(loc[-1], cast('_Schema', node['properties']))}"
    elif kind == "json_invalid":
        text = f"is no JSON: {error['ctx']['error']}"
    elif kind == "missing":
        is_word = "const" in node or "enum" in node
        expected = str(node.get("const") or _expected(schema, node, kind, None))
        text = f"is missing{f', expected {expected}' if is_word else ''}{_ADD}"
    elif kind == "value_error" and not isinstance(error["ctx"]["error"], ExpectedError):
        text = str(error["ctx"]["error"])
    else:
        expected = _expected(schema, node, kind, found)
        if kind == "value_error":
            expected = str(error["ctx"]["error"])
        if kind == "string_pattern_mismatch":  # of a value, or of a key, which has no node
            expected = f"a match of {error['ctx']['pattern']}"
        text = f"found {shown(found)}, expected {expected}"
    return SchemaProblem(path=place, kind=kind, text=text)


def _node_at(schema: _Schema, path: YamlPath) -> tuple[_Schema, YamlPath]:
    """Return the part of a JSON schema for a place, and the place without branches of unions."""
    node, place = _resolved(schema, schema), list[str | int]()
    for step in path:
        tagged = cast("list[Mapping[str, str]]", node.get("oneOf", []))
        branch = next((one for one in tagged if one["$ref"].endswith(f"/{step}")), None)
        if branch is not None:
            node = _resolved(schema, branch)
            continue
        properties = cast("Mapping[str, _Schema]", node.get("properties", {}))
        inner = properties.get(str(step), node.get("items", node.get("additionalProperties")))
        for pattern in cast("Mapping[str, _Schema]", node.get("patternProperties", {})).values():
            inner = pattern
        if not isinstance(inner, dict):
            break
        node = _resolved(schema, inner)
        place.append(step)
    return node, tuple(place)


def _resolved(schema: _Schema, node: _Schema) -> _Schema:
    """Return a node without its reference, or the one choice beside null."""
    if "$ref" in node:
        definitions = cast("Mapping[str, _Schema]", schema["$defs"])
        return _resolved(schema, definitions[str(node["$ref"]).rpartition("/")[2]])
    choices = _choices(node)
    return _resolved(schema, choices[0]) if len(choices) == 1 else node


def _choices(node: _Schema) -> list[_Schema]:
    choices = cast("list[_Schema]", node.get("anyOf", node.get("oneOf", [])))
    return [choice for choice in choices if choice.get("type") != "null"]


_NAMES = {
    "boolean": "true or false",
    "object": "a mapping",
    "string": "a string",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "exclusiveMaximum": "<", "maximum": "<="}


def _expected(schema: _Schema, node: _Schema, kind: str, found: object) -> str:
    """Return the values that a part of a JSON schema takes, and the remedy."""
    if choices := _choices(node):
        parts = (_expected(schema, _resolved(schema, one), kind, None) for one in choices)
        return " or ".join(dict.fromkeys(parts))
    if "enum" in node:
        return one_of(found, cast("list[JsonValue]", node["enum"]))
    match node.get("type"):
        case "integer" | "number" as name if "const" not in node:
            text = "an integer" if name == "integer" else "a number"
            bounds = (f" {sign} {node[key]:g}" for key, sign in _BOUNDS.items() if key in node)
            return text + " and".join(bounds) + _point_hint(found)
        case "array" if kind in {"too_short", "too_long"}:
            is_exact = node.get("minItems") == node.get("maxItems")
            number = f"{node['maxItems']} elements" if is_exact else "at least one element"
            return f"a list with {number}"
        case "array":
            is_word = isinstance(found, str) and found.strip() and found.isprintable()
            return f"a list; write [{shown(found)[1:-1]}]" if is_word else "a list"
        case name:
            text = _NAMES.get(str(name), "another value")
            if kind == "string_too_short":
                least = node.get("minLength", 1)
                text = f"at least {least} characters" if least != 1 else f"{text} that is not empty"
            return repr(node["const"]) if "const" in node else text


def _point_hint(found: object) -> str:
    match = _WITHOUT_POINT.fullmatch(found) if isinstance(found, str) else None
    return f"; YAML 1.1 takes that for a text, write {match[1]}.0{match[2]}" if match else ""


def _built(kind: object, value: object) -> object:
    """Return plain data as the type that an annotation names."""
    if value is None:
        return None
    if isinstance(kind, type) and is_dataclass(kind):
        assert isinstance(value, dict)
        hints = _hints(kind)
        names = [(hints[key], one) for key, one in value.items()]
        return kind(**{name: _built(hint, one) for (name, hint), one in names})
    if isinstance(kind, type) and issubclass(kind, Enum | Path):
        return kind(cast("str", value))
    arguments = get_args(kind)
    if get_origin(kind) in {Union, types.UnionType}:
        return _built(arguments[0], value)
    if get_origin(kind) is tuple:
        assert isinstance(value, list)
        kinds = itertools.repeat(arguments[0]) if arguments[-1] is ... else arguments
        return tuple(map(_built, kinds, value))
    return value


@functools.cache
def _hints(kind: type) -> dict[str, tuple[str, object]]:
    """Return name and type of each field, by its name and by its key in files."""
    hints = get_type_hints(kind).items()
    return {key: (name, hint) for name, hint in hints for key in (name, key_of(name))}
