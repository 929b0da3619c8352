"""For torch.distributed.run: every rank is a pytest of its own, one group for the session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from bodies import BACKEND, NUM_TESTS, body
from bodies_faults import group_timeout


@pytest.fixture(scope="session", autouse=True)
def group() -> Iterator[None]:
    if BACKEND == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKEND, timeout=group_timeout())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("number", range(NUM_TESTS))
def test_reduce(number: int) -> None:
    body(number, dist.get_rank(), dist.get_world_size())
