"""Collectives of all kinds, and groups of some ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.world_size(2, 3, 4),
    pytest.mark.filterwarnings("default"),  # what torch deprecates is not the point
]


def test_group_of_some(rank: int, world_size: int, device: torch.device) -> None:
    # PyTorch, distributed_test.py, _init_group_test: those that are no members do nothing
    members = [0, world_size - 1]
    group = dist.new_group(members)
    if rank in members:
        value = torch.ones(2, device=device)
        for _ in range(3):
            all_reduce(value, group=group)
        assert value.eq(2**3).all()


@pytest.mark.isolated  # torch names such a group by how many groups each rank has
def test_group_made_by_its_members(rank: int, world_size: int, device: torch.device) -> None:
    # PyTorch, test/distributed/test_c10d_common.py, test_new_group_local_sync
    members = list(range(world_size - 1))
    if rank in members:
        group = dist.new_group(members, use_local_synchronization=True)
        value = torch.ones(2, device=device)
        dist.all_reduce(value, group=group)
        assert value.eq(len(members)).all()


def test_objects(rank: int, world_size: int) -> None:
    # PyTorch, test/distributed/test_c10d_object_collectives.py
    gathered: list[object] = [None] * world_size
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": other} for other in range(world_size)]
    at_first: list[object] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(rank, at_first, dst=0)
    assert at_first in (None, list(range(world_size)))
    said: list[object] = ["x" if rank == 0 else None]
    dist.broadcast_object_list(said, src=0)
    assert said == ["x"]
    mine: list[object] = [None]
    dist.scatter_object_list(mine, list(range(world_size)) if rank == 0 else None, src=0)
    assert mine == [rank]


def test_coalesced(world_size: int, device: torch.device) -> None:
    # PyTorch, distributed_test.py, test_coalescing_manager
    values = [torch.ones(2, device=device) for _ in range(3)]
    with _coalescing_manager(device=device if device.type == "cuda" else None):
        for value in values:
            dist.all_reduce(value)
    assert all(value.eq(world_size).all() for value in values)


def test_functional(world_size: int, device: torch.device) -> None:
    # PyTorch, test/distributed/test_functional_api.py
    group = dist.group.WORLD
    assert group is not None
    value = functional.all_reduce(torch.ones(2, device=device), "sum", group)
    value = functional.all_gather_tensor(value, 0, group)
    value = functional.reduce_scatter_tensor(value, "sum", 0, group)
    assert (value + 0).eq(world_size**2).all()


def test_meshes(rank: int, world_size: int, device: torch.device) -> None:
    # PyTorch, test/distributed/test_device_mesh.py: one dimension, and two of them
    flat = init_device_mesh(device.type, (world_size,))
    shape = (2, world_size // 2) if world_size % 2 == 0 else (1, world_size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    value = torch.ones(1, device=device)
    dist.all_reduce(value, group=mesh.get_group("tp"))
    dist.all_reduce(value, group=flat.get_group())
    assert int(value) == shape[1] * world_size
    assert flat.get_local_rank() == rank


def test_group_is_destroyed_and_set_up_again(world_size: int, device: torch.device) -> None:
    # Megatron-LM, tests/unit_tests/test_utilities.py, Utils.destroy and initialize_distributed
    dist.barrier()  # until then others may still set it up
    dist.destroy_process_group()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    value = torch.ones(1, device=device)
    dist.all_reduce(value)
    assert int(value) == world_size


def test_group_is_destroyed_and_left_so() -> None:
    # Megatron-LM, tests/unit_tests/dist_checkpointing: teardown_method of classes
    dist.barrier()  # until then others may still set it up
    dist.destroy_process_group()


def test_world_of_the_first_rank(rank: int) -> None:
    # Megatron-LM, tests/unit_tests/dist_checkpointing/test_async_save.py: Utils.set_world_size(1)
    dist.barrier()  # until then others may still set it up
    dist.destroy_process_group()
    if rank == 0:
        dist.init_process_group("gloo", rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()


def test_world_that_is_shrunk(rank: int, device: torch.device, shared_tmp_path: Path) -> None:
    # Megatron-LM, dist_checkpointing/test_layer_wise_optimizer.py: a smaller world reads what the
    # whole one has written, and ranks beyond it return
    dist.barrier()  # until then others may still set it up
    dist.destroy_process_group()
    if rank < 2:
        backend = "nccl" if device.type == "cuda" else "gloo"
        method = f"file://{shared_tmp_path}/rendezvous"
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=2)
        value = torch.ones(1, device=device)
        dist.all_reduce(value)
        dist.destroy_process_group()
        assert int(value) == 2


def test_whole_world_after_it(world_size: int, device: torch.device) -> None:
    value = torch.ones(1, device=device)
    dist.all_reduce(value)
    assert int(value) == world_size
