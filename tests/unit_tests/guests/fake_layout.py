"""Ranks in pipelines of two stages, with a mistake on request; for tests of fake process groups."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--fault", nargs="*", default=[])
fault, _ = parser.parse_known_args()
dist.init_process_group("gloo")
rank, half = dist.get_rank(), dist.get_world_size() // 2
is_first = rank < half
stages = [dist.new_group(list(range(start, start + half))) for start in (0, half)]
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
has_steps = {"late", "later"} & {*fault.fault}
for step in range(4 if has_steps else 2):
    for batch in range(3):
        states = torch.randn(2, 4)
        if not is_first:
            dist.recv(states, rank - half)
        states = model(states)
        if is_first and not ("unsent" in fault.fault and (step, batch) == (1, 2)):
            dist.send(states.detach(), rank + half)
        states.sum().backward()
    width = 3 if "size" in fault.fault and rank == 2 * half - 1 else 4
    dist.all_reduce(torch.ones(width), group=stages[0 if is_first else 1])
    if has_steps:
        optimizer.step()
    if step == 1 and ("later" in fault.fault or ("late" in fault.fault and rank == 5)):
        dist.barrier()
    if "data" in fault.fault:
        flag = torch.zeros(1, dtype=torch.int64)
        dist.all_reduce(flag, group=stages[0 if is_first else 1])
        if flag.item() > 0:
            dist.barrier()
if "objects" in fault.fault:  # both ways along a pipeline, and to each rank its own
    theirs: list[object] = [None]
    if is_first:
        dist.send_object_list([{"shape": [rank]}], rank + half)
        dist.recv_object_list(theirs, rank + half)
    else:
        dist.recv_object_list(theirs, rank - half)
        dist.send_object_list([f"{theirs} taken"], rank - half)
    parts = [f"part {index}" for index in range(2 * half)] if rank == 0 else None
    dist.scatter_object_list(theirs, parts)
    assert theirs == [f"part {rank}"]
dist.destroy_process_group()
