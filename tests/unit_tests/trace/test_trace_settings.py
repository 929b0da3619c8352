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
        ("{", "'{' is not a JSON object; unset it"),
        ("{}", "directory is None, expected a path"),
        ('{"directory": "a", "steps": 0}', "steps is 0, expected a whole number from 1"),
        ('{"directory": "a", "steps": true}', "steps is True, expected a whole number from 1"),
        ('{"directory": "a", "values": "all"}', "values is 'all', expected hash or full"),
        ('{"directory": "a", "noise_seed": "1"}', "noise_seed is '1', expected a whole number"),
        ('{"directory": "a", "step": 1}', "unknown key 'step', expected some of directory"),
    ],
)
def test_a_wrong_value_is_named(text: str, problem: str) -> None:
    with pytest.raises(TraceError) as caught:
        TraceSettings.from_json(text)
    assert str(caught.value).startswith(f"{VARIABLE}: {problem}")
