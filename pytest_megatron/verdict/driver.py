"""Trains a workload: repeats, and attempts where one failed for a cause that is not the code's.

A repeat is a generator that yields orders and is sent what came of them, so that whoever drives it
may drive one workload on this machine or thousands on a cluster.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pytest_megatron.base.files import write_json_atomically
from pytest_megatron.engines.api import Engine, Planned, Resources, Submission, SubmissionOutcome
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.recipe.model import Workload
from pytest_megatron.runs.environment import SessionFacts
from pytest_megatron.runs.record import headed
from pytest_megatron.runs.redact import Redactor, redact_tree
from pytest_megatron.verdict.attempt import Attempt, note_triage
from pytest_megatron.verdict.job import Training, WorkloadJob, describe_plan, plan_job, refuse_wrong
from pytest_megatron.verdict.read import cause_of, judge_files, with_health
from pytest_megatron.verdict.retry import StopRetrying, next_step, with_policy
from pytest_megatron.verdict.verdict import decide_training
from pytest_megatron.workload.plan.checkpoints import require_inputs
from pytest_megatron.workload.plan.plan import AttemptPlan
from pytest_megatron.workload.run.log_watch import Progress
from pytest_megatron.workload.run.runner import AttemptListener


class _Redacting:
    """Shows a listener the lines of ranks without secrets."""

    def __init__(self, listener: AttemptListener, redactor: Redactor) -> None:
        self._redactor = redactor
        self._listener = listener

    def on_lines(self, lines: list[str]) -> None:
        """Take lines of tee'd ranks."""
        self._listener.on_lines([self._redactor.text(line) for line in lines])

    def on_progress(self, phase: int, progress: Progress) -> None:
        """Take how far the training of a phase is."""
        self._listener.on_progress(phase, progress)


