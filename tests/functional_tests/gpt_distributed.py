"""Bring one rank up and down: its device, the process groups, the seeds.

Works for ranks started by `torch.distributed.run` (or anything that sets RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT) and for a plain `python train_gpt.py`, which is a world
of one rank and opens no port.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from cpu_device import cpu_device
from gpt_arguments import Arguments
from megatron.core import parallel_state, tensor_parallel


@contextlib.contextmanager
def joined_world(arguments: Arguments) -> Iterator[torch.device]:
    """Join the process groups for as long as the context is open; gives this rank's device.

    The groups are left in order only when the run succeeds: after an exception the other ranks
    may be gone, and waiting for them would turn a failure into a hang.
    """
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with contextlib.ExitStack() as stack:
        if backend == "nccl":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
            stack.enter_context(cpu_device())
        _start_process_groups(arguments, backend)
        _seed(arguments)
        yield device
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _start_process_groups(arguments: Arguments, backend: str) -> None:
    """Start torch's default group and megatron-core's groups in it."""
    hash_store = torch.distributed.HashStore  # type: ignore[attr-defined] # torch's stub lacks it
    is_launched = "RANK" in os.environ
    torch.distributed.init_process_group(
        backend,
        store=None if is_launched else hash_store(),
        rank=-1 if is_launched else 0,
        world_size=-1 if is_launched else 1,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=arguments.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=arguments.expert_model_parallel_size,
        expert_tensor_parallel_size=arguments.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )


def _seed(arguments: Arguments) -> None:
    """Seed dropout, and ask torch for deterministic algorithms.

    Source: megatron-core adds 100 per pipeline stage and leaves data-parallel ranks alike, so
    that they draw the same dropout masks; this program does the same.
    """
    stage_seed = arguments.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)
    if arguments.deterministic_mode:
        torch.use_deterministic_algorithms(mode=True)
        torch.backends.cudnn.benchmark = False
