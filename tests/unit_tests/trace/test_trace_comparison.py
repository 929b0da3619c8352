from __future__ import annotations

import math
from pathlib import Path

import pytest

from pytest_megatron.errors import TraceError
from pytest_megatron.trace.equivalence import (
    NotCompared,
    TensorDivergence,
    TraceComparison,
    as_text,
    read_comparison,
    write_comparison,
)

_FIRST = TensorDivergence(
    order=7,
    step=1,
    microbatch=0,
    phase="gradient",
    module="decoder.layers.1.input_layernorm",
    tensor="weight",
    parameter="decoder.layers.1.input_layernorm.weight",
    ranks=(0, 1),
    norm_ratio=0.5,
    error=0.5,
    limit=1.2e-6,
)
_DIFFERENT = TraceComparison(
    verdict="different",
    steps=2,
    num_compared=120,
    hint="the gradient is half of the reference's, as without a sum over TP",
    divergences=(_FIRST,) * 50,
    num_divergences=61,
    not_compared=(
        NotCompared(module="rotary", tensor="output.0", phase="forward", reason="no rule"),
    ),
)


def test_comparison_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "equivalence.json"
    write_comparison(path, _DIFFERENT)
    assert read_comparison(path) == _DIFFERENT


def test_error_without_bound_is_null_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "equivalence.json"
    one = TensorDivergence(
        order=0, step=1, microbatch=0, phase="forward", module="", tensor="x", error=math.inf
    )
    write_comparison(path, TraceComparison(verdict="different", divergences=(one,)))
    assert read_comparison(path).divergences[0].error is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("{", "is no JSON", id="cut off"),
        pytest.param('{"verdict": "fine"}', "expected one of different, equal", id="word"),
        pytest.param('{"verdict": "equal", "format_version": 2}', "expected 1", id="later"),
    ],
)
def test_foreign_file_is_one_clear_error(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "equivalence.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=problem):
        read_comparison(path)


def test_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_comparison(tmp_path / "equivalence.json")


def test_text_names_the_first_difference_and_fits_a_screen() -> None:
    lines = as_text(_DIFFERENT).splitlines()
    assert lines[:4] == [
        "first difference: decoder.layers.1.input_layernorm.weight, gradient",
        "  step 1, ranks 0-1",
        "  its values differ: error 5.0e-01, limit 1.2e-06, norm 0.5 times the reference's",
        "  hint: the gradient is half of the reference's, as without a sum over TP",
    ]
    assert lines[-2:] == [
        "61 of 120 tensors differ, 1 not compared, 2 steps",
        "  1 not compared: no rule",
    ]
    assert len(lines) <= 20


def test_text_of_unusable_traces_is_their_problem() -> None:
    text = as_text(TraceComparison(verdict="unusable", problem="trace/rank_0.jsonl: is cut off"))
    assert text.startswith("the traces cannot be compared: trace/rank_0.jsonl: is cut off")
