"""Lines that only ranks execute count, with nothing to type but what one process needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from gang_suite import RecordedSuite

MEASURED = """\
import threading


def answer(rank):
    if rank == 1:
        return threading.Thread
    return None


def in_a_thread():
    return 1


def on_an_isolated_gang():
    return 1


def never():
    return 1
"""
SUITE = """
    import os, signal
    import pytest
    import measured

    def test_one_rank_takes_another_way(rank):
        if kind := measured.answer(rank):
            thread = kind(target=measured.in_a_thread)
            thread.start()
            thread.join()

    def test_dies(rank):
        os.kill(os.getpid(), signal.SIGKILL)

    @pytest.mark.isolated
    def test_isolated(rank):
        measured.on_an_isolated_gang()
"""
COVERAGE = (sys.executable, "-m", "coverage")
PYTEST = ("pytest", "-p", "megatron", "--ranks", "2", "--run-dir", "run")


@pytest.mark.everyday("run")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param((*COVERAGE, "run", "--source", "measured", "-m", *PYTEST), id="run"),
        pytest.param((*COVERAGE, "run", "-p", "--branch", "-m", *PYTEST), id="parallel-branch"),
        pytest.param((sys.executable, "-m", *PYTEST, "--cov", "measured"), id="pytest-cov"),
    ],
)
def test_lines_of_every_rank_count(tmp_path: Path, command: tuple[str, ...]) -> None:
    suite = RecordedSuite(root=tmp_path).write(measured=MEASURED).write(test_it=SUITE)
    run = suite.run(command=command)
    assert run.summary == "1 failed, 2 passed"
    if "--branch" in command:
        assert suite.run(command=[*COVERAGE, "combine"]).returncode == 0
    assert suite.run(command=[*COVERAGE, "json", "-o", "found.json"]).returncode == 0
    found = json.loads((tmp_path / "found.json").read_text())["files"]["measured.py"]
    assert found["missing_lines"] == [19]
    assert found.get("missing_branches", []) == []
    assert not (run.directory / "ranks" / "coverage").exists()
    assert [path.name for path in tmp_path.glob(".coverage*")] == [".coverage"]
