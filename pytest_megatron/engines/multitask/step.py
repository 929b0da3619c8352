"""Step of a job with several tasks: task 0 carries out the spec, the others serve it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Self

from pytest_megatron.engines.config import LaunchMode, SlurmConfig
from pytest_megatron.engines.multitask.commands import begin_phase
from pytest_megatron.engines.multitask.coordinator import Peers, TeamProcess
from pytest_megatron.engines.multitask.messages import encode
from pytest_megatron.engines.multitask.participant import Participant, describe_task
from pytest_megatron.engines.multitask.rendezvous import call, free_port, gather
from pytest_megatron.engines.multitask.topology import (
    TaskPlace,
    find_place,
    find_ports,
    gloo_network,
)
from pytest_megatron.engines.records import JobSpec
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.health import HealthWatch
from pytest_megatron.gpu.host import Gpu
from pytest_megatron.process.guarded import RunningCommand
from pytest_megatron.workload.plan.plan import PhasePlan

_CONFIG = SlurmConfig()
# Of `Spec.options`.
MODE, PORTS, GATHER_S = "mode", "ports", "gather_s"
REPEATABLE = "repeatable"  # there where each start has an attempt of its own
_DEFAULT_GATHER_S = "300"  # containers are fetched at different speeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The tasks of this step, with the settings of the spec.

    Attributes:
        place: Of this task.
        ports: Where tasks, and ranks, may meet.
        gather_s: How long the last task may start after the first.
    """

    place: TaskPlace
    mode: LaunchMode
    key: bytes
    ports: tuple[int, ...]
    gather_s: float

    @classmethod
    def of(cls, spec: JobSpec, env: Mapping[str, str]) -> Self | None:
        """Return the step that this process is in; None where it is all that there is.

        Raises:
            LaunchError: Slurm's variables contradict one another, or the spec has no key.
        """
        place = find_place(env)
        if place is None:
            return None
        by_tasks = LaunchMode.TORCHRUN if max(place.on_nodes) == 1 else LaunchMode.SRUN_NATIVE
        mode = LaunchMode(spec.options.get(MODE, by_tasks.value))
        if place.num_tasks == 1 and mode is LaunchMode.TORCHRUN:
            return None
        if not spec.secret and place.num_tasks > 1:
            raise LaunchError(spec.key, "the spec of a job with several tasks has no secret")
        return cls(
            place=place,
            mode=mode,
            key=sha256(spec.secret.encode()).digest(),
            ports=find_ports(spec.options.get(PORTS, _CONFIG.ports), place.seed),
            gather_s=float(spec.options.get(GATHER_S, _DEFAULT_GATHER_S)),
        )

    def serve(self, env: Mapping[str, str], gpus: tuple[Gpu, ...]) -> int:
        """Carry out the orders of task 0 until its end; return the exit code.

        Args:
            env: Of this task.
            gpus: To be watched meanwhile.
        """
        place = self.place
        try:
            channel = call(place.hosts[0], env, self.key, self.ports, limit_s=self.gather_s)
        except LaunchError as error:
            print(f"pytest-megatron: task {place.task}: {error}", file=sys.stderr)  # noqa: T201 - the job's log
            return 1
        channel.send_frame(encode(describe_task(place, env)))
        with HealthWatch(gpus) as watch:
            return Participant(channel, {**gloo_network(channel.own_host, env), **env}, watch).run()

    @contextlib.contextmanager
    def team(self, env: Mapping[str, str]) -> Iterator[Peers]:
        """Return all tasks, for task 0; they end with the context.

        Raises:
            LaunchError: No port is free.
            MissingTasksError: Tasks did not come in time.
        """
        team = Peers(self.place, describe_task(self.place, env))
        with contextlib.closing(team):
            if self.place.num_tasks > 1:
                gather(team, self.key, self.ports, limit_s=self.gather_s)
            yield team

    def start(
        self, team: Peers, env: Mapping[str, str], phase: PhasePlan, cwd: Path
    ) -> RunningCommand:
        """Start a phase on all tasks.

        Raises:
            LaunchError: The tasks are not those that the phase needs.
        """
        endpoint = (team.address, free_port(self.ports))
        begins = begin_phase(self.mode, phase, cwd, team.members, endpoint, env)
        assert phase.start is not None
        per_node = phase.start.ranks.per_node
        own = {**gloo_network(team.address, env), **env}
        return TeamProcess(team, begins, phase.dirs.launcher_log, own, per_node=per_node)


def watches(place: TaskPlace, env: Mapping[str, str]) -> bool:
    """Return whether a task asks GPUs how they are: one a node, or each that has one of its own."""
    return place.local == 0 or len(env.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1
