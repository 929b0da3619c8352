"""For pytest alone: one process, a group of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from bodies import NUM_TESTS, body


@pytest.fixture(scope="session", autouse=True)
def group() -> Iterator[None]:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("number", range(NUM_TESTS))
def test_reduce(number: int) -> None:
    body(number, 0, 1)
