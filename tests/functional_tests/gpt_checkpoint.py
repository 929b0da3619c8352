"""Save and resume a run in Megatron-LM's layout, with megatron-core's distributed checkpoints.

A checkpoint directory holds `iter_0000025/` for each saved iteration, and
`latest_checkpointed_iteration.txt` with the number of the one to resume from. Weights, optimizer
state, schedule and generators are in it, so that a resumed run goes on as if it had not stopped.
"""

from __future__ import annotations

import queue
from pathlib import Path
from typing import TypedDict

import torch
from gpt_model import Trained
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from torch.optim import AdamW

TRACKER = "latest_checkpointed_iteration.txt"

# A save that is waited for is written by this process. megatron-core has its results come through
# another one all the same, which imports torch for them: 2 s of CPU time for each rank.
vars(filesystem_async)["_results_queue"] = queue.SimpleQueue()


class Generators(TypedDict):
    """The states of one rank's generators, as a checkpoint holds them."""

    torch: torch.Tensor
    cuda: torch.Tensor
    tracker: dict[str, torch.Tensor]


def save_checkpoint(directory: Path, trained: Trained, iteration: int) -> None:
    """Write `directory/iter_<iteration>` and then point the tracker at it. Called by every rank."""
    target = directory / f"iter_{iteration:07d}"
    if torch.distributed.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state = _state(trained, iteration, is_loading=False)
    dist_checkpointing.save(state, str(target))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        replacement = directory / f"{TRACKER}.tmp"
        replacement.write_text(str(iteration))
        replacement.replace(directory / TRACKER)
        print(f"  successfully saved checkpoint from iteration {iteration:7d} to {directory}")
    torch.distributed.barrier()


def load_checkpoint(directory: Path, trained: Trained) -> int:
    """Resume from the checkpoint that the tracker names. Called by every rank.

    Returns:
        The iteration that was saved, 0 when there is no checkpoint.
    """
    is_first = torch.distributed.get_rank() == 0
    tracker = directory / TRACKER
    if not tracker.exists():
        if is_first:
            print(f"WARNING: no checkpoint in {directory} ({TRACKER}): starting from scratch")
        return 0
    iteration = int(tracker.read_text())
    source = directory / f"iter_{iteration:07d}"
    for adam in _sharded_adams(trained.optimizer):
        _allocate_state(adam)
    wanted = _state(trained, iteration, is_loading=True)
    found = dist_checkpointing.load(wanted, str(source))
    trained.bare.load_state_dict(found["model"])
    with torch.no_grad():  # it copies into fp32 weights in place
        trained.optimizer.load_state_dict(found["optimizer"])
    for adam in _sharded_adams(trained.optimizer):
        _restore_step_counts(adam)
    trained.scheduler.load_state_dict(found["scheduler"])
    _restore_generators(found["rng_state"])
    torch.distributed.barrier()
    if is_first:
        print(f"  successfully loaded checkpoint from {directory} at iteration {iteration}")
    return int(found["iteration"])


def _sharded_adams(optimizer: MegatronOptimizer) -> list[AdamW]:
    """Find torch's Adam inside the distributed optimizer (elsewhere, or with others: nothing).

    megatron-core 0.16.1 loads the distributed optimizer with Transformer Engine's Adam in mind;
    torch's, which it takes without Transformer Engine, needs the two functions below.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [part.optimizer for part in parts if isinstance(part, DistributedOptimizer)]
    return [one for one in inner if isinstance(one, AdamW)]


def _allocate_state(adam: AdamW) -> None:
    """Take a step without gradients: the loader reads a step count that Adam does not have yet.

    What the step changes is then loaded over.
    """
    for group in adam.param_groups:
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight)
    adam.step()
    adam.zero_grad()


def _restore_step_counts(adam: AdamW) -> None:
    """Give each weight the step count that was loaded, in a tensor of its own.

    The loader leaves it with the parameter groups; a tensor that all weights share would be
    counted up once for each of them.
    """
    for group in adam.param_groups:
        for weight in group["params"]:
            adam.state[weight]["step"] = torch.tensor(float(group["step"]))


def _state(trained: Trained, iteration: int, *, is_loading: bool) -> dict[str, object]:
    """Describe what a checkpoint holds, in the form that saving and loading share."""
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    model = trained.bare.sharded_state_dict(metadata=metadata)
    return {
        "iteration": iteration,
        "checkpoint_version": 3.0,
        "model": model,
        "optimizer": trained.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        ),
        "scheduler": trained.scheduler.state_dict(),
        "rng_state": _sharded_generators(),
    }


def _sharded_generators() -> ShardedObject:
    """Collect this rank's generators; one object per tensor- and pipeline-parallel rank."""
    states: Generators = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    pipeline, tensor = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    shape = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", states, shape, (pipeline, tensor), replica_id=replica)


def _restore_generators(states: Generators) -> None:
    """Set this rank's generators to what `_sharded_generators` collected."""
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
