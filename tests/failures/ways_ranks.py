"""Ranks that do not do the same: collectives that are missed, added, of another kind or size."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ways import way

if TYPE_CHECKING:
    from training import Training


@way("reduction")
def missed(training: Training) -> None:
    """A gradient that was None on this rank, so that nobody reduced it."""


@way("reduced")
def extra(training: Training) -> None:
    """One rank logs something that it has to sum up first."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(3, device=training.device))


@way("reduction")
def other_size(training: Training) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(4, 24, device=training.device))


@way("reduction")
def other_type(training: Training) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(4, 16, device=training.device, dtype=torch.float64))


@way("reduction")
def other_operation(training: Training) -> None:
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.ones(4, 16, device=training.device), src=0)


@way("step", is_everywhere=True)
def monitored_barrier(training: Training) -> None:
    """One rank is late for a barrier that names who is."""
    from datetime import timedelta

    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    if training.is_guilty:
        time.sleep(3600)
    dist.monitored_barrier(group, timeout=timedelta(seconds=3), wait_all_ranks=True)


@way("step")
def killed_in_collective(training: Training) -> None:
    """Dies in the middle of a sum that the others are in."""
    import signal

    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1 << 20, device=training.device), async_op=True)
    os.kill(os.getpid(), signal.SIGKILL)
