"""Whole processes: `python -m pytest_megatron.trace.run` and the API."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_megatron.trace.files import (
    TraceEnd,
    TraceLayout,
    rank_files,
    read_end,
    read_header,
    read_records,
)
from pytest_megatron.trace.settings import VARIABLE, TraceSettings

ROOT = Path(__file__).parents[3]
RUN = "pytest_megatron.trace.run"
PROGRAM = """
import sys
import torch
from beside import make
from pytest_megatron import trace

assert (__name__, sys.argv[1:]) == ("__main__", ["--lr", "1"])
torch.manual_seed(0)
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ATTACH
for _ in range(3):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    STEP
END
"""


def run(tmp_path: Path, module: str | None, **lines: str) -> subprocess.CompletedProcess[str]:
    """Run PROGRAM with some of its lines replaced, through a module or as it is."""
    text = PROGRAM
    for name in ("ATTACH", "STEP", "END"):
        text = text.replace(name, lines.get(name.lower(), "pass"))
    (tmp_path / "beside.py").write_text("import torch\nmake = lambda: torch.nn.Linear(4, 2)\n")
    (tmp_path / "program.py").write_text(text)
    return subprocess.run(
        [
            sys.executable,
            *(["-m", module] if module else []),
            str(tmp_path / "program.py"),
            "--lr",
            "1",
        ],
        env=os.environ | {VARIABLE: TraceSettings(directory=tmp_path / "trace").to_json()},
        check=False,
        capture_output=True,
        text=True,
    )


def summary(tmp_path: Path) -> tuple[int, TraceEnd | None]:
    path = tmp_path / "trace/rank_0.jsonl"
    return len(list(read_records(path))), read_end(path)


def test_a_program_is_traced_as_it_is_or_with_the_api(tmp_path: Path) -> None:
    assert run(tmp_path, RUN).returncode == 0
    traced = summary(tmp_path)
    assert traced == (16, TraceEnd(steps=2))
    assert run(tmp_path, None, attach="trace.attach(model)", step="trace.step()").returncode == 0
    assert summary(tmp_path) == traced


def test_the_exit_code_is_the_programs_and_its_trace_is_cut_off(tmp_path: Path) -> None:
    done = run(tmp_path, RUN, step="sys.exit(3)")
    assert (done.returncode, summary(tmp_path)) == (3, (9, None))


def test_a_wrong_variable_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", RUN, "program.py"],
        env=os.environ | {VARIABLE: "7"},
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    message = f"pytest_megatron.trace: {VARIABLE}: '7' is not a JSON object; unset it\n"
    assert (done.returncode, done.stderr) == (1, message)


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        (["--tensor-model-parallel-size", "2"], TraceLayout(tp=(1, 2), etp=(1, 2))),
        (["--use-distributed-optimizer", "--bf16"], TraceLayout(dp=(1, 2), edp=(1, 2))),
    ],
    ids=["tp2", "dp2-dist-opt"],
)
def test_the_whole_parameters_are_in_the_ranks_traces(
    tmp_path: Path, flags: list[str], layout: TraceLayout
) -> None:
    settings = TraceSettings(directory=tmp_path, steps=1)
    program = ROOT / "tests/functional_tests/train_gpt.py"
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", RUN, str(program)),
            *("--train-iters", "1", "--hidden-size", "16", *flags),
        ],
        env=os.environ | {VARIABLE: settings.to_json(), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    files = rank_files(tmp_path)
    assert read_header(files[1]).layout == layout
    held: dict[str, set[tuple[tuple[int, ...], tuple[int, int]]]] = {}
    sizes: dict[str, int] = {}
    for path in files.values():
        assert read_end(path) == TraceEnd(steps=1)
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
