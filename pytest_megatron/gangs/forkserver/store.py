"""Key-value stores for the rendezvous of gangs, in a process of their own, like torch's agent.

A store in rank 0 would die with it, and its port would have to be guessed before; here the kernel
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
from dataclasses import dataclass, replace

from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.ipc.messages import RankConfig
from pytest_megatron.process.tree import close_descriptors, fork_child

LOCAL_HOST = "127.0.0.1"
_GANG = struct.Struct("!i")
_REACH_S = 5.0  # for a busy host to connect to itself
_BACKLOG = 2048  # ranks that connect at once


@functools.cache
def check_local_host() -> None:
    """Make sure that processes of this host reach one another.

    Raises:
        LaunchError: They do not.
    """
    try:
        with listen(LOCAL_HOST) as listening, socket.socket() as caller:
            caller.settimeout(_REACH_S)
            caller.connect(listening.getsockname())
    except OSError:
        raise LaunchError(
            "network",
            f"processes of this host cannot reach one another by {LOCAL_HOST}, and ranks have no "
            f"other way to meet; bring the loopback interface up: ip link set lo up",
        ) from None


@dataclass(slots=True)
class StoreKeeper:
    """Client of the process that holds the stores; forks it at the first store.

    Attributes:
        pid: Process of the stores, or None before the first one.
    """

    pid: int | None = None
    _connection: socket.socket | None = None

    def open_store(self, gang: int, listening: socket.socket) -> None:
        """Serve the store of a gang on a socket that listens, and close the socket here."""
        with listening:
            try:
                self._send(gang, [listening.fileno()])
            except OSError:  # it was killed, which was not noticed yet
                self.note_end(self.pid)
                self._send(gang, [listening.fileno()])

    def close_store(self, gang: int) -> None:
        """Close the store of a gang that is gone, if it has one."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._send(gang, [])

    def note_end(self, pid: int | None) -> None:
        """Start anew at the next store, if the process ended; keys and ports are lost."""
        if pid == self.pid:
            self.forget()
            self.pid = self._connection = None

    def _send(self, gang: int, descriptors: list[int]) -> None:
        """Hand a listening socket over to the process of stores."""
        if self._connection is None:
            self._connection = self._fork()
        socket.send_fds(self._connection, [_GANG.pack(gang)], descriptors)

    def forget(self) -> None:
        """Close the copies of a forked child."""
        if self._connection is not None:
            self._connection.close()

    def _fork(self) -> socket.socket:
        """Fork the process of stores; return the connection to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def run() -> None:
            close_descriptors([theirs.fileno()])
            keep_stores(theirs)

        self.pid = fork_child(run)
        theirs.close()
        return ours


def keep_stores(requests: socket.socket) -> None:
    """Serve a store on every listening socket that arrives through `requests`, until that closes.

    A number of a gang without a socket closes its store. A store is created when the first rank
    connects, so that tests without torch never load it.
    """
    waiting: dict[int, int] = {}  # descriptor -> gang
    stores: dict[int, object] = {}
    while True:
        readable, _, _ = select.select([requests.fileno(), *waiting], [], [])
        for descriptor in [d for d in waiting if d in readable]:
            stores[waiting.pop(descriptor)] = _serve_store(descriptor)
        if requests.fileno() not in readable:
            continue
        content, descriptors, _, _ = socket.recv_fds(requests, _GANG.size, 1)
        if not content:
            return
        (gang,) = _GANG.unpack(content)
        waiting |= dict.fromkeys(descriptors, gang)
        if not descriptors:
            stores.pop(gang, None)
            for descriptor in [d for d, number in waiting.items() if number == gang]:
                del waiting[descriptor]
                os.close(descriptor)


def _serve_store(descriptor: int) -> object:
    """Serve a store on a socket that listens already."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Before, libuv takes no socket that listens already.
    # Source: https://github.com/pytorch/pytorch/pull/150215
    with socket.socket(fileno=os.dup(descriptor)) as listening:
        port = listening.getsockname()[1]
    has_libuv = torch.torch_version.TorchVersion("2.8") <= torch.__version__
    try:
        return TCPStore(
            LOCAL_HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=descriptor,
            use_libuv=has_libuv,
        )
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")  # the log of the agent
        os.close(descriptor)
        return None


def listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port, for clients of an address of this host.

    Unless it is `LOCAL_HOST`, the socket listens on all interfaces. That one is IPv4: torch looks
    up the names of clients, and an address such as `::ffff:127.0.0.1`, which is in no hosts file,
    costs seconds without a name server.
    """
    if host == LOCAL_HOST:
        listening = socket.socket()
        listening.bind((host, 0))
    else:
        listening = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    listening.listen(_BACKLOG)
    return listening


def with_store(configs: Sequence[RankConfig]) -> tuple[socket.socket, tuple[RankConfig, ...]]:
    """Return the listening socket of a new store, and configurations of its ranks with its port.

    Raises:
        LaunchError: No port is available.
    """
    try:
        listening = listen(configs[0].env["MASTER_ADDR"])
    except OSError as error:
        raise LaunchError("store", f"{error.strerror}; no port can be listened on") from error
    port = {"MASTER_PORT": str(listening.getsockname()[1])}
    return listening, tuple(replace(config, env={**config.env, **port}) for config in configs)
