"""Protocol of engines, and the local one. It is public: packages may bring engines of their own.

An engine runs *submissions*; a submission is one attempt of a workload. Engines are entry points of
the group `pytest_megatron.engines`, each a callable from an `EngineContext` to an `Engine`. The
local one runs attempts on this machine one at a time, on leased GPUs.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Protocol, runtime_checkable

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import one_of
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.health import Health, HealthWatch
from pytest_megatron.gpu.host import CPU_PLATFORM, Gpu, Host, Lease, lease_gpus
from pytest_megatron.process.guarded import GuardedProcess
from pytest_megatron.runs.environment import SessionFacts
from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.checks.rules import CheckFinding
from pytest_megatron.workloads.training.plan.plan import AttemptPlan, PhasePlan, Setting
from pytest_megatron.workloads.training.run.runner import (
    AttemptListener,
    PhaseEnd,
    run_attempt,
    start_here,
)

GROUP = "pytest_megatron.engines"  # of entry points
_LOG = logging.getLogger("pytest_megatron.workloads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of a submission.

    Attributes:
        platform: The recipe's; `cpu` needs no GPU.
        gpus_per_node: 0 on the platform `cpu`.
        ranks_per_node: The number of GPUs where there are any.
        time_limit_s: Limit of all phases together; an engine adds what start and end take it.
        segment: How many nodes must be near one another, from the recipe; None if it has none.
    """

    platform: str
    num_nodes: int
    gpus_per_node: int
    ranks_per_node: int
    time_limit_s: float
    segment: int | None = None

    @property
    def num_gpus(self) -> int:
        """GPUs over all nodes."""
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Plan of a submission.

    Attributes:
        plan: Data, the same however often it is asked for.
        description: Content of `plan.json`, without secrets.
    """

    plan: AttemptPlan
    description: dict[str, JsonValue]


class WatchedLosses(Protocol):
    """Losses that end a training once one of them is not finite; see `run_attempt`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, for `JobSpec.losses`."""

    def __call__(self, end: PhaseEnd, /) -> str | None:
        """Return the first that is not finite of a phase, which may still run, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One attempt of a workload, to be run somewhere.

    Attributes:
        key: `<directory of the item>/repeat_1/attempt_2`; no two of a run have the same,
            and it is the same again when the run is taken up by another controller.
        node_id: What the user types to get this workload.
        dirs: Where the attempt writes; not there yet.
        planned: Plans it, for GPUs by UUID; None where it runs on those that it finds.
        avoid_hosts: Where infrastructure failed under an earlier attempt.
        avoid_gpus: UUIDs of GPUs that failed under one; to be taken last.
        delay_s: Pause before it may be submitted.
        listener: Sees lines and progress, where the engine can show them live.
        losses: For `run_attempt`, where the engine runs it in this process; None where a loss that
            is not finite ends nothing.
    """

    key: str
    node_id: str
    resources: Resources
    dirs: AttemptDirs
    planned: Callable[[tuple[str, ...] | None], Planned]
    avoid_hosts: frozenset[str] = frozenset()
    avoid_gpus: frozenset[str] = frozenset()
    delay_s: float = 0.0
    listener: AttemptListener
    losses: WatchedLosses | None = None


class TroubleKind(Enum):
    """Reason why an attempt did not run to its end; never the code's own failure."""

    TIMEOUT = "timeout"  # a limit of the engine, not the workload's own
    NODE_FAIL = "node_fail"
    PREEMPTED = "preempted"
    OUT_OF_MEMORY = "out_of_memory"  # of the host, as the engine says
    BOOT_FAIL = "boot_fail"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"  # started a second time behind our back
    LOST = "lost"  # it ended and left nothing that says how
    NOT_STARTED = "not_started"  # refused, or not possible as asked

    @property
    def is_of_host(self) -> bool:
        """True if the machine is to be avoided from now on."""
        return self in (TroubleKind.NODE_FAIL, TroubleKind.BOOT_FAIL)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineError:
    """Error of an engine that ended an attempt.

    Attributes:
        text: One line for a person: what happened, its source, job and host.
        see: File to read.
        evidence: Lines of a log that belong to it.
        hosts: Those that it is about, where it is not about all that the attempt ran on.
        is_transient: Whether another attempt may pass; None leaves it to the table of signatures.
    """

    kind: TroubleKind
    text: str
    see: str = ""
    hosts: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    is_transient: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionOutcome:
    """End of a submission.

    Attributes:
        ends: Ends of phases, up to the first that is not clean; may be none where there is trouble.
        health: Health of the GPUs before and after; None without GPUs.
        facts: Where and with what it ran; None where that is this process's machine.
        hosts: Names of the machines, as `avoid_hosts` takes them.
        trouble: None where it ran to its end, well or not.
        lost_s: Time that it ran, where no phase left its end.
    """

    ends: tuple[PhaseEnd, ...] = ()
    health: Health | None = None
    facts: SessionFacts | None = None
    hosts: tuple[str, ...] = ()
    trouble: EngineError | None = None
    lost_s: float = 0.0

    @property
    def suspects(self) -> tuple[str, ...]:
        """The machines that are to be avoided from now on."""
        trouble = self.trouble
        if trouble is not None and trouble.hosts:
            return trouble.hosts
        has_faults = self.health is not None and bool(self.health.faults)
        is_of_host = trouble is not None and trouble.kind.is_of_host
        return self.hosts if has_faults or is_of_host else ()


