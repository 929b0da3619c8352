"""Compares traces of trainings of plain torch: other layouts, flattened batches, planted bugs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from ports import held_port

from pytest_megatron.trace.compare import compare
from pytest_megatron.trace.equivalence import TraceComparison
from pytest_megatron.trace.files import TraceLayout, rank_files, read_header
from pytest_megatron.trace.settings import TraceSettings

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

_GUESTS = Path(__file__).parents[1] / "guests"
_FLAT = ("--flatten", "loss")
_SQUARE = ("--length", "4", "--flatten", "inside")
# Name: whose weights it begins with (none: a reference, these are first), ranks, arguments.
_TRAININGS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "reference": ("", 1, ()),
    "flat": ("", 1, _FLAT),
    "square": ("", 1, _SQUARE),
    "tp2": ("reference", 2, ("--parallel", "tp")),
    "dp2": ("reference", 2, ("--parallel", "dp")),
    "halves": ("reference", 1, ("--micro-batch", "2")),
    "flat_dp2": ("flat", 2, ("--parallel", "dp", "--micro-batch", "2", *_FLAT)),
    "square_halves": ("square", 2, ("--parallel", "dp", "--micro-batch", "2", *_SQUARE)),
    "square_mixed": ("square", 1, ("--interleave", *_SQUARE)),
    **{
        name: ("reference", 2, ("--parallel", "dp", "--bug", name))
        for name in ("own-seeds", "own-rate", "state", "buffer", "scaled-head")
    },
}


def train(root: Path, program: str, named: Mapping[str, tuple[str, int, tuple[str, ...]]]) -> None:
    """Leave a trace of each training in a directory of its name."""
    trainings = []
    ports = ExitStack()
    for name, (begins_with, ranks, arguments) in named.items():
        settings = TraceSettings(
            directory=root / name,
            values="full",
            weights_to=None if begins_with else root / f"{name}.weights",
            weights_from=root / f"{begins_with}.weights" if begins_with else None,
        )
        port = ports.enter_context(held_port())
        trainings.append([settings.to_json(), ranks, port, *arguments])
    command = [sys.executable, _GUESTS / "traced_trainings.py", _GUESTS / program]
    with ports:
        done = subprocess.run(
            [*map(str, command), json.dumps(trainings)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain")
    train(root, "plain_model.py", _TRAININGS)
    return root


def found_in(traces: Path, name: str) -> TraceComparison:
    return compare(traces / _TRAININGS[name][0], traces / name, None)


def test_torch_tensor_parallelism_is_recorded_as_such(traces: Path) -> None:
    layout = TraceLayout(tp=(1, 2), etp=(1, 2), sequence_parallel=True)
    assert read_header(rank_files(traces / "tp2")[1]).layout == layout


@pytest.mark.parametrize("name", ["tp2", "dp2", "halves", "flat_dp2", "square_halves"])
def test_layouts_that_train_the_same_are_equal(traces: Path, name: str) -> None:
    found = found_in(traces, name)
    assert (found.verdict, found.divergences) == ("equal", ())
    assert found.num_compared > 200


def test_a_sequence_as_long_as_a_batch_is_not_compared_where_both_orders_fit(
    traces: Path,
) -> None:
    found = found_in(traces, "square_mixed")
    assert (found.verdict, found.divergences) == ("unusable", ())
    assert "may be sequence, batch or batch, sequence" in str(found.problem)


def test_ranks_that_begin_with_other_weights_are_named_although_these_are_replaced(
    traces: Path,
) -> None:
    first = found_in(traces, "own-seeds").divergences[0]
    assert (first.phase, first.parameter, first.kind) == ("initial", "embed.weight", "replicas")
    assert first.ranks == (0, 1)


@pytest.mark.parametrize(
    ("name", "tensor", "hint"),
    [
        ("own-rate", "embed.weight", "by the learning rate, the clipping or the state"),
        ("state", "embed.weight", "the optimizer makes of them does not: its settings, state"),
        ("buffer", "num_tokens", "the buffer is updated otherwise"),
        ("scaled-head", None, "is computed between modules"),
    ],
)
def test_a_bug_is_named(traces: Path, name: str, tensor: str | None, hint: str) -> None:
    found = found_in(traces, name)
    assert (found.verdict, found.divergences[0].parameter) == ("different", tensor)
    assert hint in str(found.hint)


def test_the_limit_that_is_named_is_the_one_that_was_applied(traces: Path) -> None:
    first = found_in(traces, "own-rate").divergences[0]
    assert first.kind == "replicas"
    assert first.error is not None
    assert first.limit == 2.0**-23
    assert first.error > first.limit
