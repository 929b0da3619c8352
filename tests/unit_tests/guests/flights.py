"""Three ranks whose flight recorders say that rank 1 missed the third all_reduce.

    python flights.py DIR

Writes `DIR/nccl_trace_rank_<r>` (pickle) and `DIR/<r>/nccl_flight_recorder.json`; nobody waits for
what never ends. Says `no recorder` where this torch has none for gloo.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

NUM_RANKS = 3
GUILTY = 1


def main(directory: Path) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    import torch
    from torch._C import _distributed_c10d as c10d

    if not hasattr(c10d, "_dump_fr_trace"):
        print("no recorder")
        return
    children = []
    for rank in range(NUM_RANKS):
        child = os.fork()
        if child == 0:
            run(rank, directory)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    print(f"torch {torch.__version__}")


def run(rank: int, directory: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=60),
    )
    store = dist.distributed_c10d._get_default_store()
    for _ in range(2):
        dist.all_reduce(torch.ones(4, 3))
    if rank != GUILTY:
        dist.all_reduce(torch.ones(5), async_op=True)
    dump, dump_json = (getattr(c10d, f"_dump_fr_trace{name}") for name in ("", "_json"))
    (directory / f"nccl_trace_rank_{rank}").write_bytes(dump())
    (directory / str(rank)).mkdir()
    record = dump_json(includeCollectives=True, onlyActive=False)
    (directory / str(rank) / "nccl_flight_recorder.json").write_bytes(record)
    store.set(f"written {rank}", "")
    store.wait([f"written {other}" for other in range(NUM_RANKS)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
