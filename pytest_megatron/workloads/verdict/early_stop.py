"""End of trainings whose verdict can only be `failed`, whatever they would measure yet.

The judgement of a run that is over is asked about one that is not: the same comparison, of metrics
that go on as their golden does (`continued_like`). What is not finite, or disagrees even so, fails.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_megatron.errors import MegatronError
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.runs.environment import SessionFacts
from pytest_megatron.workloads.golden.collect import has_measured
from pytest_megatron.workloads.golden.compare.result import continued_like
from pytest_megatron.workloads.golden.compare.rl import with_one_loss_name
from pytest_megatron.workloads.golden.model import Golden, MetricMap, Series
from pytest_megatron.workloads.golden.policy import ComparisonPolicy
from pytest_megatron.workloads.recipe.case import CaseMode, Evaluation
from pytest_megatron.workloads.training.plan.phases import PhaseRole, saved_iteration
from pytest_megatron.workloads.training.plan.plan import AttemptPlan
from pytest_megatron.workloads.training.run.runner import End, PhaseEnd
from pytest_megatron.workloads.verdict.attempt import (
    Attempt,
    FailureCause,
    StoppedEarly,
    Verdict,
    diagnose_phase,
    find_incomplete,
    find_non_finite,
    first_non_finite,
    join_windows,
    measured_in,
    signature_of,
)
from pytest_megatron.workloads.verdict.compare import Judgement, RepeatComparison, judge
from pytest_megatron.workloads.verdict.job import Training, WorkloadJob
from pytest_megatron.workloads.verdict.retry import with_policy

_TIME = "iteration-time"
_LEAST_SAVED_S = 10.0  # for less, the whole curve is worth more


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """Judge of the attempts of a job while they run.

    Attributes:
        golden: None leaves only losses that are not finite.
        policy: Rules of the comparison, see `judge`.
        facts: Facts of this machine.
    """

    job: WorkloadJob
    golden: Golden | None
    policy: ComparisonPolicy
    facts: SessionFacts

    @staticmethod
    def can_judge(job: WorkloadJob) -> bool:
        """Return if attempts of a job have a verdict before their end.

        One that is expected to fail has none, and a recipe's own script and an inference program
        write what they measured at the end.
        """
        case = job.case
        if case is None or job.metric_names is None or job.workload.script is not None:
            return False
        return case.evaluation is Evaluation.PASS and case.mode is not CaseMode.INFERENCE

    def find_failure(
        self, plan: AttemptPlan, ends: Sequence[PhaseEnd], facts: SessionFacts | None = None
    ) -> str | None:
        """Return why an attempt can only fail, None while it may pass, or fail for another cause.

        Args:
            plan: Plan of the attempt.
            ends: Ends of the phases; the last is as if it were stopped now, if it runs.
            facts: Facts of the job that it runs in; None where it runs on this machine.
        """
        if ends[-1].plan.role is not PhaseRole.TRAINING:
            return None  # a few steps, for an audit, are no training that could disagree
        ends = [end for end in ends if end.plan.role is PhaseRole.TRAINING]
        if not all(has_measured(end.plan.dirs) for end in ends):
            return None
        try:
            attempt = replace(_settled(self.attempt_of(plan, ends)), facts=facts)
            found = self._not_finite(attempt)
            failed = () if found else self._disagreeing(plan, attempt)
            if failed:
                found = Judgement(repeats=failed, policy=self.policy).in_short
            saved_s = _saved_s(plan, attempt)
            is_over = saved_s is not None and saved_s < _LEAST_SAVED_S
            return None if found is None or is_over or self._is_transient(ends[-1]) else found
        except (MegatronError, OSError):  # half written; at the end it is an error
            return None

    def attempt_of(self, plan: AttemptPlan, ends: Sequence[PhaseEnd]) -> Attempt:
        """Return an attempt with what its phases measured so far.

        Raises:
            MetricsError: One has measured nothing, or it cannot be read.
        """
        return Attempt(
            repeat=1,
            number=1,
            dirs=plan.dirs,
            ends=tuple(ends),
            metrics=tuple(measured_in(end.plan.dirs, is_rl=self._is_rl) for end in ends),
            cause=None,
            is_in_windows=plan.target is not None,
        )

    def _disagreeing(self, plan: AttemptPlan, attempt: Attempt) -> tuple[RepeatComparison, ...]:
        """Return the comparisons that fail whatever an attempt measures from now on.

        Raises:
            MegatronError: The golden and the case do not fit together.
        """
        if self.golden is None:
            return ()
        metrics = self._continued(self.golden, plan, attempt)
        continued = replace(attempt, metrics=metrics, cause=None, stopped=None)
        training = Training(job=self.job, attempts=(continued,), verdict=Verdict.PASSED)
        judgement = judge(training, self.golden, self.policy, training.facts(self.facts))
        failed = [replace(one, comparisons=one.failed) for one in judgement.failed]
        return tuple(r for r in failed if not all(c.is_golden_to_blame for c in r.failed))

    def account(self, plan: AttemptPlan, attempt: Attempt) -> Attempt:
        """Return an attempt that was stopped with what it disagrees in, and what that saved."""
        if not attempt.metrics:
            return attempt
        failed: tuple[RepeatComparison, ...] = ()
        with contextlib.suppress(MegatronError):
            seen = _settled(attempt)
            failed = () if self._not_finite(seen) else self._disagreeing(plan, seen)
        stopped = StoppedEarly(
            iteration=_done(attempt),
            last_iteration=_last_iteration(plan, attempt.ends[-1]),
            saved_s=_saved_s(plan, attempt),
            num_gpus=0 if self.job.workload.platform == CPU_PLATFORM else plan.world_size,
            compared=tuple((one.against, one.comparisons) for one in failed),
        )
        return replace(attempt, stopped=stopped)

    def explain(self, plan: AttemptPlan, attempt: Attempt) -> Attempt:
        """Return an attempt with what was off before its metrics end too early, or are not finite.

        It may have left out a step, and then all that follows is off, which explains its end.
        """
        cause, names = attempt.cause, self.job.metric_names
        if cause is None or names is None or not attempt.metrics or not attempt.ends[-1].is_clean:
            return attempt
        *earlier, latest = attempt.metrics
        if find_incomplete(latest, names, _last_iteration(plan, attempt.ends[-1])) is None:
            if (odd := first_non_finite(latest, names)) is None:
                return attempt
            latest = {
                name: series.where(lambda s, _: s < odd[0]) for name, series in latest.items()
            }
        failed: tuple[RepeatComparison, ...] = ()
        with contextlib.suppress(MegatronError):
            failed = self._disagreeing(plan, replace(attempt, metrics=(*earlier, latest)))
        if not failed:
            return attempt
        first = Judgement(repeats=failed, policy=self.policy).in_short
        return replace(attempt, cause=replace(cause, text=f"{cause.text}; before that, {first}"))

    @property
    def _is_rl(self) -> bool:
        return self.job.case is not None and self.job.case.mode is CaseMode.RL

    def _not_finite(self, attempt: Attempt) -> str | None:
        """Return the first loss that is not finite, None without one."""
        latest = attempt.metrics[-1]
        names = [name for name in self.job.metric_names or () if name in latest]
        return find_non_finite(latest, names)

    def _continued(
        self, golden: Golden, plan: AttemptPlan, attempt: Attempt
    ) -> tuple[MetricMap, ...]:
        """Return the metrics of all phases, those of the last as good as they may become."""
        expected = with_one_loss_name(golden.metrics) if self._is_rl else golden.metrics
        *earlier, latest = attempt.metrics
        if plan.target is None:
            return (*earlier, continued_like(earlier[0] if earlier else expected, latest))
        # What a window has not saved, the next one trains again, and writes some time later.
        parts = [_until(latest, saved_iteration(plan.target.checkpoints))]
        if earlier:
            parts.insert(0, _until(join_windows(earlier), attempt.ends[-2].saved))
        return (continued_like(expected, join_windows(parts)),)

    def _is_transient(self, end: PhaseEnd) -> bool:
        """Return if the logs show a cause that another attempt may not have."""
        found = diagnose_phase(replace(end, end=End.EXITED, returncode=1), table=self.job.table)
        cause = with_policy(FailureCause(text="", signature=signature_of(found)), self.job.retry)
        return cause is not None and cause.is_transient


def _settled(attempt: Attempt) -> Attempt:
    """Return an attempt without the last step of a phase that did not end by itself.

    A program may write a step more than once, and the last value counts.
    """
    if attempt.ends[-1].returncode == 0:
        return attempt
    *earlier, latest = attempt.metrics
    kept = {
        name: _before(series.steps[-1], series) for name, series in latest.items() if len(series)
    }
    return replace(attempt, metrics=(*earlier, kept))


def _before(last: int, series: Series) -> Series:
    return series.where(lambda step, _: step < last)


def _until(metrics: MetricMap, saved: int | None) -> MetricMap:
    """Return metrics up to the iteration of a checkpoint; nothing where there is none."""
    return {name: series.where(lambda s, _: s <= (saved or 0)) for name, series in metrics.items()}


def _done(attempt: Attempt) -> int:
    """Return the last iteration of the last phase, as it was printed or measured."""
    printed = attempt.ends[-1].progress
    if printed is not None:
        return printed.iteration
    return max((s.steps[-1] for s in attempt.metrics[-1].values() if len(s)), default=0)


def _last_iteration(plan: AttemptPlan, end: PhaseEnd) -> int | None:
    """Return the last iteration of a phase, None if it is not known."""
    if plan.target is not None:
        return plan.target.iteration
    printed = None if end.progress is None else end.progress.last
    return end.plan.last_iteration or printed


def _saved_s(plan: AttemptPlan, attempt: Attempt) -> float | None:
    """Return how long an attempt would still have trained, later phases included; None if unknown.

    By the mean time of an iteration: as measured, as printed, or from the whole time.
    """
    end, done = attempt.ends[-1], _done(attempt)
    last = _last_iteration(plan, end)
    later = () if plan.target is not None else plan.phases[end.plan.number :]
    further = sum((phase.last_iteration or 0) - (phase.resumes_after or 0) for phase in later)
    if last is None or not done:
        return None
    series = attempt.metrics[-1].get(_TIME)
    times = [] if series is None else list(series.finite().values())[1:]
    step_s = end.duration_s / done
    if times:
        step_s = statistics.fmean(times)
    elif end.progress is not None and end.progress.iteration_ms is not None:
        step_s = end.progress.iteration_ms / 1000
    return step_s * (max(0, last - done) + further)
