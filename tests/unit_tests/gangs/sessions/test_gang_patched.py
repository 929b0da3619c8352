"""Tests that patch the world around them: what runs in ranks beside them goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from gang_suite import Suite

pytestmark = pytest.mark.nightly

# The names are from suites of Megatron-LM, vLLM, NeMo-RL and others; each raises when it is called.
CONFTEST = """
    import builtins
    import json
    import os
    import select
    import socket
    import sys
    import time
    import types

    import pytest
    import torch

    NAMES = [
        (builtins, "open"),
        (builtins, "print"),
        (json, "dumps"),
        (json, "loads"),
        (os, "getpid"),
        (os, "write"),
        (os, "read"),
        (os, "open"),
        (os, "listdir"),
        (os, "lseek"),
        (os, "_exit"),
        (select, "poll"),
        (socket.socket, "sendall"),
        (time, "time"),
        (time, "monotonic"),
        (time, "perf_counter"),
        (time, "sleep"),
        (torch.cuda, "current_device"),
        (torch.cuda, "is_available"),
        (torch.cuda, "is_initialized"),
        (torch.cuda, "synchronize"),
        (torch.cuda, "device_count"),
        (torch.distributed, "is_available"),
        (torch.distributed, "is_initialized"),
        (torch.distributed, "get_backend"),
        (torch.distributed, "get_rank"),
        (torch.distributed, "get_world_size"),
        (torch, "zeros"),
    ]


    class Silent:
        def write(self, text):
            return len(text)


    def patch_all(monkeypatch):
        def fails(*args, **settings):
            raise AssertionError("patched")

        for owner, name in NAMES:
            monkeypatch.setattr(owner, name, fails)
        monkeypatch.setattr(sys, "stdout", Silent())
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=None))


    @pytest.fixture(scope="module")
    def patched_for_long():
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        with pytest.MonkeyPatch.context() as monkeypatch:
            patch_all(monkeypatch)
            yield
"""
MODULE = """
    import torch
    import torch.distributed as dist


    def test_long_passes(patched_for_long):
        dist.all_reduce(torch.ones(1))


    def test_long_fails(patched_for_long):
        raise ValueError("on purpose")


    def test_long_extra(patched_for_long, rank):
        if rank:
            dist.all_reduce(torch.ones(1), async_op=True)


    def test_last(process_group):
        dist.all_reduce(torch.ones(1))
"""
# For good, as a module or a test that forgets to put it back.
GOOD = """
    import os
    import time


    def test_forgets():
        os.getpid = time.monotonic = time.sleep = None


    def test_after_it(rank):
        assert rank == 0, "on purpose"


    def test_after_all():
        pass
"""


def test_ranks_go_on_whatever_a_test_patches(tmp_path: Path) -> None:
    suite = Suite(tmp_path)
    suite.write(conftest=CONFTEST, test_module=MODULE, test_whole=GOOD)
    run = suite.run("-v", "--ranks=2", "--device=cpu")
    assert run.words == {
        "test_long_passes": "PASSED",
        "test_long_fails": "FAILED",
        "test_long_extra": "FAILED",
        "test_last": "PASSED",
        "test_forgets": "PASSED",
        "test_after_it": "FAILED",
        "test_after_all": "PASSED",
    }, run.stdout
    assert run.stdout.count("\nevery rank passed, but they took part in different collectives") == 1
    assert "[rank 1] AssertionError: on purpose" in run.stdout
    assert "ranks 0-1: failed: ValueError: on purpose" in run.stdout
    assert "AssertionError: patched" not in run.stdout
