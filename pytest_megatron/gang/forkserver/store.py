"""Key-value stores for gangs to meet in, in a process of their own: what torch's agent does.

A store that lives in rank 0 dies with it, and its port has to be guessed before; here the kernel
picks the port, and a gang that replaces another one gets a store without old keys.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pytest_megatron.errors import LaunchError
from pytest_megatron.gang.ipc.messages import RankConfig
from pytest_megatron.process.tree import begin_child, close_descriptors

LOCAL_HOST = "127.0.0.1"
LOCAL_HOST_IPV6 = "::1"
_LOCAL_HOSTS = (LOCAL_HOST, LOCAL_HOST_IPV6)
_PORT = struct.Struct("!H")
_REACH_S = 5.0  # more than a busy host needs to connect to itself
_BACKLOG = 2048  # of ranks that call at once


@functools.cache
def local_host() -> str:
    """Return the address by which processes of this host reach one another: the first that works.

    Raises:
        LaunchError: There is none.
    """
    for host in _LOCAL_HOSTS:
        if _is_reachable(host):
            return host
    raise LaunchError(
        "network",
        f"processes of this host cannot reach one another by {' or '.join(_LOCAL_HOSTS)}, "
        f"and ranks have no other way to meet; bring the loopback interface up: ip link set lo up",
    )


def _is_reachable(host: str) -> bool:
    try:
        with _listen(host) as listening, socket.socket(listening.family) as caller:
            caller.settimeout(_REACH_S)
            caller.connect(listening.getsockname())
    except OSError:
        return False
    return True


@dataclass(slots=True)
class StoreKeeper:
    """The fork server's side of the process that holds the stores; forked at the first store.

    Attributes:
        pid: Its process, or None before the first store.
    """

    pid: int | None = None
    _connection: socket.socket | None = None
    _listening: dict[int, socket.socket] = field(default_factory=dict)

    def open_store(self, host: str) -> int:
        """Return the port of a new store; it listens from now on, and answers when it is asked.

        Args:
            host: Where its callers look for it; one that is not of this host only is open to all.

        Raises:
            LaunchError: No port can be had.
        """
        try:
            listening = _listen(host)
        except OSError as error:
            raise LaunchError("store", f"{error.strerror}; no port can be listened on") from error
        port = int(listening.getsockname()[1])
        self._listening[port] = listening
        try:
            self._send(port, [listening.fileno()])
        except OSError:  # it was killed, and nobody has noticed yet
            self._replace()
        return port

    def close_store(self, port: int) -> None:
        """Close the store of a gang that is gone."""
        self._listening.pop(port).close()
        with contextlib.suppress(OSError):
            self._send(port, [])

    def replace_if_ended(self, pid: int) -> None:
        """Replace the process if it is the one that ended; ports stay, what stores held is lost.

        What was sent to it just before is lost with it, unseen.
        """
        if pid == self.pid:
            self._replace()

    def _replace(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self.pid = self._connection = None
        for port, listening in self._listening.items():
            self._send(port, [listening.fileno()])

    def _send(self, port: int, descriptors: list[int]) -> None:
        if self._connection is None:
            self._connection = self._fork()
        socket.send_fds(self._connection, [_PORT.pack(port)], descriptors)

    def forget(self) -> None:
        """Close a forked child's copies."""
        if self._connection is not None:
            self._connection.close()
        for listening in self._listening.values():
            listening.close()

    def _fork(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fork_server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                begin_child(fork_server)
                close_descriptors([theirs.fileno()])
                keep_stores(theirs)
            finally:
                os._exit(0)
        theirs.close()
        self.pid = pid
        return ours


def keep_stores(orders: socket.socket) -> None:
    """Serve a store on every listening socket that comes through `orders`, until that closes.

    A port without a socket says that its store is needed no longer. A store is made when the first
    rank calls: tests without torch never load it.
    """
    waiting: dict[int, int] = {}  # descriptor -> port
    stores: dict[int, object] = {}
    while True:
        readable, _, _ = select.select([orders.fileno(), *waiting], [], [])
        for descriptor in [d for d in waiting if d in readable]:
            port = waiting.pop(descriptor)
            stores[port] = _serve_store(descriptor, port)
        if orders.fileno() not in readable:
            continue
        content, descriptors, _, _ = socket.recv_fds(orders, _PORT.size, 1)
        if not content:
            return
        (port,) = _PORT.unpack(content)
        waiting |= dict.fromkeys(descriptors, port)
        if not descriptors:
            stores.pop(port, None)
            for descriptor in [d for d, p in waiting.items() if p == port]:
                del waiting[descriptor]
                os.close(descriptor)


def _serve_store(descriptor: int, port: int) -> object:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore(
            local_host(),
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")  # the log of the fork server
        os.close(descriptor)
        return None


def _listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port.

    On one host with IPv4 it is an IPv4 one: torch looks up the name of whoever calls, and an
    address such as `::ffff:127.0.0.1`, which is in no hosts file, costs seconds where no name
    server answers.
    """
    if host in _LOCAL_HOSTS:
        listening = socket.socket(socket.AF_INET6 if host == LOCAL_HOST_IPV6 else socket.AF_INET)
        listening.bind((host, 0))
    else:
        listening = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    listening.listen(_BACKLOG)
    return listening


def with_store(orders: Sequence[RankConfig], port: int) -> tuple[RankConfig, ...]:
    """Return the orders with the port of the store to meet in."""
    return tuple(replace(o, env={**o.env, "MASTER_PORT": str(port)}) for o in orders)
