"""What libraries make of it: data, tensor and pipeline parallelism."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from pytest_megatron import ModelParallel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is deprecated
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel import p2p_communication

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.world_size(2, 3, 4),
    pytest.mark.filterwarnings("default"),  # what torch deprecates is not the point
]


def test_data_parallel_with_no_sync(rank: int, device: torch.device) -> None:
    # PyTorch, test/distributed/test_c10d_gloo.py: gradients that are accumulated
    model = DistributedDataParallel(nn.Linear(4, 2).to(device))
    with model.no_sync():
        model(torch.full((3, 4), float(rank), device=device)).sum().backward()
    model(torch.ones(3, 4, device=device)).sum().backward()


def test_tensors_over_a_mesh(device: torch.device, world_size: int) -> None:
    # PyTorch, test/distributed/tensor/test_dtensor.py
    mesh = init_device_mesh(device.type, (world_size,))
    whole = torch.arange(float(4 * world_size), device=device).reshape(-1, 4)
    shards = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(shards.redistribute(mesh, [Replicate()]).to_local(), whole)
    more = shards + 1
    assert isinstance(more, DTensor)
    assert torch.equal(more.full_tensor(), whole + 1)


def test_stages_of_megatron(
    device: torch.device, world_size: int, model_parallel: ModelParallel
) -> None:
    # Megatron-LM, tests/unit_tests/pipeline_parallel/test_p2p_bidirectional.py
    if device.type == "cpu":
        pytest.skip("megatron-core receives into memory of a GPU")
    model_parallel(pp=world_size)
    group = parallel_state.get_pipeline_model_parallel_group()
    config = ModelParallelConfig(
        pipeline_model_parallel_size=world_size, pipeline_dtype=torch.float32
    )
    stages = p2p_communication.P2PCommunicator(group, config)
    is_first, is_last = group.rank() == 0, group.rank() == world_size - 1
    value = stages.recv_forward((2, 3), is_first)
    value = torch.ones(2, 3, device=device) if is_first else value + 1
    stages.send_forward(value, is_last)
    assert not is_last or value.eq(world_size).all()


@pytest.mark.world_size(2)
def test_parallel_state_is_set_up_again(rank: int, model_parallel: ModelParallel) -> None:
    model_parallel(tp=2)
    assert parallel_state.get_tensor_model_parallel_world_size() == 2
    assert parallel_state.get_tensor_model_parallel_rank() == rank
    model_parallel(pp=2)
    assert parallel_state.get_pipeline_model_parallel_world_size() == 2
    assert parallel_state.get_tensor_model_parallel_world_size() == 1


@pytest.mark.world_size(2)
def test_parallel_state_is_gone_afterwards(model_parallel: ModelParallel) -> None:
    assert not parallel_state.is_initialized()
    model_parallel(cp=2)
    assert parallel_state.get_context_parallel_world_size() == 2


def test_batched_stages_of_megatron(
    rank: int, device: torch.device, world_size: int, model_parallel: ModelParallel
) -> None:
    # Megatron-LM, test_p2p_bidirectional.py, test_batched_bidirectional_messages_...
    model_parallel()
    group = dist.group.WORLD
    is_first, is_last = rank == 0, rank == world_size - 1
    activation, gradient = (torch.full((2, 3), v + rank, device=device) for v in (1e3, 2e3))
    previous = None if is_first else torch.empty_like(activation)
    following = None if is_last else torch.empty_like(gradient)
    for work in p2p_communication._batched_p2p_ops(
        tensor_send_prev=None if is_first else gradient,
        tensor_recv_prev=previous,
        tensor_send_next=None if is_last else activation,
        tensor_recv_next=following,
        group=group,
        prev_pipeline_rank=rank - 1,
        next_pipeline_rank=rank + 1,
    ):
        work.wait()
    assert previous is None or previous.eq(1e3 + rank - 1).all()
    assert following is None or following.eq(2e3 + rank + 1).all()
