"""Place of a task in a Slurm step, from its variables, and where the ranks of a step meet.

Source: srun(1), output environment variables.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_megatron.engines.slurm.states import expand_hosts
from pytest_megatron.errors import LaunchError
from pytest_megatron.session.slurm_step import slurm_address

_NUM_TRIES = 16  # ports that a job looks at; others of the same node have some of them
_PORTS_PER_JOB = 31  # apart, so that jobs and their steps seldom meet
_EVEN = re.compile(r"(\d+)(?:\(x\d+\))?")
_NUMBERS = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_JOB_ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlace:
    """One task of a step, as Slurm counts.

    Attributes:
        task: Over all nodes, from 0; `local` is the same on its node.
        per_node: How many tasks each node has.
        hosts: Slurm's names of the nodes, in order.
        seed: Seed of the job and its step, for ports.
        name: Job, step, and how often Slurm has started it again; no other step has the same.
    """

    task: int
    node: int
    local: int
    per_node: int
    hosts: tuple[str, ...]
    seed: int
    name: str

    @property
    def num_tasks(self) -> int:
        """Tasks over all nodes."""
        return self.per_node * len(self.hosts)


def find_place(env: Mapping[str, str]) -> TaskPlace | None:
    """Return where this task stands; None outside of a step.

    Raises:
        LaunchError: The nodes have different numbers of tasks.
    """
    on_nodes = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not on_nodes or any(not env.get(name, "").isdecimal() for name in _NUMBERS):
        return None
    task, node, local, job = (int(env[name]) for name in _NUMBERS)
    even = _EVEN.fullmatch(on_nodes)
    if even is None:
        raise LaunchError(
            "SLURM_STEP_TASKS_PER_NODE",
            f"is {on_nodes!r}, expected as many tasks on each node; give srun --ntasks-per-node",
        )
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "0"))
    return TaskPlace(
        task=task,
        node=node,
        local=local,
        per_node=int(even[1]),
        hosts=expand_hosts(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))),
        seed=job * _PORTS_PER_JOB + (int(step) if step.isdecimal() else 0),
        name=f"{job}.{step}.{env.get('SLURM_RESTART_COUNT', '0')}",
    )


def find_endpoint(place: TaskPlace, ports: str) -> tuple[str, int]:
    """Return the address of node 0 and a port of it that no program listens on; asked there.

    Args:
        place: A task of node 0.
        ports: `FIRST-LAST`, those that may be taken; the step has a port of its own.

    Raises:
        LaunchError: The ports are taken.
    """
    first, last = map(int, ports.split("-"))
    num_ports = last - first + 1
    for number in range(min(_NUM_TRIES, num_ports)):
        port = first + (place.seed + number) % num_ports
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            host = place.hosts[0]
            return ("127.0.0.1" if len(place.hosts) == 1 else slurm_address(host)), port
    raise LaunchError(
        f"{socket.gethostname()}, ports {ports}",
        "those of this job are taken; give other `ports` in the executor's configuration",
    )
