from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.errors import TraceError
from pytest_megatron.trace.settings import (
    BEGIN_VARIABLE,
    VARIABLE,
    TraceSettings,
    read_settings,
    variables_of,
)


def test_settings_pass_through_the_variable() -> None:
    settings = TraceSettings(
        directory=Path("a"),
        steps=3,
        values="full",
        weights_from=Path("w"),
        noise_seed=0,
    )
    assert read_settings({VARIABLE: settings.to_json()}) == settings


def test_a_session_says_how_its_trainings_begin() -> None:
    settings = TraceSettings(directory=Path("a"), values="full")
    assert variables_of(Path("a"), 2, "full", {}) == {VARIABLE: settings.to_json()}
    asked = {BEGIN_VARIABLE: '{"weights_from": "w", "noise_seed": 1}'}
    found = read_settings(variables_of(Path("a"), 2, "full", asked))
    assert found == replace(settings, weights_from=Path("w"), noise_seed=1)
    for text in ("{", "[]", '{"steps": 3}'):
        with pytest.raises(TraceError, match=BEGIN_VARIABLE):
            variables_of(Path("a"), 2, "full", {BEGIN_VARIABLE: text})


def test_without_the_variable_there_are_none() -> None:
    assert read_settings({}) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is no JSON: "),
        ("7", "found 7, expected a mapping; correct it, or unset the variable"),
        ("{}", "directory: is missing; add it"),
        ('{"directory": "a", "steps": 0}', "steps: found 0, expected an integer >= 1"),
        ('{"directory": "a", "steps": true}', "steps: found True, expected an integer"),
        ('{"directory": "a", "values": "all"}', "values: found 'all', expected one of full, hash"),
        ('{"directory": "a", "noise_seed": "1"}', "noise_seed: found '1', expected an integer"),
        ('{"directory": "a", "step": 1}', "step: "),
    ],
)
def test_a_wrong_value_is_named(text: str, problem: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_settings({VARIABLE: text})
    assert str(caught.value).startswith(f"{VARIABLE}: {problem}")
