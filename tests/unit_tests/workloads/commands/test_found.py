"""What `record` reads from a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.workloads.commands.found import MetricSearch, length_of


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


def test_a_file_and_its_copies_below_are_one_place(tmp_path: Path) -> None:
    search = MetricSearch(tmp_path)
    search.mark()
    for directory in (tmp_path / "out", tmp_path / "out" / "checkpoint-20"):
        directory.mkdir()
        (directory / "log.csv").write_text("step,loss\n1,2.5\n2,2.25\n")
    search.look(PhaseDirs(root=tmp_path / "logs"), is_joint=False)
    assert [place.where for place in search.places] == ["csv, out/**/log.csv"]


def test_a_norm_of_gradients_that_is_printed_is_compared(tmp_path: Path) -> None:
    dirs = PhaseDirs(root=tmp_path / "logs")
    dirs.root.mkdir()
    dirs.launcher_log.write_text(
        "grad norm: 0.59 ::train loss: 5.5\ngrad norm: 0.61 ::train loss: 5.4\n"
    )
    search = MetricSearch(tmp_path)
    search.look(dirs, is_joint=False)
    assert [place.names for place in search.places] == [("train loss", "grad norm")]
