"""Attempts that are judged while they run, by files that are laid down by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.project import ProjectConfig
from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.workloads.golden.model import Golden, series_of
from pytest_megatron.workloads.golden.policy import ComparisonPolicy
from pytest_megatron.workloads.recipe.model import Row, Workload, parse_row
from pytest_megatron.workloads.training.plan.phases import PhaseRole
from pytest_megatron.workloads.training.plan.plan import Setting
from pytest_megatron.workloads.training.run.runner import End, PhaseEnd, Progress
from pytest_megatron.workloads.verdict.attempt import FailureCause
from pytest_megatron.workloads.verdict.early_stop import EarlyStop
from pytest_megatron.workloads.verdict.job import CheckedJob, JobOptions, make_job

ITERS = 20
LOSSES = {step: 5.0 - step / 10 for step in range(1, ITERS + 1)}
CASE = "TEST_TYPE: {type}\nMETRICS: [lm loss]\nMODEL_ARGS: {{--train-iters: 20}}\n{more}"


class Here:
    """A place that changes nothing."""

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        return setting


def job_of(root: Path, kind: str = "regular", more: str = "", **spec: JsonValue) -> CheckedJob:
    case = root / "tests/functional_tests/test_cases/gpt/one/model_config.yaml"
    case.parent.mkdir(parents=True)
    case.write_text(CASE.format(type=kind, more=more))
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
    """An attempt of a job, as its files show it."""

    def __init__(self, checked: CheckedJob, golden: Mapping[int, float] = LOSSES) -> None:
        self.plan = checked.plan
        self.early = EarlyStop(
            job=checked.job,
            golden=Golden(path="golden", metrics={"lm loss": series_of({**golden})}),
            policy=ComparisonPolicy.STRICT,
            facts=gather_facts(checked.job.setting.root),
        )
        self.ends: list[PhaseEnd] = []

    def measure(
        self,
        losses: Mapping[int, float],
        *,
        phase: int = 1,
        saved: int | None = None,
        is_running: bool = True,
    ) -> str | None:
        """Write what a phase measured; return why the attempt can only fail."""
        plan = self.plan.phases[phase - 1]
        plan.dirs.logs.mkdir(parents=True, exist_ok=True)
        plan.dirs.launcher_log.touch()
        lines = [json.dumps({"step": step, "lm loss": loss}) for step, loss in losses.items()]
        plan.dirs.metrics_lines.write_text("".join(f"{line}\n" for line in lines))
        if saved is not None:
            directory = self.plan.dirs.checkpoints
            (directory / f"iter_{saved:07d}").mkdir(parents=True, exist_ok=True)
            (directory / "latest_checkpointed_iteration.txt").write_text(str(saved))
        end = PhaseEnd(
            plan=plan,
            end=End.STOPPED if is_running else End.EXITED,
            returncode=-15 if is_running else 0,
            num_left=0,
            duration_s=60.0,
            hung_rank=None,
            progress=Progress(iteration=max(losses), last=ITERS),
            saved=saved,
        )
        self.ends = [*self.ends[: phase - 1], end]
        return self.early.find_failure(self.plan, self.ends)


def first(num_steps: int, **changed: float) -> dict[int, float]:
    """Return the first losses; `at_3=0.5` adds to that of step 3."""
    more = {int(name.removeprefix("at_")): value for name, value in changed.items()}
    return {s: v + more.get(s, 0.0) for s, v in LOSSES.items() if s <= num_steps}


def test_a_step_off_the_golden_can_only_fail(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path))
    assert attempt.measure(first(6)) is None
    assert attempt.measure(first(6, at_5=0.5)) == "lm loss is off at step 5"
    assert attempt.measure(first(6, at_5=math.nan)) == (
        "lm loss is nan at step 5, the first that is not finite"
    )


def test_the_steps_of_an_audit_are_not_those_of_the_golden(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path))
    (training,) = attempt.plan.phases
    audit = replace(training, role=PhaseRole.AUDIT)
    attempt.plan = replace(attempt.plan, phases=(audit,))
    assert attempt.measure(first(2, at_1=0.5), is_running=False) is None
    attempt.plan = replace(attempt.plan, phases=(audit, training))
    assert attempt.measure(first(6), phase=2) is None
    assert attempt.measure(first(6, at_5=0.5), phase=2) == "lm loss is off at step 5"


def test_nothing_written_yet_or_half_a_line_is_nothing_wrong(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path))
    assert attempt.measure({**first(6)}) is None
    lines = attempt.plan.phases[0].dirs.metrics_lines
    lines.write_text(lines.read_text() + '{"step": 7, "lm loss": 9')
    assert attempt.early.find_failure(attempt.plan, attempt.ends) is None
    lines.unlink()
    assert attempt.early.find_failure(attempt.plan, attempt.ends) is None


def test_what_the_golden_lacks_stops_nothing(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path), {step: LOSSES[step] for step in (1, 2, 3)})
    assert attempt.measure(first(12)) is None


def test_the_last_step_may_be_written_again(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path))
    assert attempt.measure(first(5, at_5=0.5)) is None
    assert attempt.measure(first(5, at_5=math.nan)) is None
    assert attempt.measure(first(5, at_5=0.5), is_running=False) == "lm loss is off at step 5"


def test_what_is_nearly_over_goes_on(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path))
    assert attempt.measure(first(18, at_5=0.5)) is None  # 2 of 18 s
    assert attempt.measure(first(14, at_5=0.5)) is not None


def test_without_a_golden_only_what_is_not_finite_counts(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path))
    attempt.early = replace(attempt.early, golden=None)
    assert attempt.measure(first(6, at_5=0.5)) is None
    assert attempt.measure(first(6, at_5=math.inf)) is not None


def test_logs_with_a_transient_cause_let_it_go_on(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path))
    rank = attempt.plan.phases[0].dirs.logs / "x_y" / "attempt_0" / "0"
    rank.mkdir(parents=True)
    error = "RuntimeError: The server socket has failed to listen: EADDRINUSE"
    trace = f'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n{error}\n'
    (rank / "stderr.log").write_text(trace)
    assert attempt.measure(first(6, at_5=math.nan)) is None
    (rank / "stderr.log").write_text("")
    assert attempt.measure(first(6, at_5=math.nan)) is not None


def test_a_window_counts_up_to_its_checkpoint(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path, "release", max_windows=3))
    wrong = first(9, at_8=0.5)
    assert attempt.measure(wrong, saved=4) is None  # the next window trains step 8 again
    later = {s: v for s, v in first(7).items() if s > 4}
    assert attempt.measure(later, phase=2) is None
    assert attempt.measure(later, phase=2, saved=9) is None  # saved, and not written yet
    later = {s: v for s, v in first(12, at_8=0.5).items() if s > 4}
    assert attempt.measure(later, phase=2, saved=9) == "lm loss is off at step 8"


def test_a_resumed_phase_is_judged_by_the_first(tmp_path: Path) -> None:
    attempt = Attempted(job_of(tmp_path, "ckpt-resume"))
    assert attempt.measure(LOSSES, is_running=False) is None
    second = {s: v for s, v in first(15).items() if s > 10}
    assert attempt.measure(second, phase=2) is None
    assert attempt.measure({**second, 13: second[13] + 1.0}, phase=2) == "lm loss is off at step 13"


@pytest.mark.parametrize(
    ("kind", "more", "is_judged"),
    [
        ("regular", "", True),
        ("regular", "TEST_EVALUATION: xpass\n", False),
        ("frozen-start", "MODE: inference\n", False),
    ],
)
def test_jobs_without_a_verdict_before_their_end(
    tmp_path: Path, kind: str, more: str, *, is_judged: bool
) -> None:
    metrics = "METRICS: [generated_tokens]\n" if "inference" in more else ""
    checked = job_of(tmp_path, kind, more + metrics, checkpoint_load_path="here")
    assert EarlyStop.can_judge(checked.job) == is_judged


def test_what_is_saved_are_the_iterations_left_of_all_phases(tmp_path: Path) -> None:
    def saved(checked: CheckedJob, losses: Mapping[int, float]) -> Sequence[object]:
        attempt = Attempted(checked)
        attempt.measure(losses)
        judged = attempt.early.account(
            attempt.plan, attempt.early.attempt_of(attempt.plan, attempt.ends)
        )
        stopped = judged.stopped
        assert stopped is not None
        return stopped.iteration, stopped.last_iteration, stopped.saved_s, stopped.num_gpus

    alone = job_of(tmp_path / "alone")
    assert saved(alone, first(6, at_5=0.5)) == (6, 20, 140.0, 4)  # 10 s each
    resumed = job_of(tmp_path / "resumed", "ckpt-resume")
    assert saved(resumed, first(6, at_5=0.5)) == (6, 20, 240.0, 4)


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        (first(12), ""),
        # the 8th step is left out, and the others are counted on
        ({s: LOSSES[s if s < 8 else s + 1] for s in range(1, 17)}, "lm loss is off at step 8"),
        (first(ITERS, at_9=math.nan), ""),
        (first(ITERS, at_4=0.5, at_9=math.nan), "lm loss is off at step 4"),
    ],
)
def test_what_was_off_before_an_end_or_a_value_that_is_not_finite_is_told(
    tmp_path: Path, losses: dict[int, float], told: str
) -> None:
    attempt = Attempted(job_of(tmp_path))
    attempt.measure(losses, is_running=False)
    measured = attempt.early.attempt_of(attempt.plan, attempt.ends)
    ended = replace(measured, cause=FailureCause(text="it ended early"))
    cause = attempt.early.explain(attempt.plan, ended).cause
    assert cause is not None
    assert cause.text == "it ended early" + (f"; before that, {told}" if told else "")
