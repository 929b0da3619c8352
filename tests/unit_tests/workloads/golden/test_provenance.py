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


def test_other_keys_are_ignored() -> None:
    assert parse_provenance({"commit": "abc", "seed": 7}, "g") == Provenance(commit="abc")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("x", "_provenance is str 'x', expected an object"),
        ({"commit": 3}, "_provenance.commit: found 3, expected a string"),
        ({"versions": {"torch": 2}}, "versions.torch: found 2, expected a string"),
        ({"spread": 3}, "_provenance.spread: found 3, expected a mapping"),
        ({"spread": {"a": -1}}, "spread.a: found -1, expected a number >= 0 or a mapping"),
        ({"spread": {"a": {"x": 1}}}, "spread.a: found {'x': 1}, expected"),
    ],
    ids=str,
)
def test_a_field_of_another_type_is_named(value: JsonValue, problem: str) -> None:
    with pytest.raises(GoldenError) as caught:
        parse_provenance(value, "g.json")
    assert caught.value.where == "g.json"
    assert problem in caught.value.problem
