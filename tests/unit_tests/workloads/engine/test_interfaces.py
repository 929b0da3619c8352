from __future__ import annotations

import socket

import pytest

from pytest_megatron.engines.multitask.topology import gloo_network, interface_of


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None


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
