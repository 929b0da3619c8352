"""Whole programs: `python -m pytest_megatron.trace.run`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from forked_programs import Program, run_programs

from pytest_megatron.trace.files import TraceEnd, read_end, read_records
from pytest_megatron.trace.settings import VARIABLE, TraceSettings

RUN = "pytest_megatron.trace.run"
PROGRAM = """
import sys
import torch
from beside import make

assert (__name__, sys.argv[1:]) == ("__main__", ["--lr", "1"])
torch.manual_seed(0)
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    STEP
"""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A run of PROGRAM that has ended: its exit code, its number of records, and how they end."""

    exit_code: int
    num_records: int
    end: TraceEnd | None


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Traced]:
    """PROGRAM to its end, and to an exit."""
    root = tmp_path_factory.mktemp("traced")
    (root / "beside.py").write_text("import torch\nmake = lambda: torch.nn.Linear(4, 2)\n")
    programs = {}
    for name, step in (("module", "pass"), ("exit", "sys.exit(3)")):
        path = root / f"{name}.py"
        path.write_text(PROGRAM.replace("STEP", step))
        settings = TraceSettings(directory=root / name)
        programs[name] = Program(
            words=["-m", RUN, str(path), "--lr", "1"],
            output=str(root / f"{name}.txt"),
            env={VARIABLE: settings.to_json()},
        )
    codes = run_programs(list(programs.values()), ["torch", "torch._dynamo"])
    traces = {name: root / name / "rank_0.jsonl" for name in programs}
    return {
        name: Traced(
            exit_code=code,
            num_records=len(list(read_records(traces[name]))),
            end=read_end(traces[name]),
        )
        for name, code in zip(programs, codes, strict=True)
    }


def test_a_program_is_traced_as_it_is(traced: dict[str, Traced]) -> None:
    assert traced["module"] == Traced(exit_code=0, num_records=16, end=TraceEnd(steps=2))


def test_the_exit_code_is_the_programs_and_its_trace_is_cut_off(traced: dict[str, Traced]) -> None:
    assert traced["exit"] == Traced(exit_code=3, num_records=9, end=None)
