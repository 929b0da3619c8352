"""Step of a job with several tasks: task 0 carries out the spec, the others run their part."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pytest_megatron.base.text import counted
from pytest_megatron.engines.config import LaunchMode, SlurmConfig
from pytest_megatron.engines.multitask.coordinator import Participant, Team, TeamProcess
from pytest_megatron.engines.multitask.messages import PLACE_VARIABLES, Begin, Join, Meeting
from pytest_megatron.engines.multitask.topology import (
    TaskPlace,
    find_place,
    find_ports,
    free_port,
)
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.health import HealthWatch
from pytest_megatron.gpu.host import Gpu
from pytest_megatron.process.guarded import RunningCommand
from pytest_megatron.workloads.engine.records import JobSpec
from pytest_megatron.workloads.recipe.case import Launcher
from pytest_megatron.workloads.training.plan.plan import PhasePlan, Started, inherited
from pytest_megatron.workloads.training.run.node_agents import node_command

RANK_LOGS = Path("srun_native", "attempt_0")  # as torch.distributed.run has it, with its run id
NODE_LOG = "launcher.node{node}.log"  # until its lines are in the phase's launcher.log
# What torch.distributed.run gives ranks whose environment has none of it.
_RANK_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def begin_phase(
    mode: LaunchMode,
    phase: PhasePlan,
    cwd: Path,
    members: Mapping[int, Join],
    endpoint: tuple[str, int],
    env: Mapping[str, str],
) -> dict[int, Begin]:
    """Return what each task runs; one that has no rank runs nothing.

    Args:
        mode: Who starts the ranks.
        phase: What to run, with the environment that task 0 would run it in.
        cwd: Where.
        members: All tasks.
        endpoint: Where the ranks meet, unless the job has that set.
        env: The environment of task 0 itself: what differs from it goes to every task.

    Raises:
        LaunchError: The tasks are not those that the phase needs.
    """
    start = phase.start
    if start is None or start.ranks.starter is Launcher.NONE:
        what = "a recipe's script" if start is None else "started alone"
        raise LaunchError(
            phase.name,
            f"is {what}, and the step has {len(members)} tasks, expected one; "
            f"it starts its ranks itself, on one node",
        )
    base = inherited(env)
    own = {k: v for k, v in phase.env.items() if base.get(k) != v}
    unset = tuple(name for name in base if name not in phase.env)
    chosen = _chosen(mode, start, members)
    meeting = _endpoint(endpoint, members[0], own)
    common = Begin(
        argv=start.rank_words,
        env=own,
        unset=unset,
        head=endpoint[0],
        cwd=cwd,
        output=phase.dirs.launcher_log,
    )
    if mode is LaunchMode.SRUN_NATIVE:
        return _ranks(common, phase.dirs.logs / RANK_LOGS, start, chosen, meeting)
    words, ranks, found = start.launcher_words, start.ranks, {}
    for member in chosen:
        _check_devices(start, member, own)
        found[member.task] = replace(
            common,
            argv=tuple(node_command(words, member.node, ranks.per_node, ranks.copied, meeting)),
            output=phase.dirs.root / NODE_LOG.format(node=member.node),
        )
    return found


def _chosen(mode: LaunchMode, started: Started, members: Mapping[int, Join]) -> list[Join]:
    """Return the tasks that take part, in the order of ranks."""
    is_native, ranks = mode is LaunchMode.SRUN_NATIVE, started.ranks
    ordered = [members[task] for task in sorted(members)]
    there = Counter(member.host for member in ordered)
    num_nodes = ranks.num_nodes
    wanted = ranks.per_node if is_native else 1
    fits = all(found >= wanted if is_native else found == 1 for found in there.values())
    if len(there) != num_nodes or not fits:
        found = ", ".join(f"{number} on {host}" for host, number in there.items())
        raise LaunchError(
            "srun",
            f"started {counted(len(ordered), 'task')} ({found}), expected {wanted} on each of "
            f"{counted(num_nodes, 'node')} in mode {mode.value}; give srun "
            f"--nodes={num_nodes} --ntasks-per-node={wanted}",
        )
    return [member for member in ordered if member.local < wanted]


def _check_devices(started: Started, member: Join, own: Mapping[str, str]) -> None:
    """Refuse a node that shows fewer GPUs than it has ranks.

    Raises:
        LaunchError: It does.
    """
    devices = own.get("CUDA_VISIBLE_DEVICES", member.devices or "")
    num_devices, wanted = len([d for d in devices.split(",") if d]), started.ranks.per_node
    if 0 < num_devices < wanted:
        raise LaunchError(
            member.host,
            f"shows {counted(num_devices, 'GPU')} (CUDA_VISIBLE_DEVICES={devices}) to a task with "
            f"{wanted} ranks, expected {wanted}; give --gpus-per-node={wanted} and no "
            f"--gpus-per-task, or mode {LaunchMode.SRUN_NATIVE.value}",
        )


def _endpoint(endpoint: tuple[str, int], first: Join, own: Mapping[str, str]) -> tuple[str, int]:
    """Return where ranks meet: what the case or the job has set comes first."""
    given = {**first.given, **own}
    host, port = given.get("MASTER_ADDR", endpoint[0]), given.get("MASTER_PORT", str(endpoint[1]))
    if not port.isdecimal():
        raise LaunchError("MASTER_PORT", f"is {port!r} in the job's environment, expected a number")
    return host, int(port)


def _ranks(
    common: Begin, logs: Path, started: Started, chosen: Sequence[Join], endpoint: tuple[str, int]
) -> dict[int, Begin]:
    """Return what each rank runs."""
    tee, found = started.ranks.tee_ranks, {}
    for index, member in enumerate(chosen):
        env = {**rank_env(member, index, started, endpoint, common.env), **common.env}
        rank = env["RANK"]
        found[member.task] = replace(
            common,
            env={**env, "TORCHELASTIC_ERROR_FILE": str(logs / rank / "error.json")},
            defaults=_RANK_DEFAULTS,
            output=logs / rank / "stdout.log",
            errors=logs / rank / "stderr.log",
            is_rank=True,
            is_copied=tee is None or rank in map(str, tee),
        )
    _check_ranks(chosen, [begin.env["RANK"] for begin in found.values()])
    return found


def rank_env(
    member: Join, index: int, started: Started, endpoint: tuple[str, int], own: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that torch.distributed reads; what the job has set stays as it is.

    A task that sees one GPU of several uses that one: its LOCAL_RANK is 0, since programs choose
    their device by it.

    Source: torch.distributed.run's worker environment.
    """
    devices = own.get("CUDA_VISIBLE_DEVICES", member.devices or "")
    is_bound = len([device for device in devices.split(",") if device]) == 1
    return {
        "RANK": str(index),
        "WORLD_SIZE": str(started.ranks.world_size),
        "LOCAL_RANK": "0" if is_bound else str(member.local),
        "LOCAL_WORLD_SIZE": str(started.ranks.per_node),
        "MASTER_ADDR": endpoint[0],
        "MASTER_PORT": str(endpoint[1]),
        **member.given,
    }


