"""Patterns that were kept apart: nothing was tuned on them."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
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


def test_objects_within_pairs(rank: int, world_size: int, device: torch.device) -> None:
    # PyTorch, test/distributed/test_c10d_nccl.py, test_send_recv_object_list_subgroup
    group = dist.new_group([0, 1])
    if rank == 0:
        found: list[object] = [{}]
        dist.recv_object_list(found, src=1, group=group, device=device)
        assert found == [{"rank": 1}]
    elif rank == 1:
        dist.send_object_list([{"rank": 1}], dst=0, group=group, device=device)
    assert dist.get_world_size() == world_size


def test_one_who_is_no_member_receives_nothing(rank: int, device: torch.device) -> None:
    # DeepSpeed's tests/unit/comm/test_dist.py has it: test_non_member_irecv_preserves_...
    group = dist.new_group([0])
    if rank == 1:
        found = torch.full((8,), 7.0, device=device)
        with pytest.warns(UserWarning, match="does not belong"):
            assert dist.irecv(found, src=0, group=group) is None
    dist.barrier()


def test_keys_and_values_go_round(rank: int, world_size: int, device: torch.device) -> None:
    # Ring attention, as many projects have it: two sends and two receives a step, not the last
    keys, values = (torch.full((4,), float(v + rank), device=device) for v in (0, 100))
    for step in range(world_size):
        source = (rank - step) % world_size
        assert keys.eq(source).all()
        assert values.eq(100 + source).all()
        if step == world_size - 1:
            break
        received = torch.empty_like(keys), torch.empty_like(values)
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        ops = [dist.P2POp(dist.isend, value, after) for value in (keys, values)]
        ops += [dist.P2POp(dist.irecv, value, before) for value in received]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        keys, values = received


def test_scatter_by_sends(rank: int, world_size: int, device: torch.device) -> None:
    # A weight transfer: source ranks send chunks, as many as there are receivers, then a reduce
    result = torch.zeros(1, device=device)
    if rank == 0:
        works = [
            dist.isend(torch.tensor([float(part)], device=device), other)
            for other in range(1, world_size)
            for part in (1, 2)
        ]
        for work in works:
            assert work is not None
            work.wait()
    else:
        for _ in (1, 2):
            part = torch.zeros(1, device=device)
            dist.recv(part, 0)
            result += part
    dist.reduce(result, dst=0)
    if rank == 0:
        assert int(result) == 3 * (world_size - 1)


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


def test_averages_of_some_steps(device: torch.device) -> None:
    # PyTorch, distributed_test.py, test_periodic_model_averager
    model = nn.Linear(2, 2).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    for _ in range(4):
        averager.average_parameters(model.parameters())


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


def test_a_barrier_for_some_that_is_none_for_others(
    rank: int, world_size: int, device: torch.device
) -> None:
    # DeepSpeed, runtime/pipe/engine.py: the last stage broadcasts its loss after sends of others
    loss = torch.zeros(1, device=device)
    if rank == world_size - 1:
        loss += 2
        for other in range(world_size - 1):
            dist.send(loss, other)
    else:
        dist.recv(loss, world_size - 1)
    dist.broadcast(loss, src=world_size - 1)
    dist.barrier()
    assert int(loss) == 2
