"""Trainings with a loss that is not finite, while they run, by files that are laid down by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.project import ProjectConfig
from pytest_megatron.triage.rank_log import End
from pytest_megatron.workloads.recipe.model import Row, Workload, parse_row
from pytest_megatron.workloads.training.plan.plan import Setting
from pytest_megatron.workloads.training.run.runner import PhaseEnd, Progress
from pytest_megatron.workloads.verdict.driver import FiniteLosses
from pytest_megatron.workloads.verdict.job import CheckedJob, JobOptions, make_job

ITERS = 20
LOSSES = {step: 5.0 - step / 10 for step in range(1, ITERS + 1)}
CASE = "TEST_TYPE: {type}\nMETRICS: {metrics}\nMODEL_ARGS: {{--train-iters: 20}}\n{more}"
NOT_FINITE = "lm loss is nan at step 5, the first that is not finite"


class Here:
    """A place that changes nothing."""

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        return setting


def job_of(
    root: Path,
    kind: str = "regular",
    more: str = "",
    metrics: str = "[lm loss]",
    **spec: JsonValue,
) -> CheckedJob:
    case = root / "tests/functional_tests/test_cases/gpt/one/model_config.yaml"
    case.parent.mkdir(parents=True)
    case.write_text(CASE.format(type=kind, more=more, metrics=metrics))
    (root / "train.py").touch()
    options = JobOptions(
        setting=Setting(root=root, env={"PATH": "/bin"}, is_lightweight=False),
        run_dir=root / "run",
        project=ProjectConfig(),
    )
    row: dict[str, JsonValue] = {
        "model": "gpt",
        "test_case": "one",
        "environment": "dev",
        "platforms": "dgx_h100",
        "scope": "L0",
        "cadence": ["pr"],
        "gpus": 4,
        "training_script_path": "train.py",
        **spec,
    }
    workload = parse_row(Row(line=7, spec=row, axes=()), file=Path("recipes/r.yaml"), variant=())
    return make_job(options, Here(), workload, "recipes/r.yaml::one[dev-dgx_h100]")


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
    attempt = Attempted(job_of(tmp_path))
    assert attempt.measure(first(6)) is None
    assert attempt.measure(first(6, at_5=50.0)) is None
    assert attempt.measure(first(6, at_5=math.nan)) == NOT_FINITE
    assert attempt.measure(first(6, at_5=math.inf)) == NOT_FINITE.replace("nan", "inf")


def test_nothing_written_yet_or_half_a_line_is_nothing_wrong(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path))
    assert attempt.losses(attempt.end(is_running=True)) is None
    assert attempt.measure(first(6)) is None
    lines = attempt.plan.dirs.metrics_lines
    lines.write_text(lines.read_text() + '{"step": 7, "lm loss": 9')
    assert attempt.losses(attempt.end(is_running=True)) is None


def test_the_last_step_may_be_written_again(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path))
    assert attempt.measure(first(5, at_5=math.nan)) is None
    assert attempt.measure(first(5, at_5=math.nan), is_running=False) == NOT_FINITE


def test_logs_with_a_transient_cause_let_it_go_on(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path))
    rank = attempt.plan.dirs.logs / "x_y" / "attempt_0" / "0"
    rank.mkdir(parents=True)
    error = "RuntimeError: The server socket has failed to listen: EADDRINUSE"
    trace = f'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n{error}\n'
    (rank / "stderr.log").write_text(trace)
    assert attempt.measure(first(6, at_5=math.nan)) is None
    (rank / "stderr.log").write_text("")
    assert attempt.measure(first(6, at_5=math.nan)) == NOT_FINITE


def test_a_metric_that_is_no_loss_ends_nothing(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path, metrics="[lm loss, grad-norm]"))
    assert attempt.losses.names == ("lm loss",)
    assert attempt.measure(first(6, at_5=math.nan), "grad-norm") is None


def test_the_loss_of_reinforcement_learning_may_have_another_name(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path, more="MODE: rl\n", metrics="[lm-loss]"))
    assert attempt.measure(first(6, at_5=math.nan), "lm-loss") == NOT_FINITE


@pytest.mark.parametrize(
    ("kind", "more", "metrics"),
    [
        ("regular", "TEST_EVALUATION: xpass\n", "[lm loss]"),
        ("frozen-start", "MODE: inference\n", "[generated_tokens]"),
    ],
)
def test_jobs_without_a_verdict_before_their_end(
    tmp_path: Path, kind: str, more: str, metrics: str
) -> None:
    checked = job_of(tmp_path, kind, more, metrics, checkpoint_load_path="here")
    assert FiniteLosses.of(checked.job) is None
