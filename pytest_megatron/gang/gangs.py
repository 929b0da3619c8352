"""One gang as the controller sees it, and what is said to its ranks at once."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pytest_megatron.gang.channel import Channel
from pytest_megatron.gang.lifecycle import Lifecycle
from pytest_megatron.gang.messages import (
    Adopt,
    AskStacks,
    Fork,
    Message,
    RankConfig,
    Stacks,
    encode,
)
from pytest_megatron.gang.nurseries import ForkServers
from pytest_megatron.gang.patience import GangState
from pytest_megatron.gang.processes import UNKILLABLE_S, lives_on
from pytest_megatron.gang.raised import RankCollectors
from pytest_megatron.gang.spec import GangSpec, RunEnd

_LOST_S = 2.0  # between the end of a rank's connection and the news of its death
NURSERY_LIMIT_S = UNKILLABLE_S + 10.0  # for a fork server to kill a gang, or to tell of a death


@dataclass(slots=True)
class Loss:
    """A rank whose connection has ended: its death will be told, if that is why.

    With many processes on a GPU the kernel takes seconds to dismantle one that has died.

    Attributes:
        pid: Its process, if it is on this host.
        since: When the connection ended, in seconds of the monotonic clock.
        next_look: When it should have been told, likewise.
    """

    pid: int | None
    since: float
    next_look: float = field(init=False)

    def __post_init__(self) -> None:
        self.next_look = self.since + _LOST_S

    def is_final(self, now: float) -> bool:
        """Whether its death will not be told."""
        return self.pid is None or lives_on(self.pid) or now >= self.since + NURSERY_LIMIT_S

    def put_off(self, now: float) -> None:
        """Look again later."""
        self.next_look = now + _LOST_S


@dataclass(slots=True, kw_only=True)
class Gang:
    """The ranks that run one test together, seen from the controller.

    Attributes:
        number: Counted from 1 in this session.
        orders: What its ranks were told, by rank.
        descriptors: Of leased devices, for ranks to inherit.
        ends: How its tests ended, until the controller takes them.
        inboxes: Rank -> what it said that nobody has looked at.
        fork_servers: Connections of fork servers that still hold something of it.
        silent: Connections of fork servers that have not answered the last question for stacks.
        starters: Rank -> connection of the fork server that starts it.
        keepers: Rank -> connection of the fork server that has it: another one where the first one
            becomes the rank; and the one that has the store.
        pids: Rank -> its process, of ranks of this host.
        missing: Rank -> node id -> why the rank has no such test.
        orphans: Orders of ranks that nobody can start, as their node is gone.
        is_in_lockstep: Whether its ranks agree among themselves that a test went well.
        killed_at: When fork servers were told to kill it, in seconds of the monotonic clock.
    """

    number: int
    spec: GangSpec
    orders: tuple[RankConfig, ...]
    lifecycle: Lifecycle
    descriptors: tuple[int, ...] = ()
    channels: dict[int, Channel] = field(default_factory=dict)
    inboxes: dict[int, deque[Message]] = field(default_factory=dict)
    lost: dict[int, Loss] = field(default_factory=dict)
    ends: list[RunEnd] = field(default_factory=list)
    fork_servers: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    stacks: list[Stacks] = field(default_factory=list)
    starters: dict[int, Channel] = field(default_factory=dict)
    keepers: dict[int, Channel] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    missing: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    orphans: list[RankConfig] = field(default_factory=list)
    is_in_lockstep: bool = False
    killed_at: float | None = None

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left."""
        return self.lifecycle.state is GangState.GONE

    def holders(self) -> list[Channel]:
        """Return the connections of fork servers that still hold something of it."""
        found = {channel.fileno(): channel for channel in self.keepers.values()}
        return [channel for number, channel in found.items() if number in self.fork_servers]


def choose_fork_server(
    gang: Gang, order: RankConfig, fork_servers: ForkServers, raised: RankCollectors
) -> None:
    """Choose who starts a rank, and who has it then."""
    template = raised.find(order)
    if template is None:
        channel = fork_servers.of_node(order.node_rank)
        gang.starters[order.rank] = gang.keepers[order.rank] = channel
        return
    gang.is_in_lockstep = False
    gang.starters[order.rank] = gang.keepers[order.rank] = template.channel
    if template.is_single:
        node = gang.keepers[order.rank] = fork_servers.of_node(order.node_rank)
        node.send(
            Adopt(
                template=template.number,
                gang=gang.number,
                rank=order.rank,
                device=order.device,
                log_dir=order.log_dir,
            )
        )


def fork(gang: Gang) -> None:
    """Have the ranks of a gang started."""
    by_fork_server: dict[int, list[RankConfig]] = {}
    channels = {}
    for order in gang.orders:
        channel = gang.starters[order.rank]
        channels[channel.fileno()] = channel
        by_fork_server.setdefault(channel.fileno(), []).append(order)
    for number, orders in by_fork_server.items():
        channels[number].send(Fork(orders=tuple(orders)), gang.descriptors)


def ask_for_stacks(gang: Gang, ranks: tuple[int, ...]) -> None:
    """Ask for the stacks of ranks, wherever they are."""
    gang.stacks.clear()
    for fork_server in gang.holders():
        gang.silent.add(fork_server.fileno())
        fork_server.send(AskStacks(gang=gang.number, ranks=ranks))


def send_to_ranks(gang: Gang, *messages: Message) -> None:
    """Send messages to all ranks of a gang, at once."""
    frames = [encode(message) for message in messages]
    for channel in gang.channels.values():
        channel.send_frames(frames)


def rest(gangs: Sequence[Gang], limit_s: float) -> None:
    """Leave the cores to the ranks of gangs for a while, or until one has died.

    To wake up for each word of a rank takes a core from it; a death is told by who starts ranks.
    """
    poll = select.poll()
    for gang in gangs:
        for fork_server in gang.holders():
            poll.register(fork_server.fileno(), select.POLLIN)
    poll.poll(limit_s * 1000)


def join_stacks(answers: Sequence[Stacks]) -> Stacks:
    """Return one answer of what several fork servers said."""
    return Stacks(
        gang=answers[0].gang,
        stacks={rank: text for answer in answers for rank, text in answer.stacks.items()},
        flights={rank: text for answer in answers for rank, text in answer.flights.items()},
        phases={rank: phase for answer in answers for rank, phase in answer.phases.items()},
    )
