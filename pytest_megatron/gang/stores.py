"""Key-value stores for gangs to meet in, in a process of their own: what torch's agent does.

A store that lives in rank 0 dies with it, and its port has to be guessed before; here the kernel
picks the port, and a gang that replaces another one gets a store without old keys.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from dataclasses import dataclass

from pytest_megatron.errors import LaunchError
from pytest_megatron.gang.processes import close_descriptors, die_with

LOCAL_HOST = "127.0.0.1"
_BACKLOG = 2048  # of ranks that call at once


@dataclass(slots=True)
class StoreKeeper:
    """The nursery's side of the process that holds the stores; forked at the first store.

    Attributes:
        pid: Its process, or None before the first store.
    """

    pid: int | None = None
    _connection: socket.socket | None = None

    def open_store(self, host: str) -> int:
        """Return the port of a new store; it listens from now on, and answers when it is asked.

        Args:
            host: Where its callers look for it; one that is not LOCAL_HOST is open to all.

        Raises:
            LaunchError: No port can be had.
        """
        try:
            listening = _listen(host)
        except OSError as error:
            raise LaunchError("store", f"{error.strerror}; no port can be listened on") from error
        if self._connection is None:
            self._connection = self._fork()
        port = int(listening.getsockname()[1])
        socket.send_fds(self._connection, [b"s"], [listening.fileno()])
        listening.close()
        return port

    def forget(self) -> None:
        """Close a forked child's copy."""
        if self._connection is not None:
            self._connection.close()

    def _fork(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                die_with(nursery)
                close_descriptors([theirs.fileno()])
                keep_stores(theirs)
            finally:
                os._exit(0)
        theirs.close()
        self.pid = pid
        return ours


def keep_stores(orders: socket.socket) -> None:
    """Serve a store on every listening socket that comes through `orders`, until that closes.

    A store is made when the first rank calls: tests without torch never load it.
    """
    waiting: list[int] = []
    stores: list[object] = []
    while True:
        readable, _, _ = select.select([orders.fileno(), *waiting], [], [])
        for descriptor in [d for d in waiting if d in readable]:
            waiting.remove(descriptor)
            stores.append(_serve_store(descriptor))
        if orders.fileno() in readable:
            content, descriptors, _, _ = socket.recv_fds(orders, 1, 1)
            if not content:
                return
            waiting += descriptors


def _serve_store(descriptor: int) -> object:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - see above

    port = socket.socket(fileno=os.dup(descriptor)).getsockname()[1]
    try:
        return TCPStore(
            LOCAL_HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    except RuntimeError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the nursery's log
        os.close(descriptor)
        return None


def _listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port.

    On one host it is an IPv4 one: torch looks up the name of whoever calls, and an address such as
    `::ffff:127.0.0.1`, which is in no hosts file, costs seconds where no name server answers.
    """
    if host == LOCAL_HOST:
        listening = socket.socket(socket.AF_INET)
        listening.bind((host, 0))
    else:
        listening = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    listening.listen(_BACKLOG)
    return listening
