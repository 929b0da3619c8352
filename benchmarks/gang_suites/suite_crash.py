"""For our gangs: rank 1 dies in every second test; the next one needs a new gang."""

from __future__ import annotations

import os
import time

import pytest
from bodies import NUM_TESTS, body


@pytest.mark.parametrize("number", range(NUM_TESTS))
@pytest.mark.usefixtures("process_group")
def test_reduce(number: int, rank: int, world_size: int) -> None:
    with open(os.environ["BENCH_TRACE"], "a", encoding="utf-8") as file:  # noqa: PTH123 - hot
        file.write(f"{number} {rank} {time.time()}\n")
    body(number, rank, world_size)
    if number % 2 and rank == world_size - 1:
        with open(os.environ["BENCH_TRACE"], "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(f"{number} dies {time.time()}\n")
        os._exit(1)
