"""Compares traces of real trainings of a tiny GPT: one rank, two tensor-parallel ranks, a bug."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_megatron.trace.compare import main
from pytest_megatron.trace.divergences import TraceComparison, read_comparison
from pytest_megatron.trace.settings import VARIABLE, TraceSettings

pytest.importorskip("megatron.core")

_TESTS = Path(__file__).parents[2]
_PROGRAM = _TESTS / "traces/buggy_train.py"
_ARGUMENTS = (
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--seq-length", "8", "--vocab-size", "32", "--micro-batch-size", "2"),
    *("--global-batch-size", "4", "--train-iters", "1"),
)
_TP2 = ("--tensor-model-parallel-size", "2")


def _start(directory: Path, world_size: int, *arguments: str) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = TraceSettings(directory=directory, steps=1, values="full")
    command = [sys.executable, "-m", "pytest_megatron.trace.run", str(_PROGRAM)]
    ranks = []
    for rank in range(world_size):
        env = {**os.environ, VARIABLE: settings.to_json(), "OMP_NUM_THREADS": "1"}
        if world_size > 1:
            env |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        ranks.append(
            subprocess.Popen(
                [*command, *_ARGUMENTS, *arguments],
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        )
    return ranks


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("traces")
    ranks = [
        *_start(root / "reference", 1),
        *_start(root / "tp2", 2, *_TP2),
        *_start(root / "bug", 2, *_TP2, "--exam-bug", "row-parallel-unreduced"),
        *_start(root / "other_data", 1, "--seed", "5"),
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=240)
            assert rank.returncode == 0, errors.decode()[-2000:]
        yield root
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.fixture
def compare(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, TraceComparison, str]]:
    def run(*directories: str | Path) -> tuple[int, TraceComparison, str]:
        output = tmp_path / "equivalence.json"
        code = main([*(str(traces / one) for one in directories), "--output", str(output)])
        return code, read_comparison(output), capsys.readouterr().out

    return run


Compare = Callable[..., tuple[int, TraceComparison, str]]


def test_layouts_that_train_the_same_are_equal(compare: Compare) -> None:
    code, found, text = compare("reference", "tp2")
    assert (code, found.verdict, found.not_compared) == (0, "equal", ())
    assert found.num_compared > 200
    assert text.startswith("0 of ")


def test_both_may_be_cut(compare: Compare) -> None:
    assert compare("tp2", "reference")[0] == 0
    assert compare("tp2", "tp2")[0] == 0


def test_output_that_is_not_reduced_is_the_first_difference(compare: Compare) -> None:
    code, found, text = compare("reference", "bug")
    first = found.divergences[0]
    assert (code, found.verdict, first.phase, first.kind) == (1, "different", "forward", "replicas")
    assert first.module == "decoder.layers.1.self_attention.linear_proj"
    assert first.ranks == (0, 1)
    assert first.module in text.splitlines()[0]
    assert len(text.splitlines()) <= 24


def test_swapped_shards_are_never_matched_by_their_values(
    compare: Compare, traces: Path, tmp_path: Path
) -> None:
    swapped = shutil.copytree(traces / "tp2", tmp_path / "swapped")
    for rank in (0, 1):
        shutil.copy(traces / f"tp2/rank_{1 - rank}.bin", swapped / f"rank_{rank}.bin")
    code, found, _ = compare("reference", swapped)
    assert (code, found.divergences[0].step) == (1, 0)


def test_other_data_is_one_clear_error(compare: Compare) -> None:
    code, found, _ = compare("reference", "other_data")
    assert (code, found.verdict) == (2, "unusable")
    assert "4 of 4 samples in step 1 that the reference has not" in (found.problem or "")


def _without_end(trace: Path) -> None:
    lines = trace / "rank_1.jsonl"
    lines.write_text("\n".join(lines.read_text().splitlines()[:-1]) + "\n")


def _without_values(trace: Path) -> None:
    with (trace / "rank_1.bin").open("r+b") as values:
        values.truncate(1000)


def _without_rank(trace: Path) -> None:
    (trace / "rank_1.jsonl").unlink()


def _with_hashes_only(trace: Path) -> None:
    lines = trace / "rank_0.jsonl"
    lines.write_text(lines.read_text().replace('"values":"full"', '"values":"hash"', 1))


def _foreign(trace: Path) -> None:
    (trace / "rank_0.jsonl").write_text('{"loss": 1}\n')


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        pytest.param(_without_end, "is cut off", id="end"),
        pytest.param(_without_values, "is cut off after 1000 bytes", id="values"),
        pytest.param(_without_rank, "has no trace of rank 1 of 2", id="rank"),
        pytest.param(_with_hashes_only, "has hashes only", id="hashes"),
        pytest.param(_foreign, "is no header of a trace", id="foreign"),
        pytest.param(shutil.rmtree, "holds no trace", id="nothing"),
    ],
)
def test_damaged_traces_are_one_clear_error(
    compare: Compare, traces: Path, tmp_path: Path, damage: Callable[[Path], None], problem: str
) -> None:
    damage(shutil.copytree(traces / "tp2", tmp_path / "damaged"))
    code, found, _ = compare("reference", tmp_path / "damaged")
    assert (code, found.verdict) == (2, "unusable")
    assert problem in (found.problem or "")
