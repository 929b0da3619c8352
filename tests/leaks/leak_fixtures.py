"""Fixtures of the suites of leaking tests, which `test_named_leaks.py` runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="session", autouse=True)
def default_group() -> Iterator[None]:
    """Keep a default group of all ranks, as Megatron-LM's `Utils.initialize_distributed` does."""
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()
