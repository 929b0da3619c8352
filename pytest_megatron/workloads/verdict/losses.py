"""End of trainings with a loss that is not finite: their verdict can only be `failed`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from pytest_megatron.errors import MegatronError
from pytest_megatron.triage.signatures import Table
from pytest_megatron.workloads.golden.collect import has_measured
from pytest_megatron.workloads.golden.model import LOSS, MetricMap, Series, is_loss
from pytest_megatron.workloads.recipe.case import CaseMode, Evaluation
from pytest_megatron.workloads.training.run.runner import End, PhaseEnd
from pytest_megatron.workloads.verdict.attempt import (
    FailureCause,
    diagnose_phase,
    find_non_finite,
    measured_in,
    signature_of,
)
from pytest_megatron.workloads.verdict.job import WorkloadJob
from pytest_megatron.workloads.verdict.retry import RetryPolicy, with_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class FiniteLosses:
    """Losses of a training, which is ended once one of them is not finite.

    Attributes:
        names: Names of the losses.
        table: The signatures; None takes those of the package.
        retry: What is transient for the workload.
    """

    names: tuple[str, ...]
    table: Table | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    @classmethod
    def of(cls, job: WorkloadJob) -> Self | None:
        """Return those of a job; None where its attempts have no verdict before their end.

        One that is expected to fail has none, nor has a recipe's own script, and an inference
        program writes what it measured at the end.
        """
        case = job.case
        if case is None or job.metric_names is None:
            return None
        if case.evaluation is not Evaluation.PASS or case.mode is CaseMode.INFERENCE:
            return None
        names = tuple(filter(is_loss, job.metric_names))
        return cls(names=names, table=job.table, retry=job.retry)

    def __call__(self, end: PhaseEnd) -> str | None:
        """Return the first loss of a phase that is not finite, None without one.

        None as well where its logs show a transient cause: another attempt may not have it.

        Args:
            end: Its end; as if it were stopped now, if it runs.
        """
        if not has_measured(end.plan.dirs):
            return None
        try:
            latest = measured_in(end.plan.dirs, is_rl=LOSS in self.names)
            if end.returncode != 0:
                latest = _settled(latest)
            found = find_non_finite(latest, [name for name in self.names if name in latest])
            return None if found is None or self._is_transient(end) else found
        except (MegatronError, OSError):  # half written; at the end it is an error
            return None

    def _is_transient(self, end: PhaseEnd) -> bool:
        found = diagnose_phase(replace(end, end=End.EXITED, returncode=1), table=self.table)
        cause = with_policy(FailureCause(text="", signature=signature_of(found)), self.retry)
        return cause is not None and cause.is_transient


def _settled(metrics: MetricMap) -> MetricMap:
    """Return the metrics of a phase that runs without their last step.

    A program may write its values one after the other.
    """
    return {
        name: _before(series.steps[-1], series) for name, series in metrics.items() if len(series)
    }


def _before(last: int, series: Series) -> Series:
    return series.where(lambda step, _: step < last)
