"""Place of a task in a Slurm step, from its variables; addresses and ports of its host.

Source: srun(1), output environment variables.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from pytest_megatron.engines.slurm.states import expand_hosts
from pytest_megatron.errors import LaunchError
from pytest_megatron.session.slurm_step import slurm_address

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
        name: Job, step, and how often Slurm has started it again; no other step has the same.
    """

    task: int
    node: int
    local: int
    on_nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    seed: int
    name: str

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
    return TaskPlace(
        task=task,
        node=node,
        local=local,
        on_nodes=on_nodes,
        hosts=hosts,
        seed=seed,
        name=f"{job}.{step}.{env.get('SLURM_RESTART_COUNT', '0')}",
    )


def find_ports(text: str, seed: int) -> tuple[int, ...]:
    """Return the ports that ranks may meet on: the first that is free on node 0.

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


def free_port(ports: Sequence[int]) -> int:
    """Return a port that no program listens on.

    Raises:
        LaunchError: There is none.
    """
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise LaunchError(
        f"{socket.gethostname()}, ports {ports[0]}-{ports[-1]}",
        "all are taken; give other `ports` in the executor's configuration",
    )


def find_address(host: str, launched_from: Iterable[str]) -> str:
    """Return the address of this host by which others reach it.

    What a host calls itself may be its loopback, which reaches nobody else.

    Args:
        host: Slurm's name of this host.
        launched_from: Where srun is, as Slurm told the tasks, those of other hosts first; under
            sbatch that is this host, under salloc it may be another.
    """
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    given = [address for address in launched_from if address in own]
    found = next((address for address in given if not is_loopback(address)), None)
    if found is not None:
        return found
    for name in (host, slurm_address(host)):
        with contextlib.suppress(OSError):  # of no such host; another one may do
            for entry in socket.getaddrinfo(name, None):
                address = str(entry[4][0])
                if address in own and not is_loopback(address):
                    return address
                given += [address] if address in own else []
    return given[0] if given else "127.0.0.1"


def own_address(other: str) -> str:
    """Return the address that this host has for an address of another; that one if unknown."""
    with contextlib.suppress(OSError):
        family = socket.AF_INET6 if ":" in other else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))  # sends nothing
            return str(probe.getsockname()[0])
    return other


GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


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
    """Return the network interface that has an address, or None."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
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
