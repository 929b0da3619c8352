"""Connections between controller, agents and ranks: frames, and authentication between nodes.

On one host processes inherit one end of a pair of sockets. Over TCP each side proves that it knows
the key of the session before any message is decoded (HMAC-SHA256 over both sides' nonces); frames
are not encrypted, like all other traffic between ranks.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import getpid  # a test may put another function in its place
from typing import NamedTuple, TypeAlias

from typing_extensions import override

from pytest_megatron.gangs.ipc.messages import Message, Register, decode, encode_within
from pytest_megatron.process.originals import os, select, socket, time

_HEAD = struct.Struct("!IiiB")  # length of a frame, gang and rank, number of descriptors
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAX_FRAME_BYTES = 1 << 28
_MAX_FDS = 64
_BACKLOG = 512
_LOOPBACKS = ("127.0.0.1", "localhost", "::1")
_CHUNK_BYTES = 1 << 18
_HANDSHAKE_S = 20.0
_KEEPALIVE_S = 10  # interval of TCP keepalive probes
_SILENCE_MS = 30_000  # without acknowledgement until a connection ends
Place: TypeAlias = tuple[int, int]
OWN: Place = (0, -1)


class WrongKeyError(PermissionError):
    """The other side does not know the key of this session."""


class Frame(NamedTuple):
    """An encoded message.

    Attributes:
        place: Gang and rank of the process that sent it, or that it is for; `OWN` of or for the
            process at the other end of the connection, which relays the others.
        descriptors: File descriptors that come with it, on a local socket.
    """

    place: Place
    content: bytes
    descriptors: Sequence[int] = ()

    def at(self, place: Place) -> Frame:
        """Return it with another place."""
        return self._replace(place=place)


class Channel:
    """One connection of one process; sending does nothing in a forked child.

    Who relays for others reads with `drain_frames`, which never blocks; others with `receive`.

    Attributes:
        socket: The connection.
        is_closed: Whether no more can follow.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._is_local = connection.family == socket.AF_UNIX
        self._sendall = connection.sendall  # a test may patch the class
        self._buffer = bytearray()
        self._descriptors: list[int] = []  # of frames in the buffer
        self._owner = getpid()
        self.is_closed = False
        if not self._is_local:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self.socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = (), place: Place = OWN) -> None:
        """Send a message; it is dropped if the other side is gone, which is detected elsewhere.

        Texts of a message that is too long for a frame are cut, with a note.

        Args:
            message: The message.
            descriptors: File descriptors to attach, on a local socket.
            place: Whom it is for, or of.
        """
        self.send_frames([Frame(place, encode_within(message, _MAX_FRAME_BYTES), descriptors)])

    def send_frames(self, frames: Iterable[Frame]) -> None:
        """Send several encoded messages at once."""
        if self.is_closed or getpid() != self._owner:
            return
        content, attached = bytearray(), list[int]()
        for frame in frames:
            if len(frame.content) > _MAX_FRAME_BYTES:
                raise ValueError(_too_long(len(frame.content)))
            own = frame.descriptors if self._is_local else ()
            content += _HEAD.pack(len(frame.content), *frame.place, len(own)) + frame.content
            attached += own
        self._write(content, attached)

    def _write(self, content: bytearray, attached: list[int]) -> None:
        """Write frames, however long that takes."""
        try:
            if attached:
                content = content[socket.send_fds(self.socket, [content], attached) :]
            if content:  # none is an error where the other side has read all and closed
                self._sendall(content)
        except OSError:
            self.is_closed = True

    def receive(self) -> Message | None:
        """Wait for a message; return None once the other side is gone."""
        return self.receive_with_descriptors()[0]

    def receive_with_descriptors(self) -> tuple[Message | None, Sequence[int]]:
        """Wait for a message and its attached descriptors."""
        while (found := self._next_frame()) is None:
            try:
                if not self._read(1 << 16, 0, takes_descriptors=True):
                    self.is_closed = True
            except OSError:
                self.is_closed = True
            if self.is_closed:
                return None, []
        return decode(found.content), found.descriptors

    def drain(self) -> list[Message]:
        """Return the messages that have arrived; set `is_closed` if no more can follow.

        Bytes that are no message (a test may write to any descriptor) end the connection.
        """
        messages = []
        try:
            for frame in self.drain_frames():
                messages.append(decode(frame.content))  # noqa: PERF401 - keep those before a bad one
        except ValueError:
            self._give_up()
        return messages

    def drain_frames(self, *, takes_descriptors: bool = False) -> list[Frame]:
        """Return the frames that have arrived; set `is_closed` if no more can follow.

        Args:
            takes_descriptors: Whether frames may have descriptors, on a `BufferedChannel`; else one
                that has ends the connection.
        """
        try:
            while True:
                num_bytes = self._read(
                    _CHUNK_BYTES, socket.MSG_DONTWAIT, takes_descriptors=takes_descriptors
                )
                if num_bytes < _CHUNK_BYTES:
                    self.is_closed = self.is_closed or not num_bytes
                    if not (takes_descriptors and num_bytes):  # those end what is read at once
                        break
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        frames = []
        try:
            while (found := self._next_frame()) is not None:
                frames.append(found)
        except ValueError:
            self._give_up()
        return frames

    def _read(self, most_bytes: int, flags: int, *, takes_descriptors: bool) -> int:
        """Read what has arrived into the buffer; return the number of bytes."""
        if takes_descriptors and self._is_local:
            chunk, found, _, _ = socket.recv_fds(self.socket, most_bytes, _MAX_FDS, flags)
            self._descriptors += found
        else:
            chunk = self.socket.recv(most_bytes, flags)
        self._buffer += chunk
        return len(chunk)

    def _give_up(self) -> None:
        self.is_closed = True
        self._buffer.clear()

    def close(self) -> None:
        """Close the connection; may be called again."""
        self.is_closed = True
        self.socket.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def leave(self) -> None:
        """Detach the connection, so that the kernel closes it when this process exits."""
        self.is_closed = True
        self.socket.detach()

    def wait_for_end(self, limit_s: float) -> None:
        """Wait until the other side is gone, and discard its messages."""
        deadline = time.monotonic() + limit_s
        while not self.is_closed and (left_s := deadline - time.monotonic()) > 0:
            if select.select([self.socket], [], [], left_s)[0]:
                self.drain()

    def _next_frame(self) -> Frame | None:
        """Return a frame that has arrived whole, with its descriptors.

        Raises:
            ValueError: It is too long, or came without its descriptors.
        """
        if len(self._buffer) < _HEAD.size:
            return None
        length, gang, rank, num_attached = _HEAD.unpack_from(self._buffer)
        if length > _MAX_FRAME_BYTES:
            raise ValueError(_too_long(length))
        end = _HEAD.size + int(length)
        if len(self._buffer) < end:
            return None
        content, attached = bytes(self._buffer[_HEAD.size : end]), self._descriptors[:num_attached]
        if len(attached) < num_attached:
            raise ValueError(f"{len(attached)} descriptors came, {num_attached} were expected")
        del self._buffer[:end], self._descriptors[:num_attached]
        return Frame((gang, rank), content, attached)


