from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from contextlib import closing

import pytest

from pytest_megatron.gangs.ipc.channel import (
    OWN,
    BufferedChannel,
    Channel,
    Frame,
    Listener,
    WrongKeyError,
    connect,
    listen_on,
)
from pytest_megatron.gangs.ipc.messages import Broken, Close, Closed, Message, Register, encode

DEADLINE_S = 60.0
REGISTER = Register(role="node", node_rank=1)
KEY = b"k" * 32


def head(frame: bytes, num_descriptors: int = 0) -> bytes:
    return struct.pack("!IiiB", len(frame), *OWN, num_descriptors)


def pair() -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left), Channel(right)


def drain_until(channel: Channel, num_messages: int) -> list[Message]:
    """Read as the controller does, until there are enough or no more can come."""
    messages: list[Message] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(messages) < num_messages and not channel.is_closed:
        wait_s = max(0.0, deadline - time.monotonic())
        assert select.select([channel.fileno()], [], [], wait_s)[0], "nothing came"
        messages += channel.drain()
    return messages


def take_in(listener: Listener) -> Channel:
    """Accept callers until one has proved itself, in the way of the controller's loop."""
    waiting: list[socket.socket] = []
    while True:
        sources = [listener.fileno(), *(c.fileno() for c in waiting)]
        readable = select.select(sources, [], [], DEADLINE_S)[0]
        assert readable, "nobody proved itself"
        for connection in [c for c in waiting if c.fileno() in readable]:
            channel = listener.prove(connection)
            if channel is not None:
                return channel
        if listener.fileno() in readable:
            waiting.append(listener.accept())


def call(address: str, key: bytes, keep: list[Channel], errors: list[OSError]) -> threading.Thread:
    def run() -> None:
        try:
            keep.append(connect(address, key, REGISTER))
        except OSError as error:
            errors.append(error)

    caller = threading.Thread(target=run)
    caller.start()
    return caller


def listen() -> Listener:
    return listen_on("127.0.0.1", 0, KEY)


def call_silently(listener: Listener) -> socket.socket:
    host, _, port = listener.address.rpartition(":")
    return socket.create_connection((host, int(port)))


def test_a_caller_with_the_key_gets_through_past_a_silent_one() -> None:
    with closing(listen()) as listener:
        silent = call_silently(listener)
        called: list[Channel] = []
        caller = call(listener.address, listener.key, called, [])
        with closing(take_in(listener)) as channel:
            assert drain_until(channel, 1) == [REGISTER]
            channel.send(Close())
            caller.join(DEADLINE_S)
            assert called[0].receive() == Close()
            called[0].close()
        silent.close()


def test_a_caller_without_the_key_is_refused_and_told_nothing() -> None:
    with closing(listen()) as listener:
        errors: list[OSError] = []
        caller = call(listener.address, b"another key", [], errors)
        with pytest.raises(WrongKeyError, match="does not know the key"):
            take_in(listener)
        caller.join(DEADLINE_S)
        assert isinstance(errors[0], WrongKeyError)
        assert "has another key, and hung up" in str(errors[0])


def test_a_controller_without_the_key_is_refused() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as impostor:
        errors: list[OSError] = []
        caller = call(f"127.0.0.1:{impostor.getsockname()[1]}", KEY, [], errors)
        connection, _ = impostor.accept()
        connection.sendall(b"n" * 32)
        received = b""
        while len(received) < 64:
            received += connection.recv(64)
        connection.sendall(received[32:])  # its own proof back
        caller.join(DEADLINE_S)
        connection.close()
    assert isinstance(errors[0], WrongKeyError)


def test_a_caller_that_hangs_up_is_no_caller() -> None:
    with closing(listen()) as listener:
        with call_silently(listener) as caller:
            caller.sendall(b"half a nonce")
        with pytest.raises(PermissionError, match="hung up"):
            take_in(listener)


def test_frames_come_whole_however_they_are_cut() -> None:
    ours, theirs = socket.socketpair()
    messages: list[Message] = [Broken(problem="x" * 3000), Close(), Closed(problem="")]
    frames = [encode(m) for m in messages]
    content = b"".join(head(f) + f for f in frames)
    with closing(Channel(ours)) as channel, closing(theirs):
        received = []
        for start in range(0, len(content), 7):
            theirs.sendall(content[start : start + 7])
            received += drain_until(channel, 0) + channel.drain()
        assert received == messages


def test_a_large_message_gets_through_while_the_other_side_reads() -> None:
    left, right = pair()
    with closing(left), closing(right):
        message = Broken(problem="x" * 5_000_000)
        sender = threading.Thread(target=left.send, args=(message,))
        sender.start()
        assert drain_until(right, 1) == [message]
        sender.join(DEADLINE_S)


def test_last_words_are_read_before_the_end() -> None:
    left, right = pair()
    with closing(right):
        left.send(Closed(problem="bye"))
        left.close()
        assert (right.drain(), right.drain()) == ([Closed(problem="bye")], [])
        assert right.is_closed
        right.send(Close())  # to nobody: no error
        assert right.receive() is None


def test_descriptors_stay_with_their_message_among_others_that_wait() -> None:
    left, right = pair()
    with closing(left), closing(right):
        readable, writable = os.pipe()
        left.send(Closed(problem=""))
        left.send(Close(), [writable])
        left.send(Broken(problem=""))
        os.close(writable)
        assert right.receive_with_descriptors() == (Closed(problem=""), [])
        message, (received,) = right.receive_with_descriptors()
        os.write(received, b"hello")
        assert (message, os.read(readable, 5)) == (Close(), b"hello")
        os.close(received)
        os.close(readable)
        assert right.receive_with_descriptors() == (Broken(problem=""), [])


def test_a_frame_without_its_descriptors_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with closing(Channel(ours)) as channel, closing(theirs):
        frame = encode(Close())
        theirs.sendall(head(frame, num_descriptors=1) + frame)
        assert (channel.drain(), channel.is_closed) == ([], True)


def test_a_frame_without_an_end_closes_the_connection_before_it_fills_memory() -> None:
    ours, theirs = socket.socketpair()
    with closing(Channel(ours)) as channel, closing(theirs):
        theirs.sendall(b"\xff" * 13)
        assert (channel.drain(), channel.is_closed) == ([], True)


def test_a_relay_keeps_what_nobody_reads_and_passes_descriptors_on() -> None:
    source, relay_in = socket.socketpair()
    relay_out, target = socket.socketpair()
    with (
        closing(Channel(source)) as sender,
        closing(BufferedChannel(relay_in)) as reader,
        closing(BufferedChannel(relay_out)) as relay,
        closing(Channel(target)) as receiver,
    ):
        readable, writable = os.pipe()
        sender.send(Close(), [writable])
        os.close(writable)
        relay.send_frames(frame.at((1, 2)) for frame in reader.drain_frames(takes_descriptors=True))
        large = Frame((3, 4), encode(Broken(problem="x" * 5_000_000)))
        relay.send_frames([large])
        relay.flush()
        assert 0 < relay.num_unsent <= len(large.content)  # nobody was waited for
        message, (received,) = receiver.receive_with_descriptors()
        os.write(received, b"hello")
        assert (message, os.read(readable, 5)) == (Close(), b"hello")
        os.close(received)
        os.close(readable)
        frames: list[Frame] = []
        while not frames:
            relay.flush()
            frames = receiver.drain_frames()
        assert (frames[0].place, frames[0].content) == (large.place, large.content)
        reader.close()
        relay.close()
