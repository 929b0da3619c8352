"""Trainings that do all their work, and whose ranks then do not exit."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from tiny_project import Project, Run

from pytest_megatron.process.tree import activity_below

pytestmark = pytest.mark.nightly

STAYS = "stay@0:1"  # of two ranks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    project = Project(root=tmp_path_factory.mktemp("stays") / "project")
    project.add("stays", STAYS)
    project.row(project.case("differs", fault=[STAYS]), write_golden=False)
    project.golden("differs", changes={7: 0.5})
    project.add("passes", STAYS, config={"EXIT_POLICY": "pass"})
    project.add("late", "late@0:1", config={"EXIT_POLICY": "pass"})
    waits = project.case("waits", fault="stay@0", config={"EXIT_POLICY": "wait"})
    project.row(waits, time_limit=[40])
    return project.run("recipes", "-n", "5", "--max-attempts", "1")


def test_ranks_that_do_not_exit_are_named_and_the_golden_is_compared(run: Run) -> None:
    assert run.verdict("stays") == ("FAILED", "failed")
    problem = run.problem("stays")
    assert re.match(
        r"trained to the end, and rank 1 did not exit at train.py:\d+ in misbehave_at_the_end\n",
        problem,
    )
    assert "destroy_process_group()" in problem
    assert "its metrics agree with the golden" in problem
    assert str(run.record("stays")["summary"]).count("did not exit") == 1
    comparison = (run.item_dir("stays") / "comparison.json").read_text()
    assert '"against": "golden"' in comparison


def test_metrics_that_disagree_are_shown_as_well(run: Run) -> None:
    assert run.verdict("differs") == ("FAILED", "failed")
    problem = run.problem("differs")
    assert "trained to the end, and rank 1 did not exit" in problem
    assert "lm loss, step 7: observed " in problem


def test_the_case_decides_whether_that_fails(run: Run) -> None:
    assert run.verdict("passes") == ("PASSED", "passed")
    assert "rank 1 did not exit" in str(run.record("passes")["summary"])
    assert run.verdict("waits") == ("FAILED", "failed")
    assert "time limit of 40 s reached" in run.problem("waits")


def test_what_a_rank_raised_before_it_did_not_exit_fails_in_any_case(run: Run) -> None:
    assert run.verdict("late") == ("FAILED", "failed")
    first = run.problem("late").splitlines()[0]
    assert first.startswith("rank 1 of 2 raised ValueError: the crash of rank 1 at ")
    assert "; did not exit afterwards" in first


@pytest.mark.everyday
def test_work_is_seen_in_any_process_below() -> None:
    code = "import os; print(os.getpid(), flush=True); input()\nwhile True: os.write(1, b'x' * 99)"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={"RANK": "3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        before = activity_below(os.getpid())
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.read(9999)
        after = activity_below(os.getpid())
        process.kill()
    assert 3 in before.ranks
    assert process.pid in before.pids
    assert after.written_bytes - before.written_bytes >= 9999
