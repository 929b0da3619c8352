"""The probability of each commit to be the first bad one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pytest_megatron.culprit.search import (
    CONFIDENCE,
    Tally,
    choose_next,
    rates_of,
    runs_of_an_end,
    suspects,
    update,
)

SURE = rates_of(0.0)


def ends(num_commits: int, **judged: Tally) -> list[Tally]:
    """Return the tallies of ends that are as they should be; `p3` is position 3."""
    inner = [judged.get(f"p{place}", Tally()) for place in range(1, num_commits)]
    return [Tally(passed=1), *inner, Tally(failed=1)]


def test_probabilities_sum_up_to_one() -> None:
    for rate in (None, 0.0, 0.3, 0.5, 0.95):
        belief = update(ends(8, p3=Tally(passed=2, failed=1)), rates_of(rate))
        assert sum(belief.first_bad) == pytest.approx(1.0)
        assert sum(one.weight for one in rates_of(rate)) == pytest.approx(1.0)


def test_an_item_that_never_misleads_is_bisected_by_halves() -> None:
    belief = update(ends(64), SURE)
    assert choose_next(belief, range(65)) == 32
    belief = update(ends(64, p32=Tally(failed=1)), SURE)
    assert choose_next(belief, range(65)) == 16


def test_a_failure_and_a_pass_beside_it_decide_for_an_item_that_never_misleads() -> None:
    belief = update(ends(8, p4=Tally(passed=1), p5=Tally(failed=1)), SURE)
    group, chance = suspects(belief, ())
    assert group == range(5, 6)
    assert chance > CONFIDENCE


def test_the_same_runs_do_not_decide_for_a_flaky_item() -> None:
    belief = update(ends(8, p4=Tally(passed=1), p5=Tally(failed=1)), rates_of(0.3))
    assert suspects(belief, ())[1] < CONFIDENCE


def test_a_pass_at_a_bad_commit_is_taken_for_a_bug_that_fails_now_and_then() -> None:
    tallies = ends(4, p1=Tally(passed=20), p2=Tally(passed=7, failed=3), p3=Tally(3, 2))
    belief = update(tallies, rates_of(None))
    assert belief.first_bad.index(max(belief.first_bad)) == 2
    assert 0.2 < belief.bad[2] < 0.7
    assert belief.good[2] < 0.05


def test_commits_that_cannot_be_run_stay_together_with_the_next_that_can() -> None:
    belief = update(ends(8, p3=Tally(passed=1), p6=Tally(failed=1)), SURE)
    group, chance = suspects(belief, (4, 5))
    assert group == range(4, 7)
    assert chance > CONFIDENCE


@pytest.mark.parametrize("tally", [Tally(failed=30), Tally(passed=30)])
def test_ends_that_behave_alike_mean_that_nothing_changed(tally: Tally) -> None:
    belief = update([tally, *[Tally()] * 7, tally], rates_of(None))
    assert belief.no_change > 0.9


@pytest.mark.parametrize(("rate", "runs"), [(0.0, (1, 1)), (0.3, (3, 9)), (None, (3, 9))])
def test_an_end_is_wrong_once_its_runs_no_longer_mislead_by_chance(
    rate: float | None, runs: tuple[int, int]
) -> None:
    assert runs_of_an_end(rate) == runs


def test_the_next_run_is_never_one_of_a_commit_that_cannot_be_run() -> None:
    belief = update(ends(8), SURE)
    assert choose_next(belief, {0, 1, 8}) == 1


def answer(first_bad: int, good: float, bad: float, chance: random.Random) -> int:
    """Return the answer of a search over 16 commits with random outcomes."""
    tallies = [Tally(passed=1), *[Tally()] * 15, Tally(failed=1)]
    rates = rates_of(0.3)
    while True:
        belief = update(tallies, rates)
        group, probability = suspects(belief, ())
        if probability >= CONFIDENCE:
            return group[0]
        place = choose_next(belief, range(17))
        is_failure = chance.random() < (bad if place >= first_bad else good)
        tally = tallies[place]
        tallies[place] = Tally(tally.passed + (not is_failure), tally.failed + is_failure)


@pytest.mark.parametrize(("good", "bad"), [(0.0, 0.3), (0.3, 1.0)])
def test_flaky_culprits_are_found_in_19_of_20_searches(good: float, bad: float) -> None:
    chance = random.Random(21)
    planted = [chance.randrange(1, 17) for _ in range(20)]
    found = [answer(first_bad, good, bad, chance) for first_bad in planted]
    assert sum(map(int.__eq__, planted, found)) >= 19


def test_more_failures_make_later_commits_less_probable() -> None:
    tallies = [ends(8, p4=Tally(failed=number)) for number in range(4)]
    chances = [sum(update(one, rates_of(0.3)).first_bad[5:]) for one in tallies]
    assert all(before > after for before, after in pairwise(chances))
