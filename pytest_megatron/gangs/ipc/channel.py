"""Connections between controller, fork servers and ranks: frames, authentication, addresses.

Each side proves that it knows the key of the session before any message is decoded (HMAC-SHA256
over both sides' nonces). On one host the socket is a file in a directory that only the user can
read; over TCP frames are not encrypted, like all other traffic between ranks.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import getpid  # a test may put another function in its place
from pathlib import Path

from pytest_megatron.gangs.ipc.messages import Message, Register, decode, encode_within
from pytest_megatron.process.originals import os, select, socket, time

_HEAD = struct.Struct("!IB")  # length of a frame, and its number of descriptors
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
_MOST_TEMP_CHARS = 80
_SHORT_TEMP = "/tmp"  # noqa: S108 - mkdtemp makes a private directory in it


class WrongKeyError(PermissionError):
    """The other side does not know the key of this session."""


class Channel:
    """One authenticated connection of one process; sending does nothing in a forked child.

    The controller reads with `drain`, which never blocks; others read with `receive`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sendall = connection.sendall  # a test may patch the class
        self._buffer = bytearray()
        self._descriptors: list[int] = []  # of frames in the buffer
        self._owner = getpid()
        self.is_closed = False
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message; it is dropped if the other side is gone, which is detected elsewhere.

        Texts of a message that is too long for a frame are cut, with a note.

        Args:
            message: The message.
            descriptors: File descriptors to attach, on a local socket.
        """
        self.send_frames([encode_within(message, _MAX_FRAME_BYTES)], descriptors)

    def send_frame(self, frame: bytes) -> None:
        """Send an encoded message, so that it can be encoded once for many channels."""
        self.send_frames([frame])

    def send_frames(self, frames: Sequence[bytes], descriptors: Sequence[int] = ()) -> None:
        """Send several messages at once; descriptors are attached to the first."""
        if self.is_closed or getpid() != self._owner:
            return
        longest = max(map(len, frames))
        if longest > _MAX_FRAME_BYTES:
            raise ValueError(_too_long(longest))
        attached = list(descriptors) if self._socket.family == socket.AF_UNIX else []
        numbers = (len(attached), *(0 for _ in frames[1:]))
        heads = map(_HEAD.pack, map(len, frames), numbers)
        content = b"".join(head + frame for head, frame in zip(heads, frames, strict=True))
        try:
            if attached:
                content = content[socket.send_fds(self._socket, [content], attached) :]
            if content:  # none is an error where the other side has read all and closed
                self._sendall(content)
        except OSError:
            self.is_closed = True

    def receive(self) -> Message | None:
        """Wait for a message; return None once the other side is gone."""
        return self.receive_with_descriptors()[0]

    def receive_with_descriptors(self) -> tuple[Message | None, list[int]]:
        """Wait for a message and its attached descriptors."""
        while (found := self._next_frame()) is None:
            try:
                if self._socket.family == socket.AF_UNIX:
                    chunk, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, _MAX_FDS)
                    self._descriptors += fds
                else:
                    chunk = self._socket.recv(1 << 16)
            except OSError:
                chunk = b""
            if not chunk:
                self.is_closed = True
                return None, []
            self._buffer += chunk
        return decode(found[0]), found[1]

    @property
    def has_message(self) -> bool:
        """True if a complete message is buffered."""
        return self._frame_end() is not None

    def drain(self) -> list[Message]:
        """Return the messages that have arrived; set `is_closed` if no more can follow.

        Bytes that are no message (a test may write to any descriptor) end the connection, as do
        descriptors, which only `receive_with_descriptors` takes.
        """
        messages = []
        try:
            for frame in self.drain_frames():
                messages.append(decode(frame))  # noqa: PERF401 - keep those before a bad one
        except ValueError:
            self._give_up()
        return messages

    def drain_frames(self) -> list[bytes]:
        """Return the frames that have arrived, like `drain`."""
        try:
            while True:
                chunk = self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
                self._buffer += chunk
                if len(chunk) < _CHUNK_BYTES:  # all that has arrived
                    self.is_closed = not chunk
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        frames = []
        try:
            while (found := self._next_frame()) is not None:
                frames.append(found[0])
        except ValueError:
            self._give_up()
        return frames

    def _give_up(self) -> None:
        self.is_closed = True
        self._buffer.clear()

    def close(self) -> None:
        """Close the connection; may be called again."""
        self.is_closed = True
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def leave(self) -> None:
        """Detach the connection, so that the kernel closes it when this process exits."""
        self.is_closed = True
        self._socket.detach()

    def wait_for_end(self, limit_s: float) -> None:
        """Wait until the other side is gone, and discard its messages."""
        deadline = time.monotonic() + limit_s
        while not self.is_closed and (left_s := deadline - time.monotonic()) > 0:
            if select.select([self._socket], [], [], left_s)[0]:
                self.drain()

    def _frame_end(self) -> int | None:
        """Return where the first frame in the buffer ends, None if it is not whole."""
        if len(self._buffer) < _HEAD.size:
            return None
        length, _ = _HEAD.unpack_from(self._buffer)
        if length > _MAX_FRAME_BYTES:
            raise ValueError(_too_long(length))
        end = _HEAD.size + int(length)
        return end if len(self._buffer) >= end else None

    def _next_frame(self) -> tuple[bytes, list[int]] | None:
        """Return a frame that has arrived, with its descriptors.

        Raises:
            ValueError: It is too long, or came without its descriptors.
        """
        end = self._frame_end()
        if end is None:
            return None
        _, num_attached = _HEAD.unpack_from(self._buffer)
        frame, attached = bytes(self._buffer[_HEAD.size : end]), self._descriptors[:num_attached]
        if len(attached) < num_attached:
            raise ValueError(f"{len(attached)} descriptors came, {num_attached} were expected")
        del self._buffer[:end], self._descriptors[:num_attached]
        return frame, attached


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
        address: Address for clients: `unix:PATH` or `tcp:HOST:PORT`.
        key: Secret that clients have to prove.
    """

    address: str
    key: bytes
    _socket: socket.socket
    _directory: Path | None = None
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

    def forget(self) -> None:
        """Close the descriptors, in a forked child."""
        for caller in self._pending.values():
            caller.connection.close()
        self._socket.close()

    def close(self) -> None:
        """Stop listening, and remove the socket file."""
        self.forget()
        if self._directory is not None:
            remove_socket(self.address)


