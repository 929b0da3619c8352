"""Jobs: workloads as a session or a command runs them, planned and checked once.

`make_job` is the only maker of jobs: for pytest, which `repro` starts as well, and `sbatch`. It
plans and checks a job once.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.project import SHORT_COMMIT, ProjectConfig
from pytest_megatron.base.text import nearest
from pytest_megatron.errors import CaseError, LaunchError, RecipeError
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.runs.environment import SessionFacts, kept_variables, utc_now
from pytest_megatron.runs.layout import ItemDirs, item_dirs
from pytest_megatron.runs.record import RecordedPhase, RecordedPlan, to_json
from pytest_megatron.runs.redact import Redactor
from pytest_megatron.triage.signatures import Table, builtin_table
from pytest_megatron.workloads.engine.api import (
    Checking,
    Resources,
)
from pytest_megatron.workloads.golden.model import GENERATION_METRICS, rl_metrics
from pytest_megatron.workloads.recipe.case import (
    CaseMode,
    TestType,
    WorkloadCase,
    case_document,
    case_of,
    case_path,
    fingerprint,
)
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.checks.check import findings_of, problem_of
from pytest_megatron.workloads.training.checks.layout import hits_of
from pytest_megatron.workloads.training.checks.rules import CheckFinding
from pytest_megatron.workloads.training.plan.phases import find_untraceable
from pytest_megatron.workloads.training.plan.plan import (
    FT_PACKAGE,
    SHARED_CHECKPOINTS,
    AttemptPlan,
    Replay,
    Setting,
    plan_attempt,
    require_inputs,
)
from pytest_megatron.workloads.verdict.attempt import (
    DEFAULT_METRICS,
    Attempt,
    Verdict,
    decide_training,
)
from pytest_megatron.workloads.verdict.gradients import tolerance_of
from pytest_megatron.workloads.verdict.retry import (
    RetryPolicy,
    policy_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadJob:
    """One workload as a run wants it executed.

    Attributes:
        node_id: What the user types to get exactly this workload.
        case: None for a row with a script.
        num_repeats: How often it is trained.
        retry: When a repeat is started again.
        table: The signatures that a failure is looked up in.
        replay: What of it is done again, where this is about an earlier run.
        config_hash: The `fingerprint` of case and row as they are trained.
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
    config_hash: str | None = None

    @property
    def metric_names(self) -> tuple[str, ...] | None:
        """Metrics that are compared; None for a script that judges itself."""
        return None if self.case is None else metric_names_of(self.case)

    @property
    def required_metrics(self) -> tuple[str, ...] | None:
        """Metrics that must be measured: `metric_names`, but for a few steps, which may lack them.

        Only where the program says by which words it trains few steps; others log each step.
        """
        has_stop = self.case is not None and self.case.stop is not None
        return () if has_stop and self.setting.is_lightweight else self.metric_names

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
        """True if the case is compared with a golden: not in lightweight mode, for one."""
        return self.case is not None and self.case.is_compared and self._is_whole

    @property
    def why_not_traced(self) -> str | None:
        """Why `--tensor-trace` passes it over; None if it is traced, or need not be."""
        if self.setting.trace is None:
            return None
        return find_untraceable(self.workload, self.case)

    @property
    def gradient_tolerance(self) -> float | None:
        """Tolerance between gradients of two layouts; None where none are compared."""
        case = self.case
        if case is None or case.is_compared or not (case.is_judged and self._is_whole):
            return None
        return tolerance_of(case)

    @property
    def _is_whole(self) -> bool:
        """Return whether all of the training runs, and not a few steps or one phase of it."""
        return self.replay.phase is None and not self.setting.is_lightweight


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Result of a job, before it is compared with a golden.

    Attributes:
        attempts: In the order they ran; those of repeats that never ran are missing.
    """

    job: WorkloadJob
    attempts: tuple[Attempt, ...]

    @property
    def verdict(self) -> Verdict:
        """FAILED or BROKEN where a repeat never trained as it should."""
        return decide_training(self.attempts)

    @property
    def stopped(self) -> str | None:
        """Why there was no further attempt although the last cause is transient, or None."""
        return next((a.stopped for a in self.attempts if a.stopped is not None), None)

    def facts(self, here: SessionFacts) -> SessionFacts:
        """Return where and with what it ran: `here`, unless an engine's job recorded its own."""
        return next((a.facts for a in reversed(self.attempts) if a.facts is not None), here)

    def other_code(self, here: SessionFacts) -> tuple[str, ...]:
        """Return what of the checkouts that an engine's jobs had is not as it is `here`."""
        found: list[str] = []
        for there in (attempt.facts for attempt in self.attempts if attempt.facts is not None):
            if there.commit != here.commit:
                ours, theirs = ((c or "none")[:SHORT_COMMIT] for c in (here.commit, there.commit))
                found.append(f"HEAD, which is {ours} here and was {theirs} in the job")
            found += sorted({*there.edited} - {*here.edited})
        return tuple(dict.fromkeys(found))

    @property
    def clean(self) -> tuple[Attempt, ...]:
        """The attempt of each repeat that trained as it should."""
        return tuple(attempt for attempt in self.attempts if attempt.cause is None)

    @property
    def whole(self) -> tuple[Attempt, ...]:
        """The attempts that trained as they should, also where what came after failed."""
        return tuple(attempt for attempt in self.attempts if attempt.is_whole)

    @property
    def duration_s(self) -> float:
        """Time of all attempts."""
        return sum(attempt.duration_s for attempt in self.attempts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedJob:
    """A job that was planned and checked; only such a job can be trained.

    Attributes:
        plan: Plan of the first attempt of the first repeat, for GPUs that are not leased yet.
        needed: By each attempt.
        own_findings: Problems of the job itself, errors first.
        engine_findings: Problems that its engine found.
    """

    job: WorkloadJob
    plan: AttemptPlan
    needed: Resources
    own_findings: tuple[CheckFinding, ...]
    engine_findings: tuple[CheckFinding, ...] = ()

    @property
    def findings(self) -> tuple[CheckFinding, ...]:
        """All problems."""
        return (*self.own_findings, *self.engine_findings)

    def require_runnable(self) -> None:
        """Refuse a job that cannot train, before it costs anything.

        Raises:
            LaunchError: A check found an error, a script is to run on several nodes, or a program
                or checkpoint is missing.
        """
        problem = problem_of(self.findings)
        if problem is not None:
            raise LaunchError(*problem)
        if self.plan.script is not None and self.needed.num_nodes > 1:
            raise LaunchError(
                self.job.workload.where,
                f"has a script and nodes: {self.needed.num_nodes}; a script is run on one node; "
                f"name the program by training_script_path instead, whose ranks are started on all",
            )
        workload, shared = self.job.workload, SHARED_CHECKPOINTS
        if workload.by_bash is not None and shared.is_dir() and any(shared.iterdir()):
            raise LaunchError(
                workload.where,
                f"bash runs Megatron-LM's driver ({workload.by_bash}), which would load what "
                f"another run left in {shared}, nothing was run; remove that",
            )
        require_inputs(self.plan)

    def plan_of(
        self, *, repeat: int, number: int, devices: tuple[str, ...] | None = None
    ) -> AttemptPlan:
        """Return the plan of an attempt, where `devices` are leased for these GPUs.

        Raises:
            MegatronError: It cannot be planned.
        """
        if devices is None and (repeat, number) == (self.job.replay.repeat, 1):
            return self.plan
        return _plan(self.job, repeat=repeat, number=number, devices=devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options from which a session or a command makes its jobs.

    Attributes:
        setting: Of all jobs; its environment has the variables that labels of CI set.
        max_attempts: As typed; None leaves it to the row.
    """

    setting: Setting
    run_dir: Path
    project: ProjectConfig
    max_attempts: int | None = None
    backoff_s: float = 0.0
    table: Table = field(default_factory=builtin_table)
    replay: Replay = field(default_factory=Replay)


class JobPlace(Protocol):
    """The part of an engine that jobs depend on."""

    def settle(self, setting: Setting, workload: Workload) -> Setting:
        """Return the setting of plans for this engine."""


def make_job(
    options: JobOptions, place: JobPlace, workload: Workload, node_id: str, *, num_repeats: int = 1
) -> CheckedJob:
    """Make the job of a workload.

    Raises:
        CaseError: The case cannot be read, or names no metric.
        MegatronError: It cannot be planned, or the engine lacks a setting.
        RecipeError: The row's keys about retries are wrong.
    """
    workload = options.replay.resized(workload)
    asks_for_few = workload.of_driver is not None and workload.of_driver.is_lightweight
    setting = replace(
        options.setting,
        is_lightweight=options.setting.is_lightweight or asks_for_few,
        has_ft_launcher=importlib.util.find_spec(FT_PACKAGE) is not None,
        secret_names=options.project.secret_names,
        kept_variables=options.project.kept_variables,
    )
    job = WorkloadJob(
        node_id=node_id,
        workload=workload,
        case=read_case_of(setting.root, workload),
        dirs=item_dirs(options.run_dir, node_id),
        setting=place.settle(setting, workload),
        num_repeats=1 if setting.is_lightweight else num_repeats,
        retry=policy_of(
            workload,
            max_attempts=options.max_attempts,
            backoff_s=options.backoff_s,
            table=options.table,
        ),
        table=options.table,
        replay=options.replay,
        config_hash=config_hash(setting.root, workload),
    )
    checked = check_job(job)
    if not isinstance(place, Checking):
        return checked
    found = place.findings(workload, job.setting, checked.needed)
    return replace(checked, engine_findings=tuple(found))


def config_hash(root: Path, workload: Workload) -> str:
    """Return the fingerprint of a row and of its case as that is now.

    Raises:
        YamlError: The case cannot be read.
    """
    case = case_document(root, workload)
    return fingerprint(workload, None if case is None else case.value)


def check_job(job: WorkloadJob) -> CheckedJob:
    """Plan and check a job.

    Raises:
        MegatronError: It cannot be planned.
    """
    plan = _plan(job, repeat=job.replay.repeat, number=1)
    env = job.setting.env
    hits = () if job.case is None else hits_of(job.workload, job.case, env)
    return CheckedJob(
        job=job, plan=plan, needed=_needs(job.workload, plan), own_findings=findings_of(hits)
    )


def _plan(
    job: WorkloadJob, *, repeat: int, number: int, devices: tuple[str, ...] | None = None
) -> AttemptPlan:
    """Plan one attempt of a job."""
    dirs = job.dirs.attempt(repeat=repeat, attempt=number)
    setting = replace(job.setting, devices=devices)
    plan = plan_attempt(job.workload, job.case, dirs, setting, repeat=repeat)
    return job.replay.cut(plan, job.node_id)


def _needs(workload: Workload, plan: AttemptPlan) -> Resources:
    """Return the resources of an attempt."""
    segment = workload.spec.get("segment")
    return Resources(
        platform=workload.platform,
        num_nodes=workload.nodes,
        gpus_per_node=0 if workload.platform == CPU_PLATFORM else workload.gpus,
        ranks_per_node=workload.gpus,
        time_limit_s=plan.time_limit_s,
        segment=segment if isinstance(segment, int) else None,
    )


def describe_plan(
    job: WorkloadJob, plan: AttemptPlan, facts: SessionFacts, *, repeat: int, number: int
) -> dict[str, JsonValue]:
    """Return the content of `plan.json`: all that a repetition needs, without secrets."""
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
        for phase in sorted(plan.phases, key=lambda phase: phase.number)
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
        gradient_tolerance=job.gradient_tolerance,
        seed=None if case is None else case.argument("--seed"),
        is_lightweight=job.setting.is_lightweight,
        python_hash_seed=job.setting.env.get("PYTHONHASHSEED"),
        planned=utc_now(),
        **vars(facts.recorded()),
    )
    return to_json(record)


def _redacted(redactor: Redactor, text: str | None) -> str | None:
    return None if text is None else redactor.text(text)


def metric_names_of(case: WorkloadCase) -> tuple[str, ...]:
    """Return what a case compares.

    Raises:
        CaseError: It names nothing to compare, or, in an inference case, what no such program
            writes: then nothing would be compared, or not what was meant.
    """
    if case.mode is CaseMode.RL:
        return rl_metrics(case.metrics)
    if case.metrics == ():
        raise CaseError(
            str(case.path),
            "METRICS is empty, so nothing would be compared; name metrics, or leave it out",
        )
    if case.mode is CaseMode.PRETRAINING:
        is_consistency = case.test_type is TestType.CHECKPOINT_CONSISTENCY
        default = DEFAULT_METRICS[:1] if is_consistency else DEFAULT_METRICS
        return default if case.metrics is None else case.metrics
    known = ", ".join(sorted(GENERATION_METRICS))
    if case.metrics is None:
        raise CaseError(str(case.path), f"METRICS is missing, expected some of {known}")
    for name in case.metrics:
        if name not in GENERATION_METRICS:
            raise CaseError(
                str(case.path),
                f"METRICS: {name!r} is not compared in MODE inference, expected some of {known}"
                f"{nearest(name, GENERATION_METRICS)}",
            )
    return case.metrics


def read_case_of(root: Path, workload: Workload) -> WorkloadCase | None:
    """Return the test case of a row; None for one with a script, which does what it wants.

    Raises:
        CaseError: The case cannot be read, or names no metric.
    """
    if workload.script is not None:
        return None
    path = case_path(root, workload)
    if workload.of_driver is not None and not path.is_file():
        raise RecipeError(
            workload.where, f"{workload.test_case!r} has no case, expected {path}; add it"
        )
    case = case_of(root, workload)
    metric_names_of(case)  # a case that compares nothing is told before it costs anything
    return case
