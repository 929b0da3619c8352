"""Place of this rank in the parallel layout, from megatron-core's parallel state or torch's."""

from __future__ import annotations

import os
import re
import sys
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from pytest_megatron.trace.files import TraceHeader, TraceLayout
from pytest_megatron.trace.shards import is_dtensor


def header(
    model: torch.nn.Module | None,
    device: torch.device,
    values: Literal["hash", "full"],
    *,
    batch_first: bool | None,
) -> TraceHeader:
    """Return the first line of this rank's trace."""
    rank, world_size = rank_and_size()
    megatron = sys.modules.get("megatron.core")
    return TraceHeader(
        rank=rank,
        world_size=world_size,
        device=device.type,
        torch=torch.__version__,
        megatron_core=None if megatron is None else str(megatron.__version__),
        layout=layout(model),
        values=values,
        batch_first=batch_first,
    )


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; a program need not have joined them."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


_IS_TENSOR_PARALLEL = re.compile(r"tp|tensor|model").search


def _layout_by_meshes(model: torch.nn.Module | None) -> TraceLayout:
    """Return the place of this rank by the meshes of the model's parameters."""
    rank, world_size = rank_and_size()
    mesh = None if model is None else _widest_mesh(model)
    if mesh is None:
        return TraceLayout(dp=(rank, world_size), edp=(rank, world_size))
    names = mesh.mesh_dim_names or ()
    # FSDP shards parameters over the first dimension of a mesh, and over all of one without names.
    is_sharded = any(type(one).__name__.startswith("FSDP") for one in model.modules())  # type: ignore[union-attr]
    dimensions = [
        number
        for number in range(mesh.ndim)
        if (_IS_TENSOR_PARALLEL(names[number]) if is_sharded and names else not is_sharded)
    ]
    index, size = 0, 1
    for dimension in dimensions:
        index = index * mesh.size(dimension) + mesh.get_local_rank(dimension)
        size *= mesh.size(dimension)
    if size == 1:
        return TraceLayout(dp=(rank, world_size), edp=(rank, world_size))
    num_replicas = world_size // size
    ranks = mesh.mesh.flatten().tolist()
    # Neighbours share tensors, as in every mesh whose last dimension they are.
    is_last = len(ranks) > size or ranks == list(range(ranks[0], ranks[0] + size))
    dp = (rank // size if is_last else rank % num_replicas, num_replicas)
    tp = (index, size)
    return TraceLayout(tp=tp, dp=dp, etp=tp, edp=dp, sequence_parallel=True)


def _widest_mesh(model: torch.nn.Module) -> DeviceMesh | None:
    """Return the mesh with the most dimensions that a parameter is placed on."""
    meshes = [one.device_mesh for one in model.parameters() if is_dtensor(one)]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def layout(model: torch.nn.Module | None) -> TraceLayout:
    """Return the place of this rank.

    Where megatron-core is not in use: data parallel, beside the tensor parallelism of `DTensor`s.
    """
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return _layout_by_meshes(model)
    config = getattr(model, "config", None)
    return TraceLayout(
        tp=(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        pp=(
            state.get_pipeline_model_parallel_rank(),
            state.get_pipeline_model_parallel_world_size(),
        ),
        dp=(state.get_data_parallel_rank(), state.get_data_parallel_world_size()),
        cp=(state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
        ep=(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
        etp=(
            state.get_expert_tensor_parallel_rank(),
            state.get_expert_tensor_parallel_world_size(),
        ),
        edp=(state.get_expert_data_parallel_rank(), state.get_expert_data_parallel_world_size()),
        vpp=state.get_virtual_pipeline_model_parallel_world_size() or 1,
        sequence_parallel=bool(getattr(config, "sequence_parallel", False)),
    )
