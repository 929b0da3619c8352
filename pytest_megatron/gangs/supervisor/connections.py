"""Connections to the controller, from the handshake to their end (effects).

There is one for each agent, and one for the session of each other node. Where ranks collect for
themselves, each has an agent of its own, which the agent of its node relays for.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.forkserver.store import with_store
from pytest_megatron.gangs.ipc.channel import (
    OWN,
    Channel,
    Frame,
    Listener,
    Place,
    WrongKeyError,
)
from pytest_megatron.gangs.ipc.messages import (
    AskStacks,
    Collected,
    Died,
    Kill,
    Message,
    RankConfig,
    Register,
    Stacks,
    Start,
    decode,
)
from pytest_megatron.process.guard import send_signal

OnRegister: TypeAlias = Callable[[Channel, Register, Sequence[Frame]], None]


class Calls:
    """Every connection of one controller, without threads.

    Attributes:
        late_s: Time by which the last wait exceeded its limit: a busy host or Ctrl-Z.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._selector = selectors.DefaultSelector()
        self.late_s = 0.0

    def listen(
        self, listener: Listener, on_register: OnRegister, on_wrong_key: Callable[[], None]
    ) -> None:
        """Accept connections at a socket.

        Args:
            listener: The socket.
            on_register: Called with each channel that has registered and the frames that
                followed; has to `read` or `drop` it.
            on_wrong_key: Called when a client does not know the key of the session.
        """
        self._on_register, self._on_wrong_key = on_register, on_wrong_key
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, self._on_call)

    def read(self, channel: Channel, handle: Callable[[], None]) -> None:
        """Call `handle` from now on whenever the channel is readable."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(channel)
        self._selector.register(channel, selectors.EVENT_READ, lambda _: handle())

    def take(self, timeout_s: float) -> bool:
        """Wait for readable connections and handle them; return whether there were any.

        `select` returns nothing if a signal (`fg` after Ctrl-Z) interrupts it past its limit;
        messages that arrived meanwhile have to be read before deadlines are checked.
        """
        began = time.monotonic()
        ready = self._selector.select(max(0.0, timeout_s))
        self.late_s = time.monotonic() - began - max(0.0, timeout_s)
        ready = ready or self._selector.select(0.0)
        for key, _ in ready:
            handler: Callable[[object], None] = key.data
            handler(key.fileobj)
        return bool(ready)

    def drop(self, channel: Channel) -> None:
        """Close a connection; may be called again."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel)
        channel.close()

    def stop(self) -> None:
        """Stop listening for connections."""
        self._selector.close()
        for listener in self._listeners:
            listener.close()

    def forget(self) -> None:
        """Close the descriptors in a forked child; the parent keeps its own."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, Channel | socket.socket):
                key.fileobj.close()
        self.stop()

    def _on_call(self, source: object) -> None:
        """Accept a connection."""
        assert isinstance(source, Listener)
        on_proof = functools.partial(self._on_proof, source)
        self._selector.register(source.accept(), selectors.EVENT_READ, on_proof)

    def _on_proof(self, listener: Listener, source: object) -> None:
        """Go on with the proof that a connection knows the key."""
        assert isinstance(source, socket.socket)
        descriptor = source.fileno()
        try:
            channel = listener.prove(source)
        except PermissionError as error:
            self._selector.unregister(descriptor)
            if isinstance(error, WrongKeyError):
                self._on_wrong_key()
            return
        except BaseException:  # Ctrl-C in between: the proof cannot go on, the caller hears of it
            self._selector.unregister(descriptor)
            source.close()
            raise
        if channel is not None:
            self._selector.unregister(descriptor)
            self._selector.register(channel, selectors.EVENT_READ, self._on_first_message)

    def _on_first_message(self, source: object) -> None:
        """Take the message that says who has connected."""
        assert isinstance(source, Channel)
        frames = source.drain_frames()
        with contextlib.suppress(ValueError):
            if frames and isinstance(register := decode(frames[0].content), Register):
                self._on_register(source, register, frames[1:])
                return
        if frames or source.is_closed:
            self.drop(source)


@dataclass(frozen=True, slots=True)
class Peer:
    """A process that is reached by the connection of its node: an agent or a rank."""

    node: Channel
    place: Place = OWN

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message."""
        self.node.send(message, descriptors, self.place)


