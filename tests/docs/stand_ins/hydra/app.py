"""Stands in for an application of Hydra on some ranks, which logs as Lightning's CSVLogger does."""

import csv
import datetime
import os
import pathlib
import sys

given = dict(word.split("=") for word in sys.argv[1:])
now = datetime.datetime.now()
out = pathlib.Path("outputs", now.strftime("%Y-%m-%d"), now.strftime("%H-%M-%S"))
rank, weight = int(os.environ.get("RANK", "0")), 1 + int(given["seed"]) / 100
rows = [("epoch", "step", "train/loss")]
for step in range(int(given["trainer.max_steps"])):
    weight *= 0.9 + 0.01 * int(os.environ.get("WORLD_SIZE", "1"))
    rows.append((0, step, weight))
if rank == 0:
    out.mkdir(parents=True)
    with (out / "metrics.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
print(f"rank {rank} loss {weight + rank:.3f}")
