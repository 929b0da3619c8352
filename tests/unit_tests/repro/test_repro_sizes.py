"""On how few ranks a training can run."""

from __future__ import annotations

import pytest

from pytest_megatron.errors import ReproError
from pytest_megatron.repro.compare import say_fewer_ranks, typed_sizes
from pytest_megatron.workloads.recipe.case import ParallelSizes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param([], ParallelSizes(), id="nothing said"),
        pytest.param(
            ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size=4"],
            ParallelSizes(tp=2, pp=4, etp=2),
            id="options",
        ),
        pytest.param(
            ["model.tensor_model_parallel_size=2", "+model.context_parallel_size=2"],
            ParallelSizes(tp=2, cp=2, etp=2),
            id="keys",
        ),
        pytest.param(
            ["--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1"],
            ParallelSizes(ep=4),
            id="experts",
        ),
        pytest.param(["--tensor-model-parallel-size", "$(id)"], ParallelSizes(), id="no number"),
    ],
)
def test_sizes_are_read_from_both_kinds_of_arguments(
    words: list[str], expected: ParallelSizes
) -> None:
    assert typed_sizes(words) == expected


def test_ranks_that_the_model_cannot_be_split_over_are_refused() -> None:
    with pytest.raises(ReproError, match=r"3 is no multiple of 4, .* \(TP 2, PP 2, CP 1"):
        say_fewer_ranks(ParallelSizes(tp=2, pp=2, etp=2), there=8, here=3)


def test_experts_need_ranks_of_their_own() -> None:
    assert ParallelSizes(tp=2, ep=4, etp=2).least_ranks == 8


def test_what_changes_is_said() -> None:
    (line,) = say_fewer_ranks(ParallelSizes(tp=2, etp=2), there=8, here=2)
    assert line.startswith("2 instead of 8 ranks: data parallel 4 -> 1; ")
    assert say_fewer_ranks(ParallelSizes(), there=2, here=2) == []
