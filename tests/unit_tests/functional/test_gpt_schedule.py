from __future__ import annotations

from typing import TypedDict

import pytest
from gpt_arguments import Arguments

pytestmark = pytest.mark.filterwarnings("ignore")  # megatron-core warns of what it does without


class Group(TypedDict):
    """The entries of a parameter group that a schedule sets."""

    lr: float
    weight_decay: float
    wd_mult: float


class FakeOptimizer:
    """Has one parameter group, as far as a schedule looks."""

    def __init__(self) -> None:
        self.param_groups: list[Group] = [{"lr": -1.0, "weight_decay": -1.0, "wd_mult": 1.0}]


def learning_rates(arguments: Arguments) -> list[float]:
    """The learning rate of each iteration."""
    from gpt_model import build_scheduler

    optimizer = FakeOptimizer()
    scheduler = build_scheduler(arguments, optimizer)
    rates = []
    for _ in range(arguments.train_iters):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=arguments.global_batch_size)
    return rates


@pytest.mark.parametrize(
    ("style", "rates"),
    [
        ("constant", [0.0, 4.0, 8.0, 8.0, 8.0, 8.0]),
        ("linear", [0.0, 4.0, 8.0, 6.5, 5.0, 3.5]),
    ],
)
def test_it_rises_over_the_warmup_and_falls_to_the_end(style: str, rates: list[float]) -> None:
    arguments = Arguments(
        train_iters=6, lr=8.0, min_lr=2.0, lr_warmup_iters=2, lr_decay_style=style
    )
    assert learning_rates(arguments) == pytest.approx(rates)


def test_a_cosine_is_half_way_down_in_the_middle() -> None:
    arguments = Arguments(train_iters=8, lr=1.0, lr_decay_style="cosine")
    rates = learning_rates(arguments)
    assert (rates[0], rates[4]) == pytest.approx((1.0, 0.5))
    assert rates == sorted(rates, reverse=True)