def listen_locally() -> Listener:
    """Listen on a socket file that only this user can open."""
    directory = Path(tempfile.mkdtemp(prefix="ptm-", dir=_short_temp()))
    listening = socket.socket(socket.AF_UNIX)
    path = directory / "wire"
    listening.bind(str(path))
    listening.listen(_BACKLOG)
    return Listener(f"unix:{path}", secrets.token_bytes(32), listening, directory)


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
    return Listener(f"tcp:{host}:{listening.getsockname()[1]}", key, listening)


def remove_socket(address: str) -> None:
    """Remove the socket file of a controller that was killed."""
    scheme, _, path = address.partition(":")
    if scheme == "unix":
        with contextlib.suppress(OSError):
            Path(path).unlink(missing_ok=True)
            Path(path).parent.rmdir()


def connect(address: str, key: bytes, register: Register | None) -> Channel:
    """Connect to the controller, and register unless `register` is None.

    On one host there is no time limit, as the controller may be busy with a test of its own for
    minutes; if it dies, the kernel closes the connection.

    Raises:
        WrongKeyError: The two sides have different keys.
        OSError: It cannot be reached.
    """
    connection = _reach(address)
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
    if register is not None:
        channel.send(register)
    return channel


def connect_unless_ended(address: str, key: bytes, register: Register) -> Channel | None:
    """Connect to the controller; None if it has ended, and if it was killed, remove its socket.

    Raises:
        OSError: It cannot be reached.
    """
    try:
        return connect(address, key, register)
    except (FileNotFoundError, WrongKeyError):
        return None
    except ConnectionError:  # nobody listens
        remove_socket(address)
        return None


def _reach(address: str) -> socket.socket:
    """Connect to an address, a path of a Unix socket or host and port."""
    scheme, _, rest = address.partition(":")
    if scheme != "unix":
        host, _, port = rest.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=_HANDSHAKE_S)
    connection = socket.socket(socket.AF_UNIX)  # no time limit: see `connect`
    try:
        connection.connect(rest)
    except OSError:
        connection.close()
        raise
    return connection


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


def _short_temp() -> str | None:
    """Return a directory with a short name: the kernel takes paths of sockets up to 107 bytes."""
    is_short = len(tempfile.gettempdir()) <= _MOST_TEMP_CHARS
    return None if is_short or not os.path.isdir(_SHORT_TEMP) else _SHORT_TEMP
