"""Who calls the controller: connections from the first knock to their end (effects).

Knows nothing of gangs: a caller that has proved itself and greeted is handed on.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from pytest_megatron.gang.channel import Channel, Listener, WrongKeyError
from pytest_megatron.gang.messages import Hello, Message

OnHello: TypeAlias = Callable[[Channel, Hello, Sequence[Message]], None]


class Calls:
    """Every connection of one controller; there are no threads.

    Attributes:
        late_s: How much longer than it should have the last wait took; a busy host or Ctrl-Z.
    """

    def __init__(self, listener: Listener, on_hello: OnHello) -> None:
        """Begin to listen.

        Args:
            listener: Where callers call.
            on_hello: Told of one that has greeted, with what else it said; has to `read` or `drop`
                it.
        """
        self._on_hello = on_hello
        self._on_stranger: Callable[[], None] | None = None
        self._listeners: list[Listener] = []
        self._selector = selectors.DefaultSelector()
        self.late_s = 0.0
        self.listen(listener)

    def listen(self, listener: Listener, on_stranger: Callable[[], None] | None = None) -> None:
        """Take calls at one more place.

        Args:
            listener: The place.
            on_stranger: Told when a caller does not know the key of the session.
        """
        self._listeners.append(listener)
        self._on_stranger = on_stranger or self._on_stranger
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
            if self._on_stranger is not None and isinstance(error, WrongKeyError):
                self._on_stranger()
            return
        if channel is not None:
            self._selector.unregister(descriptor)
            self._selector.register(channel, selectors.EVENT_READ, self._on_greeting)

    def _on_greeting(self, source: object) -> None:
        assert isinstance(source, Channel)
        messages = source.drain()
        if messages and isinstance(messages[0], Hello):
            self._on_hello(source, messages[0], messages[1:])
        elif messages or source.is_closed:
            self.drop(source)
