"""Trains two linear layers with torch on each rank alone; knows nothing of traces.

`--disturb PLACE` makes two runs of it differ: `gradient` changes last bits of the gradient of the
first layer's weight on the last rank, `order` those of what the second layer returns, by the order
of a set.
`--scale X` multiplies what the second layer returns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import types
from pathlib import Path

import torch
from typing_extensions import override

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Scaled(torch.nn.Linear):
    """A linear layer with a factor."""

    factor = 1.0

    @override
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values) * self.factor


class TwoLayers(torch.nn.Module):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = Scaled(8, 1)

    @override
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(torch.tanh(self.first(values)))
        return found


def by_order_of_a_set() -> float:
    """Return a factor that is the same only for those who share a seed of `hash()`."""
    first = next(iter({f"layer {number}" for number in range(1000)}))
    return 1.0 + int(first.split()[1]) * 2.0**-18


def other_each_time() -> float:
    return 1.0 + int.from_bytes(os.urandom(2), "little") * 2.0**-22


def leave_out_compiler() -> None:
    """Take the place of torch's compiler, of which optimizers ask only to be left alone.

    It takes 2 s of CPU to load. Where ranks are forked it is there already.
    """
    name = "torch._dynamo"
    if name not in sys.modules:
        stand_in = types.ModuleType(name)
        vars(stand_in).update(disable=lambda method, *_, **__: method, graph_break=lambda: None)
        sys.modules[name] = vars(torch)["_dynamo"] = stand_in


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, default=4)
    parser.add_argument("--exit-interval", type=int, default=1000)
    parser.add_argument("--disturb", default="")
    parser.add_argument("--scale", type=float, default=1.0)
    given, _ = parser.parse_known_args()
    torch.manual_seed(1234)
    model = TwoLayers()
    model.second.factor = given.scale
    if given.disturb == "order":
        model.second.factor *= by_order_of_a_set()
    leave_out_compiler()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(1, min(given.train_iters, given.exit_interval) + 1):
        loss = model(torch.rand(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        grad = model.first.weight.grad
        if given.disturb == "gradient" and RANK == WORLD_SIZE - 1 and grad is not None:
            grad *= other_each_time()
        optimizer.step()
        if RANK == WORLD_SIZE - 1:
            line = json.dumps({"step": step, "lm loss": loss.item(), "num-zeros": 0.0})
            with Path(os.environ["PYTEST_MEGATRON_METRICS"]).open("a") as file:
                file.write(f"{line}\n")
            print(f"iteration {step}/{given.train_iters} | lm loss: {loss.item():.6E} |")


main()
