"""Who calls the controller: connections from the first knock to their end (effects).

Knows nothing of gangs: a caller that has proved itself and greeted is handed on.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from pytest_megatron.errors import LaunchError
from pytest_megatron.gang.ipc.channel import Channel, Listener, WrongKeyError
from pytest_megatron.gang.ipc.messages import (
    Joined,
    Message,
    Register,
    SessionEnded,
    Welcome,
    encode,
)
from pytest_megatron.process.tree import send_signal

OnRegister: TypeAlias = Callable[[Channel, Register, Sequence[Message]], None]


class Calls:
    """Every connection of one controller; there are no threads.

    Attributes:
        late_s: How much longer than it should have the last wait took; a busy host or Ctrl-Z.
    """

    def __init__(self, listener: Listener, on_register: OnRegister) -> None:
        """Begin to listen.

        Args:
            listener: Where callers call.
            on_register: Called with each channel that has registered and the messages that
                followed; has to `read` or `drop` it.
        """
        self._on_register = on_register
        self._on_wrong_key: Callable[[], None] | None = None
        self._listeners: list[Listener] = []
        self._selector = selectors.DefaultSelector()
        self.late_s = 0.0
        self.listen(listener)

    def listen(self, listener: Listener, on_wrong_key: Callable[[], None] | None = None) -> None:
        """Take calls at one more place.

        Args:
            listener: The place.
            on_wrong_key: Told when a caller does not know the key of the session.
        """
        self._listeners.append(listener)
        self._on_wrong_key = on_wrong_key or self._on_wrong_key
        self._selector.register(listener, selectors.EVENT_READ, self._on_call)

    def read(self, channel: Channel, handle: Callable[[], None]) -> None:
        """From now on, have `handle` called whenever there is something to read."""
        self._selector.modify(channel, selectors.EVENT_READ, lambda _: handle())

    def take(self, timeout_s: float) -> bool:
        """Handle what there is to read, waiting for it; return whether there was anything.

        A wait that a signal interrupts (`fg` after Ctrl-Z) ends without a look once its time is
        over; nobody may look at the clock before what came meanwhile is read.
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
        """End a connection; may be called again."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel)
        channel.close()

    def stop(self) -> None:
        """Take no more calls."""
        self._selector.close()
        for listener in self._listeners:
            listener.close()

    def forget(self) -> None:
        """Let go of descriptors in a forked child; what they belong to lives on."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, Channel | socket.socket):
                key.fileobj.close()
        self._selector.close()
        for listener in self._listeners:
            listener.forget()

    def _on_call(self, source: object) -> None:
        assert isinstance(source, Listener)
        on_proof = functools.partial(self._on_proof, source)
        self._selector.register(source.accept(), selectors.EVENT_READ, on_proof)

    def _on_proof(self, listener: Listener, source: object) -> None:
        assert isinstance(source, socket.socket)
        descriptor = source.fileno()
        try:
            channel = listener.prove(source)
        except PermissionError as error:
            self._selector.unregister(descriptor)
            if self._on_wrong_key is not None and isinstance(error, WrongKeyError):
                self._on_wrong_key()
            return
        if channel is not None:
            self._selector.unregister(descriptor)
            self._selector.register(channel, selectors.EVENT_READ, self._on_first_message)

    def _on_first_message(self, source: object) -> None:
        assert isinstance(source, Channel)
        messages = source.drain()
        if messages and isinstance(messages[0], Register):
            self._on_register(source, messages[0], messages[1:])
        elif messages or source.is_closed:
            self.drop(source)


OF_NODE = -1  # in the place of a rank


class ForkServers:
    """Connections of fork servers, by node and rank; a node's own has `OF_NODE` for a rank."""

    def __init__(self) -> None:
        self._channels: dict[tuple[int, int], Channel] = {}
        self._pids: dict[Channel, int] = {}

    def add(self, registration: Register, channel: Channel) -> None:
        """Take note of one that has called."""
        if not registration.world_size:
            self._channels[registration.node_rank, registration.rank] = channel
        if registration.node_rank == 0:
            self._pids[channel] = registration.pid

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


_USAGE_ERROR = 4  # pytest's


class Followers:
    """The connections to sessions of other nodes.

    Attributes:
        joined: What each session that can take part said, by node.
        refused: Why a session cannot take part, one line for each.
        num_wrong_keys: Callers that did not know the key.
    """

    def __init__(self, welcome: Welcome) -> None:
        """Begin without any.

        Args:
            welcome: What each is told first.
        """
        self.joined: dict[int, Joined] = {}
        self.refused: list[str] = []
        self.num_wrong_keys = 0
        self._welcome = welcome
        self._channels: dict[int, Channel] = {}

    def accept(self, node_rank: int, channel: Channel) -> None:
        """Take a session in that called."""
        known = self._channels.get(node_rank)
        is_taken = node_rank == 0 or (known is not None and not known.is_closed)
        if is_taken or node_rank >= self._welcome.num_nodes:
            text = f"--node-rank: {node_rank} is taken or too large; give each node one of its own"
            channel.send(SessionEnded(exit_code=_USAGE_ERROR, kind="exit", text=text))
            channel.close()
            return
        self._channels[node_rank] = channel
        channel.send(self._welcome)

    def read(self, channel: Channel) -> None:
        """Take in what a session said."""
        for node_rank in [n for n, c in self._channels.items() if c is channel]:
            for message in channel.drain():
                if isinstance(message, Joined) and not message.problem:
                    self.joined[node_rank] = message
                elif isinstance(message, Joined):
                    self.refused.append(f"node {node_rank}: {message.problem}")
            if channel.is_closed:
                del self._channels[node_rank]
                self.joined.pop(node_rank, None)

    def broadcast(self, message: Message) -> None:
        """Tell every session; one that is gone hears nothing."""
        frame = encode(message)
        for channel in self._channels.values():
            channel.send_frame(frame)

    def dismiss(self, ended: SessionEnded) -> None:
        """Tell every session that it is over; they wait for the end of this process."""
        self.broadcast(ended)
        for channel in self._channels.values():
            channel.leave()
        self._channels.clear()
