"""What the sessions of several nodes say to one another, as frozen types: see `gang.messages`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_megatron.files import JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What node 0 tells another node that called.

    Attributes:
        ranks_per_node: Ranks that each node has room for.
        num_gpus: CUDA devices that the node leases for the session.
        node_ids: Items that node 0 collected, in order.
        collecting: How ranks that collect for themselves are started, `fork` or `fresh`; "" where
            ranks are forked from what the node's session collected.
    """

    num_nodes: int
    ranks_per_node: int
    num_gpus: int
    node_ids: tuple[str, ...]
    collecting: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What the session of another node answers.

    Attributes:
        problem: Why it cannot take part, or "".
        missing: Node ids that only node 0 collected.
        extra: Node ids that only this node collected.
    """

    problem: str = ""
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """Something that pytest was told on node 0 and shall be told on every node.

    Attributes:
        hook: Name of pytest's hook.
        data: Its arguments, in the form of `hooks.mirror`.
    """

    hook: str
    data: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """The session of node 0 ended.

    Attributes:
        exit_code: Pytest's.
        kind: How it ended before its last test: `failed`, `interrupted` or `exit`, or "".
        text: What it said then.
    """

    exit_code: int
    kind: str = ""
    text: str = ""
