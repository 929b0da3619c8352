"""Runs and judges the training or script of a job: repeats, attempts, what became of them.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pytest_megatron.base.files import write_json_atomically
from pytest_megatron.base.text import name_ranks
from pytest_megatron.errors import GoldenError, MetricsError
from pytest_megatron.gpu.health import Health
from pytest_megatron.runs.environment import SessionFacts
from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.runs.record import RecordedHealthFile, to_json
from pytest_megatron.runs.redact import Redactor, redact_tree
from pytest_megatron.triage.signatures import Table, builtin_table
from pytest_megatron.workloads.engine.api import (
    Engine,
    Planned,
    Submission,
    SubmissionOutcome,
    TroubleKind,
)
from pytest_megatron.workloads.golden.compare.result import Comparison
from pytest_megatron.workloads.golden.model import Generation, MetricMap, generation_to_json
from pytest_megatron.workloads.golden.store import read_metrics, write_metrics
from pytest_megatron.workloads.recipe.case import (
    LIGHTWEIGHT_ITERS,
    CaseMode,
    TestType,
    WorkloadCase,
)
from pytest_megatron.workloads.training.plan.phases import iteration_name
from pytest_megatron.workloads.training.plan.plan import AttemptPlan
from pytest_megatron.workloads.training.run.runner import (
    AttemptListener,
    End,
    ForwardingListener,
    PhaseEnd,
)
from pytest_megatron.workloads.verdict.attempt import (
    Attempt,
    FailureCause,
    cause_of_measured,
    decide_training,
    diagnose_phase,
    find_problem,
    judge_attempt,
    judge_generation,
    missing_metric,
    note_triage,
    one_value_each,
    why_a_script_failed_late,
    why_it_failed,
)
from pytest_megatron.workloads.verdict.gradients import (
    compare_gradients,
    measure_gradients,
)
from pytest_megatron.workloads.verdict.job import CheckedJob, Training, WorkloadJob
from pytest_megatron.workloads.verdict.losses import FiniteLosses
from pytest_megatron.workloads.verdict.retry import StopRetrying, next_step, with_policy

_RESUMES = (TestType.CKPT_RESUME, TestType.FROZEN_RESUME)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptResult:
    """Result of a script.

    Attributes:
        metrics: Metrics of each training that it ran: one, or two of a resume.
        generation: Result of an inference case.
        cause: None if it did what the case expects.
    """

    metrics: tuple[MetricMap, ...] = ()
    generation: Generation | None = None
    cause: FailureCause | None = None


def judge_script(
    end: PhaseEnd,
    case: WorkloadCase,
    dirs: AttemptDirs,
    *,
    metric_names: Sequence[str],
    is_lightweight: bool,
    time_limit_s: float,
) -> ScriptResult:
    """Return what a script wrote and what is wrong with it, if anything.

    Args:
        end: How the script ended.
        case: Says what must have been measured.
        dirs: Directories of the attempt; the script wrote below its `assets` and `artifacts`.
        metric_names: Names by `metric_names_of`.
        is_lightweight: Whether it was to train only a few iterations.
        time_limit_s: For the text.
    """
    if not end.is_clean:
        return ScriptResult(cause=why_it_failed(end, time_limit_s))
    if (restarted := _find_restart(dirs)) is not None:
        text = "the script ended with exit code 0, but a rank failed and was started again"
        return ScriptResult(cause=FailureCause(text=text, see=str(restarted)))
    try:
        if case.mode is CaseMode.INFERENCE:
            return _judge_generation(dirs, metric_names)
        return _judge_training(case, dirs, metric_names, is_lightweight=is_lightweight)
    except (GoldenError, MetricsError) as error:
        return ScriptResult(
            cause=FailureCause(text=f"the script ended with exit code 0, but {error}")
        )


def _judge_generation(dirs: AttemptDirs, names: Sequence[str]) -> ScriptResult:
    """Return what a script's inference program generated."""
    for path in _json_files(dirs):
        generation = read_metrics(path).generation
        if generation is None:
            continue
        absent = next((name for name in names if not generation.has(name)), None)
        cause = (
            None
            if absent is None
            else FailureCause(text=missing_metric(generation, absent), see=str(path))
        )
        return ScriptResult(generation=generation, cause=cause)
    raise MetricsError(str(dirs.assets), "holds no output of an inference program")