class Agents:
    """Agents that are ready, by node."""

    def __init__(self) -> None:
        self._channels: dict[int, Channel] = {}
        self._pids: dict[Channel, int] = {}

    def connect(self, node_rank: int, channel: Channel) -> None:
        """Add an agent that may not be ready yet: it reads later what is sent to it."""
        self._channels[node_rank] = channel

    def add(self, channel: Channel, pid: int) -> None:
        """Note that an agent is ready."""
        self._pids[channel] = pid

    def has(self, node_rank: int) -> bool:
        """Return whether the agent of a node is ready."""
        channel = self.find(node_rank)
        return channel is not None and channel in self._pids

    def find(self, node_rank: int) -> Channel | None:
        """Return the connection of a node's agent, None if it is gone."""
        channel = self._channels.get(node_rank)
        return None if channel is None or channel.is_closed else channel

    def of_node(self, node_rank: int) -> Channel:
        """Return the connection of a node's agent.

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
        """Kill an agent of this host that does not answer; its ranks die with it."""
        if channel in self._pids and self._channels.get(0) is channel:
            send_signal([self._pids[channel]], signal.SIGKILL)

    def lose(self, channel: Channel) -> None:
        """Remove the agent of a closed connection."""
        self._pids.pop(channel, None)
        for node_rank in [n for n, c in self._channels.items() if c is channel]:
            del self._channels[node_rank]


@dataclass(slots=True)
class RankCollector:
    """A process that collects for one rank of gangs of one size, and is its agent then.

    Attributes:
        config: Configuration of the rank. In place of a gang's number it has one below 0, of those
            that were started together.
        is_ready: Whether it has collected.
        is_single: Whether it cannot fork and becomes the rank itself.
        is_asked: Whether it was asked for its stack.
    """

    config: RankConfig
    peer: Peer
    until: float  # it is late then, in seconds of the monotonic clock
    is_ready: bool = False
    is_single: bool = False
    is_asked: bool = False

    @property
    def number(self) -> int:
        """The number of those that were started together."""
        return self.config.gang


CollectorMessage: TypeAlias = Collected | Died | Stacks
OnCollectorMessage: TypeAlias = Callable[[Sequence[RankCollector], CollectorMessage], None]


class RankCollectors:
    """All rank collectors of one controller.

    Attributes:
        on_message: Called with the messages of collectors, or with stacks of several.
        num_starts: How often some were started.
    """

    on_message: OnCollectorMessage

    def __init__(self, agents: Agents) -> None:
        """Begin without processes that collect.

        Args:
            agents: Agents of nodes, which start collectors.
        """
        self._agents = agents
        self._all: list[RankCollector] = []
        self.num_starts = 0

    def start(self, configs: Sequence[RankConfig], until: float, *, has_begun: bool) -> int:
        """Start collectors; return their number.

        Args:
            configs: Configurations of their ranks.
            until: When they are late.
            has_begun: Whether they were started already, as the first ones.

        Raises:
            LaunchError: There is no port for a store.
        """
        self.num_starts += 1
        number = -self.num_starts
        nodes = {c.node_rank: self._agents.find(c.node_rank) for c in configs}
        if not has_begun:
            store, configs = with_store([replace(config, gang=number) for config in configs])
            with store:
                for node_rank, node in nodes.items():
                    own = tuple(c for c in configs if c.node_rank == node_rank)
                    start = Start(gang=number, configs=own, has_store=node_rank == 0)
                    if node is not None:
                        node.send(start, [store.fileno()] * start.has_store)
        self._all += [
            RankCollector(config, Peer(node, (number, config.rank)), until)
            for config in configs
            if (node := nodes[config.node_rank]) is not None
        ]
        return number

    def of_size(self, world_size: int) -> dict[int, RankCollector]:
        """Return rank -> collector for gangs of one size."""
        return {c.config.rank: c for c in self._all if c.config.world_size == world_size}

    def of_number(self, number: int) -> list[RankCollector]:
        """Return those that were started together."""
        return [collector for collector in self._all if collector.number == number]

    def find(self, config: RankConfig) -> RankCollector | None:
        """Return the collector that can start a rank; one with `is_single` is then used up."""
        collector = self.of_size(config.world_size).get(config.rank)
        if collector is None or not collector.is_ready:
            return None
        if collector.is_single:
            self._all.remove(collector)
        return collector

    def ask(self, number: int, ranks: tuple[int, ...]) -> None:
        """Request stacks of collectors with a number."""
        for node in {collector.peer.node for collector in self.of_number(number)}:
            node.send(AskStacks(gang=number, ranks=ranks))

    def kill(self, number: int) -> None:
        """Kill the collectors with a number."""
        for node in {collector.peer.node for collector in self.of_number(number)}:
            node.send(Kill(gang=number))
        self.lose(lambda peer: peer.place[0] == number)

    def take(self, message: CollectorMessage, place: Place) -> None:
        """Handle a message of a collector, or of its node about it; a rank below 0 means all."""
        found = [c for c in self.of_number(place[0]) if place[1] < 0 or c.peer.place == place]
        if isinstance(message, Died):
            self.lose(lambda peer: peer.place == place)
        for collector in found:
            if isinstance(message, Collected):
                collector.is_ready, collector.is_single = True, bool(message.obstacle)
        if found:
            self.on_message(found, message)

    def lose(self, is_lost: Callable[[Peer], bool]) -> None:
        """Remove collectors that are gone, or not to be used again."""
        self._all = [collector for collector in self._all if not is_lost(collector.peer)]
