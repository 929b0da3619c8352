"""However pytest ends, no process of a training is left and no file is half written."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from tiny_project import Project, send, wait_until


def hanging(tmp_path: Path) -> tuple[Project, subprocess.Popen[str]]:
    """Start a session whose second workload hangs and whose third would run."""
    project = Project(root=tmp_path)
    project.row("first", script=["true"], write_golden=False)
    project.add("hang", "hang@2:1", "spawn@1:1")
    project.row("third", script=["touch third"], write_golden=False)
    process = project.start("recipes")
    wait_until((tmp_path / "run" / "run.json").exists, "the first workload")
    wait_until((tmp_path / "state" / "hang.up").exists, "the hang")
    return project, process


def assert_nothing_is_left(project: Project) -> None:
    wait_until(lambda: project.processes() == [], f"no process of {project.root}")
    run_dir = project.root / "run"
    for path in run_dir.rglob("*.json"):
        json.loads(path.read_text())
    assert list(run_dir.rglob("*.tmp")) == []


@pytest.mark.parametrize("to_group", [True, False], ids=["to the group", "to pytest alone"])
@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_ctrl_c_ends_the_training_and_the_session(
    tmp_path: Path, times: int, *, to_group: bool
) -> None:
    project, process = hanging(tmp_path)
    for _ in range(times):
        send(process, signal.SIGINT, to_group=to_group)
    output, _ = process.communicate()
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in output
    assert not (tmp_path / "third").exists()
    assert_nothing_is_left(project)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert list(run["items"]) == ["recipes/tiny.yaml::first[dev-cpu]"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_a_pytest_that_is_killed_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    project, process = hanging(tmp_path)
    send(process, number, to_group=False)
    process.communicate()
    assert process.returncode == -number
    assert_nothing_is_left(project)
