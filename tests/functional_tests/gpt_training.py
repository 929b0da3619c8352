"""The training loop: iterations, checkpoints when they are due, and what one iteration is.

An iteration is megatron-core's pipeline schedule over this rank's microbatches, then its
optimizer. Must not know how ranks are started or where what is logged goes.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import time
from collections.abc import Iterator

import torch
from gpt_arguments import Arguments
from gpt_checkpoint import load_checkpoint, save_checkpoint
from gpt_data import Batch, Dataset, first_indices
from gpt_logging import RunLog, Step
from gpt_model import Trained
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
    reduce_aux_losses_tracker_across_ranks,
)


def train(arguments: Arguments, trained: Trained, device: torch.device, log: RunLog) -> None:
    """Run the iterations from the resumed one, or the first, to the last."""
    done = load_checkpoint(arguments.load, trained) if arguments.load else 0
    saved = done
    for chunk in trained.chunks:
        chunk.train()
    for iteration in range(done + 1, arguments.train_iters + 1):
        if arguments.fault == f"kill@{iteration}":
            os.kill(os.getpid(), signal.SIGKILL)
        log.tell(train_step(arguments, trained, device, iteration))
        is_last = iteration == arguments.train_iters or (
            arguments.exit_interval is not None and iteration % arguments.exit_interval == 0
        )
        is_due = arguments.save_interval is not None and iteration % arguments.save_interval == 0
        if arguments.save is not None and (is_due or is_last) and saved < iteration:
            save_checkpoint(arguments.save, trained, iteration)
            saved = iteration
        if is_last:
            break


def train_step(
    arguments: Arguments, trained: Trained, device: torch.device, iteration: int
) -> Step:
    """Run one iteration: forward and backward over all microbatches, then the optimizer."""
    start = time.perf_counter()
    learning_rate = trained.optimizer.param_groups[0]["lr"]
    for chunk in trained.chunks:
        chunk.zero_grad_buffer()
    trained.optimizer.zero_grad()
    batches = microbatches(arguments, device, iteration)
    iterators = [iter(batches) for _ in trained.chunks]
    losses = get_forward_backward_func()(
        forward_step_func=functools.partial(forward_step, arguments, iteration),
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=trained.chunks,
        num_microbatches=len(batches),
        seq_length=arguments.seq_length,
        micro_batch_size=arguments.micro_batch_size,
        forward_only=False,
    )
    for chunk in trained.chunks:
        disturb_gradients(chunk, arguments.gradient_noise)
    is_updated, grad_norm, num_zeros = trained.optimizer.step()
    if is_updated:
        trained.scheduler.step(increment=arguments.global_batch_size)
    loss = mean_over_data_parallel_ranks(losses, device)
    balance = load_balancing_loss(arguments, len(batches))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return Step(
        iteration=iteration,
        loss=loss,
        learning_rate=learning_rate,
        grad_norm=0.0 if grad_norm is None else float(grad_norm),
        num_zeros=None if num_zeros is None else int(num_zeros),
        is_skipped=not is_updated,
        time_s=time.perf_counter() - start,
        load_balancing_loss=balance,
    )


def disturb_gradients(model: torch.nn.Module, noise: float) -> None:
    """Scale each gradient by 1 + `noise` times a normal number that no seed governs.

    Stands for what kernels that add in any order do to the last digits, on every device.
    """
    if noise == 0:
        return
    draws = torch.Generator()
    draws.seed()  # from the system: two runs never agree
    for parameter in model.parameters():
        factors = 1 + noise * torch.randn(parameter.shape, generator=draws)
        gradient: torch.Tensor = vars(parameter)["main_grad"]  # megatron-core put it there
        gradient.mul_(factors.to(gradient))


def microbatches(arguments: Arguments, device: torch.device, iteration: int) -> list[Batch]:
    """Make the microbatches of this data-parallel rank for one iteration."""
    data = Dataset(
        seed=arguments.seed, vocab_size=arguments.vocab_size, seq_length=arguments.seq_length
    )
    dp_rank = parallel_state.get_data_parallel_rank()
    dp_size = parallel_state.get_data_parallel_world_size()
    size = arguments.micro_batch_size
    indices = first_indices(
        (iteration - 1) * arguments.global_batch_size,
        num_microbatches=arguments.global_batch_size // (size * dp_size),
        micro_batch_size=size,
        dp=(dp_rank, dp_size),
    )
    return [data.batch(index, size, device) for index in indices]


def forward_step(
    arguments: Arguments, iteration: int, batches: Iterator[Batch], model: GPTModel
) -> tuple[torch.Tensor, functools.partial[tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    """Run the model on the next microbatch; called by megatron-core's schedule."""
    batch = next(batches)
    output = model(batch.tokens, batch.position_ids, None, labels=batch.labels)
    return output, functools.partial(loss_of, arguments, iteration)


def loss_of(
    arguments: Arguments, iteration: int, token_losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Average the losses of a microbatch's tokens; called in the last pipeline stage only.

    Raises:
        RuntimeError: The loss is NaN or infinite and may not be.
    """
    loss = token_losses.float().mean()
    if arguments.fault == f"nan@{iteration}":
        loss = loss * math.nan
    if arguments.check_for_nan_in_loss_and_grad and not torch.isfinite(loss):
        found, rank = "NaN" if torch.isnan(loss) else "Inf", torch.distributed.get_rank()
        raise RuntimeError(
            f"Rank {rank}, iteration {iteration}: Unexpected result {loss.item()}"
            f" (message='found {found} in local forward loss calculation')"
        )
    return loss, {"lm loss": loss.detach().clone()}


def mean_over_data_parallel_ranks(
    losses: list[dict[str, torch.Tensor]], device: torch.device
) -> float:
    """Average the microbatches' losses over data-parallel ranks; NaN outside the last stage."""
    if not losses:
        return math.nan
    mean = torch.stack([one["lm loss"] for one in losses]).mean().to(device)
    torch.distributed.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    return float(mean) / int(parallel_state.get_data_parallel_world_size())


def load_balancing_loss(arguments: Arguments, num_microbatches: int) -> float | None:
    """Mean over layers and microbatches of the router's loss; None for a dense model."""
    if arguments.num_experts is None:
        return None
    reduce_aux_losses_tracker_across_ranks()
    values = get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"]
    mean = float(values.sum()) / (arguments.num_layers * num_microbatches)
    clear_aux_losses_tracker()
    return mean
