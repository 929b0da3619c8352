from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults import Fault, Kind, misbehave, parse_fault

PROGRAM = Path(__file__).resolve().parents[2] / "functional_tests"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("crash@20:1", Fault(kind=Kind.CRASH, iteration=20, rank=1)),
        ("nan@3", Fault(kind=Kind.NAN, iteration=3)),
        ("silent@0", Fault(kind=Kind.SILENT, iteration=0)),
    ],
)
def test_a_fault_is_read(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize("text", ["crash", "melt@3", "crash@x", "crash@3:", "crash@3:1 "])
def test_a_fault_that_is_not_one_names_the_kinds(text: str) -> None:
    with pytest.raises(ValueError, match="crash, exit0, hang, kill, nan, segfault, silent"):
        parse_fault(text)


def test_a_crash_happens_at_its_iteration_on_its_rank_only() -> None:
    fault = Fault(kind=Kind.CRASH, iteration=2, rank=1)
    for iteration, rank in ((1, 1), (2, 0), (3, 1)):
        misbehave(fault, iteration, rank)
    misbehave(None, 2, 1)
    with pytest.raises(RuntimeError, match="fault crash of rank 1 at iteration 2"):
        misbehave(fault, 2, 1)


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [("exit0", 0), ("kill", -signal.SIGKILL), ("segfault", -signal.SIGSEGV)],
)
def test_a_process_ends_as_the_fault_says(kind: str, exit_code: int) -> None:
    code = (
        "from faults import misbehave, parse_fault\n"
        f"misbehave(parse_fault('{kind}@1'), 1, 0)\n"
        "raise AssertionError('still alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROGRAM, check=False, timeout=60)
    assert done.returncode == exit_code
