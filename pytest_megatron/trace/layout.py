"""Place of this rank in the parallel layout, from megatron-core's parallel state or torch's."""

from __future__ import annotations

import os
import sys
from typing import Literal

import torch

from pytest_megatron.trace.files import TraceHeader, TraceLayout


def header(
    model: torch.nn.Module | None, device: torch.device, values: Literal["hash", "full"]
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


def layout(model: torch.nn.Module | None) -> TraceLayout:
    """Return the place of this rank; data parallel alone where megatron-core is not in use."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return TraceLayout(dp=rank_and_size(), edp=rank_and_size())
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
