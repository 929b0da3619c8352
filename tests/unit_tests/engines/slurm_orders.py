"""Orders whose trainings are lines of bash, scripts for them, and an engine on the lab."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from labs import DEADLINE_S, SlurmLab

from pytest_megatron.engines.slurm.engine import SlurmEngine
from pytest_megatron.engines.slurm.journal import Journal
from pytest_megatron.engines.slurm.submit import JobScript, RealSlurm, SlurmCommands, SlurmSettings
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.workloads.engine.api import (
    EngineContext,
    Planned,
    Resources,
    Submission,
    SubmissionOutcome,
    Update,
)
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import AttemptPlan, PhasePlan, Setting
from pytest_megatron.workloads.training.run.runner import Progress

LIMIT_S = 60.0  # of every training
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node=1 --time=2
exec {python} -m pytest_megatron.engines.worker "$1"
"""


@dataclass
class Heard:
    """A listener that keeps what it was told."""

    lines: list[str] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)

    def on_lines(self, lines: list[str]) -> None:
        self.lines += lines

    def on_progress(self, phase: str, progress: Progress) -> None:
        del phase
        self.iterations.append(progress.iteration)


@dataclass
class Run:
    """A run directory, and what is ordered in it.

    Attributes:
        copies_lines: Whether lines of ranks are wanted.
    """

    root: Path
    copies_lines: bool = False
    heard: Heard = field(default_factory=Heard)

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    def context(self, env: dict[str, str]) -> EngineContext:
        """What an engine of this run is made from."""
        facts = gather_facts(self.root)
        return EngineContext(
            root=self.root,
            run_dir=self.run_dir,
            facts=facts,
            env=env,
            copies_lines=self.copies_lines,
        )

    def order(
        self,
        item: str,
        line: str = "true",
        *,
        attempt: int = 1,
        nodes: int = 1,
        avoid_hosts: Iterable[str] = (),
    ) -> Submission:
        """Return the order for an item whose training is a line of bash."""
        dirs = AttemptDirs(root=self.run_dir / item / "repeat_1" / f"attempt_{attempt}")
        phase = PhasePlan(
            number=1,
            argv=("bash", "-c", line),
            env={},
            own_env={"ITEM": item},
            dirs=dirs.phase(1),
            last_iteration=None,
        )
        plan = AttemptPlan(
            phases=(phase,), dirs=dirs, cwd=self.root, world_size=1, time_limit_s=LIMIT_S
        )
        needed = Resources(
            platform=CPU_PLATFORM,
            num_nodes=nodes,
            gpus_per_node=0,
            ranks_per_node=1,
            time_limit_s=LIMIT_S,
        )
        return Submission(
            key=f"{item}/repeat_1/attempt_{attempt}",
            node_id=f"recipes/x.yaml::{item}[dev-cpu]",
            resources=needed,
            dirs=dirs,
            planned=lambda _devices: Planned(plan=plan, description={"item": item}),
            avoid_hosts=frozenset(avoid_hosts),
            listener=self.heard,
        )

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        """Have jobs do as this process does."""
        return setting

    def describe(self, _needed: Resources) -> list[str]:
        """Show nothing."""
        return []

    def write(self, wanted: Sequence[Resources]) -> dict[Resources, JobScript]:
        """Write the scripts of jobs."""
        found = {}
        self.run_dir.mkdir(exist_ok=True)
        for number, needed in enumerate(wanted):
            path = self.run_dir / f"{needed.num_nodes}_{number}.sh"
            text = SCRIPT.format(
                nodes=needed.num_nodes,
                python=sys.executable,
            )
            path.write_text(text)
            found[needed] = JobScript(path=path)
        return found

    def engine(
        self,
        commands: SlurmCommands,
        env: dict[str, str],
        settings: SlurmSettings | None = None,
        clock: tuple[Callable[[], float], Callable[[float], None]] | None = None,
    ) -> SlurmEngine:
        """Return an engine that goes on where an earlier one of this run ended."""
        journal = Journal.open(self.run_dir / "engine")
        return SlurmEngine(
            self.context(env),
            commands,
            self,
            settings or SlurmSettings(interval_s=0.05, timers_s=6.0),
            journal,
            clock or (time.monotonic, time.sleep),
        )


def on_lab(run: Run, lab: SlurmLab, settings: SlurmSettings | None = None) -> SlurmEngine:
    """Return an engine over the lab's Slurm."""
    env = {**os.environ, **lab.env}
    run.root.mkdir(exist_ok=True)
    return run.engine(RealSlurm(env, run.root), env, settings)


def until(engine: SlurmEngine, is_enough: Callable[[dict[str, Update]], bool]) -> dict[str, Update]:
    """Poll until what was last said of each order is enough; return that."""
    last: dict[str, Update] = {}
    deadline = time.monotonic() + DEADLINE_S
    while not is_enough(last):
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {last}"
        for update in engine.poll():
            last[update.key.split("/")[0]] = update
        time.sleep(engine.interval_s)
    return last


def outcomes(engine: SlurmEngine, num_orders: int) -> dict[str, SubmissionOutcome]:
    """Poll until so many orders have ended; return what came of each item."""
    last = until(
        engine, lambda said: sum(u.outcome is not None for u in said.values()) == num_orders
    )
    return {item: update.outcome for item, update in last.items() if update.outcome is not None}
