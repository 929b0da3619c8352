"""Gangs and nodes of a session: what a gang is like, places of its ranks, and the nodes' key.

Pure except for the key, which is a file in the user's home.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.errors import LaunchError

KEY_VARIABLE = "PYTEST_MEGATRON_KEY"
_KEY_FILE = Path(".pytest_megatron", "key")
_KEY_BYTES = 32
_OTHERS = 0o077


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class GangSpec:
    """Gang that a test needs; tests of equal specs share one.

    Attributes:
        world_size: Ranks over all nodes.
        device: `cuda` or `cpu`.
        is_isolated: Whether the gang runs this one test only.
    """

    world_size: int
    device: str
    is_isolated: bool = False


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

    @property
    def num_ranks(self) -> int:
        """Ranks that fit on all nodes."""
        return self.num_nodes * self.ranks_per_node

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
            return self.num_ranks
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
    """Return the key of this user's nodes, which is made on first use."""
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
