"""One rank of an all_reduce, `BACKEND RANK WORLD_SIZE FILE`; exits with 0 if the sum is right.

Runs under the Python of the environment that is looked at; standard library and torch only.
"""

from __future__ import annotations

import datetime as dt
import os
import sys

import torch
import torch.distributed as dist


def main() -> None:
    """Join the process group, sum a tensor up over all ranks, and check the sum."""
    backend, rank, world_size, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{file}",
        rank=rank,
        world_size=world_size,
        timeout=dt.timedelta(seconds=60),
    )
    values = torch.full((1 << 20,), float(rank + 1), device=device)
    dist.all_reduce(values)
    wanted = world_size * (world_size + 1) / 2
    if not bool((values == wanted).all()):
        sys.exit(f"the sum is {values.min().item()} to {values.max().item()}, not {wanted}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # nothing of interest can fail from here on


main()
