"""Place of a task in a Slurm step, from its variables. Pure.

Source: srun(1), output environment variables.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_megatron.engines.slurm.states import expand_hosts
from pytest_megatron.errors import LaunchError

_NUM_TRIES = 16  # ports that a job looks at; others of the same node have some of them
_PORTS_PER_JOB = 31  # apart, so that jobs and their steps seldom meet
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_NUMBERS = (
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    *("SLURM_LOCALID", "SLURM_JOB_ID"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlace:
    """One task of a step, as Slurm counts.

    Attributes:
        task: Over all nodes, from 0; `local` is the same on its node.
        on_nodes: How many tasks each node has.
        hosts: Slurm's names of the nodes, in order.
        seed: Seed of the job and its step, for ports.
    """

    task: int
    node: int
    local: int
    on_nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    seed: int

    @property
    def num_tasks(self) -> int:
        """Tasks over all nodes."""
        return sum(self.on_nodes)

    @property
    def host(self) -> str:
        """The name of its node."""
        return self.hosts[self.node]


def find_place(env: Mapping[str, str]) -> TaskPlace | None:
    """Return where this task stands; None outside of a step.

    Raises:
        LaunchError: The variables contradict one another.
    """
    if any(not env.get(name, "").isdecimal() for name in _NUMBERS):
        return None
    task, num_tasks, node, num_nodes, local, job = (int(env[name]) for name in _NUMBERS)
    hosts = expand_hosts(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
    on_nodes = _tasks_on_nodes(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if sum(on_nodes) != num_tasks or not num_nodes == len(hosts) == len(on_nodes):
        raise LaunchError(
            "SLURM_STEP_TASKS_PER_NODE",
            f"is {env.get('SLURM_STEP_TASKS_PER_NODE')!r} for {num_tasks} tasks on {num_nodes} "
            f"nodes ({', '.join(hosts)}), expected numbers that fit; start the step with srun",
        )
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "0"))
    seed = job * _PORTS_PER_JOB + (int(step) if step.isdecimal() else 0)
    return TaskPlace(task=task, node=node, local=local, on_nodes=on_nodes, hosts=hosts, seed=seed)


def find_ports(text: str, seed: int) -> tuple[int, ...]:
    """Return the ports that the tasks of a step meet on: the first that is free on node 0.

    Args:
        text: `FIRST-LAST`, those that may be taken.
        seed: Seed for ports, `Place.seed`.
    """
    first, _, last = text.partition("-")
    ports = range(int(first), int(last) + 1)
    return tuple(ports[(seed + n) % len(ports)] for n in range(min(_NUM_TRIES, len(ports))))


def _tasks_on_nodes(text: str) -> tuple[int, ...]:
    """Return the numbers of `2(x2),1`."""
    found: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        if match is not None:
            found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_NAME_BYTES = 15
_ADDRESS = slice(20, 24)  # of the answer


def gloo_network(address: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that names gloo's network; nothing where gloo finds it.

    Args:
        address: By which this host and the others reach one another.
        env: Environment of the job; what it has set stays.
    """
    if GLOO_VARIABLE in env or is_loopback(address) or not _is_named_after_loopback():
        return {}
    name = interface_of(address)
    return {} if name is None else {GLOO_VARIABLE: name}


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name[:_NAME_BYTES].encode())
            with contextlib.suppress(OSError):  # it has none
                found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, asked)
                if socket.inet_ntoa(found[_ADDRESS]) == address:
                    return name
    return None


def is_loopback(address: str) -> bool:
    """Return whether an address reaches this host only."""
    return address.startswith("127.") or address == "::1"


def _is_named_after_loopback() -> bool:
    """Return whether the host's name resolves to its loopback."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None)
    except OSError:  # nobody knows the name: gloo takes the loopback then
        return True
    return all(is_loopback(str(entry[4][0])) for entry in found)
