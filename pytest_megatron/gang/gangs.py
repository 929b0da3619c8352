"""One gang as the controller sees it, and what is said to its ranks at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pytest_megatron.gang.channel import Channel
from pytest_megatron.gang.lifecycle import Lifecycle, State
from pytest_megatron.gang.messages import Message, RankOrder, Stacks, encode
from pytest_megatron.gang.spec import GangSpec, RunEnd


@dataclass(slots=True, kw_only=True)
class Gang:
    """The ranks that run one test together, seen from the controller.

    Attributes:
        number: Counted from 1 in this session.
        orders: What its ranks were told, by rank.
        descriptors: Of leased devices, for ranks to inherit.
        ends: How its tests ended, until the controller takes them.
        inboxes: Rank -> what it said that nobody has looked at.
        nurseries: Connections of nurseries that still hold something of it.
        silent: Connections of nurseries that have not answered the last question for stacks.
        starters: Rank -> connection of the nursery that starts it.
        keepers: Rank -> connection of the nursery that has it: another one where the first one
            becomes the rank; and the one that has the store.
        missing: Rank -> node id -> why the rank has no such test.
        orphans: Orders of ranks that nobody can start, as their node is gone.
        is_in_lockstep: Whether its ranks agree among themselves that a test went well.
    """

    number: int
    spec: GangSpec
    orders: tuple[RankOrder, ...]
    lifecycle: Lifecycle
    descriptors: tuple[int, ...] = ()
    channels: dict[int, Channel] = field(default_factory=dict)
    inboxes: dict[int, deque[Message]] = field(default_factory=dict)
    lost: dict[int, float] = field(default_factory=dict)
    ends: list[RunEnd] = field(default_factory=list)
    nurseries: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    stacks: list[Stacks] = field(default_factory=list)
    starters: dict[int, Channel] = field(default_factory=dict)
    keepers: dict[int, Channel] = field(default_factory=dict)
    missing: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    orphans: list[RankOrder] = field(default_factory=list)
    is_in_lockstep: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left."""
        return self.lifecycle.state is State.GONE


@dataclass(slots=True, kw_only=True)
class Template:
    """A nursery of one rank that has collected.

    Attributes:
        number: What it was started under; below 0, where gangs have numbers above.
        is_single: Whether it cannot fork and becomes the rank itself.
    """

    number: int
    channel: Channel
    is_single: bool


def send_to_ranks(gang: Gang, *messages: Message) -> None:
    """Send messages to all ranks of a gang, at once."""
    frames = [encode(message) for message in messages]
    for channel in gang.channels.values():
        channel.send_frames(frames)


def with_store(orders: Sequence[RankOrder], port: int) -> tuple[RankOrder, ...]:
    """Return the orders with the port of the store to meet in."""
    return tuple(replace(o, env={**o.env, "MASTER_PORT": str(port)}) for o in orders)


def join_stacks(answers: Sequence[Stacks]) -> Stacks:
    """Return one answer of what several nurseries said."""
    return Stacks(
        gang=answers[0].gang,
        stacks={rank: text for answer in answers for rank, text in answer.stacks.items()},
        flights={rank: text for answer in answers for rank, text in answer.flights.items()},
        phases={rank: phase for answer in answers for rank, phase in answer.phases.items()},
    )
