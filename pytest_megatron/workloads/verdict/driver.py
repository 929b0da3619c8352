"""Runs and judges the training or script of a job: repeats, attempts, what became of them.

A loss that is not finite ends a training: its verdict can only be `failed`.

A repeat gets another attempt where one failed for another cause than the code.

A repeat is a generator that yields orders and is sent their outcomes: the same for one workload on
this machine and for thousands on a cluster.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Protocol, Self

from pytest_megatron.base.files import write_json_atomically
from pytest_megatron.errors import MegatronError, MetricsError
from pytest_megatron.gpu.health import Health
from pytest_megatron.runs.environment import SessionFacts
from pytest_megatron.runs.record import RecordedHealthFile, to_json
from pytest_megatron.runs.redact import Redactor, redact_tree
from pytest_megatron.triage.rank_log import End
from pytest_megatron.triage.signatures import Table, builtin_table
from pytest_megatron.workloads.engine.api import (
    Engine,
    Planned,
    Submission,
    SubmissionOutcome,
    TroubleKind,
)
from pytest_megatron.workloads.golden.collect import has_measured
from pytest_megatron.workloads.golden.compare.result import Comparison
from pytest_megatron.workloads.golden.model import LOSS, MetricMap, Series, is_loss
from pytest_megatron.workloads.golden.store import write_metrics
from pytest_megatron.workloads.recipe.case import CaseMode, Evaluation
from pytest_megatron.workloads.training.plan.phases import iteration_name
from pytest_megatron.workloads.training.plan.plan import AttemptPlan
from pytest_megatron.workloads.training.run.runner import (
    AttemptListener,
    ForwardingListener,
    PhaseEnd,
)
from pytest_megatron.workloads.verdict.attempt import (
    Attempt,
    FailureCause,
    diagnose_phase,
    find_non_finite,
    judge_generation,
    judge_metrics,
    measured_in,
    note_triage,
    signature_of,
    why_it_ended,
)
from pytest_megatron.workloads.verdict.gradients import (
    compare_gradients,
    measure_gradients,
)
from pytest_megatron.workloads.verdict.job import CheckedJob, Training, WorkloadJob, describe_plan
from pytest_megatron.workloads.verdict.retry import (
    RetryPolicy,
    StopRetrying,
    next_step,
    with_policy,
)

_LOG = logging.getLogger("pytest_megatron.workloads")


class Retries(Protocol):
    """Budget of further attempts, and their observer."""

    def claim(self, attempt: Attempt) -> str | None:
        """Take a further attempt from what the run may have; return why there is none, or None."""

    def on_retry(self, attempt: Attempt, pause_s: float) -> None:
        """Learn of an attempt that failed, and how many seconds the next one waits."""


# Ends with its attempts, at least one; the last is clean, or not worth another one.
Repeat = Generator[Submission, SubmissionOutcome, tuple[Attempt, ...]]


def train(
    checked: CheckedJob,
    facts: SessionFacts,
    listener: AttemptListener,
    retries: Retries,
    engine: Engine,
) -> Training:
    """Run one job, its repeats one after the other up to the first that is not clean.

    Args:
        checked: What to run.
        facts: Facts of this machine; go into every `plan.json`.
        listener: Sees lines and progress.
        retries: Asked before every further attempt.
        engine: Where it runs.

    Raises:
        MegatronError: It cannot be planned or started; nothing is left running.
        KeyboardInterrupt: Ctrl-C, also in the pause before a further attempt.
    """
    attempts: list[Attempt] = []
    for repeat in begin(checked, facts, listener, retries):
        attempts += _drive(repeat, engine)
        if attempts[-1].cause is not None:
            break
    return Training(job=checked.job, attempts=tuple(attempts))


def begin(
    checked: CheckedJob,
    facts: SessionFacts,
    listener: AttemptListener,
    retries: Retries,
) -> tuple[Repeat, ...]:
    """Return the repeats of a job; nothing of them has run yet.

    Raises:
        LaunchError: A check found an error, or a program or checkpoint is missing.
    """
    checked.require_runnable()
    first = checked.job.replay.repeat
    return tuple(
        _repeat(checked, facts, listener, retries, repeat=repeat)
        for repeat in range(first, first + checked.job.num_repeats)
    )


def _drive(repeat: Repeat, engine: Engine) -> tuple[Attempt, ...]:
    """Run a repeat to its end."""
    try:
        submission = next(repeat)
        while True:
            submission = repeat.send(_run_submission(submission, engine))
    except StopIteration as done:
        attempts: tuple[Attempt, ...] = done.value
        return attempts


def _run_submission(submission: Submission, engine: Engine) -> SubmissionOutcome:
    """Run one submission to its end."""
    time.sleep(submission.delay_s)
    try:
        engine.submit([submission])
        while True:
            for update in engine.poll():
                if update.outcome is not None:
                    return update.outcome
            time.sleep(engine.interval_s)
    except BaseException:
        try:
            engine.cancel([submission.key])
        except Exception:  # noqa: BLE001 - what is on its way matters more
            _LOG.warning("%s: could not be cancelled", submission.key, exc_info=True)
        raise


def _repeat(
    checked: CheckedJob,
    facts: SessionFacts,
    listener: AttemptListener,
    retries: Retries,
    *,
    repeat: int,
) -> Repeat:
    """Run one repeat until it is clean or not worth another attempt."""
    job = checked.job
    attempts: list[Attempt] = []
    outcomes: list[SubmissionOutcome] = []
    pause_s = 0.0
    while True:
        plan = checked.plan_of(repeat=repeat, number=len(outcomes) + 1)
        submission = _submission(checked, plan, facts, listener, outcomes, repeat=repeat)
        outcome = yield replace(submission, delay_s=pause_s)
        outcomes.append(outcome)
        if unclean := _redact(job, plan, outcome):
            listener.on_lines(unclean)
        judged = _judged(job, plan, outcome, repeat=repeat, number=len(outcomes))
        attempts.append(judged)
        step = next_step(attempts, job.retry, random.random())  # noqa: S311 - no secret
        where = f"{job.node_id}, repeat {repeat}, attempt {len(attempts)}"
        if isinstance(step, StopRetrying):
            cause = "it trained as it should" if judged.cause is None else judged.cause.text
            _LOG.info("%s: no further attempt: %s", where, step.reason or cause)
            return (*attempts[:-1], replace(judged, stopped=step.reason))
        refusal = retries.claim(judged)
        _LOG.info("%s: further attempt: %s", where, refusal or f"in {step.pause_s:g} s")
        if refusal is not None:
            return (*attempts[:-1], replace(judged, stopped=refusal))
        retries.on_retry(judged, step.pause_s)
        pause_s = step.pause_s


def _submission(
    checked: CheckedJob,
    plan: AttemptPlan,
    facts: SessionFacts,
    listener: AttemptListener,
    earlier: Sequence[SubmissionOutcome],
    *,
    repeat: int,
) -> Submission:
    """Return the submission for the next attempt of a repeat."""
    job, number = checked.job, len(earlier) + 1
    redactor = job.redactor(plan)

    def planned(devices: tuple[str, ...] | None) -> Planned:
        """Return the plan of an attempt on these devices."""
        chosen = (
            plan
            if devices is None
            else checked.plan_of(repeat=repeat, number=number, devices=devices)
        )
        description = describe_plan(job, chosen, facts, repeat=repeat, number=number)
        return Planned(plan=chosen, description=description)

    healths = [outcome.health for outcome in earlier if outcome.health is not None]
    return Submission(
        key=f"{job.dirs.root.name}/{plan.dirs.root.relative_to(job.dirs.root)}",
        node_id=job.node_id,
        resources=checked.needed,
        dirs=plan.dirs,
        planned=planned,
        avoid_hosts=frozenset(host for outcome in earlier for host in outcome.suspects),
        avoid_gpus=frozenset(
            f.gpu for health in healths for f in health.faults if f.gpu is not None
        ),
        listener=ForwardingListener(
            on_lines=lambda lines: listener.on_lines([redactor.text(line) for line in lines]),
            on_progress=listener.on_progress,
        ),
        losses=FiniteLosses.of(job),
    )


def _judged(
    job: WorkloadJob,
    plan: AttemptPlan,
    outcome: SubmissionOutcome,
    *,
    repeat: int,
    number: int,
) -> Attempt:
    """Clean up, read and judge what an attempt left."""
    health = outcome.health
    if health is not None:
        found = RecordedHealthFile(faults=health.faults, notes=health.notes)
        write_json_atomically(plan.dirs.health, {**to_json(found), **to_json(health)})
    known = {one.name: getattr(outcome, one.name) for one in fields(SubmissionOutcome)}
    attempt = Attempt(
        repeat=repeat,
        number=number,
        dirs=plan.dirs,
        metrics=(),
        cause=None,
        **known,
    )
    if outcome.trouble is not None:
        return replace(attempt, cause=with_policy(cause_of(outcome, job.table), job.retry))
    judged = judge_files(job, plan, attempt)
    cause = with_policy(with_health(judged.cause, health), job.retry)
    if cause is not None and outcome.ends:
        last = outcome.ends[-1]
        note_triage(job.dirs, plan.dirs.root, last, cause)
    return replace(judged, cause=cause)


def _redact(job: WorkloadJob, plan: AttemptPlan, outcome: SubmissionOutcome) -> list[str]:
    """Take secrets out of an attempt's files; return warnings about those where that failed."""
    redactor = job.redactor(plan)
    for end in outcome.ends:  # a script before the training may have exported some
        redactor = redactor.knowing(Redactor.of(end.plan.env, (), redactor.names).values)
    unclean = redact_tree(plan.dirs.root, redactor)
    return [f"secrets may be left in {text}" for text in unclean]


