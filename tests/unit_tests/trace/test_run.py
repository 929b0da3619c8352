"""Whole processes: `python -m pytest_megatron.trace.run` and the API."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pytest_megatron.trace.files import TraceEnd, read_end, read_records
from pytest_megatron.trace.settings import VARIABLE, TraceSettings

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
