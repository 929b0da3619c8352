"""Connections to the controller, from the handshake to their end (effects).

Independent of gangs: a client that has registered is handed on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.ipc.channel import Channel, Listener, WrongKeyError
from pytest_megatron.gangs.ipc.messages import (
    Joined,
    Message,
    Register,
    SessionEnded,
    Welcome,
    encode,
)
from pytest_megatron.process.guard import send_signal

OnRegister: TypeAlias = Callable[[Channel, Register, Sequence[Message]], None]


class Calls:
    """Every connection of one controller, without threads.

    Attributes:
        late_s: Time by which the last wait exceeded its limit: a busy host or Ctrl-Z.
    """

    def __init__(self, listener: Listener, on_register: OnRegister) -> None:
        """Start listening for connections.

        Args:
            listener: The first listening socket.
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
        """Accept connections at one more socket.

        Args:
            listener: The socket.
            on_wrong_key: Called when a client does not know the key of the session.
        """
        self._listeners.append(listener)
        self._on_wrong_key = on_wrong_key or self._on_wrong_key
        self._selector.register(listener, selectors.EVENT_READ, self._on_call)

    def read(self, channel: Channel, handle: Callable[[], None]) -> None:
        """Call `handle` from now on whenever the channel is readable."""
        self._selector.modify(channel, selectors.EVENT_READ, lambda _: handle())

    def watch(self, descriptor: int, handle: Callable[[], None]) -> None:
        """Call `handle` whenever another descriptor is readable, until `unwatch`."""
        self._selector.register(descriptor, selectors.EVENT_READ, lambda _: handle())

    def unwatch(self, descriptor: int) -> None:
        """Close a descriptor that was watched."""
        self._selector.unregister(descriptor)
        os.close(descriptor)

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
        self._selector.close()
        for listener in self._listeners:
            listener.forget()

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
            if self._on_wrong_key is not None and isinstance(error, WrongKeyError):
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
        messages = source.drain()
        if messages and isinstance(messages[0], Register):
            self._on_register(source, messages[0], messages[1:])
        elif messages or source.is_closed:
            self.drop(source)


OF_NODE = -1  # in place of a rank


class ForkServers:
    """Connections of fork servers, by node and rank; that of a whole node has rank `OF_NODE`."""

    def __init__(self) -> None:
        self._channels: dict[tuple[int, int], Channel] = {}
        self._pids: dict[Channel, int] = {}

    def add(self, registration: Register, channel: Channel) -> None:
        """Add the connection of a fork server that has registered."""
        if not registration.world_size:
            self._channels[registration.node_rank, registration.rank] = channel
        if registration.node_rank == 0:
            self._pids[channel] = registration.pid

    def has(self, node_rank: int, rank: int = OF_NODE) -> bool:
        """Return whether a fork server is connected."""
        channel = self._channels.get((node_rank, rank))
        return channel is not None and not channel.is_closed

    def find(self, node_rank: int) -> Channel | None:
        """Return the connection of a node's fork server, None if it is gone."""
        return self._channels[node_rank, OF_NODE] if self.has(node_rank) else None

    def of_node(self, node_rank: int) -> Channel:
        """Return the connection of a node's fork server.

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
        """Kill a fork server of this host that does not answer; its ranks die with it."""
        if channel in self._pids:
            send_signal([self._pids[channel]], signal.SIGKILL)

    def lose(self, channel: Channel) -> None:
        """Remove the fork server of a closed connection."""
        self._pids.pop(channel, None)
        for place in [k for k, c in self._channels.items() if c is channel]:
            del self._channels[place]

    def close(self) -> None:
        """Close the connection to every fork server."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


_USAGE_ERROR = 4  # exit code of pytest


class Followers:
    """Connections to the sessions of other nodes.

    Attributes:
        joined: Reply of each session that can join, by node.
        refused: Reasons why sessions cannot join, a line each.
        num_wrong_keys: Number of clients that did not know the key.
    """

    def __init__(self, welcome: Welcome) -> None:
        """Begin without connections of other nodes.

        Args:
            welcome: First message to each session.
        """
        self.joined: dict[int, Joined] = {}
        self.refused: list[str] = []
        self.num_wrong_keys = 0
        self._welcome = welcome
        self._channels: dict[int, Channel] = {}

    def accept(self, node_rank: int, channel: Channel) -> None:
        """Accept or refuse a session that has registered."""
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
        """Read the messages of a session."""
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
        """Send a message to every session; those that are gone are skipped."""
        frame = encode(message)
        for channel in self._channels.values():
            channel.send_frame(frame)

    def dismiss(self, ended: SessionEnded) -> None:
        """Send the end of the session to all; they wait for the end of this process."""
        self.broadcast(ended)
        for channel in self._channels.values():
            channel.leave()
        self._channels.clear()
