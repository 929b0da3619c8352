"""Nodes of a session: places of ranks, the Slurm step that started them, and their key.

Pure except for the key, which is a file in the user's home, and `slurm_address`, which runs
`scontrol`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pytest_megatron.base.text import name_ranks
from pytest_megatron.errors import LaunchError

KEY_VARIABLE = "PYTEST_MEGATRON_KEY"
_KEY_FILE = Path(".pytest_megatron", "key")
_KEY_BYTES = 32
_OTHERS = 0o077
# Below the range from which the kernel takes ports for connections, above those of services.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
_STEPS_PER_JOB = 31  # apart, so that steps of one job seldom meet
_NUM_CHOICES, _APART = 4, 3_001
_SCONTROL_S = 10.0
_FIRST_SPECIAL_STEP = 0xFFFF_FF00  # batch scripts and interactive shells, in later versions
_ADDRESS = "NodeAddr="


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Place of one rank, numbered as by `torch.distributed.run`."""

    rank: int
    node_rank: int
    local_rank: int
    local_world_size: int
    num_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes of a session; node 0 has the controller.

    Attributes:
        num_nodes: At least 1.
        ranks_per_node: Ranks that fit on a node.
    """

    num_nodes: int
    ranks_per_node: int

    def place(self, world_size: int) -> tuple[RankPlace, ...]:
        """Return the places of the ranks of a gang: nodes are filled in order, node 0 first."""
        room = max(self.ranks_per_node, -(-world_size // self.num_nodes))
        num_used = -(-world_size // room)
        return tuple(
            RankPlace(
                rank=rank,
                node_rank=rank // room,
                local_rank=rank % room,
                local_world_size=min(room, world_size - rank // room * room),
                num_nodes=num_used,
            )
            for rank in range(world_size)
        )

    def num_ranks_on(self, node_rank: int, world_size: int) -> int:
        """Return the number of ranks of a gang on a node."""
        return sum(place.node_rank == node_rank for place in self.place(world_size))

    def num_free(self, world_sizes: Sequence[int]) -> int:
        """Return the number of ranks that may be started beside gangs of these sizes.

        Gangs that fit on node 0 run there side by side; one that spans nodes runs alone.
        """
        room = self.ranks_per_node
        if not world_sizes:
            return room * self.num_nodes
        if self.num_nodes > 1 and max(world_sizes) > room:
            return 0
        return max(0, room - sum(world_sizes))


def share_gpus(world_size: int, ranks_per_gpu: int) -> tuple[RankPlace, ...]:
    """Return the simulated places of ranks that share the GPUs of one host.

    They are placed as on several nodes with these GPUs each: a local rank is the index of its GPU,
    and NCCL, which refuses two ranks of a node on one GPU, treats them as ranks of several nodes.
    """
    num_gpus = count_gpus(world_size, ranks_per_gpu)
    return Nodes(num_nodes=ranks_per_gpu, ranks_per_node=num_gpus).place(world_size)


def count_gpus(world_size: int, ranks_per_gpu: int) -> int:
    """Return the number of GPUs of one host that ranks need."""
    return -(-world_size // ranks_per_gpu)


def find_key(env: Mapping[str, str], home: Path, step: str = "") -> bytes:
    """Return the key that all nodes of this session share; create the user's if it is missing.

    Args:
        env: Environment that may have PYTEST_MEGATRON_KEY.
        home: Directory of the key file otherwise, which nodes of a cluster share.
        step: Name of the Slurm step, so that it does not accept nodes of another.

    Raises:
        LaunchError: It cannot be read or created, or other users can read it.
    """
    key = _user_key(env, home)
    return hmac.digest(key, step.encode(), "sha256") if step else key


def _user_key(env: Mapping[str, str], home: Path) -> bytes:
    named = env.get(KEY_VARIABLE)
    if named:
        return hashlib.sha256(named.encode()).digest()
    path = home / _KEY_FILE
    try:
        if not path.exists():
            _make_key(path)
        if path.stat().st_mode & _OTHERS:
            raise LaunchError(
                str(path), f"others can read it; chmod 600 it, or set {KEY_VARIABLE} on every node"
            )
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        raise LaunchError(
            str(error.filename or path), f"{error.strerror}; set {KEY_VARIABLE} on every node"
        ) from error


def describe_node(node_rank: int, ranks: Sequence[int]) -> str:
    """Return `node 1 (ranks 2-3)`."""
    return f"node {node_rank} ({name_ranks(ranks)})"


def _make_key(path: Path) -> None:
    """Create the key file atomically: a hard link to a complete file, which one process creates."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    new = path.with_name(f"key.{secrets.token_hex(8)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(_KEY_BYTES).encode())
        os.fsync(descriptor)
        path.hardlink_to(new)
    except FileExistsError:  # another node was faster
        pass
    finally:
        os.close(descriptor)
        new.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """The nodes that `srun` started this process on.

    Attributes:
        name: Unique name of the step, over all clusters.
        host: Slurm's name of node 0.
        port: Port of node 0, if it is free.
    """

    num_nodes: int
    node_rank: int
    name: str
    host: str
    port: int

    @property
    def endpoint(self) -> str:
        """Address of node 0; asks Slurm for it."""
        return f"{slurm_address(self.host)}:{self.port}"


