"""Where the controller reaches the processes that start ranks: one of each node, and their like."""

from __future__ import annotations

import signal

from pytest_megatron.errors import LaunchError
from pytest_megatron.gang.channel import Channel
from pytest_megatron.gang.messages import Hello
from pytest_megatron.gang.processes import send_signal

OF_NODE = -1  # in the place of a rank


class ForkServers:
    """Connections of fork servers, by node and rank; a node's own has `OF_NODE` in place of a rank."""

    def __init__(self) -> None:
        self._channels: dict[tuple[int, int], Channel] = {}
        self._pids: dict[Channel, int] = {}

    def add(self, hello: Hello, channel: Channel) -> None:
        """Take note of one that has called."""
        if not hello.world_size:
            self._channels[hello.node_rank, hello.rank] = channel
        if hello.node_rank == 0:
            self._pids[channel] = hello.pid

    def has(self, node_rank: int, rank: int = OF_NODE) -> bool:
        """Whether one has called and is there."""
        channel = self._channels.get((node_rank, rank))
        return channel is not None and not channel.is_closed

    def find(self, node_rank: int) -> Channel | None:
        """Return the connection of a node's own, None if it is gone."""
        return self._channels[node_rank, OF_NODE] if self.has(node_rank) else None

    def of_node(self, node_rank: int) -> Channel:
        """Return the connection of a node's own.

        Raises:
            LaunchError: It is gone.
        """
        channel = self.find(node_rank)
        if channel is None:
            raise LaunchError(
                f"node {node_rank}", "the process that starts ranks is gone; was it killed?"
            )
        return channel

    def kill(self, channel: Channel) -> None:
        """Kill one that does not answer, if it is of this host: what it started dies with it."""
        if channel in self._pids:
            send_signal([self._pids[channel]], signal.SIGKILL)

    def lose(self, channel: Channel) -> None:
        """Forget the one whose connection ended."""
        self._pids.pop(channel, None)
        for place in [k for k, c in self._channels.items() if c is channel]:
            del self._channels[place]

    def close(self) -> None:
        """End every connection."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
