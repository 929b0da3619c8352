"""Ranks that are forked from a process with torch: nothing tells them from fresh interpreters."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from tiny_project import Project, Run, wait_until

from pytest_megatron.base.files import JsonValue
from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.triage.api import triage
from pytest_megatron.triage.logs.exits import how_it_ended
from pytest_megatron.workloads.engine.local import free_names, imports_of, obstacle_of
from pytest_megatron.workloads.engine.warm_process import (
    PRELOADED_FOR_MEGATRON,
    PRELOADED_FOR_OPTIMIZERS,
    calling_function,
    replace_popen,
)

MIRROR = Path(__file__).parents[2] / "guests" / "mirror.py"
HEAD = "from __future__ import annotations\n"
# Different at each start: ports and run ids.
_CHANGING = re.compile(r"(?<=_PORT\": \")\d+|[0-9a-f-]{36}(?:_\w{8})?")
# Reports that it runs, and waits until it may go on.
WAIT = """
import os, time
from pathlib import Path
state = Path(os.environ["TINY_TRAIN_STATE"])
state.with_name("up").touch()
while not state.with_name("go").exists():
    time.sleep(0.01)
"""


ENDS = {
    "raises": "def f():\n    raise ValueError('ended')\nf()",
    "exits": "import sys; sys.exit('some words')",
    "interrupts": "raise KeyboardInterrupt",
    "aborts": "import os; os.kill(os.getpid(), 6)",
    "leaves": "import atexit; atexit.register(print, 'at exit'); raise SystemExit(3)",
}
DRAWS = """
import os, random
from pathlib import Path
import numpy, torch
state = Path(os.environ['TINY_TRAIN_STATE'])
assert os.environ['NVTE_DEBUG'] == '1'
drawn = [random.random(), numpy.random.random(), torch.rand(1).item()]
state.with_name(f'drawn_{os.getpid()}').write_text(repr(drawn))
"""
ENV = {"PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}  # of all: they share a warm process
HANG_LIMIT_S = 25  # must cover the start of the ranks on a busy machine


def program(project: Project, name: str, text: str) -> str:
    """Write a variant of the training program; return its path in the project."""
    path = project.root / name
    path.parent.mkdir(exist_ok=True)
    path.write_text((project.root / "train.py").read_text().replace(HEAD, HEAD + text))
    return name


def phase_of(project: Project, run_dir: str, case: str, *, repeat: int = 1) -> Path:
    item = next((project.root / run_dir).glob(f"*-{case}-*"))
    return item / f"repeat_{repeat}" / "attempt_1" / "phase_1"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("warm"), has_torch=True)
    programs: dict[str, dict[str, JsonValue]] = {
        "sound": {"training_script_path": [program(project, "mirrored.py", "import mirror\n")]},
        "hangs": {"time_limit": [HANG_LIMIT_S]},
        "draws": {
            "training_script_path": [program(project, "drawing.py", "import draws\n")],
            "n_repeat": [2],
        },
        "changes": {
            "training_script_path": [
                program(project, "changing.py", "import os\nos.environ['TORCH_LOGS'] = ''\n")
            ]
        },
        "hides": {
            "training_script_path": [
                program(
                    project,
                    "hiding/train.py",
                    "import typing_extensions\nassert typing_extensions.IS_MINE\n",
                )
            ],
            "gpus": [1],
        },
    }
    programs |= {name: {"training_script_path": [f"{name}.py"], "gpus": [1]} for name in ENDS}
    for case, product in programs.items():
        env = {**ENV, "NVTE_DEBUG": "1"} if case == "draws" else ENV
        project.case(case, env=env, fault=["hang@5:1"] if case == "hangs" else None)
        project.row(case, write_golden=True, **product)
    for name, text in ENDS.items():
        (project.root / f"{name}.py").write_text(text)
    (project.root / "mirror.py").write_text(MIRROR.read_text())
    (project.root / "draws.py").write_text(DRAWS)
    (project.root / "hiding" / "typing_extensions.py").write_text("IS_MINE = True\n")
    return project


@pytest.fixture(scope="module")
def forked(project: Project) -> Run:
    """One session of everything, forked where that can be."""
    return project.run("recipes", "-o", "megatron_workload_start=fork", run_dir="forked")


def launcher_log(project: Project, case: str) -> str:
    return (phase_of(project, "forked", case) / "launcher.log").read_text()


def test_a_forked_rank_sees_what_a_fresh_one_sees(project: Project, forked: Run) -> None:
    fresh = project.run(
        "recipes", "-o", "megatron_workload_start=fresh", "-k", "sound", run_dir="fresh"
    )
    assert forked.outcomes["sound"] == fresh.outcomes["sound"] == "PASSED"
    seen: dict[str, list[Mapping[str, JsonValue]]] = {}
    for run_dir in ("forked", "fresh"):
        phase = phase_of(project, run_dir, "sound")
        texts = [(phase / f"mirror_{rank}.json").read_text() for rank in range(2)]
        seen[run_dir] = [
            json.loads(_CHANGING.sub("*", text.replace(f"/{run_dir}/", "/*/"))) for text in texts
        ]
    assert [rank["has torch"] for rank in seen["forked"]] == [True, True]
    assert [{**rank, "has torch": False} for rank in seen["forked"]] == seen["fresh"]


@pytest.mark.parametrize("name", ENDS)
def test_a_forked_rank_ends_as_a_fresh_interpreter(
    project: Project, forked: Run, name: str
) -> None:
    assert forked.verdict(name) == ("FAILED", "failed")
    assert "not forked" not in launcher_log(project, name)
    fresh = subprocess.run(
        [sys.executable, "-u", f"{name}.py"],
        cwd=project.root,
        env=os.environ | ENV,
        capture_output=True,
        text=True,
        check=False,
    )
    phase = PhaseDirs(root=phase_of(project, "forked", name))
    (group,) = triage([phase.root]).groups
    assert group.first.exits == {"0": how_it_ended(fresh.returncode)}
    logs = phase.logs / "0"
    assert (logs / "stdout.log").read_text() == fresh.stdout
    if name != "aborts":  # its stack shows from where the program was run
        assert (logs / "stderr.log").read_text() == fresh.stderr


def test_the_stacks_of_forked_ranks_are_shown_at_the_time_limit(
    project: Project, forked: Run
) -> None:
    assert "not forked" not in launcher_log(project, "hangs")
    problem = forked.problem("hangs")
    assert problem.startswith(f"time limit of {HANG_LIMIT_S} s reached at train.py:")
    place = r"in hang_for_ever \(rank 1\), after iteration 4 of 10(, nothing logged for \d+ s)?\n"
    assert re.search(place, problem), problem


def test_random_numbers_that_no_seed_governs_differ(project: Project, forked: Run) -> None:
    assert forked.outcomes["draws"] == "PASSED"
    assert "not forked" not in launcher_log(project, "draws")
    drawn = [json.loads(path.read_text()) for path in project.root.rglob("drawn_*")]
    assert len(drawn) == 4  # two ranks, two repeats
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == 4


def test_variables_that_only_the_program_reads_need_no_process_of_their_own() -> None:
    env = {
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1",
        "GPUS_PER_NODE": "1",
        "REPEAT": "2",
        "OUTPUT_PATH": "/runs/1/out",
    }
    others = {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "CHILD": "/runs"}
    assert free_names(env | others, Path("/runs/1")) == list(env)


def test_a_program_that_changes_its_environment_is_not_forked(
    project: Project, forked: Run
) -> None:
    assert forked.outcomes["changes"] == "PASSED"
    lines = (project.root / "changing.py").read_text().splitlines()
    line = next(n for n, text in enumerate(lines, start=1) if "os.environ['TORCH_LOGS']" in text)
    reason = f"ranks are not forked: changing.py:{line} changes the environment, maybe for torch"
    assert launcher_log(project, "changes").splitlines()[0] == f"pytest-megatron: {reason}"


def test_a_module_that_hides_a_library_is_imported_all_the_same(
    project: Project, forked: Run
) -> None:
    assert forked.outcomes["hides"] == "PASSED"
    reason = "rank 0 is not forked: typing_extensions.py beside it hides a library that is loaded"
    assert reason in launcher_log(project, "hides")


def test_a_killed_parent_leaves_the_training_alone(tmp_path: Path) -> None:
    project = Project(root=tmp_path, gpus=1, has_torch=True)
    project.add("waits")
    project.add("sound")
    program(project, "train.py", WAIT)
    process = project.start("recipes")
    wait_until((tmp_path / "state" / "up").exists, "the first training")
    (warm,) = [p for p in psutil.Process(process.pid).children() if p.status() != "zombie"]
    os.kill(warm.pid, signal.SIGKILL)
    (tmp_path / "state" / "go").touch()
    output, _ = process.communicate()
    assert (process.returncode, project.processes()) == (0, []), output


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import os\nos.environ['TORCH_LOGS'] = '+dynamo'", 2),
        ("import os\ndef f():\n    os.environ.setdefault('NCCL_DEBUG', 'INFO')", 3),
        ("from os import environ\nenviron.update(A='1')", 2),
        ("import os\ndel os.environ['LD_PRELOAD']", 2),
        ("import os\nos.putenv('A', '1')", 2),
        ("import os\nos.environ.setdefault('MASTER_PORT', '1')\nprint(os.environ['A'])", None),
        ("import os\nos.environ.get('TORCH_LOGS')", None),
        ("import beside", "beside.py:1"),
        ("from parts import inner", "inner.py:1"),
        ("def f(:", "cannot be read"),
    ],
)
def test_changes_of_the_environment_are_found(
    tmp_path: Path, text: str, line: int | str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    (tmp_path / "beside.py").write_text("import os; os.environ['A'] = '1'")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "inner.py").write_text("import os; os.environ['A'] = '1'")
    found = obstacle_of(script, {})
    assert (found == "") == (line is None)
    wanted = f"train.py:{line} " if isinstance(line, int) else str(line or "")
    assert wanted in found


def test_a_tool_that_watches_programs_gets_fresh_interpreters(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    found = obstacle_of(script, {"COVERAGE_PROCESS_CONFIG": "x"})
    assert found == "COVERAGE_PROCESS_CONFIG is set"


def test_a_program_imports_late_through_a_module_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def main():\n    import model")
    (tmp_path / "model.py").write_text("from megatron.core import parallel_state")
    (tmp_path / "small.py").write_text("import torch\ndef f(m): torch.optim.SGD(m.parameters())")
    (tmp_path / "named.py").write_text("from torch.optim import SGD")
    (tmp_path / "other.py").write_text("import torch, megatronic")
    assert imports_of(tmp_path / "train.py") == PRELOADED_FOR_MEGATRON
    assert imports_of(tmp_path / "small.py") == PRELOADED_FOR_OPTIMIZERS
    assert imports_of(tmp_path / "named.py") == PRELOADED_FOR_OPTIMIZERS
    assert imports_of(tmp_path / "other.py") == ()


def test_releases_of_torch_start_ranks_in_one_of_two_ways() -> None:
    newer: dict[str, object] = {"Popen": subprocess.Popen}
    older: dict[str, object] = {"subprocess": subprocess}
    assert replace_popen(newer, print)
    assert newer["Popen"] is print
    assert replace_popen(older, print)
    assert getattr(older["subprocess"], "Popen", None) is print
    assert not replace_popen({"posix_spawn": os.posix_spawn}, print)


def test_a_rendezvous_names_the_method_that_records() -> None:
    def record() -> str:
        return calling_function()

    def join() -> str:
        return record()

    assert join() == "join"