def _judge_training(
    case: WorkloadCase, dirs: AttemptDirs, names: Sequence[str], *, is_lightweight: bool
) -> ScriptResult:
    """Return what a script's trainings measured."""
    places = _event_dirs(dirs) or _json_files(dirs)[:1]
    wanted = 2 if case.test_type in _RESUMES else 1
    if len(places) != wanted:
        found = ", ".join(str(place.relative_to(dirs.root)) for place in places) or "none"
        raise MetricsError(
            str(dirs.assets), f"holds metrics of {found}, expected those of {wanted} training(s)"
        )
    last = case.train_iters
    if case.mode is CaseMode.RL or case.test_type is TestType.RELEASE:
        last = case.exit_interval or last
    if is_lightweight:
        last = min(last, LIGHTWEIGHT_ITERS)
    measured: list[MetricMap] = []
    for place in places:
        observed = read_metrics(place)
        measured.append(one_value_each(observed, names, is_rl=case.mode is CaseMode.RL))
        if problem := find_problem(measured[-1], names, last):
            cause = cause_of_measured(problem, str(place), None)
            return ScriptResult(metrics=tuple(measured), cause=cause)
    return ScriptResult(metrics=tuple(measured))


def _event_dirs(dirs: AttemptDirs) -> list[Path]:
    """Return every directory of TensorBoard files; `results/` belongs to its parent."""
    found = {
        path.parent.parent if path.parent.name == "results" else path.parent
        for root in (dirs.assets, dirs.artifacts)
        for path in root.rglob("events*tfevents*")
    }
    return sorted(found)


def _json_files(dirs: AttemptDirs) -> list[Path]:
    """Return the files that a driver extracts its metrics to, or a program writes requests to."""
    return sorted(dirs.assets.glob("golden_values*.json"))


def _find_restart(dirs: AttemptDirs) -> Path | None:
    """Return logs of a second attempt of a launcher: its first one failed, whatever came after."""
    return next(iter(sorted(dirs.assets.rglob("attempt_[1-9]*"))), None)


def find_saved(dirs: AttemptDirs, key: str) -> Path:
    """Return the last checkpoint that Megatron-LM's driver had a start of a training save.

    Args:
        dirs: Directories of the attempt.
        key: `MODEL_ARGS_<n>` of the start.

    Raises:
        MetricsError: There is none.
    """
    places = (dirs.artifacts, dirs.assets, dirs.checkpoints)
    found = [path for place in places for path in place.rglob(f"repeat_*_key_{key}/iter_*")]
    if not found:
        raise MetricsError(str(dirs.artifacts), f"holds no checkpoint of {key}")
    return max(found, key=lambda path: path.name)


_LOG = logging.getLogger("pytest_megatron.workloads")


