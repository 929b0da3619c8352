from __future__ import annotations

import math
from pathlib import Path

import pytest

from pytest_megatron.errors import MetricsError
from pytest_megatron.workloads.golden.store import read_json_lines


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    return path


def test_each_line_is_a_step_of_some_metrics(tmp_path: Path) -> None:
    text = (
        '{"step": 2, "lm loss": 4.5}\n\n{"step": 1, "lm loss": 5, "lr": 0.1}\n{"step": 2, "lr": 0}'
    )
    observed = read_json_lines(write(tmp_path, text))
    assert {name: dict(s.items()) for name, s in observed.metrics.items()} == {
        "lm loss": {1: 5.0, 2: 4.5},
        "lr": {1: 0.1, 2: 0.0},
    }


def test_nan_and_infinity_are_kept(tmp_path: Path) -> None:
    text = '{"step": 1, "a": NaN, "b": Infinity, "c": -Infinity}\n'
    values = {n: s.values[0] for n, s in read_json_lines(write(tmp_path, text)).metrics.items()}
    assert math.isnan(float(values["a"]))
    assert (values["b"], values["c"]) == (math.inf, -math.inf)


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = write(tmp_path, '{"step": 1, "a": 1}\n{"step": 2, "a"')
    observed = read_json_lines(path)
    assert observed.metrics["a"].steps == (1,)


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        pytest.param(
            '{"step": 1\n{"step": 2, "a": 1}\n', ":1", "not JSON", id="torn-in-the-middle"
        ),
        pytest.param("[1]\n", ":1", "a list, expected an object", id="list"),
        pytest.param('{"a": 1}\n', ":1", "'step' is None", id="no-step"),
        pytest.param('{"step": true, "a": 1}\n', ":1", "'step' is True", id="boolean-step"),
        pytest.param('{"step": 1, "a": "x"}\n', ":1", "'a' is 'x', expected a number", id="text"),
        pytest.param("", "", "no metrics in 0 lines", id="empty"),
        pytest.param('{"step": 1}\n', "", "no metrics in 1 line;", id="steps-only"),
    ],
)
def test_what_is_no_metric_is_an_error_with_its_line(
    tmp_path: Path, text: str, place: str, problem: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(MetricsError) as caught:
        read_json_lines(path)
    assert caught.value.where == f"{path}{place}"
    assert problem in caught.value.problem


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="cannot be read"):
        read_json_lines(tmp_path / "no.jsonl")


def test_a_step_with_another_value_disagrees_and_with_the_same_one_does_not(tmp_path: Path) -> None:
    """Two ranks that write, or a training that starts again in the same file."""
    path = write(tmp_path, '{"step": 1, "a": 4}\n{"step": 1, "a": 4.5}\n')
    text = (
        "step 1 has two values of 'a', 4.0 and then 4.5; have one rank write it, each "
        "training a file of its own, and a resumed one go on counting"
    )
    assert read_json_lines(path).disagreements == {"a": (f"{path}:2", text)}
    path = write(tmp_path, '{"step": 1, "a": 4, "b": NaN}\n' * 2)
    assert read_json_lines(path).disagreements == {}


def test_deep_nesting_is_an_error_of_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "[" * 100_000 + "]" * 100_000 + "\n\n")
    with pytest.raises(MetricsError, match=r":1: not JSON: "):
        read_json_lines(path)
