"""Fork servers of single ranks: processes that collect for one rank and then start it.

Used only where ranks collect for themselves; see `gangs.start.start_mode`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from pytest_megatron.gangs.forkserver.store import with_store
from pytest_megatron.gangs.ipc.channel import Channel
from pytest_megatron.gangs.ipc.messages import (
    AskStacks,
    Collected,
    Died,
    Fork,
    Kill,
    Message,
    OpenStore,
    RankConfig,
    Register,
    Stacks,
    StoreOpened,
)
from pytest_megatron.gangs.supervisor.connections import ForkServers

CollectorMessage: TypeAlias = Collected | Died | Stacks | StoreOpened
OnCollectorMessage: TypeAlias = Callable[[int, CollectorMessage, int], None]
_OF_ALL = -1  # in place of a rank


@dataclass(slots=True, kw_only=True)
class RankCollector:
    """A fork server of one rank that has collected.

    Attributes:
        number: Number of its start, below 0; numbers of gangs are above 0.
        is_single: Whether it cannot fork and becomes the rank itself.
    """

    number: int
    channel: Channel
    is_single: bool


class RankCollectors:
    """All rank collectors of one controller; those started together share a number below 0."""

    def __init__(self, fork_servers: ForkServers) -> None:
        """Begin without processes that collect.

        Args:
            fork_servers: Fork servers of nodes, which start collectors.
        """
        self._fork_servers = fork_servers
        self._collectors: dict[tuple[int, int, int], RankCollector] = {}
        self._configs: dict[int, tuple[tuple[RankConfig, ...], OnCollectorMessage]] = {}

    def start(self, configs: tuple[RankConfig, ...], on_message: OnCollectorMessage) -> int:
        """Start collectors; return their number.

        Args:
            configs: Configurations of their ranks, with gang 0.
            on_message: Called with their number, the message and its rank (-1 for stacks).

        Raises:
            LaunchError: The fork server of their first node is gone.
        """
        node = self._fork_servers.of_node(configs[0].node_rank)
        number = -self.next_number
        configs = tuple(replace(config, gang=number) for config in configs)
        self._configs[number] = configs, on_message
        node.send(OpenStore(gang=number, host=configs[0].env["MASTER_ADDR"]))
        return number

    @property
    def next_number(self) -> int:
        """The next return value of `start`, without its sign."""
        return len(self._configs) + 1

    def has(self, number: int) -> bool:
        """Return whether collectors were started with a number."""
        return number in self._configs

    def find(self, config: RankConfig) -> RankCollector | None:
        """Return the collector that can start a rank; one with `is_single` is then used up."""
        key = config.node_rank, config.rank, config.world_size
        collector = self._collectors.get(key)
        if collector is not None and collector.is_single:
            del self._collectors[key]
        return collector

    def can_start(self, node_rank: int, rank: int, world_size: int) -> bool:
        """Return whether a collector can start a rank."""
        return (node_rank, rank, world_size) in self._collectors

    def ask(self, number: int, ranks: tuple[int, ...]) -> None:
        """Request stacks of the collectors with a number."""
        for node in self._nodes(number):
            node.send(AskStacks(gang=number, ranks=ranks))

    def kill(self, number: int) -> None:
        """Kill the collectors with a number."""
        for key in [k for k, c in self._collectors.items() if c.number == number]:
            del self._collectors[key]
        for node in self._nodes(number):
            node.send(Kill(gang=number))

    def take_collected(self, source: Channel, registration: Register, collected: Collected) -> None:
        """Record that a collector has collected."""
        self._collectors[registration.node_rank, registration.rank, registration.world_size] = (
            RankCollector(
                number=registration.gang, channel=source, is_single=bool(collected.obstacle)
            )
        )
        self._configs[registration.gang][1](registration.gang, collected, registration.rank)

    def take(self, message: Message) -> bool:
        """Handle a message of a node's fork server about collectors; return whether it is news."""
        match message:
            case StoreOpened(gang=number, port=port, problem=""):
                self._fork(number, port)
                return False
            case StoreOpened(gang=number):
                self._configs[number][1](number, message, 0)
            case Died(gang=number, rank=rank):
                self._configs[number][1](number, message, rank)
            case Stacks(gang=number):
                self._configs[number][1](number, message, _OF_ALL)
            case _:
                pass
        return True

    def lose(self, channel: Channel) -> None:
        """Remove the collector of a closed connection."""
        for place in [k for k, c in self._collectors.items() if c.channel is channel]:
            del self._collectors[place]

    def close(self) -> None:
        """Close the connection to every process that collects."""
        for collector in self._collectors.values():
            collector.channel.close()
        self._collectors.clear()

    def _fork(self, number: int, port: int) -> None:
        """Have the fork servers of the nodes start the processes that collect."""
        configs = with_store(self._configs[number][0], port)
        for node_rank in {config.node_rank for config in configs}:
            node = self._fork_servers.find(node_rank)
            if node is not None:
                node.send(Fork(configs=tuple(c for c in configs if c.node_rank == node_rank)))

    def _nodes(self, number: int) -> list[Channel]:
        ranks = {config.node_rank for config in self._configs[number][0]}
        return [node for rank in ranks if (node := self._fork_servers.find(rank)) is not None]