def judge_files(job: WorkloadJob, plan: AttemptPlan, attempt: Attempt) -> Attempt:
    """Read the files of an attempt, and judge them: how it ended, and apart what it measured."""
    last_phase = max(phase.number for phase in plan.phases)
    failed = why_it_ended(attempt.ends, last_phase, plan.time_limit_s, job.table)
    is_over = failed is None or failed.is_after_training
    mode = CaseMode.PRETRAINING if job.case is None else job.case.mode
    if mode is CaseMode.INFERENCE:
        if not is_over:
            return replace(attempt, cause=failed)
        generation, cause = judge_generation(attempt.ends[0], job.metric_names or ())
        return replace(attempt, generation=generation, cause=_joined(failed, cause))
    metrics, cause = judge_metrics(
        attempt.ends,
        names=job.required_metrics,
        is_over=is_over,
        is_rl=mode is CaseMode.RL,
        table=job.table,
    )
    for end, measured in zip(attempt.ends, metrics, strict=False):
        write_metrics(end.plan.dirs.metrics, measured)
    attempt = replace(attempt, metrics=metrics)
    if is_over and cause is None and job.gradient_tolerance is not None:
        try:
            attempt = replace(attempt, gradients=_gradients(job, attempt, job.gradient_tolerance))
        except MetricsError as error:
            cause = FailureCause(text=str(error))
    return replace(attempt, cause=_joined(failed, cause))


