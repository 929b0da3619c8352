"""Local engine: attempts run on this machine one at a time, on leased GPUs. Opens other engines."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_megatron.base.text import one_of
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.health import HealthWatch
from pytest_megatron.gpu.host import CPU_PLATFORM, Gpu, Host, Lease, lease_gpus
from pytest_megatron.process.guarded import GuardedProcess
from pytest_megatron.workloads.engine.api import (
    GROUP,
    Engine,
    EngineContext,
    Planned,
    Resources,
    Submission,
    SubmissionOutcome,
    SubmissionPhase,
    Update,
)
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import PhasePlan, Setting
from pytest_megatron.workloads.training.run.runner import run_attempt, start_here

_LOG = logging.getLogger("pytest_megatron.workloads")

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
