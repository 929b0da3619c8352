"""This host's own name: torch.distributed.run meets its ranks at what the name resolves to."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable

LOOPBACK = "127.0.0.1"
_LIMIT_S = 10.0


def launcher_env() -> dict[str, str]:
    """Return what tells any torch.distributed.run below a command its address on this host.

    Nothing where the host's name leads here. Source: torch.distributed.run, `--local-addr`, and
    `PET_`, which stands before the names of its arguments as variables.
    """
    return {} if host_name_problem() is None else {"PET_LOCAL_ADDR": LOOPBACK}


@functools.cache
def host_name_problem() -> str | None:
    """Return why this host cannot be reached by its own name; None where it can."""
    name = socket.gethostname()

    def look_up() -> str:
        """Return the problem, "" if there is none."""
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError as error:
            return f"{name!r}: {error.strerror}"
        if any(_can_listen(family, address) for family, _, _, _, address in found):
            return ""
        return f"{name!r} is {found[0][4][0]}, an address that no interface has"

    said = in_time(look_up)
    return f"{name!r}: no answer within {_LIMIT_S:g} s" if said is None else said or None


def _can_listen(family: int, address: tuple[str | int, ...] | tuple[int, bytes]) -> bool:
    """Return whether an address is one of this host."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(address)
    except OSError:
        return False
    return True


def in_time(ask: Callable[[], str]) -> str | None:
    """Return an answer, None if there was none in time: a name server may not answer at all."""
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(ask()), daemon=True)
    thread.start()
    thread.join(_LIMIT_S)
    return said[0] if said else None
