"""The test body that every runner repeats: one small all_reduce, checked."""

from __future__ import annotations

import os
import socket

import bodies_faults
import torch
import torch.distributed as dist

NUM_TESTS = int(os.environ.get("BENCH_TESTS", "40"))
WORLD_SIZE = int(os.environ.get("BENCH_WORLD", "1"))
DEVICE = os.environ.get("BENCH_DEVICE", "cpu")
BACKEND = "nccl" if DEVICE == "cuda" else "gloo"


def body(number: int, rank: int, world_size: int) -> None:
    """Reduce four numbers over all ranks, and check them."""
    if bodies_faults.FAULT and bodies_faults.strike(number, rank, world_size, "before"):
        return
    device = torch.device(DEVICE, rank) if DEVICE == "cuda" else torch.device(DEVICE)
    values = torch.full((4,), float(rank + 1 + number), device=device)
    dist.all_reduce(values)
    expected = world_size * (world_size + 1) / 2 + world_size * number
    assert values.tolist() == [expected] * 4
    if bodies_faults.FAULT:
        bodies_faults.strike(number, rank, world_size, "after")
        bodies_faults.note_end(number, rank)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