class BufferedChannel(Channel):
    """A connection whose `send` never waits: `flush` sends what did not fit."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        connection.settimeout(0.0)  # `send_fds` and `recv_fds` ignore MSG_DONTWAIT
        self._unsent = bytearray()
        self._unsent_descriptors: list[int] = []

    @property
    def num_unsent(self) -> int:
        """Number of bytes that wait for the other side to read."""
        return len(self._unsent)

    @override
    def _write(self, content: bytearray, attached: list[int]) -> None:
        """Keep frames for `flush`."""
        self._unsent += content
        self._unsent_descriptors += map(os.dup, attached)

    def flush(self) -> None:
        """Send as much as the other side takes now."""
        try:
            while self._unsent:
                chunk, attached = self._unsent[:_CHUNK_BYTES], self._unsent_descriptors[:_MAX_FDS]
                if attached:
                    num_sent = socket.send_fds(self.socket, [chunk], attached)
                else:
                    num_sent = self.socket.send(chunk)
                del self._unsent[:num_sent], self._unsent_descriptors[: len(attached)]
                for descriptor in attached:
                    os.close(descriptor)
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
            self.is_closed = True


@dataclass(slots=True)
class _PendingCaller:
    """A connection that is not authenticated yet."""

    connection: socket.socket
    nonce: bytes
    received: bytes = b""


@dataclass(slots=True)
class Listener:
    """Listening socket of the controller; never blocks on a silent client.

    Attributes:
        address: Address for clients, `HOST:PORT`.
        key: Secret that clients have to prove.
    """

    address: str
    key: bytes
    _socket: socket.socket
    _pending: dict[int, _PendingCaller] = field(default_factory=dict)

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._socket.fileno()

    def accept(self) -> socket.socket:
        """Accept a connection; `prove` authenticates it."""
        connection, _ = self._socket.accept()
        connection.settimeout(0.0)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        with contextlib.suppress(OSError):  # it closed at once: `prove` detects that
            connection.send(nonce)
        self._pending[connection.fileno()] = _PendingCaller(connection, nonce)
        return connection

    def prove(self, connection: socket.socket) -> Channel | None:
        """Continue the handshake; return the channel once the client is authenticated.

        Raises:
            WrongKeyError: It does not know the key.
            PermissionError: It closed the connection.
        """
        caller = self._pending[connection.fileno()]
        wanted = _NONCE_BYTES + _PROOF_BYTES - len(caller.received)
        try:
            chunk = connection.recv(wanted)
        except BlockingIOError:
            chunk = None
        except OSError:
            chunk = b""
        if chunk is None:
            return None
        caller.received += chunk
        if chunk and len(caller.received) < _NONCE_BYTES + _PROOF_BYTES:
            return None
        del self._pending[connection.fileno()]
        their_nonce, proof = caller.received[:_NONCE_BYTES], caller.received[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _prove(self.key, b"caller", caller.nonce, their_nonce)):
            connection.close()
            if not chunk:
                raise PermissionError("a caller hung up")
            raise WrongKeyError("a caller does not know the key of this session")
        connection.settimeout(None)
        try:
            connection.sendall(_prove(self.key, b"controller", their_nonce, caller.nonce))
            return Channel(connection)
        except OSError:
            connection.close()
            raise PermissionError("a caller hung up") from None

    def close(self) -> None:
        """Stop listening."""
        for caller in self._pending.values():
            caller.connection.close()
        self._socket.close()


def listen_on(host: str, port: int, key: bytes) -> Listener:
    """Listen on TCP, for several nodes: on every interface, unless the host is a loopback address.

    A host may resolve its own name to the loopback interface, other hosts do not.

    Raises:
        OSError: The port is taken.
    """
    if host in _LOOPBACKS:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    elif socket.has_dualstack_ipv6():
        listening = socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
        )
    else:
        listening = socket.create_server(("", port), backlog=_BACKLOG)
    return Listener(f"{host}:{listening.getsockname()[1]}", key, listening)


def connect(address: str, key: bytes, register: Register) -> Channel:
    """Connect to the controller, and register.

    Raises:
        WrongKeyError: The two sides have different keys.
        OSError: It cannot be reached.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=_HANDSHAKE_S)
    try:
        their_nonce = _read(connection, _NONCE_BYTES)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce + _prove(key, b"caller", their_nonce, nonce))
        try:
            proof = _read(connection, _PROOF_BYTES)
        except ConnectionError:
            raise WrongKeyError(f"{address}: has another key, and hung up") from None
        if not hmac.compare_digest(proof, _prove(key, b"controller", nonce, their_nonce)):
            raise WrongKeyError(f"{address}: has another key")
        connection.settimeout(None)
        channel = Channel(connection)
    except OSError:
        connection.close()
        raise
    channel.send(register)
    return channel


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    """Read exactly so many bytes."""
    content = b""
    while len(content) < num_bytes:
        chunk = connection.recv(num_bytes - len(content))
        if not chunk:
            raise ConnectionError("the other side hung up")
        content += chunk
    return content


def _too_long(num_bytes: int) -> str:
    return f"a message of {num_bytes} bytes, at most {_MAX_FRAME_BYTES} were expected"


def _prove(key: bytes, role: bytes, theirs: bytes, own: bytes) -> bytes:
    return hmac.digest(key, role + theirs + own, "sha256")
