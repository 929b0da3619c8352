"""The look after a test, in one process."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest

from pytest_megatron.leaks.look import Look, Things, cuda_bytes, describe


def new(look: Look, before: Things) -> list[str]:
    return describe(look.things() - before)


def test_groups_are_found_where_all_others_were_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as before, with the same names."""
    kept = []

    def world() -> SimpleNamespace:
        groups = [SimpleNamespace() for _ in range(3)]
        kept.extend(groups)
        names = SimpleNamespace(items=lambda: [(g, str(n)) for n, g in enumerate(groups)])
        return SimpleNamespace(default_pg=groups[0], pg_names=names)

    distributed = ModuleType("torch.distributed.distributed_c10d")
    monkeypatch.setitem(sys.modules, distributed.__name__, distributed)
    look = Look()
    before = look.things()
    vars(distributed)["_world"] = world()
    assert new(look, before) == ["2 process groups"]
    before = look.things()
    assert new(look, before) == []
    vars(distributed)["_world"] = world()
    assert new(look, before) == ["2 process groups"]


def test_memory_of_all_gpus_counts_once_one_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    is_used = False
    cuda = ModuleType("torch.cuda")
    vars(cuda).update(
        is_initialized=lambda: is_used,
        device_count=lambda: 2,
        memory_allocated=lambda device: (3 << 30) * device,
    )
    monkeypatch.setitem(sys.modules, cuda.__name__, cuda)
    assert cuda_bytes() == 0
    is_used = True
    assert cuda_bytes() == 3 << 30


def test_variables_are_named_without_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    look = Look(["RANK"])
    before = look.things()
    monkeypatch.setenv("KEPT", "secret")
    monkeypatch.setenv("NEW", "secret")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("HOME", raising=False)
    assert new(look, before) == ["environment: HOME unset, KEPT set, NEW set"]


def test_a_thread_of_a_pool_is_no_leak() -> None:
    """Inductor compiles in one."""
    look = Look()
    before = look.things()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert new(look, before) == []
