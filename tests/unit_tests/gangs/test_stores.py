from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from pytest_megatron.gangs.forkserver.store import LOCAL_HOST, StoreKeeper, _listen, _serve_store


@pytest.fixture
def keeper() -> Iterator[StoreKeeper]:
    found = StoreKeeper()
    yield found
    found.forget()
    assert found.pid is not None
    os.waitpid(found.pid, 0)  # it ends with its connection


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex((LOCAL_HOST, port)) == 0


def wait_for_end(port: int) -> None:
    deadline = time.monotonic() + 60
    while listens(port):
        assert time.monotonic() < deadline, "the store is still there"
        time.sleep(0.01)


def test_a_store_listens_until_its_gang_is_gone(keeper: StoreKeeper) -> None:
    first, second = keeper.open_store(LOCAL_HOST), keeper.open_store(LOCAL_HOST)
    keeper.close_store(first)
    wait_for_end(first)
    assert listens(second)


def test_a_store_that_served_is_closed_too(keeper: StoreKeeper) -> None:
    torch = pytest.importorskip("torch")
    port = keeper.open_store(LOCAL_HOST)
    store = torch.distributed.TCPStore(LOCAL_HOST, port, is_master=False)
    store.set("key", "value")
    del store
    keeper.close_store(port)
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
    listening = _listen(LOCAL_HOST)
    port = listening.getsockname()[1]
    store = _serve_store(listening.detach(), port)
    assert isinstance(store, real)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_keeper_that_was_killed_gets_a_successor(keeper: StoreKeeper) -> None:
    keeper.open_store(LOCAL_HOST)
    killed = keeper.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    assert listens(keeper.open_store(LOCAL_HOST))
    assert keeper.pid != killed


def test_stores_that_are_open_get_a_new_keeper_too(keeper: StoreKeeper) -> None:
    torch = pytest.importorskip("torch")
    first = keeper.open_store(LOCAL_HOST)
    killed = keeper.pid
    assert killed is not None
    os.kill(killed, signal.SIGSTOP)  # what it is sent now, it never reads
    second = keeper.open_store(LOCAL_HOST)
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    keeper.replace_if_ended(killed)
    for port in (first, second):
        store = torch.distributed.TCPStore(LOCAL_HOST, port, is_master=False)
        store.set("key", "value")
        assert store.get("key") == b"value"
