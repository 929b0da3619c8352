"""A program without ranks has logs, an exit code and signals as rank 0 of a launcher has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tiny_project import wait_until

from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.triage.api import triage
from pytest_megatron.workloads.training.plan.plan import ALONE
from pytest_megatron.workloads.training.run.runner import settle_logs

PRINTS = "import os, sys; print('out', 'RANK' in os.environ); print('err', file=sys.stderr)"


def start(dirs: PhaseDirs, *command: str, copies: str = "1") -> subprocess.Popen[bytes]:
    dirs.logs.mkdir(parents=True)
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    words = [sys.executable, "-P", "-m", ALONE, str(dirs.logs), copies, *command]
    with dirs.launcher_log.open("wb") as log:
        return subprocess.Popen(words, stdout=log, env=env)


def test_its_output_is_kept_apart_and_copied(tmp_path: Path) -> None:
    dirs = PhaseDirs(root=tmp_path / "phase")
    assert start(dirs, sys.executable, "-c", PRINTS).wait(60) == 0
    settle_logs(dirs)
    assert (dirs.logs / "0" / "stdout.log").read_text() == "out False\n"
    assert (dirs.logs / "0" / "stderr.log").read_text() == "err\n"
    copied = dirs.launcher_log.read_text().splitlines()
    assert sorted(copied) == ["[default0]:err", "[default0]:out False"]


def test_nothing_is_copied_that_nobody_asked_for(tmp_path: Path) -> None:
    dirs = PhaseDirs(root=tmp_path / "phase")
    assert start(dirs, sys.executable, "-c", PRINTS, copies="0").wait(60) == 0
    assert dirs.launcher_log.read_text() == ""


def test_its_failure_is_that_of_rank_0(tmp_path: Path) -> None:
    dirs = PhaseDirs(root=tmp_path / "phase")
    assert start(dirs, sys.executable, "-c", "raise ValueError('bad')").wait(60) == 1
    settle_logs(dirs)
    (group,) = triage([dirs.root]).groups
    said = "rank 0 raised ValueError: bad at <string>:1 in <module>"
    assert group.first.headline.startswith(said)


def test_a_signal_that_ended_it_is_named(tmp_path: Path) -> None:
    dirs = PhaseDirs(root=tmp_path / "phase")
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert start(dirs, sys.executable, "-c", kill).wait(60) == 128 + signal.SIGKILL
    settle_logs(dirs)
    (group,) = triage([dirs.root]).groups
    assert group.first.exits == {"0": "SIGKILL"}


def test_it_is_stopped_with_its_launcher(tmp_path: Path) -> None:
    dirs, up = PhaseDirs(root=tmp_path / "phase"), tmp_path / "up"
    code = f"import time; open({str(up)!r}, 'w').close(); time.sleep(600)"
    process = start(dirs, sys.executable, "-c", code)
    wait_until(up.exists, "the program")
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM


def test_programs_beside_the_interpreter_are_found(tmp_path: Path) -> None:
    dirs = PhaseDirs(root=tmp_path / "phase")
    assert start(dirs, Path(sys.executable).name, "-c", "").wait(60) == 0


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    dirs = PhaseDirs(root=tmp_path / "phase")
    assert start(dirs, "no-such-program").wait(60) == 127
    settle_logs(dirs)
    found = (dirs.logs / "0" / "stderr.log").read_text()
    assert found == "FileNotFoundError: No such file or directory: 'no-such-program'\n"
