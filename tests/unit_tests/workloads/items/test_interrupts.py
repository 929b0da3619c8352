"""However pytest ends, no process of a training is left and no file is half written."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from tiny_project import Project, send, wait_until

pytestmark = pytest.mark.nightly


def hanging(tmp_path: Path, *, has_torch: bool) -> tuple[Project, subprocess.Popen[str]]:
    """Start a session whose second workload hangs and whose third would run."""
    project = Project(root=tmp_path, has_torch=has_torch)
    project.row("first", script=["true"], write_golden=False)
    project.add("hang", "hang@2:1", "spawn@1:1")
    project.row("third", script=["touch third"], write_golden=False)
    process = project.start("recipes")
    wait_until((tmp_path / "run" / "run.json").exists, "the first workload")
    wait_until(project.state("hang").with_suffix(".up").exists, "the hang")
    return project, process


def assert_nothing_is_left(project: Project) -> None:
    wait_until(lambda: project.processes() == [], f"no process of {project.root}")
    run_dir = project.root / "run"
    for path in run_dir.rglob("*.json"):
        json.loads(path.read_text())
    assert list(run_dir.rglob("*.tmp")) == []


@pytest.mark.everyday("once-to the group", "twice-to pytest alone")
@pytest.mark.parametrize(
    ("times", "to_group", "has_torch"),
    [
        pytest.param(1, True, False, id="once-to the group"),
        pytest.param(1, False, False, id="once-to pytest alone"),
        pytest.param(2, True, True, id="twice-to the group"),
        pytest.param(2, False, False, id="twice-to pytest alone"),
    ],
)
def test_ctrl_c_ends_the_training_and_the_session(
    tmp_path: Path, times: int, *, to_group: bool, has_torch: bool
) -> None:
    project, process = hanging(tmp_path, has_torch=has_torch)
    for _ in range(times):
        send(process, signal.SIGINT, to_group=to_group)
    output, _ = process.communicate()
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in output
    assert not (tmp_path / "third").exists()
    assert_nothing_is_left(project)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert list(run["items"]) == ["recipes/tiny.yaml::first[dev-cpu]"]


@pytest.mark.everyday
def test_a_pytest_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    project, process = hanging(tmp_path, has_torch=True)
    send(process, signal.SIGKILL, to_group=False)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert_nothing_is_left(project)


@pytest.mark.everyday("15-False-False")
@pytest.mark.parametrize(
    ("number", "to_group", "has_torch"),
    [
        (signal.SIGTERM, True, True),
        (signal.SIGTERM, False, False),
        (signal.SIGHUP, True, False),
        (signal.SIGQUIT, False, False),
    ],
)
def test_a_session_that_is_told_to_end_writes_what_it_has(
    tmp_path: Path, number: signal.Signals, *, to_group: bool, has_torch: bool
) -> None:
    project, process = hanging(tmp_path, has_torch=has_torch)
    for again in (number, signal.SIGTERM):
        send(process, again, to_group=to_group)
    output, _ = process.communicate()
    assert process.returncode == pytest.ExitCode.INTERRUPTED, output
    assert re.search(r"KeyboardInterrupt: SIG\w+: whoever started pytest ended it", output)
    assert_nothing_is_left(project)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert list(run["items"]) == ["recipes/tiny.yaml::first[dev-cpu]"]


@pytest.mark.everyday
def test_what_a_session_in_the_background_ignores_is_its_own(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.add("waits", "hang@2:1")
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)  # as `nohup pytest &` in a script
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        process = project.start("recipes")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    wait_until(project.state("waits").with_suffix(".up").exists, "the hang")
    below = psutil.Process(process.pid).children(recursive=True)
    ranks = [child.pid for child in below if "--train-iters" in child.cmdline()]
    for rank in ranks:
        lines = Path(f"/proc/{rank}/status").read_text().splitlines()
        mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
        assert [number for number in ignored if mask >> (number - 1) & 1] == []
    assert len(ranks) >= 2
    for number in (*ignored, signal.SIGTERM):
        send(process, number, to_group=False)
    output, _ = process.communicate()
    assert "KeyboardInterrupt: SIGTERM" in output
    assert process.returncode == pytest.ExitCode.INTERRUPTED