class SubmissionPhase(Enum):
    """Progress of a submission."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """News of a submission.

    Attributes:
        key: The submission's.
        detail: For the terminal: why it waits, since when, where it runs; may be empty.
        outcome: There if, and only if, it has ended.
    """

    key: str
    phase: SubmissionPhase
    detail: str = ""
    outcome: SubmissionOutcome | None = None


class Engine(Protocol):
    """Place where attempts run. All of it is called in the controller, by one thread.

    Attributes:
        name: Name that `--executor` takes.
        is_queue: Whether it wants all of them at once and runs them as room comes; False for one
            that runs a submission at a time, within `poll`.
        interval_s: Time between two polls.
    """

    name: str
    is_queue: bool
    interval_s: float

    def settle(self, setting: Setting, workload: Workload) -> Setting:
        """Return what plans for this engine need: the interpreter, the environment."""

    def lacks(self, resources: Resources) -> str | None:
        """Return why a submission with these needs can never run here, or None if it can."""

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Take submissions. One that is refused ends with `TroubleKind.NOT_STARTED`.

        Raises:
            LaunchError: None of them can be taken, now or later.
        """

    def poll(self) -> Sequence[Update]:
        """Return what changed since the last call; each submission that was taken ends once.

        Raises:
            LaunchError: An engine that runs submissions within `poll` cannot start one; it is gone.
        """

    def cancel(self, keys: Sequence[str]) -> None:
        """End submissions, and wait a reasonable time for it; some may have ended already."""

    def close(self) -> None:
        """Leave nothing behind that is not meant to go on."""


@runtime_checkable
class Checking(Protocol):
    """Optional part of an engine: it knows what cannot work where it runs a workload."""

    def findings(
        self, workload: Workload, setting: Setting, resources: Resources
    ) -> Sequence[CheckFinding]:
        """Return what is wrong; an error refuses the workload, a warning is shown once for a run.

        Raises:
            LaunchError: The settings ask for what is not there.
        """


@runtime_checkable
class Describing(Protocol):
    """Optional part of an engine: it shows what it would start."""

    def describe(self, plan: AttemptPlan, resources: Resources) -> Sequence[str]:
        """Return lines for `--plan`, such as image, mounts and script; nothing is written.

        Raises:
            LaunchError: It could not be started.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """Arguments that an engine is made from.

    Attributes:
        root: The project.
        run_dir: Directory of this run; an engine's own files go below `engine/` in it.
        facts: Facts of the controller's machine and checkout.
        env: The controller's environment.
        config_file: What `--executor-config` names, or None.
        copies_lines: Whether lines of ranks are wanted live, of all attempts that run at a time.
    """

    root: Path
    run_dir: Path
    facts: SessionFacts
    env: Mapping[str, str]
    config_file: Path | None = None
    copies_lines: bool = False

    @property
    def engine_dir(self) -> Path:
        """Directory of an engine's own files; may not exist yet."""
        return self.run_dir / "engine"


