"""Fixtures of the suites of leaking tests; see `tests/unit_tests/hooks/test_audit.py`."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from megatron.core import parallel_state


@pytest.fixture(scope="session", autouse=True)
def default_group():
    """Keep a default group of all ranks, as Megatron-LM's `Utils.initialize_distributed` does."""
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


@pytest.fixture
def model_parallel():
    """Undo what `initialize_model_parallel` does, with its groups."""
    yield
    parallel_state.destroy_model_parallel()
