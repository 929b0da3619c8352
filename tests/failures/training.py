"""A small data-parallel training that something can go wrong in: four ranks, gloo or NCCL.

    torchrun --nproc-per-node 4 training.py --fault NAME --guilty 2 --work DIR [--device cuda]

Looks and behaves as trainings do: a model, batches, gradients that are summed over the ranks, an
iteration line from the last rank, a checkpoint at the end. The fault strikes by itself, at the
place that its entry in one of the `ways_*` modules names; nobody catches what it does.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import ways

if TYPE_CHECKING:
    import torch

ITERATIONS = 6
LEARNING_RATE = 0.01
STRIKES_AT = 4  # the iteration of faults that strike in one


class Training:
    """What a fault may look at and break.

    Attributes:
        work: A directory of the case, the same for all ranks.
    """

    model: torch.nn.Linear
    loss: torch.Tensor

    def __init__(self, asked: argparse.Namespace) -> None:
        self.fault = ways.find(asked.fault)
        self.guilty = asked.guilty
        self.device_name: str = asked.device
        self.timeout_s: float = asked.timeout
        self.work: Path = asked.work
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.iteration = 0
        self.has_struck = False

    @property
    def is_guilty(self) -> bool:
        return self.guilty == "all" or str(self.rank) in self.guilty.split(",")

    @property
    def device(self) -> str:
        return f"cuda:{self.local_rank}" if self.device_name == "cuda" else "cpu"

    def strike(self, point: str) -> None:
        """Let the fault happen if this is its place; called by every rank at every place."""
        fault = self.fault
        if fault.point != point or self.has_struck or not (fault.is_everywhere or self.is_guilty):
            return
        if point in ways.POINTS_IN_AN_ITERATION and self.iteration < STRIKES_AT:
            return
        self.has_struck = not fault.is_lasting
        fault.act(self)

    def run(self) -> None:
        self.strike("start")
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.strike("imports")
        if self.device_name == "cuda":
            torch.cuda.set_device(self.local_rank)
        backend = "nccl" if self.device_name == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=self.timeout_s))
        self.say(f"process group of {self.world_size} ranks is up, backend {backend}")
        torch.manual_seed(1234)
        self.model = torch.nn.Linear(16, 4).to(self.device)
        self.strike("setup")
        for self.iteration in range(1, ITERATIONS + 1):
            self.step()
        self.strike("end")
        if self.rank == 0:
            torch.save(self.model.state_dict(), self.work / "final.pt")
        dist.barrier()
        self.strike("saved")
        dist.destroy_process_group()
        self.strike("destroyed")
        self.say("training finished")

    def step(self) -> None:
        import torch

        started = time.monotonic()
        self.strike("step")
        self.model.zero_grad()
        batch = torch.randn(8, 16, device=self.device)
        self.loss = self.model(batch).pow(2).mean()
        self.strike("loss")
        torch.autograd.backward(self.loss)
        self.strike("gradients")
        if not self.takes_over_reduction():
            self.reduce()
        self.strike("reduced")
        with torch.no_grad():  # by hand: torch.optim imports a compiler, for seconds
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
        if self.rank == self.world_size - 1:
            self.report(1e3 * (time.monotonic() - started))

    def reduce(self) -> None:
        """Sum the gradients of all parameters over the ranks, in one bucket."""
        import torch
        import torch.distributed as dist

        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        bucket = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(bucket)
        start = 0
        for gradient in gradients:
            end = start + gradient.numel()
            gradient.copy_(bucket[start:end].view_as(gradient))
            start = end

    def takes_over_reduction(self) -> bool:
        """Whether the fault does something else in the place of the all-reduce."""
        is_due = self.fault.point == "reduction" and self.is_guilty
        if is_due and not self.has_struck and self.iteration == STRIKES_AT:
            self.has_struck = True
            self.fault.act(self)
            return True
        return False

    def report(self, step_ms: float) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        print(
            f" [{now}] iteration {self.iteration:8}/{ITERATIONS:8} | consumed samples: "
            f"{self.iteration * 32:12} | elapsed time per iteration (ms): {step_ms:.1f} | "
            f"learning rate: 1.000000E-02 | global batch size:    32 | "
            f"lm loss: {self.loss.item():.6E} | loss scale: 1.0 | number of skipped iterations:   "
            f"0 | number of nan iterations:   0 |",
            flush=True,
        )

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"> {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="training.py")
    parser.add_argument("--fault", default="nothing")
    parser.add_argument("--guilty", default="2", help="ranks, with commas; or all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--timeout", type=float, default=8.0, help="of collectives, in seconds")
    parser.add_argument("--work", type=Path, required=True)
    asked, rest = parser.parse_known_args()
    training = Training(asked)
    if rest and training.is_guilty:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    training.run()


def main_recorded() -> None:
    """Leave torch's `error.json`, as programs with its `@record` do."""
    from torch.distributed.elastic.multiprocessing.errors import record

    record(main)()


if __name__ == "__main__":
    if os.environ.get("FAILURES_RECORD"):
        main_recorded()
    else:
        main()
