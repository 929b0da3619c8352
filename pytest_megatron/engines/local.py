"""Local engine: attempts run on this machine one at a time, on leased GPUs. Opens other engines."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pytest_megatron.engines.api import (
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
from pytest_megatron.engines.warm_start import WarmProcesses
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.host import CPU_PLATFORM, Gpu, Host, Lease, lease_gpus
from pytest_megatron.gpu.monitor import HealthWatch
from pytest_megatron.process.guarded import GuardedProcess, execute_guard
from pytest_megatron.recipe.model import Workload
from pytest_megatron.workload.plan.plan import PhasePlan, Setting
from pytest_megatron.workload.run.runner import run_attempt, start_here

CarryOut = Callable[[Submission, Planned, Lease], SubmissionOutcome]


class LeasingEngine:
    """Runs orders within `poll`, in the order in which they came."""

    is_queue = False
    interval_s = 0.0

    def __init__(self, host: Host, carry_out: CarryOut) -> None:
        """Have nothing to run yet.

        Args:
            host: Whose GPUs are leased.
            carry_out: Runs a plan to its end while its GPUs are held.
        """
        self._host = host
        self._carry_out = carry_out
        self._waiting: list[Submission] = []

    def lacks(self, needed: Resources) -> str | None:
        """Return which GPUs are not there; nodes are on this machine, side by side."""
        return self._host.lacks(needed.platform, needed.num_nodes * needed.ranks_per_node)

    def submit(self, orders: Sequence[Submission]) -> None:
        """Keep orders until `poll`."""
        self._waiting += orders

    def poll(self) -> Sequence[Update]:
        """Run the next order to its end.

        Raises:
            LaunchError: It cannot be started, now or later.
            KeyboardInterrupt: Ctrl-C; everything of the attempt is gone by then.
        """
        if not self._waiting:
            return []
        order = self._waiting.pop(0)
        return [Update(key=order.key, phase=SubmissionPhase.ENDED, outcome=self._run(order))]

    def cancel(self, keys: Sequence[str]) -> None:
        """Forget orders; none of them runs outside of `poll`."""
        self._waiting = [order for order in self._waiting if order.key not in keys]

    def _run(self, order: Submission) -> SubmissionOutcome:
        """Run an order on leased GPUs."""
        needed = order.resources
        fitting = _trusted_first(self._host.fitting(needed.platform), order.avoid_gpus)
        leased = lease_gpus(fitting, needed.num_gpus, lambda text: order.listener.on_lines([text]))
        with contextlib.closing(leased) as lease, HealthWatch(lease.gpus) as watch:
            is_on_gpus = needed.platform != CPU_PLATFORM
            devices = tuple(gpu.uuid for gpu in lease.gpus) if is_on_gpus else None
            outcome = self._carry_out(order, order.planned(devices), lease)
            return replace(outcome, health=watch.finish())


def _trusted_first(gpus: Sequence[Gpu], avoided: frozenset[str]) -> tuple[Gpu, ...]:
    """Return the GPUs with those last on which the hardware failed before."""
    return tuple(sorted(gpus, key=lambda gpu: gpu.uuid in avoided))


class LocalEngine(LeasingEngine):
    """Runs orders as processes of this machine."""

    name = "local"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context.facts.host, self._run_plan)
        self._context = context
        self._warm = WarmProcesses()

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        """Return the setting as it is: the ranks have what the controller has."""
        return setting

    def close(self) -> None:
        """End the processes that have imported torch."""
        self._warm.close()

    def _run_plan(self, order: Submission, planned: Planned, lease: Lease) -> SubmissionOutcome:
        mode = self._context.workload_start
        forks = mode == "fork" or (mode == "auto" and order.resources.platform == CPU_PLATFORM)

        def start(phase: PhasePlan, cwd: Path) -> GuardedProcess:
            if phase.is_script or not forks:
                fresh = partial(execute_guard, kept_open=lease.descriptors)
                return start_here(phase, cwd, fresh)
            run_dir = self._context.run_dir
            forked = partial(self._warm.start_guard, phase, run_dir, lease.descriptors)
            return start_here(phase, cwd, forked)

        return SubmissionOutcome(
            ends=run_attempt(
                planned.plan, planned.description, order.listener, start, order.stop_early
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
        known = ", ".join(sorted({LOCAL, *found}))
        raise LaunchError(
            "--executor",
            f"unknown engine {name!r}, expected one of {known}; an engine is an entry point of "
            f"the group {GROUP}",
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
