"""A workload as a run wants it executed, what exactly that starts, and what came of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import LaunchError
from pytest_megatron.recipe.case import TestType, WorkloadCase, read_case
from pytest_megatron.recipe.model import Workload
from pytest_megatron.recipe.paths import case_path
from pytest_megatron.runs.environment import SessionFacts, kept_variables, utc_now
from pytest_megatron.runs.layout import ItemDirs
from pytest_megatron.runs.record import RecordedPhase, RecordedPlan, to_json
from pytest_megatron.runs.redact import Redactor
from pytest_megatron.triage.signatures import Table, builtin_table
from pytest_megatron.verdict.attempt import DEFAULT_METRICS, Attempt
from pytest_megatron.verdict.gradients import tolerance_of
from pytest_megatron.verdict.mode import metric_names_of
from pytest_megatron.verdict.retry import RetryPolicy
from pytest_megatron.verdict.script import is_judged_by_us
from pytest_megatron.verdict.verdict import Verdict
from pytest_megatron.workload.checks.check import findings_of, hits_of, problem_of
from pytest_megatron.workload.checks.rules import CheckFinding
from pytest_megatron.workload.plan.plan import AttemptPlan, Setting, plan_attempt
from pytest_megatron.workload.plan.replay import Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadJob:
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
    case: WorkloadCase | None
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

    job: WorkloadJob
    attempts: tuple[Attempt, ...]
    verdict: Verdict
    stopped: str | None = None

    def facts(self, here: SessionFacts) -> SessionFacts:
        """Return where and with what it ran: `here`, unless an engine's job said otherwise."""
        return next((a.facts for a in reversed(self.attempts) if a.facts is not None), here)

    @property
    def clean(self) -> tuple[Attempt, ...]:
        """The attempt of each repeat that trained as it should."""
        return tuple(attempt for attempt in self.attempts if attempt.cause is None)

    @property
    def duration_s(self) -> float:
        """Time of all attempts."""
        return sum(attempt.duration_s for attempt in self.attempts)


def plan_job(job: WorkloadJob, *, repeat: int | None = None, number: int = 1) -> AttemptPlan:
    """Plan one attempt of a job.

    Raises:
        MegatronError: The case or the row cannot be planned.
    """
    repeat = repeat or job.replay.repeat
    dirs = job.dirs.attempt(repeat=repeat, attempt=number)
    plan = plan_attempt(job.workload, job.case, dirs, job.setting, repeat=repeat)
    return job.replay.cut(plan, job.node_id)


def describe_plan(
    job: WorkloadJob, plan: AttemptPlan, facts: SessionFacts, *, repeat: int, number: int
) -> dict[str, JsonValue]:
    """Return a plan as `plan.json` keeps it: all that is needed to do it again, without secrets."""
    redactor, kept = job.redactor(plan), job.setting.kept_variables
    phases = [
        RecordedPhase(
            number=phase.number,
            argv=tuple(redactor.words(phase.argv)),
            env=redactor.env(kept_variables(phase.env, phase.own_env, kept)),
            name=phase.name,
            world_size=phase.world_size,
            last_iteration=phase.last_iteration,
            rewind_to=phase.resumes_after,
            before_script=_redacted(redactor, phase.before_script),
            after_script=_redacted(redactor, phase.after_script),
        )
        for phase in plan.phases
    ]
    case = job.case
    record = RecordedPlan(
        node_id=job.node_id,
        repeat=repeat,
        attempt=number,
        recipe=job.workload.where,
        case=None if case is None else str(case.path),
        cwd=str(plan.cwd),
        phases=tuple(phases),
        script=_redacted(redactor, plan.script),
        world_size=plan.world_size,
        nodes=job.workload.nodes,
        platform=job.workload.platform,
        time_limit_s=plan.time_limit_s,
        until_iteration=None if plan.target is None else plan.target.iteration,
        gradient_tolerance=job.gradient_tolerance,
        seed=None if case is None else case.argument("--seed"),
        is_lightweight=job.setting.is_lightweight,
        python_hash_seed=job.setting.env.get("PYTHONHASHSEED"),
        planned=utc_now(),
        **facts.as_keys(),
    )
    return to_json(record)


def _redacted(redactor: Redactor, text: str | None) -> str | None:
    return None if text is None else redactor.text(text)


def read_case_of(root: Path, workload: Workload) -> WorkloadCase | None:
    """Return the test case of a row.

    None for a row that brings its own script and either has no case or one that only the script
    can judge.

    Raises:
        CaseError: The case cannot be read, or names no metric.
    """
    path = case_path(root, workload)
    if workload.script is not None and not path.is_file():
        return None
    case = read_case(path)
    if workload.script is not None and not is_judged_by_us(case):
        return None
    metric_names_of(case)  # a case that compares nothing is told before it costs anything
    return case


def check_job(job: WorkloadJob, *, memory_bytes: int | None = None) -> tuple[CheckFinding, ...]:
    """Return what is wrong with a job, errors first.

    Args:
        job: What is to run.
        memory_bytes: Of a GPU that it will run on, where one is known.
    """
    if job.case is None:
        return ()
    return findings_of(hits_of(job.workload, job.case, job.setting.env, memory_bytes=memory_bytes))


def refuse_wrong(job: WorkloadJob) -> None:
    """Refuse a job that cannot train, whatever it runs on.

    Raises:
        LaunchError: A check finds an error; says all of them.
    """
    problem = problem_of(check_job(job))
    if problem is not None:
        raise LaunchError(*problem)