def find_slurm_step(env: Mapping[str, str]) -> SlurmStep | None:
    """Return the step of this process; None outside of `srun`, and on one node.

    Raises:
        LaunchError: The step has not one task on each node.
    """
    nodes = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_JOB_NUM_NODES", "1"))
    hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    job, node_rank = env.get("SLURM_JOB_ID", ""), env.get("SLURM_NODEID", "")
    is_known = all(word.isdecimal() for word in (nodes, step, job, node_rank))
    if not is_known or int(nodes) == 1 or not hosts:
        return None
    tasks = env.get("SLURM_STEP_NUM_TASKS", nodes)
    if tasks != nodes:
        raise LaunchError(
            "srun",
            f"started {tasks} tasks on {nodes} nodes, expected one on each; "
            f"give srun both of --ntasks={nodes} --ntasks-per-node=1, "
            f"and pytest --gpus or --ranks",
        )
    cluster, restart = env.get("SLURM_CLUSTER_NAME", ""), env.get("SLURM_RESTART_COUNT", "0")
    return SlurmStep(
        num_nodes=int(nodes),
        node_rank=int(node_rank),
        name=f"{cluster}:{job}.{step}:{restart}",
        host=first_host(hosts),
        port=_FIRST_PORT + (int(job) * _STEPS_PER_JOB + int(step)) % _NUM_PORTS,
    )


def count_unused_nodes(env: Mapping[str, str]) -> int:
    """Return the number of nodes of an allocation that this process is no step of; 0 for one node.

    That is a shell of `salloc`, or the script of `sbatch` itself.
    """
    nodes, step = env.get("SLURM_JOB_NUM_NODES", ""), env.get("SLURM_STEP_ID", "")
    is_step = step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
    return int(nodes) if nodes.isdecimal() and int(nodes) > 1 and not is_step else 0


def first_host(hosts: str) -> str:
    """Return the first of Slurm's list of hosts, such as `rack[1-2]node[004-007,9],login`."""
    first = re.split(r",(?![^\[]*\])", hosts, maxsplit=1)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def choose_ports(port: int) -> tuple[int, ...]:
    """Return ports for node 0 of a step, which listens on the first that is free."""
    return tuple(
        _FIRST_PORT + (port - _FIRST_PORT + number * _APART) % _NUM_PORTS
        for number in range(_NUM_CHOICES)
    )


@cache
def slurm_address(host: str) -> str:
    """Return the address by which Slurm's daemons reach a node, whose name may not resolve.

    Without Slurm's client (in a container) that is the name.
    """
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return host
    command = [scontrol, "show", "node", host, "-o"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SCONTROL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return host
    words = [word for word in done.stdout.split() if word.startswith(_ADDRESS)]
    return words[0].removeprefix(_ADDRESS) if words else host