def _joined(failed: FailureCause | None, measured: FailureCause | None) -> FailureCause | None:
    """Return the cause of an attempt from those of its end and of what it measured before."""
    if failed is None or measured is None:
        return failed or measured
    if not failed.is_after_training:  # of a later phase
        return measured
    return replace(failed, text=f"{failed.text}; {measured.text}", is_after_training=False)


def _gradients(
    job: WorkloadJob, attempt: Attempt, tolerance: float
) -> tuple[tuple[str, tuple[Comparison, ...]], ...]:
    """Compare the checkpoints of an attempt that trained with each layout.

    Raises:
        MetricsError: A checkpoint cannot be read.
    """
    (name, first), *others = _checkpoints(attempt)
    measured = measure_gradients(
        sys.executable, first, [path for _, path in others], job.setting.env
    )
    return tuple(
        (other, compare_gradients(found, tolerance, name=name, where=str(first)))
        for (other, _), found in zip(others, measured, strict=True)
    )


def _checkpoints(attempt: Attempt) -> list[tuple[str, Path]]:
    """Return the checkpoints of each start of a checkpoint-consistency, with its name."""
    found = []
    for end in attempt.ends:
        assert end.plan.saves is not None
        assert end.plan.last_iteration is not None
        directory = end.plan.saves / iteration_name(end.plan.last_iteration)
        found.append((end.plan.name, directory))
    return found


_OOM = "cuda_oom"


def with_health(cause: FailureCause | None, health: Health | None) -> FailureCause | None:
    """Return a cause with what NVML and the kernel saw on the attempt's own GPUs.

    A failure of the hardware during the attempt is its cause, whatever the program printed. An
    OOM on a GPU that another program held memory of is that program's, once.

    Args:
        cause: From the attempt's files; None for one that trained as it should.
        health: State of the attempt's GPUs; None where it had none.
    """
    if cause is None or health is None:
        return cause
    if health.faults:
        first = health.faults[0]
        return replace(
            cause,
            text=f"{first.text}; {cause.text}",
            evidence=(*(fault.text for fault in health.faults), *cause.evidence),
            signature=builtin_table()[first.signature],
        )
    signature = cause.signature
    if signature is not None and signature.id == _OOM and health.foreign is not None:
        return replace(
            cause,
            text=f"{cause.text}; {health.foreign}",
            signature=replace(signature, is_transient=True, advice="end that process"),
        )
    return cause


def cause_of(outcome: SubmissionOutcome, table: Table) -> FailureCause:
    """Return why an attempt that an engine did not bring to its end is no good.

    Args:
        outcome: With trouble.
        table: The signatures.
    """
    trouble = outcome.trouble
    assert trouble is not None
    row = table.engine(trouble.kind.value)
    if row is not None and trouble.is_transient is not None:
        row = replace(row, is_transient=trouble.is_transient)
    return FailureCause(
        text=trouble.text,
        see=trouble.see,
        evidence=trouble.evidence,
        signature=row,
        is_of_engine=trouble.kind is not TroubleKind.OUT_OF_MEMORY,
    )


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
