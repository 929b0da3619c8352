"""Compares traces of real trainings of a tiny GPT: one rank, two tensor-parallel ranks, a bug."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import pytest
from ports import held_port

from pytest_megatron.trace.compare import compare as compare_traces
from pytest_megatron.trace.equivalence import TraceComparison, as_text
from pytest_megatron.trace.files import (
    TraceEnd,
    TraceLayout,
    rank_files,
    read_end,
    read_header,
    read_records,
)
from pytest_megatron.trace.settings import TraceSettings

# Not imported: every worker of pytest-xdist would do so, and the tests train elsewhere.
pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="has no megatron-core"),
    pytest.mark.timeout(900),
]

_TESTS = Path(__file__).parents[2]
_GUEST = _TESTS / "unit_tests/guests/traced_trainings.py"
_ARGUMENTS = (
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--seq-length", "8", "--vocab-size", "32", "--micro-batch-size", "2"),
    *("--global-batch-size", "4", "--train-iters", "2"),
)
_GATHERED_LATE = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
_TP2 = ("--tensor-model-parallel-size", "2")
_MANY_EXPERTS = ("--num-experts", "16", "--disable-bias-linear")
_EP2 = ("--expert-model-parallel-size", "2")


class Compare(Protocol):
    def __call__(
        self, reference: str, candidate: str | Path, noise: str | None = None
    ) -> TraceComparison: ...


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("traces")
    trainings = []
    ports = ExitStack()
    for name, world_size, *arguments in (
        ("reference", 1),
        ("tp2", 2, *_TP2),
        ("dp2", 2, "--use-distributed-optimizer", "--bf16"),
        ("bug", 2, *_TP2, "--exam-bug", "row-parallel-unreduced"),
        ("other_data", 1, "--seed", "5"),
        ("experts", 1, *_MANY_EXPERTS),
        ("experts_noise", 1, *_MANY_EXPERTS),
        ("experts_ep2", 2, *_MANY_EXPERTS, *_EP2),
        ("gathered_late", 2, *_GATHERED_LATE, "--init-method-std", "0.5"),
    ):
        settings = TraceSettings(
            directory=root / str(name),
            values="full",
            weights_to=root / "weights" if name == "reference" else None,
            weights_from=root / "weights" if name == "gathered_late" else None,
            noise_seed=1 if name == "experts_noise" else None,
        )
        port = ports.enter_context(held_port())
        trainings.append([settings.to_json(), world_size, port, *_ARGUMENTS, *arguments])
    path = os.pathsep.join((str(_TESTS / "functional_tests"), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, str(_GUEST), str(_TESTS / "traces/buggy_train.py")]
    with ports:
        done = subprocess.run(
            [*command, json.dumps(trainings)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    return root


@pytest.fixture
def compare(traces: Path) -> Compare:
    def run(reference: str, candidate: str | Path, noise: str | None = None) -> TraceComparison:
        return compare_traces(
            traces / reference, traces / candidate, None if noise is None else traces / noise
        )

    return run


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tp2", TraceLayout(tp=(1, 2), etp=(1, 2))),
        ("dp2", TraceLayout(dp=(1, 2), edp=(1, 2))),
    ],
)
def test_the_whole_parameters_are_in_the_ranks_traces(
    traces: Path, name: str, layout: TraceLayout
) -> None:
    files = rank_files(traces / name)
    assert read_header(files[1]).layout == layout
    held: dict[str, set[tuple[tuple[int, ...], tuple[int, int]]]] = {}
    sizes: dict[str, int] = {}
    for path in files.values():
        assert read_end(path) == TraceEnd(steps=2)
        for one in read_records(path):
            shard = one.parameter
            if one.phase == "gradient" and shard is not None:
                assert shard.key is not None
                flat = shard.flat or (0, math.prod(one.shape))
                held.setdefault(shard.key, set()).add((shard.global_offset, flat))
                sizes[shard.key] = math.prod(shard.global_shape)
    assert "embedding.position_embeddings.weight" in held
    for key, parts in held.items():  # each value once, whoever holds it
        assert sum(stop - start for _, (start, stop) in parts) == sizes[key], key


def test_layouts_that_train_the_same_are_equal(compare: Compare) -> None:
    found = compare("reference", "tp2")
    assert (found.verdict, found.not_compared) == ("equal", ())
    assert found.num_compared > 200
    assert as_text(found).startswith("0 of ")


def test_parameters_that_are_gathered_in_the_forward_pass_begin_as_the_reference_s(
    compare: Compare,
) -> None:
    found = compare("reference", "gathered_late")
    assert (found.verdict, found.steps) == ("equal", 2)


def test_experts_without_tokens_are_compared(compare: Compare, traces: Path) -> None:
    records = read_records(rank_files(traces / "experts")[0])
    assert any(one.shape[:1] == (0,) for one in records)
    found = compare("experts", "experts_ep2", "experts_noise")
    assert (found.verdict, found.not_compared) == ("equal", ())


def test_both_may_be_cut(compare: Compare) -> None:
    assert compare("tp2", "reference").verdict == "equal"
    assert compare("tp2", "tp2").verdict == "equal"


def test_output_that_is_not_reduced_is_the_first_difference(compare: Compare) -> None:
    found = compare("reference", "bug")
    first = found.divergences[0]
    assert (found.verdict, first.phase, first.kind) == ("different", "forward", "replicas")
    assert first.module == "decoder.layers.1.self_attention.linear_proj"
    assert first.ranks == (0, 1)
    assert len(as_text(found).splitlines()) <= 24


def test_swapped_shards_are_never_matched_by_their_values(
    compare: Compare, traces: Path, tmp_path: Path
) -> None:
    swapped = shutil.copytree(traces / "tp2", tmp_path / "swapped")
    for rank in (0, 1):
        shutil.copy(traces / f"tp2/rank_{1 - rank}.bin", swapped / f"rank_{rank}.bin")
    found = compare("reference", swapped)
    assert (found.verdict, found.divergences[0].step) == ("different", 0)


def test_other_data_is_one_clear_error(compare: Compare) -> None:
    found = compare("reference", "other_data")
    assert found.verdict == "unusable"
    assert "4 of 4 samples in step 1 that the reference has not" in (found.problem or "")


def test_noise_of_another_layout_is_one_clear_error(compare: Compare) -> None:
    found = compare("reference", "tp2", "tp2")
    assert found.verdict == "unusable"
    assert "expected a second run of it" in (found.problem or "")


def _without_end(trace: Path) -> None:
    lines = trace / "rank_1.jsonl"
    lines.write_text("\n".join(lines.read_text().splitlines()[:-1]) + "\n")


def _without_values(trace: Path) -> None:
    with (trace / "rank_1.bin").open("r+b") as values:
        values.truncate(1000)


def _with_hashes_only(trace: Path) -> None:
    lines = trace / "rank_0.jsonl"
    lines.write_text(lines.read_text().replace('"values":"full"', '"values":"hash"', 1))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        pytest.param(_without_end, "is cut off", id="end"),
        pytest.param(_without_values, "rank_1.bin: is cut off before", id="values"),
        pytest.param(_with_hashes_only, "has hashes only", id="hashes"),
        pytest.param(shutil.rmtree, "holds no trace", id="nothing"),
    ],
)
def test_damaged_traces_are_one_clear_error(
    compare: Compare, traces: Path, tmp_path: Path, damage: Callable[[Path], None], problem: str
) -> None:
    damage(shutil.copytree(traces / "tp2", tmp_path / "damaged"))
    found = compare("reference", tmp_path / "damaged")
    assert found.verdict == "unusable"
    assert problem in (found.problem or "")
