"""Ranks that are forked from a process with torch: nothing tells them from fresh interpreters."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from tiny_project import Project, Run, wait_until

from pytest_megatron.base.files import JsonValue
from pytest_megatron.engines.local import imports_of, obstacle_of
from pytest_megatron.engines.warm_process import (
    PRELOADED_FOR_MEGATRON,
    PRELOADED_FOR_OPTIMIZERS,
    calling_function,
    replace_popen,
)

MIRROR = Path(__file__).parents[1] / "guests" / "mirror.py"
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


def change_program(project: Project, text: str) -> None:
    program = project.root / "train.py"
    program.write_text(program.read_text().replace(HEAD, HEAD + text))


def run_both(project: Project, *arguments: str) -> tuple[Run, Run]:
    """Run with forks, then with fresh interpreters, in the same directory."""
    forked = project.run("recipes", "--workload-start", "fork", *arguments)
    (project.root / "run").rename(project.root / "forked")
    return forked, project.run("recipes", "--workload-start", "fresh", *arguments)


def phase_of(project: Project, run_dir: str, case: str) -> Path:
    return next((project.root / run_dir).glob(f"*-{case}-*/repeat_1/attempt_1/phase_1"))


def test_a_forked_rank_sees_what_a_fresh_one_sees(tmp_path: Path) -> None:
    project = Project(root=tmp_path, has_torch=True)
    project.add("sound", env={"PYTHONFAULTHANDLER": "1"})
    (tmp_path / "mirror.py").write_text(MIRROR.read_text())
    change_program(project, "import mirror\n")
    forked, fresh = run_both(project)
    assert forked.outcomes == fresh.outcomes == {"sound": "PASSED"}
    seen: dict[str, list[Mapping[str, JsonValue]]] = {}
    for run_dir in ("forked", "run"):
        phase = phase_of(project, run_dir, "sound")
        texts = [(phase / f"mirror_{rank}.json").read_text() for rank in range(2)]
        seen[run_dir] = [json.loads(_CHANGING.sub("*", text)) for text in texts]
    assert [rank["has torch"] for rank in seen["forked"]] == [True, True]
    assert [{**rank, "has torch": False} for rank in seen["forked"]] == seen["run"]


def test_a_forked_rank_ends_as_a_fresh_one(tmp_path: Path) -> None:
    project = Project(root=tmp_path, gpus=1, has_torch=True)
    ends = {
        "raises": "def f():\n    raise ValueError('ended')\nf()",
        "exits": "import sys; sys.exit('some words')",
        "interrupts": "raise KeyboardInterrupt",
        "aborts": "import os; os.kill(os.getpid(), 6)",
        "leaves": "import atexit; atexit.register(print, 'at exit'); raise SystemExit(3)",
    }
    for name, text in ends.items():
        project.case(name)
        (tmp_path / f"{name}.py").write_text(text)
        project.row(name, training_script_path=[f"{name}.py"])
    forked, fresh = run_both(project)
    for name in ends:
        failures = [
            str(run.record(name)["problem"]).replace("/forked/", "/run/") for run in (forked, fresh)
        ]
        assert failures[0] == failures[1]
        logs = [phase_of(project, run_dir, name) / "logs" / "0" for run_dir in ("forked", "run")]
        for stream in ("stdout.log", "stderr.log"):
            texts = [(log / stream).read_text() for log in logs]
            if name != "aborts":  # its stack shows from where the program was run
                assert texts[0] == texts[1], name


def test_a_program_that_changes_its_environment_is_not_forked(tmp_path: Path) -> None:
    project = Project(root=tmp_path, gpus=1, has_torch=True)
    project.add("sound")
    change_program(project, "import os\nos.environ['TORCH_LOGS'] = ''\n")
    run = project.run("recipes")
    assert run.outcomes == {"sound": "PASSED"}
    log = (phase_of(project, "run", "sound") / "launcher.log").read_text()
    line = program_line(tmp_path, "os.environ['TORCH_LOGS']")
    reason = f"ranks are not forked: train.py:{line} changes the environment, maybe for torch"
    assert log.splitlines()[0] == f"pytest-megatron: {reason}"


def program_line(root: Path, text: str) -> int:
    lines = (root / "train.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def test_a_module_that_hides_a_library_is_imported_all_the_same(tmp_path: Path) -> None:
    project = Project(root=tmp_path, gpus=1, has_torch=True)
    project.add("sound")
    (tmp_path / "sympy.py").write_text("IS_MINE = True\n")
    change_program(project, "import sympy\nassert sympy.IS_MINE\n")
    (tmp_path / "megatron").mkdir()  # torch alone imports no sympy
    change_program(project, "if 0: import megatron.core\n")
    run = project.run("recipes")
    assert run.outcomes == {"sound": "PASSED"}
    log = (phase_of(project, "run", "sound") / "launcher.log").read_text()
    assert "rank 0 is not forked: sympy.py beside it hides a library that is loaded" in log


def test_a_killed_parent_leaves_the_training_alone(tmp_path: Path) -> None:
    project = Project(root=tmp_path, gpus=1, has_torch=True)
    project.add("waits")
    project.add("sound")
    change_program(project, WAIT)
    process = project.start("recipes")
    wait_until((tmp_path / "state" / "up").exists, "the first training")
    (warm,) = [p for p in psutil.Process(process.pid).children() if p.status() != "zombie"]
    os.kill(warm.pid, signal.SIGKILL)
    (tmp_path / "state" / "go").touch()
    output, _ = process.communicate()
    assert (process.returncode, project.processes()) == (0, []), output


def test_a_killed_session_leaves_nothing_that_was_forked(tmp_path: Path) -> None:
    project = Project(root=tmp_path, has_torch=True)
    project.add("hang", "hang@2:1", "spawn@1:1")
    process = project.start("recipes", "--workload-start", "fork")
    wait_until(project.state("hang").with_suffix(".up").exists, "the hang")
    log = phase_of(project, "run", "hang") / "launcher.log"
    assert "not forked" not in log.read_text()
    process.kill()
    process.communicate()
    wait_until(lambda: project.processes() == [], f"no process of {tmp_path}")


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


def test_random_numbers_that_no_seed_governs_differ(tmp_path: Path) -> None:
    project = Project(root=tmp_path, has_torch=True)
    project.add("sound")
    (tmp_path / "unseeded.py").write_text(
        "import os, random\n"
        "from pathlib import Path\n"
        "import numpy, torch\n"
        "state = Path(os.environ['TINY_TRAIN_STATE'])\n"
        "drawn = [random.random(), numpy.random.random(), torch.rand(1).item()]\n"
        "name = f'drawn_{os.getpid()}'\n"
        "state.with_name(name).write_text(repr(drawn))\n"
    )
    change_program(project, "import unseeded\n")
    run = project.run("recipes", "--workload-start", "fork", "--n-repeat", "2")
    assert run.outcomes == {"sound": "PASSED"}
    drawn = [json.loads(path.read_text()) for path in tmp_path.rglob("drawn_*")]
    assert len(drawn) == 4  # two ranks, two repeats
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == 4
