from __future__ import annotations

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import GoldenError
from pytest_megatron.workloads.golden.model import (
    Provenance,
    parse_provenance,
    provenance_to_json,
    series_of,
)


def test_everything_is_optional() -> None:
    assert parse_provenance({}, "g") == Provenance()
    assert provenance_to_json(Provenance()) == {}


def test_a_spread_is_one_number_or_one_a_step() -> None:
    provenance = parse_provenance({"spread": {"a": 0, "b": {"10": 0.5, "1": 0}}}, "g")
    assert provenance.spread == {
        "a": 0.0,
        "b": series_of({1: 0.0, 10: 0.5}, is_full_precision=True),
    }


def test_unknown_keys_are_kept() -> None:
    value: dict[str, JsonValue] = {"commit": "abc", "seed": 7}
    assert provenance_to_json(parse_provenance(value, "g")) == value


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("x", "_provenance is str 'x', expected an object"),
        ({"commit": 3}, "'commit' is int '3', expected text"),
        ({"deterministic": "yes"}, "'deterministic' is str 'yes', expected true or false"),
        ({"repeats": True}, "'repeats' is bool 'True', expected a count"),
        ({"command": [1]}, "'command' is list '[1]', expected a list of text"),
        ({"versions": {"torch": 2}}, "'versions' is not an object of texts"),
        ({"spread": 3}, "'spread' is int '3', expected an object"),
        ({"spread": {"a": -1}}, "the spread of 'a' is neither a number from 0 up nor"),
        ({"spread": {"a": {"x": 1}}}, "the spread of 'a' is neither a number from 0 up nor"),
    ],
    ids=str,
)
def test_a_field_of_another_type_is_named(value: JsonValue, problem: str) -> None:
    with pytest.raises(GoldenError) as caught:
        parse_provenance(value, "g.json")
    assert caught.value.where == "g.json"
    assert problem in caught.value.problem
