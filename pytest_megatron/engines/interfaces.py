"""Which network a task reaches the others by, for gloo, which asks the host for its own name.

Where that name means the loopback, as on Debian and in many containers, gloo of another host never
gets through. NCCL chooses its networks by itself.

Source: torch ProcessGroupGloo.cpp, createDefaultDevice(), v2.6.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_NAME_BYTES = 15
_ADDRESS = slice(20, 24)  # of the answer


def gloo_network(address: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that names gloo's network; nothing where gloo finds it by itself.

    Args:
        address: By which this host and the others reach one another.
        env: Of the job; what it has set stays.
    """
    if GLOO_VARIABLE in env or is_loopback(address) or not _is_named_after_loopback():
        return {}
    name = interface_of(address)
    return {} if name is None else {GLOO_VARIABLE: name}


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name[:_NAME_BYTES].encode())
            with contextlib.suppress(OSError):  # it has none
                found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, asked)
                if socket.inet_ntoa(found[_ADDRESS]) == address:
                    return name
    return None


def is_loopback(address: str) -> bool:
    """Return whether an address reaches this host only."""
    return address.startswith("127.") or address == "::1"


def _is_named_after_loopback() -> bool:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None)
    except OSError:  # nobody knows the name: gloo takes the loopback then
        return True
    return all(is_loopback(str(entry[4][0])) for entry in found)
