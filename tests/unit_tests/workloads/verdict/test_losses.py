"""Trainings with a loss that is not finite, while they run, by files that are laid down by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from checked_jobs import job_of

from pytest_megatron.triage.rank_log import End
from pytest_megatron.workloads.training.run.runner import PhaseEnd, Progress
from pytest_megatron.workloads.verdict.driver import FiniteLosses
from pytest_megatron.workloads.verdict.job import CheckedJob

ITERS = 20
LOSSES = {step: 5.0 - step / 10 for step in range(1, ITERS + 1)}
CASE = "TEST_TYPE: regular\nMETRICS: [lm loss]\nMODEL_ARGS: {--train-iters: 20}\n"
NOT_FINITE = "lm loss is nan at step 5, the first that is not finite"


class Attempted:
    """The training of a job, as its files show it."""

    def __init__(self, checked: CheckedJob) -> None:
        self.plan = checked.plan.phases[0]
        losses = FiniteLosses.of(checked.job)
        assert losses is not None
        self.losses = losses

    def measure(
        self, losses: Mapping[int, float], name: str = "lm loss", *, is_running: bool = True
    ) -> str | None:
        """Write what the training measured; return the loss that is not finite."""
        dirs = self.plan.dirs
        dirs.logs.mkdir(parents=True, exist_ok=True)
        dirs.launcher_log.touch()
        lines = [json.dumps({"step": step, name: loss}) for step, loss in losses.items()]
        dirs.metrics_lines.write_text("".join(f"{line}\n" for line in lines))
        return self.losses(self.end(is_running=is_running))

    def end(self, *, is_running: bool) -> PhaseEnd:
        return PhaseEnd(
            plan=self.plan,
            end=End.STOPPED if is_running else End.EXITED,
            returncode=-15 if is_running else 0,
            num_left=0,
            duration_s=60.0,
            hung_rank=None,
            progress=Progress(iteration=5, last=ITERS),
        )


def first(num_steps: int, **changed: float) -> dict[int, float]:
    """Return the first losses; `at_3=0.5` adds to that of step 3."""
    more = {int(name.removeprefix("at_")): value for name, value in changed.items()}
    return {s: v + more.get(s, 0.0) for s, v in LOSSES.items() if s <= num_steps}


def test_a_loss_that_is_not_finite_is_found_whatever_other_steps_are(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path, CASE))
    assert attempt.measure(first(6)) is None
    assert attempt.measure(first(6, at_5=50.0)) is None
    assert attempt.measure(first(6, at_5=math.nan)) == NOT_FINITE
    assert attempt.measure(first(6, at_5=math.inf)) == NOT_FINITE.replace("nan", "inf")


def test_nothing_written_yet_or_half_a_line_is_nothing_wrong(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path, CASE))
    assert attempt.losses(attempt.end(is_running=True)) is None
    assert attempt.measure(first(6)) is None
    lines = attempt.plan.dirs.metrics_lines
    lines.write_text(lines.read_text() + '{"step": 7, "lm loss": 9')
    assert attempt.losses(attempt.end(is_running=True)) is None


def test_the_last_step_may_be_written_again(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path, CASE))
    assert attempt.measure(first(5, at_5=math.nan)) is None
    assert attempt.measure(first(5, at_5=math.nan), is_running=False) == NOT_FINITE


def test_logs_with_a_transient_cause_let_it_go_on(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path, CASE))
    rank = attempt.plan.dirs.logs / "x_y" / "attempt_0" / "0"
    rank.mkdir(parents=True)
    error = "RuntimeError: The server socket has failed to listen: EADDRINUSE"
    trace = f'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n{error}\n'
    (rank / "stderr.log").write_text(trace)
    assert attempt.measure(first(6, at_5=math.nan)) is None
    (rank / "stderr.log").write_text("")
    assert attempt.measure(first(6, at_5=math.nan)) == NOT_FINITE


def test_a_metric_that_is_no_loss_ends_nothing(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path, CASE.replace("lm loss", "lm loss, grad-norm")))
    assert attempt.losses.names == ("lm loss",)
    assert attempt.measure(first(6, at_5=math.nan), "grad-norm") is None


def test_the_loss_of_reinforcement_learning_may_have_another_name(tmp_path: Path) -> None:
    case = CASE.replace("lm loss", "lm-loss") + "MODE: rl\n"
    attempt = Attempted(job_of(tmp_path, case))
    assert attempt.measure(first(6, at_5=math.nan), "lm-loss") == NOT_FINITE


@pytest.mark.parametrize(
    "case",
    [
        f"{CASE}TEST_EVALUATION: xpass\n",
        "TEST_TYPE: frozen-start\nMETRICS: [generated_tokens]\nMODE: inference\n",
    ],
    ids=["expected", "inference"],
)
def test_jobs_without_a_verdict_before_their_end(tmp_path: Path, case: str) -> None:
    checked = job_of(tmp_path, case, checkpoint_load_path="here")
    assert FiniteLosses.of(checked.job) is None
