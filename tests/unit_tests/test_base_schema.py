"""Data from outside against a dataclass: what it becomes, and the words for what is wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated

import pytest
from annotated_types import Ge, Len, Lt

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.schema import (
    FINITE,
    Count,
    FormatVersion,
    Pattern,
    SchemaError,
    Text,
    Texts,
    closed,
    json_schema,
    matches,
    read,
    refuse_duplicates,
    trusted,
    validate,
)
from pytest_megatron.base.yaml import parse_document
from pytest_megatron.errors import ConfigError


class Colour(Enum):
    RED = "red"
    GREEN = "green"


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    colour: Colour = Colour.RED
    is_round: bool = False
    limit_s: Annotated[float, Ge(0), Lt(1), FINITE] = 0.5


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    format_version: FormatVersion
    name: Text
    words: Texts = ()
    pair: Annotated[tuple[str, ...], Len(2, 2)] = ()
    count: Count | None = None
    exact: Colour | bool | None = None
    pattern: Pattern | None = None
    inner: dict[str, Inner] = field(default_factory=dict)
    env: dict[Annotated[str, matches("[A-Z]+", "a name in capitals")], str] = field(
        default_factory=dict
    )


GOOD: dict[str, JsonValue] = {"format_version": 1, "name": "a"}


def problems(**values: JsonValue) -> list[str]:
    with pytest.raises(SchemaError) as caught:
        validate(Whole, {**GOOD, **values})
    return [problem.message for problem in caught.value.problems]


def test_lists_words_and_short_names_become_what_the_fields_hold() -> None:
    value: dict[str, JsonValue] = {
        **GOOD,
        "words": ["b", "c"],
        "inner": {"x": {"colour": "green", "round": True, "limit": 0}},
    }
    expected = Whole(
        format_version=1,
        name="a",
        words=("b", "c"),
        inner={"x": Inner(colour=Colour.GREEN, is_round=True, limit_s=0)},
    )
    assert validate(Whole, value) == expected
    simple: dict[str, JsonValue] = {"colour": "green", "round": True}
    assert trusted(Inner, simple) == validate(Inner, simple)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nmae": 1}, "nmae: unknown key, expected one of count, env, exact, format_version, "),
        ({"format_version": 2}, "format_version: found 2, expected 1"),
        ({"format_version": True}, "format_version: found True, expected 1"),
        ({"name": ""}, "name: found '', expected a string that is not empty"),
        ({"name": 1}, "name: found 1, expected a string"),
        ({"words": "b"}, "words: found 'b', expected a list; write [b]"),
        ({"words": []}, "words: found [], expected a list with at least one element"),
        ({"words": ["b", ""]}, "words[1]: found '', expected a string that is not empty"),
        ({"pair": ["b"]}, "pair: found ['b'], expected a list with 2 elements"),
        ({"[key]": 1}, "[key]: unknown key, expected one of count, env, "),
        ({"a\nb": 1}, "a\\nb: unknown key, expected one of count, env, "),
        ({"words": "a\nb"}, "words: found 'a\\nb', expected a list"),
        ({"count": -1}, "count: found -1, expected an integer >= 0"),
        ({"count": "many"}, "count: found 'many', expected an integer >= 0"),
        ({"count": 1.5}, "count: found 1.5, expected an integer >= 0"),
        ({"count": True}, "count: found True, expected an integer >= 0"),
        ({"exact": "blue"}, "exact: found 'blue', expected one of green, red or true or false"),
        ({"pattern": "("}, "pattern: pattern '(' is no regular expression: "),
        ({"inner": []}, "inner: found [], expected a mapping"),
        ({"inner": {"x": 1}}, "inner.x: found 1, expected a mapping"),
        ({"inner": {"x": {"color": "red"}}}, "inner.x.color: unknown key, expected one of colour,"),
        (
            {"inner": {"x": {"colour": "gren"}}},
            "inner.x.colour: found 'gren', expected one of green, red; did you mean 'green'?",
        ),
        ({"inner": {"x": {"is_round": True}}}, "inner.x.is_round: unknown key, expected one of "),
        (
            {"inner": {"x": {"limit": "5e-3"}}},
            "inner.x.limit: found '5e-3', expected a number >= 0 and < 1; YAML 1.1 takes that for",
        ),
        (
            {"inner": {"x": {"limit": float("nan")}}},
            "inner.x.limit: found nan, expected a number >= 0",
        ),
        ({"env": {"a": "b"}}, "env.a: found 'a', expected a name in capitals"),
        ({"env": {"A": None}}, "env.A: found None, expected a string"),
    ],
)
def test_a_wrong_value_is_one_line_with_its_key(values: dict[str, JsonValue], message: str) -> None:
    (found,) = problems(**values)
    assert found.startswith(message)
    assert "\n" not in found


def test_everything_that_is_wrong_is_found_and_nothing_twice() -> None:
    assert problems(words=[1, 2], count=-1, inner={"x": {"colour": 1, "round": 1}}) == [
        "words[0]: found 1, expected a string",
        "words[1]: found 2, expected a string",
        "count: found -1, expected an integer >= 0",
        "inner.x.colour: found 1, expected one of green, red",
        "inner.x.round: found 1, expected true or false",
    ]


def test_an_error_of_a_file_has_its_line() -> None:
    text = "format_version: 1\nname: a\ninner:\n  x:\n    colour: blue\n"
    with pytest.raises(ConfigError, match=r"^f.yaml:5: inner.x.colour: found 'blue', expected one"):
        read(Whole, parse_document(text, Path("f.yaml")), ConfigError)
    with pytest.raises(ConfigError, match=r"^f.yaml:1: name: is missing; add it$"):
        read(Whole, parse_document("format_version: 1\n", Path("f.yaml")), ConfigError)
    with pytest.raises(ConfigError, match=r"^f.yaml:2: the key 'name' is there twice; keep one$"):
        refuse_duplicates(parse_document("name: a\nname: b\n", Path("f.yaml")), ConfigError)


def test_a_published_schema_has_the_limits_and_the_keys_of_the_file() -> None:
    schema = json_schema(Whole, "whole")
    assert (schema["title"], schema["required"]) == ("whole", ["format_version", "name"])
    definitions = schema["$defs"]
    assert isinstance(definitions, dict)
    inner = definitions["Inner"]
    assert isinstance(inner, dict)
    assert isinstance(inner["properties"], dict)
    assert set(inner["properties"]) == {"colour", "round", "limit"}
    assert "[A-Z]+" in str(schema)


def test_pydantic_and_numpy_are_imported_with_the_first_check() -> None:
    code = (
        "import sys, pytest_megatron.base.schema as schema\n"
        "import pytest_megatron.ci.table, pytest_megatron.triage.signatures as signatures\n"
        "import pytest_megatron.pages.command, pytest_megatron.runs.find\n"
        "import pytest_megatron.triage.api\n"
        "import pytest_megatron.ci.summary.model\n"
        "import pytest_megatron.engines.config\n"
        "pytest_megatron.ci.table.built_in_table(), signatures.builtin_table()\n"
        "import pytest_megatron.runs.record as record\n"
        "record.to_json(record.RecordedHealthFile())\n"
        "assert not {'numpy', 'pydantic', 'yaml'} & set(sys.modules)\n"
        "import pytest_megatron.workloads.items.training\n"
        "import pytest_megatron.workloads.commands.golden_refresh\n"
        "assert 'numpy' not in sys.modules\n"
        "assert schema.validate(int, 1) == 1\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
