"""Which rank is on which node, and how nodes of one session find and trust one another.

Pure but for the key, which is a file in the user's home; nothing here talks to another node.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.errors import LaunchError
from pytest_megatron.wording import name_ranks

KEY_VARIABLE = "PYTEST_MEGATRON_KEY"
_KEY_FILE = Path(".pytest_megatron", "key")
_KEY_BYTES = 32
_OTHERS = 0o077
# Below the range from which the kernel takes ports for connections, above those of services.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
_STEPS_PER_JOB = 31  # apart, so that steps of one job seldom meet


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank runs, as `torch.distributed.run` counts."""

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
        ranks_per_node: Ranks that a node has room for.
    """

    num_nodes: int
    ranks_per_node: int

    def place(self, world_size: int) -> tuple[Place, ...]:
        """Return where the ranks of a gang run: nodes are filled in order, node 0 first."""
        room = max(self.ranks_per_node, -(-world_size // self.num_nodes))
        num_used = -(-world_size // room)
        return tuple(
            Place(
                rank=rank,
                node_rank=rank // room,
                local_rank=rank % room,
                local_world_size=min(room, world_size - rank // room * room),
                num_nodes=num_used,
            )
            for rank in range(world_size)
        )

    def num_ranks_on(self, node_rank: int, world_size: int) -> int:
        """Return how many ranks of a gang run on a node."""
        return sum(place.node_rank == node_rank for place in self.place(world_size))

    def num_free(self, world_sizes: Sequence[int]) -> int:
        """Return how many ranks may be started beside gangs of these sizes.

        Gangs that fit on node 0 run there side by side; one that spans nodes runs alone.
        """
        room = self.ranks_per_node
        if not world_sizes:
            return room * self.num_nodes
        if self.num_nodes > 1 and max(world_sizes) > room:
            return 0
        return max(0, room - sum(world_sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """The nodes that `srun` started this process on.

    Attributes:
        endpoint: `HOST:PORT` of the first node; each step has a port of its own.
    """

    num_nodes: int
    node_rank: int
    endpoint: str


def find_slurm_step(env: Mapping[str, str]) -> SlurmStep | None:
    """Return what Slurm says of this step; None outside of `srun`, and on one node.

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
            f"give srun --ntasks-per-node=1, and pytest --gpus or --ranks",
        )
    port = _FIRST_PORT + (int(job) * _STEPS_PER_JOB + int(step)) % _NUM_PORTS
    return SlurmStep(
        num_nodes=int(nodes), node_rank=int(node_rank), endpoint=f"{first_host(hosts)}:{port}"
    )


def first_host(hosts: str) -> str:
    """Return the first of Slurm's list of hosts, such as `rack[1-2]node[004-007,9],login`."""
    first = re.split(r",(?![^\[]*\])", hosts, maxsplit=1)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def find_key(env: Mapping[str, str], home: Path) -> bytes:
    """Return the key that all nodes of this user share; whoever comes first makes it.

    Args:
        env: Where PYTEST_MEGATRON_KEY may be.
        home: Else the key is a file in this directory, which nodes of a cluster share.

    Raises:
        LaunchError: There is none, and none can be made, or others can read it.
    """
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
    """Make the key; a link is made by one only, and a file that is linked is whole."""
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
