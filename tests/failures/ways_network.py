"""What the network does to a training; every server, port and namespace is real."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING

from ways import way

if TYPE_CHECKING:
    from training import Training

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
READ_TIMEOUT_S = 1.5


def serve(answer: Callable[[socket.socket], None]) -> str:
    """Answer each connection on a port of this host; return the address of a file there."""
    listener = socket.create_server(("127.0.0.1", 0))

    def loop() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                answer(connection)

    threading.Thread(target=loop, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/tokenizer.json"


def say(head: str, body: str = "") -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(f"HTTP/1.1 {head}\r\n\r\n{body}".encode())


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=READ_TIMEOUT_S) as answer:
        return bytes(answer.read())


def reset(connection: socket.socket) -> None:
    """End a connection with RST instead of FIN."""
    linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


@way("imports")
def name_resolution(training: Training) -> None:
    socket.create_connection(("datasets.invalid", 443), timeout=10)


@way("imports")
def name_resolution_in_a_download(training: Training) -> None:
    fetch("http://hub.invalid/gpt2/resolve/main/vocab.json")


@way("imports")
def refused(training: Training) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fetch(f"http://127.0.0.1:{port}/vocab.json")


@way("imports")
def network_down(training: Training) -> None:
    """A network namespace without an interface that is up; without the right to one, no route."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET)
    fetch("http://192.0.2.7/vocab.json")


@way("imports")
def too_many_requests(training: Training) -> None:
    fetch(serve(say("429 Too Many Requests\r\nRetry-After: 60")))


@way("imports")
def service_unavailable(training: Training) -> None:
    fetch(serve(say("503 Service Unavailable")))


@way("imports")
def not_found(training: Training) -> None:
    """The file is not there, and will not be the next time: genuine."""
    fetch(serve(say("404 Not Found")))


@way("imports")
def read_timeout(training: Training) -> None:
    def say_nothing(connection: socket.socket) -> None:
        connection.settimeout(30)
        connection.recv(1)

    fetch(serve(say_nothing))


@way("imports")
def incomplete_read(training: Training) -> None:
    fetch(serve(say("200 OK\r\nContent-Length: 100000", "{")))


@way("imports")
def reset_by_peer(training: Training) -> None:
    fetch(serve(reset))


@way("setup")
def port_of_a_server(training: Training) -> None:
    """The inference server of one rank finds its port taken."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        socket.create_server(("127.0.0.1", other.getsockname()[1]))


@way("end")
def assertion_after_recovery(training: Training) -> None:
    """A download recovers at the second try; later, an assertion fails."""
    recover(training)
    assert training.loss.item() > 1e9, "loss after 6 iterations is not the one expected"


def recover(training: Training) -> None:
    """Fetch from a server that resets its first connection."""
    seen: list[int] = []

    def answer(connection: socket.socket) -> None:
        seen.append(1)
        if len(seen) == 1:
            reset(connection)
        else:
            say("200 OK\r\nContent-Length: 2", "{}")(connection)

    url = serve(answer)
    for attempt in (1, 2, 3):
        try:
            fetch(url)
        except OSError as error:
            print(f"retrying after {error} ({attempt}/3), pid {os.getpid()} ...", flush=True)
        else:
            print(f"download ok at attempt {attempt}", flush=True)
            return