CarryOut = Callable[[Submission, Planned, Lease], SubmissionOutcome]


class LeasingEngine:
    """Runs submissions within `poll`, in the order in which they came."""

    is_queue = False
    interval_s = 0.0

    def __init__(self, host: Host, carry_out: CarryOut) -> None:
        """Begin without submissions.

        Args:
            host: Whose GPUs are leased.
            carry_out: Runs a plan to its end while its GPUs are held.
        """
        self._host = host
        self._carry_out = carry_out
        self._waiting: list[Submission] = []

    def lacks(self, resources: Resources) -> str | None:
        """Return which GPUs are not there; nodes are on this machine, side by side."""
        return self._host.lacks(resources.platform, resources.num_nodes * resources.ranks_per_node)

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Keep submissions until `poll`."""
        self._waiting += submissions

    def poll(self) -> Sequence[Update]:
        """Run the next submission to its end.

        Raises:
            LaunchError: It cannot be started, now or later.
            KeyboardInterrupt: Ctrl-C; everything of the attempt is gone by then.
        """
        if not self._waiting:
            return []
        submission = self._waiting.pop(0)
        return [
            Update(key=submission.key, phase=SubmissionPhase.ENDED, outcome=self._run(submission))
        ]

    def cancel(self, keys: Sequence[str]) -> None:
        """Forget submissions; none of them runs outside of `poll`."""
        self._waiting = [submission for submission in self._waiting if submission.key not in keys]

    def _run(self, submission: Submission) -> SubmissionOutcome:
        """Run a submission, on leased GPUs unless it is one for the CPU."""
        needed = submission.resources
        if needed.platform == CPU_PLATFORM:
            return self._carry_out(
                submission, submission.planned(None), Lease(gpus=(), descriptors=())
            )
        fitting = _trusted_first(self._host.fitting(needed.platform), submission.avoid_gpus)
        leased = lease_gpus(
            fitting, needed.num_gpus, lambda text: submission.listener.on_lines([text])
        )
        with contextlib.closing(leased) as lease, HealthWatch(lease.gpus) as watch:
            devices = tuple(gpu.uuid for gpu in lease.gpus)
            _LOG.info("%s: leased %s", submission.key, ", ".join(devices))
            outcome = self._carry_out(submission, submission.planned(devices), lease)
            return replace(outcome, health=watch.finish())


def _trusted_first(gpus: Sequence[Gpu], avoided: frozenset[str]) -> tuple[Gpu, ...]:
    """Return the GPUs with those last on which the hardware failed before."""
    return tuple(sorted(gpus, key=lambda gpu: gpu.uuid in avoided))


class LocalEngine(LeasingEngine):
    """Runs submissions as processes of this machine."""

    name = "local"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context.facts.host, self._run_plan)

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        """Return the setting as it is: the ranks have what the controller has."""
        return setting

    def close(self) -> None:
        """Do nothing: what it started has ended."""

    def _run_plan(
        self, submission: Submission, planned: Planned, lease: Lease
    ) -> SubmissionOutcome:
        """Run a plan on the leased GPUs."""

        def start(phase: PhasePlan, cwd: Path) -> GuardedProcess:
            """Start a phase."""
            return start_here(phase, cwd, lease.descriptors)

        return SubmissionOutcome(
            ends=run_attempt(
                planned.plan, planned.description, submission.listener, start, submission.losses
            )
        )


LOCAL = LocalEngine.name


def open_engine(name: str, context: EngineContext) -> Engine:
    """Return the engine of that name.

    Raises:
        LaunchError: No package brings one of that name, it cannot be imported, or it refuses its
            configuration.
    """
    if name == LOCAL:
        return LocalEngine(context)
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    if name not in found:
        raise LaunchError(
            "--executor",
            f"unknown engine {name!r}, expected {one_of(name, {LOCAL, *found})}",
        )
    try:
        make: Callable[[EngineContext], Engine] = found[name].load()
    except (ImportError, AttributeError) as error:
        raise LaunchError(
            "--executor",
            f"the engine {name!r} cannot be loaded ({found[name].value}): {error}; "
            f"reinstall the package that brings it",
        ) from error
    return make(context)
