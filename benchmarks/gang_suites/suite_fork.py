"""For torch.multiprocessing: processes forked, and a group set up, for every test."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist
from bodies import NUM_TESTS, WORLD_SIZE, body, free_port
from bodies_faults import group_timeout
from torch.multiprocessing.spawn import start_processes


def work(rank: int, number: int, port: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=WORLD_SIZE, timeout=group_timeout()
    )
    body(number, rank, WORLD_SIZE)
    dist.destroy_process_group()


@pytest.mark.parametrize("number", range(NUM_TESTS))
def test_reduce(number: int) -> None:
    method = os.environ["BENCH_METHOD"]
    start_processes(  # type: ignore[no-untyped-call]
        work, (number, free_port()), nprocs=WORLD_SIZE, start_method=method
    )
