"""Trains a workload: repeats, and attempts where one failed for a cause that is not the code's."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pytest_megatron.errors import MetricsError
from pytest_megatron.files import JsonValue, write_json_atomically
from pytest_megatron.golden.comparison import Comparison
from pytest_megatron.golden.generation import generation_to_json
from pytest_megatron.golden.store import write_metrics
from pytest_megatron.host import CPU_PLATFORM, Gpu
from pytest_megatron.launch.case import Case, Mode, TestType
from pytest_megatron.launch.checkpoints import iteration_name, require_frozen
from pytest_megatron.launch.facts import Facts, utc_now
from pytest_megatron.launch.follow import Progress
from pytest_megatron.launch.health import HealthWatch
from pytest_megatron.launch.kept import kept_variables
from pytest_megatron.launch.layout import ItemDirs
from pytest_megatron.launch.local import Listener, run_attempt
from pytest_megatron.launch.plan import AttemptPlan, Setting, plan_attempt
from pytest_megatron.launch.replay import Replay
from pytest_megatron.launch.secrets import Redactor
from pytest_megatron.lease import lease_gpus
from pytest_megatron.recipe.model import Workload
from pytest_megatron.triage.signature import Table, builtin_table
from pytest_megatron.verdict.attempt import DEFAULT_METRICS, Attempt, Cause, judge_attempt
from pytest_megatron.verdict.decide import Verdict, decide_training
from pytest_megatron.verdict.generated import judge_generation
from pytest_megatron.verdict.gradients import compare_gradients, measure_gradients, tolerance_of
from pytest_megatron.verdict.hardware import with_health
from pytest_megatron.verdict.modes import metric_names_of
from pytest_megatron.verdict.redaction import redact_tree
from pytest_megatron.verdict.retry import RetryPolicy, Stop, next_step, with_policy
from pytest_megatron.verdict.script_result import judge_script
from pytest_megatron.verdict.triaged import note_triage


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One workload as a run wants it executed.

    Attributes:
        node_id: What the user types to get exactly this workload.
        case: None for a row with a script of its own.
        num_repeats: How often it is trained.
        retry: When a repeat is started again.
        table: The signatures that a failure is looked up in.
        replay: What of it is done again, where this is about an earlier run.
    """

    node_id: str
    workload: Workload
    case: Case | None
    dirs: ItemDirs
    setting: Setting
    num_repeats: int
    retry: RetryPolicy
    table: Table = field(default_factory=builtin_table)
    replay: Replay = field(default_factory=Replay)

    @property
    def metric_names(self) -> tuple[str, ...] | None:
        """What is compared; None for a script that judges itself."""
        if self.case is None:
            return None
        if self._is_consistency and self.case.metrics is None:
            return DEFAULT_METRICS[:1]
        return metric_names_of(self.case)

    def redactor(self, plan: AttemptPlan) -> Redactor:
        """Return what knows the secrets of the controller, of the case and of its arguments."""
        words = [word for phase in plan.phases for word in phase.argv]
        env = {k: v for phase in plan.phases for k, v in phase.own_env.items()}
        own = {} if self.case is None else self.case.env
        names = self.setting.secret_names
        known = Redactor.of({**self.setting.env, **own}, words, names)
        return known.knowing(Redactor.of(env, (), names).values)

    @property
    def is_compared(self) -> bool:
        """Whether the case is compared with a golden: not in lightweight mode, for one."""
        return self._is_judged and not self._is_consistency

    @property
    def gradient_tolerance(self) -> float | None:
        """How far gradients of two layouts may be apart; None where none are compared."""
        if self.case is None or not (self._is_judged and self._is_consistency):
            return None
        return tolerance_of(self.case)

    @property
    def _is_judged(self) -> bool:
        case = self.case
        if case is None or case.is_never_compared or self.replay.phase is not None:
            return False
        return not (self.setting.is_lightweight or case.is_always_lightweight)

    @property
    def _is_consistency(self) -> bool:
        case = self.case
        return case is not None and case.test_type is TestType.CHECKPOINT_CONSISTENCY


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What came of a job, before any golden is looked at.

    Attributes:
        attempts: In the order they ran.
        verdict: FAILED or BROKEN where a repeat never trained as it should.
        stopped: Why there was no further attempt although the last cause is transient, or None.
    """

    job: Job
    attempts: tuple[Attempt, ...]
    verdict: Verdict
    stopped: str | None = None

    @property
    def clean(self) -> tuple[Attempt, ...]:
        """The attempt of each repeat that trained as it should."""
        return tuple(attempt for attempt in self.attempts if attempt.cause is None)

    @property
    def duration_s(self) -> float:
        """Time of all attempts."""
        return sum(attempt.duration_s for attempt in self.attempts)


class _Redacting:
    """Shows a listener the lines of ranks without secrets."""

    def __init__(self, listener: Listener, redactor: Redactor) -> None:
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


def train(job: Job, facts: Facts, listener: Listener, retries: Retries) -> Training:
    """Run a job.

    Args:
        job: What to run.
        facts: Go into every `plan.json`.
        listener: Sees lines and progress.
        retries: Asked before every further attempt.

    Raises:
        MegatronError: It cannot be planned or started; nothing is left running.
        KeyboardInterrupt: Ctrl-C, also in the pause before a further attempt.
    """
    require_frozen(plan_job(job))  # a missing checkpoint is worth knowing before the training
    attempts: list[Attempt] = []
    stopped = None
    first = job.replay.repeat
    for repeat in range(first, first + job.num_repeats):
        found, stopped = _repeat(job, facts, listener, retries, repeat=repeat)
        attempts += found
        if attempts[-1].cause is not None:
            break
    verdict = decide_training(attempts)
    return Training(job=job, attempts=tuple(attempts), verdict=verdict, stopped=stopped)


def _repeat(
    job: Job, facts: Facts, listener: Listener, retries: Retries, *, repeat: int
) -> tuple[list[Attempt], str | None]:
    """Run one repeat until it is clean or not worth another attempt; say why it is not."""
    attempts: list[Attempt] = []
    while True:
        attempts.append(_attempt(job, facts, listener, attempts, repeat=repeat))
        step = next_step(attempts, job.retry, random.random())  # noqa: S311 - no secret
        if isinstance(step, Stop):
            return attempts, step.reason
        refusal = retries.claim(attempts[-1])
        if refusal is not None:
            return attempts, refusal
        retries.on_retry(attempts[-1], step.pause_s)
        time.sleep(step.pause_s)


def plan_job(job: Job, *, repeat: int | None = None, number: int = 1) -> AttemptPlan:
    """Plan one attempt of a job.

    Raises:
        MegatronError: The case or the row cannot be planned.
    """
    repeat = repeat or job.replay.repeat
    dirs = job.dirs.attempt(repeat=repeat, attempt=number)
    plan = plan_attempt(job.workload, job.case, dirs, job.setting, repeat=repeat)
    return job.replay.cut(plan, job.node_id)


def describe_plan(
    job: Job, plan: AttemptPlan, facts: Facts, *, repeat: int, number: int
) -> dict[str, JsonValue]:
    """Return a plan as `plan.json` keeps it: all that is needed to do it again, without secrets."""
    redactor, kept = job.redactor(plan), job.setting.kept_variables
    phases: list[JsonValue] = [
        {
            "number": phase.number,
            "argv": list[JsonValue](redactor.words(phase.argv)),
            "env": dict[str, JsonValue](
                redactor.env(kept_variables(phase.env, phase.own_env, kept))
            ),
            "name": phase.name,
            "world_size": phase.world_size,
            "last_iteration": phase.last_iteration,
            "rewind_to": phase.resumes_after,
            "before_script": _redacted(redactor, phase.before_script),
            "after_script": _redacted(redactor, phase.after_script),
        }
        for phase in plan.phases
    ]
    case = job.case
    return {
        "schema": 1,
        "node_id": job.node_id,
        "repeat": repeat,
        "attempt": number,
        "recipe": job.workload.where,
        "case": None if case is None else str(case.path),
        "cwd": str(plan.cwd),
        "phases": phases,
        "script": _redacted(redactor, plan.script),
        "world_size": plan.world_size,
        "nodes": job.workload.nodes,
        "platform": job.workload.platform,
        "time_limit_s": plan.time_limit_s,
        "until_iteration": None if plan.target is None else plan.target.iteration,
        "gradient_tolerance": job.gradient_tolerance,
        "seed": None if case is None else case.argument("--seed"),
        "is_lightweight": job.setting.is_lightweight,
        "python_hash_seed": job.setting.env.get("PYTHONHASHSEED"),
        "planned": utc_now(),
        **facts.as_json(),
    }


def _attempt(
    job: Job, facts: Facts, listener: Listener, earlier: Sequence[Attempt], *, repeat: int
) -> Attempt:
    """Run and judge one attempt, on GPUs of its own."""
    workload, number = job.workload, len(earlier) + 1
    is_on_gpus = workload.platform != CPU_PLATFORM
    num_gpus = workload.nodes * workload.gpus if is_on_gpus else 0
    fitting = _trusted_first(facts.host.fitting(workload.platform), earlier)
    leased = lease_gpus(fitting, num_gpus, lambda text: listener.on_lines([text]))
    with contextlib.closing(leased) as lease, HealthWatch(lease.gpus) as watch:
        if is_on_gpus:
            devices = tuple(gpu.uuid for gpu in lease.gpus)
            job = replace(job, setting=replace(job.setting, devices=devices))
        plan = plan_job(job, repeat=repeat, number=number)
        description = describe_plan(job, plan, facts, repeat=repeat, number=number)
        redactor = job.redactor(plan)
        ends = run_attempt(plan, description, _Redacting(listener, redactor), lease.descriptors)
        health = watch.finish()
    for end in ends:  # a script before the training may have exported some
        redactor = redactor.knowing(Redactor.of(end.plan.env, (), redactor.names).values)
    unclean = redact_tree(plan.dirs.root, redactor)
    if unclean:
        listener.on_lines([f"secrets may be left in {text}" for text in unclean])
    if health is not None:
        write_json_atomically(plan.dirs.health, health.as_json())
    attempt = Attempt(
        repeat=repeat,
        number=number,
        dirs=plan.dirs,
        ends=ends,
        metrics=(),
        cause=None,
        health=health,
        is_in_windows=plan.target is not None,
    )
    judged = _judged(job, plan, attempt)
    cause = with_policy(with_health(judged.cause, health), job.retry)
    if cause is not None and ends:
        note_triage(job.dirs, plan.dirs.root, ends[-1], cause.diagnosis, problem=cause.text)
    return replace(judged, cause=cause)


def _trusted_first(gpus: Sequence[Gpu], earlier: Sequence[Attempt]) -> tuple[Gpu, ...]:
    """Return the GPUs with those last on which the hardware failed before."""
    suspect = {f.uuid for a in earlier if a.health is not None for f in a.health.faults}
    return tuple(sorted(gpus, key=lambda gpu: gpu.uuid in suspect))


def _judged(job: Job, plan: AttemptPlan, attempt: Attempt) -> Attempt:
    """Read what an attempt left, and say what is wrong with it."""
    if plan.script is not None and job.case is not None:
        return _judged_script(job, job.case, plan, attempt)
    mode = Mode.PRETRAINING if job.case is None else job.case.mode
    if mode is Mode.INFERENCE:
        generation, cause = judge_generation(
            attempt.ends,
            metric_names=job.metric_names or (),
            time_limit_s=plan.time_limit_s,
            table=job.table,
        )
        return replace(attempt, generation=generation, cause=cause)
    metrics, cause = judge_attempt(
        attempt.ends,
        metric_names=job.metric_names,
        time_limit_s=plan.time_limit_s,
        target=plan.target,
        is_rl=mode is Mode.RL,
        table=job.table,
    )
    for end, measured in zip(attempt.ends, metrics, strict=False):
        write_metrics(end.plan.dirs.metrics, measured)
    attempt = replace(attempt, metrics=metrics, cause=cause)
    if attempt.is_in_windows and metrics:
        write_metrics(attempt.whole_path, attempt.whole)
    return attempt if cause is not None else _with_gradients(job, attempt)


def _judged_script(job: Job, case: Case, plan: AttemptPlan, attempt: Attempt) -> Attempt:
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
    return replace(
        attempt, metrics=result.metrics, generation=result.generation, cause=result.cause
    )


def _with_gradients(job: Job, attempt: Attempt) -> Attempt:
    """Return a clean attempt with the comparison of its checkpoints, where it has any."""
    tolerance = job.gradient_tolerance
    if tolerance is None:
        return attempt
    saved = []
    for end in attempt.ends:
        assert end.plan.saves is not None
        assert end.plan.last_iteration is not None
        saved.append(end.plan.saves / iteration_name(end.plan.last_iteration))
    first, *others = saved
    try:
        measured = measure_gradients(job.setting.python, first, others, job.setting.env)
    except MetricsError as error:
        return replace(attempt, cause=Cause(text=str(error)))
    name = attempt.ends[0].plan.name
    compared: list[tuple[str, tuple[Comparison, ...]]] = [
        (end.plan.name, compare_gradients(found, tolerance, name=name, where=str(first)))
        for end, found in zip(attempt.ends[1:], measured, strict=True)
    ]
    return replace(attempt, gradients=tuple(compared))


def _redacted(redactor: Redactor, text: str | None) -> str | None:
    return None if text is None else redactor.text(text)