class Retries(Protocol):
    """Who has a say in further attempts, and wants to know of them."""

    def claim(self, attempt: Attempt) -> str | None:
        """Take a further attempt from what the run may have; return why there is none, or None."""

    def on_retry(self, attempt: Attempt, pause_s: float) -> None:
        """Learn of an attempt that failed, and how many seconds the next one waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatEnd:
    """How a repeat ended.

    Attributes:
        attempts: At least one; the last is clean, or not worth another one.
        stopped: Why there was no further attempt although the last cause is transient, or None.
    """

    attempts: tuple[Attempt, ...]
    stopped: str | None


Repeat = Generator[Submission, SubmissionOutcome, RepeatEnd]


def train(
    job: WorkloadJob,
    facts: SessionFacts,
    listener: AttemptListener,
    retries: Retries,
    engine: Engine,
) -> Training:
    """Run a job by itself, its repeats one after the other up to the first that is not clean.

    Args:
        job: What to run.
        facts: Of this machine; go into every `plan.json`.
        listener: Sees lines and progress.
        retries: Asked before every further attempt.
        engine: Where it runs.

    Raises:
        MegatronError: It cannot be planned or started; nothing is left running.
        KeyboardInterrupt: Ctrl-C, also in the pause before a further attempt.
    """
    found: list[RepeatEnd] = []
    for repeat in begin(job, facts, listener, retries):
        found.append(_drive(repeat, engine))
        if found[-1].attempts[-1].cause is not None:
            break
    return conclude(job, found)


def begin(
    job: WorkloadJob, facts: SessionFacts, listener: AttemptListener, retries: Retries
) -> tuple[Repeat, ...]:
    """Return the repeats of a job; nothing of them has run yet.

    Raises:
        MegatronError: It cannot be planned, or a check finds an error.
    """
    refuse_wrong(job)
    require_inputs(plan_job(job))  # what is missing is worth knowing before the training
    first = job.replay.repeat
    return tuple(
        _repeat(job, facts, listener, retries, repeat=repeat)
        for repeat in range(first, first + job.num_repeats)
    )


def conclude(job: WorkloadJob, ends: Sequence[RepeatEnd]) -> Training:
    """Return what came of a job, of its repeats in order; those that never ran are missing."""
    attempts = tuple(attempt for end in ends for attempt in end.attempts)
    stopped = next((end.stopped for end in ends if end.stopped is not None), None)
    verdict = decide_training(attempts)
    return Training(job=job, attempts=attempts, verdict=verdict, stopped=stopped)


def _drive(repeat: Repeat, engine: Engine) -> RepeatEnd:
    """Run a repeat to its end."""
    try:
        order = next(repeat)
        while True:
            order = repeat.send(_run_order(order, engine))
    except StopIteration as done:
        end: RepeatEnd = done.value
        return end


def _run_order(order: Submission, engine: Engine) -> SubmissionOutcome:
    """Run one order to its end."""
    time.sleep(order.delay_s)
    try:
        engine.submit([order])
        while True:
            for update in engine.poll():
                if update.outcome is not None:
                    return update.outcome
            time.sleep(engine.interval_s)
    except BaseException:
        with contextlib.suppress(Exception):  # what is on its way matters more
            engine.cancel([order.key])
        raise


def _repeat(
    job: WorkloadJob,
    facts: SessionFacts,
    listener: AttemptListener,
    retries: Retries,
    *,
    repeat: int,
) -> Repeat:
    """Run one repeat until it is clean or not worth another attempt; say why it is not."""
    attempts: list[Attempt] = []
    outcomes: list[SubmissionOutcome] = []
    pause_s = 0.0
    while True:
        order = _order(job, facts, listener, outcomes, repeat=repeat, delay_s=pause_s)
        outcome = yield order
        outcomes.append(outcome)
        plan = plan_job(job, repeat=repeat, number=len(outcomes))  # anew: it is large to keep
        if unclean := _redact(job, plan, outcome):
            listener.on_lines(unclean)
        attempts.append(_judged(job, plan, outcome, repeat=repeat, number=len(outcomes)))
        step = next_step(attempts, job.retry, random.random())  # noqa: S311 - no secret
        if isinstance(step, StopRetrying):
            return RepeatEnd(attempts=tuple(attempts), stopped=step.reason)
        refusal = retries.claim(attempts[-1])
        if refusal is not None:
            return RepeatEnd(attempts=tuple(attempts), stopped=refusal)
        retries.on_retry(attempts[-1], step.pause_s)
        pause_s = step.pause_s


def _order(
    job: WorkloadJob,
    facts: SessionFacts,
    listener: AttemptListener,
    earlier: Sequence[SubmissionOutcome],
    *,
    repeat: int,
    delay_s: float,
) -> Submission:
    """Return the order for the next attempt of a repeat."""
    workload, number = job.workload, len(earlier) + 1
    dirs = job.dirs.attempt(repeat=repeat, attempt=number)

    def planned(devices: tuple[str, ...] | None) -> Planned:
        setting = job.setting if devices is None else replace(job.setting, devices=devices)
        on_these = replace(job, setting=setting)
        plan = plan_job(on_these, repeat=repeat, number=number)
        description = describe_plan(on_these, plan, facts, repeat=repeat, number=number)
        return Planned(plan=plan, description=description)

    plan = plan_job(job, repeat=repeat, number=number)
    healths = [outcome.health for outcome in earlier if outcome.health is not None]
    return Submission(
        key=f"{job.dirs.root.name}/{dirs.root.relative_to(job.dirs.root)}",
        node_id=job.node_id,
        resources=needs_of(workload, plan),
        dirs=dirs,
        planned=planned,
        avoid_hosts=frozenset(host for outcome in earlier for host in outcome.suspects),
        avoid_gpus=frozenset(
            f.uuid for health in healths for f in health.faults if f.uuid is not None
        ),
        delay_s=delay_s,
        listener=_Redacting(listener, job.redactor(plan)),
    )


def needs_of(workload: Workload, plan: AttemptPlan) -> Resources:
    """Return what an attempt of a workload needs; a release may take every window it has."""
    segment = workload.spec.get("segment")
    return Resources(
        platform=workload.platform,
        num_nodes=workload.nodes,
        gpus_per_node=0 if workload.platform == CPU_PLATFORM else workload.gpus,
        ranks_per_node=workload.gpus,
        time_limit_s=plan.time_limit_s * (1 if plan.target is None else len(plan.phases)),
        segment=segment if isinstance(segment, int) else None,
    )


def _judged(
    job: WorkloadJob, plan: AttemptPlan, outcome: SubmissionOutcome, *, repeat: int, number: int
) -> Attempt:
    """Clean up, read and judge what an attempt left."""
    health = outcome.health
    if health is not None:
        write_json_atomically(plan.dirs.health, headed(health.as_json()))
    attempt = Attempt(
        repeat=repeat,
        number=number,
        dirs=plan.dirs,
        ends=outcome.ends,
        metrics=(),
        cause=None,
        health=health,
        is_in_windows=plan.target is not None,
        facts=outcome.facts,
        suspects=outcome.suspects,
    )
    if outcome.trouble is not None:
        return replace(attempt, cause=with_policy(cause_of(outcome, job.table), job.retry))
    judged = judge_files(job, plan, attempt)
    cause = with_policy(with_health(judged.cause, health), job.retry)
    if cause is not None and outcome.ends:
        last = outcome.ends[-1]
        note_triage(job.dirs, plan.dirs.root, last, cause.diagnosis, problem=cause.text)
    return replace(judged, cause=cause)


def _redact(job: WorkloadJob, plan: AttemptPlan, outcome: SubmissionOutcome) -> list[str]:
    """Take secrets out of an attempt's files; return what to tell where that failed."""
    redactor = job.redactor(plan)
    for end in outcome.ends:  # a script before the training may have exported some
        redactor = redactor.knowing(Redactor.of(end.plan.env, (), redactor.names).values)
    unclean = redact_tree(plan.dirs.root, redactor)
    return [f"secrets may be left in {text}" for text in unclean]
