"""Key-value stores for gangs to meet in, in a process of their own: what torch's agent does.

A store that lives in rank 0 dies with it, and its port has to be guessed before; here the kernel
picks the port, and a gang that replaces another one gets a store without old keys.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from dataclasses import dataclass
from typing import Protocol

from pytest_megatron.errors import LaunchError
from pytest_megatron.gang.processes import close_descriptors, die_with

_PORT = struct.Struct("!i")


@dataclass(slots=True)
class StoreKeeper:
    """The nursery's side of the process that holds the stores; forked at the first store.

    Attributes:
        pid: Its process, or None before the first store.
    """

    pid: int | None = None
    _orders: int = -1
    _answers: int = -1

    def open_store(self) -> int:
        """Return the port of a new store.

        Raises:
            LaunchError: torch cannot open one.
        """
        if self.pid is None:
            self._fork()
        os.write(self._orders, b"s")
        answer = os.read(self._answers, _PORT.size)
        port = _PORT.unpack(answer)[0] if answer else 0
        if port <= 0:
            raise LaunchError("store", "torch.distributed.TCPStore could not listen on any port")
        return int(port)

    def forget(self) -> None:
        """Close a forked child's copies."""
        if self.pid is not None:
            os.close(self._orders)
            os.close(self._answers)

    def _fork(self) -> None:
        orders_read, self._orders = os.pipe()
        self._answers, answers_write = os.pipe()
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                die_with(nursery)
                close_descriptors((orders_read, answers_write))
                keep_stores(orders_read, answers_write)
            finally:
                os._exit(0)
        os.close(orders_read)
        os.close(answers_write)
        self.pid = pid


def keep_stores(orders: int, answers: int) -> None:
    """Open a store for every byte of `orders` and write its port to `answers`."""
    stores = []
    while os.read(orders, 1):
        port = 0
        try:
            store = _listen()
        except (ImportError, RuntimeError) as error:
            print(error, file=sys.stderr)  # noqa: T201 - the nursery's log
        else:
            stores.append(store)
            port = store.port
        os.write(answers, _PORT.pack(port))


class _Store(Protocol):
    @property
    def port(self) -> int: ...


def _listen() -> _Store:
    # torch does not declare what it exports, and its import takes a second.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
