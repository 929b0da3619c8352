"""The choice of ranks as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.base.schema import parse
from pytest_megatron.errors import LaunchError
from pytest_megatron.layouts.model import Settings

FOUR = Settings(directory=Path("out"), world_size=4)


@pytest.mark.parametrize(
    ("text", "ranks", "count"),
    [
        ("all", (0, 1, 2, 3), 12),
        ("3", None, 3),
        ("3,0, 3", (0, 3), 12),
        ("0,", (0,), 12),
    ],
)
def test_a_choice_is_all_how_many_or_which(
    text: str, ranks: tuple[int, ...] | None, count: int
) -> None:
    chosen = FOUR.choose(text)
    assert (chosen.ranks, chosen.count) == (ranks, count)
    assert parse(Settings, chosen.to_json()) == chosen


@pytest.mark.parametrize("text", ["abc", "0", "1;2", "", "-1", "1,,2", ","])
def test_a_choice_that_names_no_ranks_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=f"^--fake-ranks: '{text}' names no ranks, expected all"):
        FOUR.choose(text)


def test_a_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(LaunchError, match="rank 9 of 4, expected 0 to 3"):
        FOUR.choose("0,9")
