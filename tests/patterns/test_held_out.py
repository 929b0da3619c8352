"""Patterns that were kept apart: nothing was tuned on them."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.world_size(2, 3, 4),
    pytest.mark.filterwarnings("default"),  # what torch deprecates is not the point
]


def test_uneven_inputs(rank: int, device: torch.device) -> None:
    # PyTorch, distributed_test.py, test_ddp_uneven_inputs
    model = DistributedDataParallel(nn.Linear(4, 2).to(device))
    with Join([model]):
        for _ in range(rank + 1):
            model(torch.ones(2, 4, device=device)).sum().backward()


def test_one_who_is_no_member_receives_nothing(rank: int, device: torch.device) -> None:
    # DeepSpeed's tests/unit/comm/test_dist.py has it: test_non_member_irecv_preserves_...
    group = dist.new_group([0])
    if rank == 1:
        found = torch.full((8,), 7.0, device=device)
        with pytest.warns(UserWarning, match="does not belong"):
            assert dist.irecv(found, src=0, group=group) is None
    dist.barrier()


def test_pipeline_of_torch(rank: int, world_size: int, device: torch.device) -> None:
    # torchtitan and PyTorch, test/distributed/pipelining/test_schedule_multiproc.py
    torch.manual_seed(0)
    stage = PipelineStage(nn.Linear(4, 4).to(device), rank, world_size, device)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        schedule.step(torch.ones(4, 4, device=device))
    elif rank == world_size - 1:
        schedule.step(target=torch.zeros(4, 4, device=device), losses=[])
    else:
        schedule.step()


def test_gloo_beside_the_default(rank: int, world_size: int) -> None:
    # torchtitan, checkpoint.py, and Megatron-LM: a gloo group for checkpoints
    group = dist.new_group(backend="gloo")
    if rank == 0:
        dist.send(torch.ones(1), 1, group=group)
    elif rank == 1:
        dist.recv(torch.zeros(1), 0, group=group)
    dist.monitored_barrier(group)
    found: list[object] = [None] * world_size
    dist.all_gather_object(found, rank, group=group)
    assert found == list(range(world_size))


def test_sends_of_a_thread(rank: int, world_size: int, device: torch.device) -> None:
    # Asynchronous checkpointing and transfers: a thread sends, the main one reduces
    if device.type == "cuda":
        pytest.skip("NCCL wants one order of all that runs on a device")

    def transfer() -> None:
        for _ in range(20):
            if rank == 0:
                dist.send(torch.ones(1), 1, tag=9)
            elif rank == 1:
                dist.recv(torch.zeros(1), 0, tag=9)

    thread = threading.Thread(target=transfer)
    thread.start()
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    thread.join()
    assert _get_default_group().size() == world_size
