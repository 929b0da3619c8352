"""Trains a recurrent model of plain torch whose tensors begin with the sequence.

Ranks have a part of the samples each; `DistributedDataParallel` averages their gradients. The last
state is no part of the loss, so its gradient is none there.
"""

from __future__ import annotations

import os

import torch
from typing_extensions import override

VOCABULARY, WIDTH, LENGTH, BATCH = 24, 8, 6, 8


class Model(torch.nn.Module):
    """Tokens (sequence, batch) to logits of all tokens, as one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = torch.nn.GRU(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    @override
    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, last = self.recurrent(self.embed(tokens))
        return self.head(hidden).view(-1, VOCABULARY), last


def main() -> None:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(7)
    model: torch.nn.Module = Model()
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = torch.nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        data = torch.randint(VOCABULARY, (LENGTH + 1, BATCH), generator=generator)
        mine = data.chunk(world_size, 1)[rank].contiguous()
        optimizer.zero_grad()
        logits, _ = model(mine[:-1])
        loss_of(logits, mine[1:].flatten()).backward()
        optimizer.step()


main()
