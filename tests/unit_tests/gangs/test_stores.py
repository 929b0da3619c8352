from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from pytest_megatron.gangs.forkserver.store import (
    LOCAL_HOST,
    StoreKeeper,
    _serve_store,
    listen,
)


@pytest.fixture
def keeper() -> Iterator[StoreKeeper]:
    found = StoreKeeper()
    yield found
    found.forget()
    assert found.pid is not None
    os.waitpid(found.pid, 0)  # it ends with its connection


def open_store(keeper: StoreKeeper, gang: int) -> int:
    """Open a store; return its port."""
    listening = listen(LOCAL_HOST)
    port = int(listening.getsockname()[1])
    keeper.open_store(gang, listening)
    return port


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex((LOCAL_HOST, port)) == 0


def wait_for_end(port: int) -> None:
    deadline = time.monotonic() + 60
    while listens(port):
        assert time.monotonic() < deadline, "the store is still there"
        time.sleep(0.01)


def test_a_store_listens_until_its_gang_is_gone(keeper: StoreKeeper) -> None:
    first, second = open_store(keeper, 1), open_store(keeper, 2)
    keeper.close_store(1)
    wait_for_end(first)
    assert listens(second)


def test_a_store_that_served_is_closed_too(keeper: StoreKeeper) -> None:
    torch = pytest.importorskip("torch")
    port = open_store(keeper, 1)
    store = torch.distributed.TCPStore(LOCAL_HOST, port, is_master=False)
    store.set("key", "value")
    del store
    keeper.close_store(1)
    wait_for_end(port)


def test_a_store_of_torch_2_6_takes_a_socket_that_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    real = torch.distributed.TCPStore

    def store_of_2_6(*args: object, use_libuv: bool = True, **settings: object) -> object:
        if use_libuv and settings.get("master_listen_fd") is not None:
            raise NotImplementedError("libuv: no initialization with an listen fd")
        return real(*args, use_libuv=use_libuv, **settings)

    monkeypatch.setattr(torch.distributed, "TCPStore", store_of_2_6)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.6.0+cu124"))
    store = _serve_store(listen(LOCAL_HOST).detach())
    assert isinstance(store, real)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_keeper_that_was_killed_gets_a_successor(keeper: StoreKeeper) -> None:
    open_store(keeper, 1)
    killed = keeper.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    assert listens(open_store(keeper, 2))
    assert keeper.pid != killed
