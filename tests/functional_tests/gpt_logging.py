"""What a run tells: one line per iteration on stdout, and TensorBoard scalars.

The last rank speaks, as in Megatron-LM: it is in the last pipeline stage, so it has the loss.
Scalars carry Megatron-LM's names. Everything is flushed at once: a run that is killed leaves what
it had done.
"""

from __future__ import annotations

import datetime as dt
import math
import resource
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psutil
import torch
from gpt_arguments import Arguments
from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one iteration came to, as the last rank knows it.

    Attributes:
        loss: Mean over all tokens of the global batch; NaN when it was not finite somewhere.
        num_zeros: Zeros in the gradient over all ranks; None when not counted.
        is_skipped: The optimizer refused the gradient.
        load_balancing_loss: None for a dense model.
        reward: Mean reward of the answers of a reinforcement-learning step; None in pretraining.
    """

    iteration: int
    loss: float
    learning_rate: float
    grad_norm: float
    num_zeros: int | None
    is_skipped: bool
    time_s: float
    load_balancing_loss: float | None = None
    reward: float | None = None


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Memory in use now and at its peak.

    On a GPU: what torch's allocator holds for tensors. On the CPU there is no such count; it is
    the resident set of the whole process, Python and libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    now = psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # the kernel updates it late
    return now, max(now, peak)


class RunLog:
    """Speaks for the run on the last rank; on the others it is silent."""

    def __init__(self, arguments: Arguments, device: torch.device) -> None:
        self.arguments = arguments
        self.device = device
        size = torch.distributed.get_world_size()
        self.is_speaking = torch.distributed.get_rank() == size - 1
        self.writer: SummaryWriter | None = None
        if self.is_speaking and arguments.tensorboard_dir is not None:
            self.writer = SummaryWriter(log_dir=str(arguments.tensorboard_dir))
        self.num_skipped = 0
        self.num_nan = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.writer is not None:
            self.writer.close()

    def tell(self, step: Step) -> None:
        """Count the step, and print and write it when its turn comes."""
        self.num_skipped += step.is_skipped
        self.num_nan += not math.isfinite(step.loss)
        if not self.is_speaking or step.iteration % self.arguments.log_interval:
            return
        print(self._line(step), flush=True)
        if self.writer is not None:
            for name, value in scalars(self.arguments, step, memory_bytes(self.device)).items():
                self.writer.add_scalar(name, value, step.iteration)
            self.writer.flush()

    def _line(self, step: Step) -> str:
        """Word one step as Megatron-LM does."""
        now = dt.datetime.now().astimezone()
        total = step.iteration * self.arguments.global_batch_size
        last = self.arguments.train_iters
        parts = [
            f" [{now:%Y-%m-%d %H:%M:%S}] iteration {step.iteration:8d}/{last:8d}",
            f"consumed samples: {total:12d}",
            f"elapsed time per iteration (ms): {step.time_s * 1000:.1f}",
            f"learning rate: {step.learning_rate:.6E}",
            f"global batch size: {self.arguments.global_batch_size:5d}",
            f"lm loss: {step.loss:.6E}",
        ]
        if step.load_balancing_loss is not None:
            parts.append(f"load_balancing_loss: {step.load_balancing_loss:.6E}")
        if step.reward is not None:
            parts.append(f"mean reward: {step.reward:.6E}")
        parts.append(f"grad norm: {step.grad_norm:.3f}")
        if step.num_zeros is not None:
            parts.append(f"num zeros: {step.num_zeros}")
        parts += [
            f"number of skipped iterations: {self.num_skipped:3d}",
            f"number of nan iterations: {self.num_nan:3d} |",
        ]
        return " | ".join(parts)


def scalars(arguments: Arguments, step: Step, memory: tuple[int, int]) -> dict[str, float]:
    """Name what is written to TensorBoard for one step."""
    values = {
        "lm loss": step.loss,
        "learning-rate": step.learning_rate,
        "grad-norm": step.grad_norm,
    }
    if step.num_zeros is not None:
        values["num-zeros"] = step.num_zeros
    if arguments.log_timers_to_tensorboard:
        values["iteration-time"] = step.time_s
    if arguments.log_memory_to_tensorboard:
        values["mem-allocated-bytes"], values["mem-max-allocated-bytes"] = memory
    if step.load_balancing_loss is not None:
        values["load_balancing_loss"] = step.load_balancing_loss
    if step.reward is not None:
        values["mean-reward"] = step.reward
    return values