class Retries(Protocol):
    """Budget of further attempts, and their observer."""

    def claim(self, attempt: Attempt) -> str | None:
        """Take a further attempt from what the run may have; return why there is none, or None."""

    def on_retry(self, attempt: Attempt, pause_s: float) -> None:
        """Learn of an attempt that failed, and how many seconds the next one waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatEnd:
    """End of a repeat.

    Attributes:
        attempts: At least one; the last is clean, or not worth another one.
        stopped: Why there was no further attempt although the last cause is transient, or None.
    """

    attempts: tuple[Attempt, ...]
    stopped: str | None


Repeat = Generator[Submission, SubmissionOutcome, RepeatEnd]


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
    found: list[RepeatEnd] = []
    for repeat in begin(checked, facts, listener, retries):
        found.append(_drive(repeat, engine))
        if found[-1].attempts[-1].cause is not None:
            break
    return conclude(checked.job, found)


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


def conclude(job: WorkloadJob, ends: Sequence[RepeatEnd]) -> Training:
    """Return the training of a job from its repeats in order; those that never ran are missing."""
    attempts = tuple(attempt for end in ends for attempt in end.attempts)
    stopped = next((end.stopped for end in ends if end.stopped is not None), None)
    verdict = decide_training(attempts)
    return Training(job=job, attempts=attempts, verdict=verdict, stopped=stopped)


def _drive(repeat: Repeat, engine: Engine) -> RepeatEnd:
    """Run a repeat to its end."""
    try:
        submission = next(repeat)
        while True:
            submission = repeat.send(_run_submission(submission, engine))
    except StopIteration as done:
        end: RepeatEnd = done.value
        return end


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
    """Run one repeat until it is clean or not worth another attempt; return the reason as well."""
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
            return RepeatEnd(attempts=tuple(attempts), stopped=step.reason)
        refusal = retries.claim(attempts[-1])
        _LOG.info("%s: further attempt: %s", where, refusal or f"in {step.pause_s:g} s")
        if refusal is not None:
            return RepeatEnd(attempts=tuple(attempts), stopped=refusal)
        retries.on_retry(attempts[-1], step.pause_s)
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
        return checked.described(chosen, facts, repeat=repeat, number=number)

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
        lost_s=outcome.lost_s,
        note=next(
            (
                f"{name_ranks(e.waiting)} did not exit"
                for e in outcome.ends
                if e.waiting and e.is_clean
            ),
            None,
        ),
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
    """Read the files of an attempt, and judge them."""
    late = _why_only_late(job, plan, attempt)
    if late is not None:
        *earlier, last = attempt.ends
        whole = replace(last, end=End.EXITED, returncode=0)
        judged = judge_files(job, plan, replace(attempt, ends=(*earlier, whole)))
        return _with_late(job, replace(judged, ends=attempt.ends), late)
    if plan.script is not None and job.case is not None:
        return _judged_script(job, job.case, plan, attempt)
    mode = CaseMode.PRETRAINING if job.case is None else job.case.mode
    if mode is CaseMode.INFERENCE:
        generation, cause = judge_generation(
            attempt.ends,
            metric_names=job.metric_names or (),
            time_limit_s=plan.time_limit_s,
            table=job.table,
        )
        return replace(attempt, generation=generation, cause=cause)
    metrics, cause = judge_attempt(
        attempt.ends,
        metric_names=job.required_metrics,
        time_limit_s=plan.time_limit_s,
        target=plan.target,
        is_rl=mode is CaseMode.RL,
        table=job.table,
    )
    for end, measured in zip(attempt.ends, metrics, strict=False):
        write_metrics(end.plan.dirs.metrics, measured)
    attempt = replace(attempt, metrics=metrics, cause=cause)
    if attempt.is_in_windows and metrics:
        write_metrics(attempt.whole_path, attempt.whole)
    if cause is not None:
        return attempt
    return _with_gradients(job, attempt)


def _why_only_late(job: WorkloadJob, plan: AttemptPlan, attempt: Attempt) -> FailureCause | None:
    """Return the failure of an attempt that came after its last training, None for another."""
    last = attempt.ends[-1] if attempt.ends else None
    if last is None or last.is_clean or job.case is None:
        return None
    if last.end is End.NOT_EXITED:
        is_last = last.plan.number == max(phase.number for phase in plan.phases)
        return why_it_failed(last, plan.time_limit_s, job.table) if is_last else None
    if not last.plan.is_script or last.end is not End.EXITED or last.returncode < 0:
        return None
    found = diagnose_phase(last, plan.time_limit_s, job.table)
    has_failed_rank = found is not None and found.record.root_rank is not None
    return None if has_failed_rank else why_a_script_failed_late(last)


def _with_late(job: WorkloadJob, attempt: Attempt, late: FailureCause) -> Attempt:
    """Return an attempt that was judged without its late failure, with that as well.

    A script that compares with a golden cannot end well while that golden is written.
    """
    if attempt.cause is not None:
        is_script = attempt.ends[-1].end is End.EXITED
        first, second = (attempt.cause, late) if is_script else (late, attempt.cause)
        cause = replace(first, text=f"{first.text}; {second.text}", is_after_training=False)
        return replace(attempt, cause=cause)
    if job.is_writing_goldens and attempt.ends[-1].plan.is_script:
        return replace(attempt, note=late.text)
    return replace(attempt, cause=late)


def _judged_script(
    job: WorkloadJob, case: WorkloadCase, plan: AttemptPlan, attempt: Attempt
) -> Attempt:
    """Read what a recipe's own script left."""
    (end,) = attempt.ends
    result = judge_script(
        end,
        case,
        attempt.dirs,
        metric_names=job.metric_names or (),
        is_lightweight=job.setting.is_lightweight or case.is_always_lightweight,
        time_limit_s=plan.time_limit_s,
    )
    for number, measured in enumerate(result.metrics, start=1):
        path = attempt.dirs.phase(number).metrics
        path.parent.mkdir(exist_ok=True)
        write_metrics(path, measured)
    if result.generation is not None:
        write_json_atomically(
            attempt.dirs.phase(1).generated, generation_to_json(result.generation)
        )
    attempt = replace(
        attempt, metrics=result.metrics, generation=result.generation, cause=result.cause
    )
    return attempt if attempt.cause is not None else _with_gradients(job, attempt)


def _with_gradients(job: WorkloadJob, attempt: Attempt) -> Attempt:
    """Return a clean attempt with the comparison of its checkpoints, where it has any."""
    tolerance = job.gradient_tolerance
    if tolerance is None:
        return attempt
    try:
        (name, first), *others = _checkpoints(job, attempt)
        measured = measure_gradients(
            sys.executable, first, [path for _, path in others], job.setting.env
        )
    except MetricsError as error:
        return replace(attempt, cause=FailureCause(text=str(error)))
    compared: list[tuple[str, tuple[Comparison, ...]]] = [
        (other, compare_gradients(found, tolerance, name=name, where=str(first)))
        for (other, _), found in zip(others, measured, strict=True)
    ]
    return replace(attempt, gradients=tuple(compared))


def _checkpoints(job: WorkloadJob, attempt: Attempt) -> list[tuple[str, Path]]:
    """Return the checkpoints of each start of a checkpoint-consistency, with its name.

    Raises:
        MetricsError: The driver of a script left none of a start.
    """
    if job.case is not None and attempt.ends[0].plan.is_script:
        keys = [variant.key for variant in job.case.variants]
        return [(key, find_saved(attempt.dirs, key)) for key in keys]
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
