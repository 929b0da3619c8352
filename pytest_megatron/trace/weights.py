"""Place of a rank in its layout, and exchange of initial weights between runs of different ones.

The place is megatron-core's parallel state's, or torch's. A run writes what a checkpoint of its
models would hold, each tensor once over the ranks; another run reads its parts of the whole
tensors. Every rank of the reader reads by itself, after the writer has ended: models are found at
their first call, where ranks cannot act together.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from pytest_megatron.errors import TraceError
from pytest_megatron.trace.files import TraceHeader, TraceLayout
from pytest_megatron.trace.settings import TraceValues
from pytest_megatron.trace.shards import TensorShard, is_dtensor, local_tensors, local_values


def header_of(
    model: torch.nn.Module | None, device: torch.device, values: TraceValues
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


def write_weights(model: torch.nn.Module, prefix: str, directory: Path, number: int) -> None:
    """Write the model's parameters and buffers that no other rank writes.

    Args:
        model: The model, or a chunk of it.
        prefix: Name of the model; "" is the only one.
        directory: Gets a file of this rank.
        number: Models of this rank that were written before.
    """
    directory.mkdir(parents=True, exist_ok=True)
    parts = [
        (shard.key, shard.global_shape, shard.global_offset, shard.tensor.cpu().clone())
        for local in local_tensors(model, prefix)
        for shard in local.cut(local_values(local.values))
        if shard.is_main
    ]
    torch.save(parts, directory / f"rank_{rank_and_size()[0]}_{number}.pt")


def read_weights(model: torch.nn.Module, prefix: str, directory: Path) -> None:
    """Replace the model's parameters and buffers by those of the run that wrote `directory`.

    Raises:
        TraceError: The directory has no weights, or not those that this model needs.
    """
    stored = _Stored(directory)
    for local in local_tensors(model, prefix):
        values = local_values(local.values)
        parts = [stored.read(shard) for shard in local.cut(values)]
        values.copy_(local.merge(parts))


# The shape of a whole tensor, where a part of it begins, and the values of the part.
_Part = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]


class _Stored:
    """The weights of a run, read a part at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: defaultdict[str, list[_Part]] = defaultdict(list)
        for path in sorted(directory.glob("rank_*.pt")):
            for key, *part in torch.load(path, map_location="cpu", mmap=True):
                self._parts[key].append(cast("_Part", tuple(part)))
        if not self._parts:
            raise TraceError(
                str(directory), "holds no weights; the run that had to write them has ended early"
            )

    def read(self, shard: TensorShard) -> torch.Tensor:
        """Return the values of a part, put together from what was written.

        Raises:
            TraceError: The key is missing, has another shape, or the values have gaps.
        """
        values = shard.tensor.clone()
        num_filled = 0
        for part in self._parts.get(shard.key, ()):
            if part[0] != shard.global_shape and not shard.is_padded:
                raise TraceError(
                    str(self._directory),
                    f"{shard.key} is {list(part[0])} there and {list(shard.global_shape)} here; "
                    "compare runs of one model",
                )
            num_filled += _fill(values, shard, part)
        if shard.key not in self._parts or (num_filled < values.numel() and not shard.is_padded):
            raise TraceError(
                str(self._directory),
                f"holds {num_filled} of {values.numel()} values of {shard.key}"
                f" {list(shard.global_shape)} at {list(shard.global_offset)}, which the model here"
                " has; compare runs of one model",
            )
        return values


def _fill(values: torch.Tensor, shard: TensorShard, part: _Part) -> int:
    """Copy what a stored part has of these values; returns how many."""
    _, offset, found = part
    stacked = len(shard.global_shape) - values.dim()  # axes that the tensors lack
    if shard.global_offset[:stacked] != offset[:stacked]:
        return 0
    here, there = [], []
    for mine, length, theirs, stored in zip(
        shard.global_offset[stacked:], values.shape, offset[stacked:], found.shape, strict=True
    ):
        start, stop = max(mine, theirs), min(mine + length, theirs + stored)
        if start >= stop:
            return 0
        here.append(slice(start - mine, stop - mine))
        there.append(slice(start - theirs, stop - theirs))
    copied = found[tuple(there)]
    values[tuple(here)] = copied.to(values)
    return copied.numel()