def _check_ranks(chosen: Sequence[Join], ranks: Sequence[str]) -> None:
    """Refuse ranks that are not 0, 1, 2 and so on, each once.

    Raises:
        LaunchError: RANK is set for all tasks alike, for example.
    """
    if sorted(ranks) == sorted(map(str, range(len(chosen)))):
        return
    shown = ", ".join(f"{rank} on {m.host}" for rank, m in zip(ranks, chosen, strict=True))
    raise LaunchError(
        "RANK",
        f"is {shown} in the job's environment, expected each of 0-{len(chosen) - 1} once; "
        f"drop it from job_env, setup or the prolog, so that it follows from SLURM_PROCID",
    )


_CONFIG = SlurmConfig()
# Of `Spec.options`.
MODE, PORTS, GATHER_S = "mode", "ports", "gather_s"
REPEATABLE = "repeatable"  # there where each start has an attempt of its own
_DEFAULT_GATHER_S = "300"  # containers are fetched at different speeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The tasks of this step, with the settings of the spec.

    Attributes:
        place: Place of this task.
        ports: Where ranks may meet.
        meeting: Where the tasks leave one another files, in the run directory.
        gather_s: How long the last task may start after the first.
    """

    place: TaskPlace
    mode: LaunchMode
    ports: tuple[int, ...]
    meeting: Meeting
    gather_s: float

    @classmethod
    def of(cls, spec: JobSpec, env: Mapping[str, str]) -> Self | None:
        """Return the step that this process is in; None where it is all that there is.

        Raises:
            LaunchError: Slurm's variables contradict one another.
        """
        place = find_place(env)
        if place is None:
            return None
        by_tasks = LaunchMode.TORCHRUN if max(place.on_nodes) == 1 else LaunchMode.SRUN_NATIVE
        mode = LaunchMode(spec.options.get(MODE, by_tasks.value))
        if place.num_tasks == 1 and mode is LaunchMode.TORCHRUN:
            return None
        return cls(
            place=place,
            mode=mode,
            ports=find_ports(spec.options.get(PORTS, _CONFIG.ports), place.seed),
            meeting=Meeting(spec.outcome.parent / f"tasks-{place.name}"),
            gather_s=float(spec.options.get(GATHER_S, _DEFAULT_GATHER_S)),
        )

    def serve(self, env: Mapping[str, str], gpus: tuple[Gpu, ...]) -> int:
        """Run what task 0 wants until its end; return the exit code.

        Args:
            env: Environment of this task.
            gpus: To be watched meanwhile.
        """
        place = self.place
        with HealthWatch(gpus) as watch:
            try:
                self.meeting.open()
                self.meeting.leave(
                    f"here-{place.task}", describe_task(place, env, has_gpus=bool(gpus))
                )
            except OSError as error:
                print(  # noqa: T201 - the job's log
                    f"pytest-megatron: task {place.task}: {error.filename}: {error.strerror}",
                    file=sys.stderr,
                )
                return 1
            if not self.meeting.has_within("here-0", self.gather_s):
                print(  # noqa: T201 - the job's log
                    f"pytest-megatron: task {place.task}: task 0 on {place.hosts[0]} did not come "
                    f"within {self.gather_s:g} s; nodes of a job must share the run directory",
                    file=sys.stderr,
                )
                return 1
            return Participant(self.meeting, place.task, env, watch).run()

    @contextlib.contextmanager
    def team(self, env: Mapping[str, str]) -> Iterator[Team]:
        """Return all tasks, for task 0; they end with the context.

        Raises:
            OSError: The directory in which they meet cannot be made.
            MissingTasksError: Tasks did not come in time.
        """
        own = describe_task(self.place, env)
        self.meeting.open()
        with Team(self.place, own, self.meeting) as team:
            self.meeting.leave("here-0", own)
            team.gather(self.gather_s)
            yield team

    def start(
        self, team: Team, env: Mapping[str, str], phase: PhasePlan, cwd: Path
    ) -> RunningCommand:
        """Start a phase on all tasks.

        Raises:
            LaunchError: The tasks are not those that the phase needs.
        """
        endpoint = (team.address(), free_port(self.ports))
        begins = begin_phase(self.mode, phase, cwd, team.members, endpoint, env)
        assert phase.start is not None
        per_node = phase.start.ranks.per_node
        return TeamProcess(team, begins, phase.dirs.launcher_log, env, per_node=per_node)


def describe_task(place: TaskPlace, env: Mapping[str, str], *, has_gpus: bool = False) -> Join:
    """Return the introduction of a task."""
    return Join(
        task=place.task,
        node=place.node,
        local=place.local,
        host=place.host,
        devices=env.get("CUDA_VISIBLE_DEVICES"),
        given={name: env[name] for name in PLACE_VARIABLES if env.get(name)},
        launched_from=env.get("SLURM_LAUNCH_NODE_IPADDR", ""),
        has_gpus=has_gpus,
    )


def watches(place: TaskPlace, env: Mapping[str, str]) -> bool:
    """Return whether a task asks GPUs how they are: one a node, or each that has one of its own."""
    return place.local == 0 or len(env.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1
