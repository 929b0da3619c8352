"""Which earlier tests a failure takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pytest_megatron.repro.command import smallest_cause

TESTS = tuple(f"t{number}" for number in range(40))


@pytest.mark.parametrize(
    "needed",
    [("t0",), ("t39",), ("t17",), ("t3", "t4"), ("t0", "t39"), ("t1", "t20", "t38")],
    ids="-".join,
)
def test_the_smallest_cause_is_what_is_needed_in_its_order(needed: tuple[str, ...]) -> None:
    asked: list[tuple[str, ...]] = []

    def is_cause(part: Sequence[str]) -> bool:
        asked.append(tuple(part))
        return [test for test in part if test in needed] == list(needed)

    assert smallest_cause(TESTS, is_cause) == needed
    assert len(asked) == len(set(asked)) <= 80


def test_a_single_polluter_is_found_by_halving() -> None:
    trials: list[Sequence[str]] = []

    def is_cause(part: Sequence[str]) -> bool:
        trials.append(part)
        return "t30" in part

    assert smallest_cause(TESTS, is_cause) == ("t30",)
    assert len(trials) <= 12
