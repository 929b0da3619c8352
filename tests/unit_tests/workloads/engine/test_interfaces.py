from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from pytest_megatron.engines.multitask.topology import find_address, gloo_network, interface_of


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None


@pytest.mark.parametrize(
    ("launched_from", "name_is", "address"),
    [
        (["10.0.0.1"], "127.0.1.1", "10.0.0.1"),  # Debian's name of a host
        (["192.0.2.7", "127.0.1.1"], "10.0.0.1", "10.0.0.1"),  # salloc on another host
        (["192.0.2.7", ""], "192.0.2.8", "127.0.0.1"),  # nobody knows
        (["127.0.1.1"], "127.0.1.1", "127.0.1.1"),
    ],
)
def test_ranks_meet_at_an_address_of_node_0_that_is_not_its_loopback(
    monkeypatch: pytest.MonkeyPatch, launched_from: list[str], name_is: str, address: str
) -> None:
    entries = [SimpleNamespace(address=a) for a in ("127.0.0.1", "127.0.1.1", "10.0.0.1")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth7": entries})
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", (name_is, 0))])
    assert find_address("node0", launched_from) == address


def test_gloo_is_told_its_network_only_where_the_name_of_the_host_is_its_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "pytest_megatron.engines.multitask.topology.interface_of", lambda _address: "eth7"
    )
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
    assert gloo_network("10.0.0.1", {}) == {"GLOO_SOCKET_IFNAME": "eth7"}
    assert gloo_network("10.0.0.1", {"GLOO_SOCKET_IFNAME": "ib0"}) == {}
    assert gloo_network("127.0.0.1", {}) == {}
    monkeypatch.setattr(socket, "gethostname", lambda: "10.0.0.1")
    assert gloo_network("10.0.0.1", {}) == {}
