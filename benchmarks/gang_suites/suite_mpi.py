"""For mpi-pytest: every rank is a pytest of its own, which mpiexec starts."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from bodies import NUM_TESTS, WORLD_SIZE, body, free_port
from bodies_faults import group_timeout
from mpi4py import MPI


def join_group() -> None:
    """Set one group up for all tests, where the communicator says."""
    if not dist.is_initialized():
        world = MPI.COMM_WORLD
        port = world.bcast(free_port() if world.rank == 0 else None)
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(
            "gloo",
            init_method=address,
            rank=world.rank,
            world_size=world.size,
            timeout=group_timeout(),
        )


@pytest.mark.parallel(nprocs=WORLD_SIZE)
@pytest.mark.parametrize("number", range(NUM_TESTS))
def test_reduce(number: int) -> None:
    join_group()
    body(number, dist.get_rank(), dist.get_world_size())
