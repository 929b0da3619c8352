"""Trainings that are ended because a loss is not finite: real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_project import ITERS, Project

HANGS = "hang@8"  # so that only we, or the time limit, end it
TEXT = "stopped after iteration 7 of 10: lm loss is nan at step 3, the first that is not finite"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(root=tmp_path / "project")


@pytest.mark.parametrize("arguments", [(), ("--golden", "off"), ("--n-repeat", "3")])
def test_a_loss_that_is_not_finite_ends_the_training(
    project: Project, arguments: tuple[str, ...]
) -> None:
    project.add("nan", "nan@3", HANGS)
    run = project.run("recipes", *arguments)
    assert run.verdict("nan") == ("FAILED", "failed")
    assert run.problem("nan").startswith(TEXT)
    (attempt,) = run.attempts("nan")  # the first repeat that is stopped is the last
    assert attempt["cause"] == TEXT
    assert attempt["is_transient"] is False
    golden = run.record("nan")["golden"]
    assert not isinstance(golden, dict) or "candidate" not in golden  # half a curve
    measured = run.item_dir("nan") / "repeat_1" / "attempt_1" / "phase_1" / "metrics.json"
    assert measured.is_file()


def test_after_a_phase_with_a_loss_that_is_not_finite_no_other_starts(project: Project) -> None:
    project.add("resume", "nan@3", config={"TEST_TYPE": "ckpt-resume"}, save_interval=ITERS // 2)
    run = project.run("recipes")
    assert run.problem("resume").startswith("stopped after iteration 10 of 10: lm loss is nan at")
    assert not (run.item_dir("resume") / "repeat_1" / "attempt_1" / "phase_2").exists()
