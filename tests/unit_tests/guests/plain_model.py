"""Trains a small language model of plain torch, as many training loops do.

Its batch comes first. `--parallel tp` cuts it with torch's tensor parallelism, `dp` averages the
gradients of ranks that have a part of the samples each.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from typing_extensions import override

VOCABULARY = 24


class Block(torch.nn.Module):
    """A layer of the model; with `flattens` its inner tokens are one axis."""

    def __init__(self, width: int, *, flattens: bool) -> None:
        super().__init__()
        self.flattens = flattens
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    @override
    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        inner = mask.softmax(-1) @ self.norm(hidden)  # the mean of the tokens so far
        if self.flattens:
            inner = inner.flatten(0, 1)
        added: torch.Tensor = self.down(torch.relu(self.up(inner)))
        return hidden + added.view(hidden.shape)


class Model(torch.nn.Module):
    """Tokens to logits, (batch, sequence, vocabulary)."""

    num_tokens: torch.Tensor
    counted: torch.Tensor

    def __init__(self, width: int, *, flattens: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.blocks = torch.nn.ModuleList(Block(width, flattens=flattens) for _ in range(2))
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("num_tokens", torch.zeros(VOCABULARY))
        self.register_buffer("rotation", torch.polar(torch.ones(width), torch.arange(width) / 8))
        self.register_buffer("counted", torch.zeros(VOCABULARY), persistent=False)

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        mask = torch.full((tokens.shape[1],) * 2, -torch.inf).triu(1)
        for block in self.blocks:
            hidden = block(hidden, mask)
        found: torch.Tensor = self.head(hidden)
        return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", choices=("none", "dp", "tp"), default="none")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=6)
    parser.add_argument("--flatten", choices=("no", "inside", "loss"), default="no")
    parser.add_argument("--interleave", action="store_true")
    parser.add_argument("--bug", default="")
    return parser.parse_args()


def draw(given: argparse.Namespace, generator: torch.Generator) -> torch.Tensor:
    """Return the tokens of a step, and one more of each sample; the same in any order."""
    data = torch.randint(VOCABULARY, (given.batch, given.length + 1), generator=generator)
    return (
        data.view(2, -1, data.shape[1]).transpose(0, 1).flatten(0, 1) if given.interleave else data
    )


def disturb(bug: str, rank: int, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Do what is wrong before the optimizer's step."""
    if bug == "own-rate" and rank:
        optimizer.param_groups[0]["lr"] = 5e-3
    if bug == "state":
        for state in optimizer.state.values():
            state["exp_avg_sq"] *= 1.5
    if bug == "buffer":
        model.num_tokens *= 2


def reduce(model: Model, *, gradients: bool) -> None:
    """Add what ranks have of gradients and counts."""
    for parameter in model.parameters() if gradients else ():
        torch.distributed.all_reduce(parameter.grad)
    torch.distributed.all_reduce(model.counted)
    model.num_tokens += model.counted
    model.counted.zero_()


def main() -> None:
    given = parse()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(7 + (rank if given.bug == "own-seeds" else 0))
    model = Model(8, flattens=given.flatten == "inside")
    if given.parallel == "tp":
        mesh = init_device_mesh("cpu", (world_size,))
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of = torch.nn.CrossEntropyLoss()
    replicas = world_size if given.parallel == "dp" else 1
    mine = range(rank if replicas > 1 else 0, given.batch // given.micro_batch, replicas)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        chunks = draw(given, generator).split(given.micro_batch)  # type: ignore[no-untyped-call] # torch's stub
        optimizer.zero_grad()
        for number in mine:
            tokens, labels = chunks[number][:, :-1], chunks[number][:, 1:]
            model.counted += torch.bincount(tokens.flatten(), minlength=VOCABULARY)
            logits = model(tokens)
            if given.bug == "scaled-head":
                logits = logits * 1.1
            if given.flatten == "loss":
                loss = loss_of(logits.flatten(0, 1), labels.flatten())
            else:
                loss = loss_of(logits.transpose(1, 2), labels)
            (loss / len(chunks)).backward()
        if replicas > 1:
            reduce(model, gradients=given.bug != "unreduced")
        else:
            model.num_tokens += model.counted
            model.counted.zero_()
        disturb(given.bug, rank, model, optimizer)
        optimizer.step()


main()
