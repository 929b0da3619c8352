"""Trainings that are ended because their verdict can only be `failed`: real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_project import ITERS, Project

from pytest_megatron.base.files import JsonValue
from pytest_megatron.runs.record import RecordedComparison, read_record

HANGS = "hang@8"  # so that only an early stop, or the time limit, ends it
SLOW = {"TINY_TRAIN_STEP_MS": "60000.0"}  # as it prints


def stop_of(attempt: dict[str, JsonValue]) -> dict[str, JsonValue]:
    stopped = attempt["stopped"]
    assert isinstance(stopped, dict)
    return stopped


def wrong_golden(project: Project, case: str, step: int) -> None:
    project.golden(case, changes={step: 1.0})


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(root=tmp_path / "project")


def test_a_loss_that_is_not_finite_ends_the_training(project: Project) -> None:
    project.add("nan", "nan@3", HANGS, env=SLOW)
    run = project.run("recipes")
    assert run.verdict("nan") == ("FAILED", "failed")
    assert run.problem("nan").startswith(
        "stopped after iteration 7 of 10: lm loss is nan at step 3, the first that is not finite"
    )
    assert (
        "stopped early: saved about 3 min; for all of it: -o megatron_stop_early=off" in run.stdout
    )
    (attempt,) = run.attempts("nan")
    stopped = stop_of(attempt)
    assert (stopped["iteration"], stopped["last_iteration"]) == (7, ITERS)
    assert stopped["saved_s"] == 180.0  # three iterations
    assert stopped["saved_gpu_s"] == 0.0


def test_a_step_off_the_golden_ends_the_training(project: Project) -> None:
    case = project.add("off", HANGS, env=SLOW)
    wrong_golden(project, case, 3)
    run = project.run("recipes")
    assert run.verdict("off") == ("FAILED", "failed")
    assert run.problem("off").startswith("stopped after iteration 7 of 10: lm loss is off at step")
    problem = str(run.record("off")["problem"])
    assert "    lm loss, step 3: observed 5.934, golden 6.934, off by 1.4e-01" in problem
    record = run.record("off")
    assert record["compared"] is True
    assert record["fingerprint"] == "mismatch|golden: lm loss"
    golden = record["golden"]
    assert isinstance(golden, dict)
    assert "candidate" not in golden  # half a curve is nothing to review
    assert "stopped early: saved about 3 min" in str(record["summary"])
    compared = read_record(run.item_dir("off") / "comparison.json", RecordedComparison)
    assert compared.passed is False
    (repeat,) = compared.repeats
    (metric,) = repeat.comparisons
    assert (repeat.against, metric.metric, metric.num_compared) == ("golden", "lm loss", 6)
    measured = run.item_dir("off") / "repeat_1" / "attempt_1" / "phase_1" / "metrics.json"
    assert measured.is_file()


@pytest.mark.parametrize("arguments", [("-o", "megatron_stop_early=off"), ("--golden", "off")])
def test_not_asked_for_nothing_is_stopped(project: Project, arguments: tuple[str, str]) -> None:
    case = project.case("off", fault=[HANGS], env=SLOW)
    project.row(case, time_limit=[4])
    wrong_golden(project, case, 3)
    run = project.run("recipes", *arguments)
    assert re.match(
        r"time limit of 4 s reached at .*, after iteration 7 of 10\n", run.problem("off")
    )


def test_a_first_phase_that_disagrees_has_no_second_one(project: Project) -> None:
    case = project.add(
        "resume", env=SLOW, config={"TEST_TYPE": "ckpt-resume"}, save_interval=ITERS // 2
    )
    wrong_golden(project, case, ITERS)
    run = project.run("recipes")
    assert run.problem("resume").startswith("stopped after iteration 10 of 10: lm loss is off at")
    (attempt,) = run.attempts("resume")
    assert stop_of(attempt)["saved_s"] == 60.0 * ITERS / 2
    assert not (run.item_dir("resume") / "repeat_1" / "attempt_1" / "phase_2").exists()


def test_a_resumed_phase_off_the_first_one_is_ended(project: Project) -> None:
    project.add(
        "resume",
        env={**SLOW, "TINY_TRAIN_FAULT": "drift@1 hang-if-resumed@8"},
        config={"TEST_TYPE": "ckpt-resume"},
        save_interval=ITERS // 2,
    )
    run = project.run("recipes")
    assert run.problem("resume").startswith(
        "stopped after iteration 7 of 10, in phase 2: lm loss is off at step 6"
    )
    assert "repeat 1 against the first phase:" in run.stdout


def test_the_first_repeat_that_is_stopped_is_the_last(project: Project) -> None:
    case = project.add("off", HANGS, env=SLOW)
    wrong_golden(project, case, 3)
    run = project.run("recipes", "--n-repeat", "3")
    assert [attempt["repeat"] for attempt in run.attempts("off")] == [1]
    assert "repeat 1 against the golden:" in run.stdout
