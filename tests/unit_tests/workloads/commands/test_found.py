"""What `record` reads from a command line."""

from __future__ import annotations

import pytest

from pytest_megatron.workloads.commands.found import length_of


@pytest.mark.parametrize(
    ("line", "length"),
    [
        ("train.py --max_steps 20", ("--max_steps", 20)),
        ("train.py --max_iters=20 --lr 1", ("--max_iters", 20)),
        ("app.py trainer.max_steps=7", ("trainer.max_steps", 7)),
        ("-m torchtitan.train --training.steps 12", ("--training.steps", 12)),
        ("train.py --num_train_epochs 3 --save_steps 5", None),
    ],
)
def test_the_length_of_a_training_is_an_argument(line: str, length: tuple[str, int] | None) -> None:
    assert length_of(line.split()) == length
