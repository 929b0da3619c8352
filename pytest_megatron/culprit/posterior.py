"""Probability of each commit to be the first bad one, from runs that may mislead. Pure.

Positions count the commits from the good end, 0, to the bad end. The unknowns are the position of
the first bad commit and the rates at which the item fails before it and from it on; runs of one
commit are taken to be independent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Above 0.95: with rates that are not known, so many answers of 100 are wrong that look right to 95.
CONFIDENCE = 0.98
_NO_CHANGE = 0.05  # prior probability that the good end is bad, and that the bad end is good
_SURE = 0.005  # rate at which an item misleads of which no flakiness is known
_NEVER = 1e-4  # likewise, of one that is known to be without
_RATES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_USUAL = 0.3  # rate of a flaky item of which nothing is known
_BY_CHANCE = 0.05  # probability of all outcomes at an end to mislead
_IS_FLAKY = 0.5  # prior probability, of an item of which nothing is known
_IS_OTHER = 0.1  # prior probability that an item has other rates than its history


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates at which the item fails before the first bad commit and from it on.

    Attributes:
        weight: Prior probability; those of all rates sum up to 1.
    """

    good: float
    bad: float
    weight: float


@dataclass(frozen=True, slots=True)
class Tally:
    """Numbers of runs of one commit that passed and failed."""

    passed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Belief:
    """Knowledge after some runs.

    Attributes:
        first_bad: Probability of each position to be the first bad one; of 0, the good end is bad
            as well; the last is one behind the bad end, which is good then.
        good: Rate of failures before the first bad commit, should it be the one at a position.
        bad: Rate of failures from the first bad commit on, likewise.
    """

    first_bad: tuple[float, ...]
    good: tuple[float, ...]
    bad: tuple[float, ...]

    @property
    def no_change(self) -> float:
        """Probability that both ends are good or both are bad."""
        return self.first_bad[0] + self.first_bad[-1]


def rates_of(flake_rate: float | None) -> tuple[Rates, ...]:
    """Return the rates that an item may have.

    Args:
        flake_rate: Share of its runs that mislead: that fail at a good commit, or pass at a bad
            one. None where nothing is known.
    """
    sure = [(_SURE, 1 - _SURE)]
    unknown = _pairs((_SURE, *_RATES, 1 - _SURE))
    if flake_rate is None:
        return (*_weighted(sure, 1 - _IS_FLAKY), *_weighted(unknown, _IS_FLAKY))
    if flake_rate <= _SURE:
        return tuple(_weighted([(_NEVER, 1 - _NEVER)], 1.0))
    known = _pairs(sorted({_SURE, flake_rate, 1 - flake_rate, 1 - _SURE}))
    return (*_weighted(known, 1 - _IS_OTHER), *_weighted(unknown, _IS_OTHER))


def runs_of_an_end(flake_rate: float | None) -> tuple[int, int]:
    """Return after how many runs an end counts as wrong that failed each time, and passed.

    Args:
        flake_rate: As for `rates_of`; where it is not known, a usual one is taken.
    """
    rate = _USUAL if flake_rate is None else max(flake_rate, _NEVER)
    is_rare = 1 - rate if rate > _SURE else rate  # a bug that fails in this share of its runs
    chances = (rate, max(rate, is_rare))
    always_failed, always_passed = (math.ceil(math.log(_BY_CHANCE, chance)) for chance in chances)
    return always_failed, always_passed


def _pairs(rates: Sequence[float]) -> list[tuple[float, float]]:
    return [(good, bad) for good in rates for bad in rates if good < bad]


def _weighted(pairs: Sequence[tuple[float, float]], weight: float) -> list[Rates]:
    share = weight / len(pairs)
    return [Rates(good, bad, share) for good, bad in pairs]


def update(tallies: Sequence[Tally], rates: Sequence[Rates]) -> Belief:
    """Return the knowledge after some runs.

    Args:
        tallies: Of each position, the good end first.
        rates: As from `rates_of`.
    """
    num_commits = len(tallies) - 1
    inner = math.log((1 - 2 * _NO_CHANGE) / num_commits)
    prior = [math.log(_NO_CHANGE), *([inner] * num_commits), math.log(_NO_CHANGE)]
    rows: list[list[float]] = []
    for one in rates:
        good, bad = (_log_likelihoods(tallies, rate) for rate in (one.good, one.bad))
        score = math.log(one.weight) + sum(bad)  # of all positions being bad
        row = []
        for position, log_prior in enumerate(prior):
            row.append(log_prior + score)
            if position < len(tallies):
                score += good[position] - bad[position]
        rows.append(row)
    largest = max(map(max, rows))
    weights = [[math.exp(value - largest) for value in row] for row in rows]
    sums = [max(sum(column), 1e-300) for column in zip(*weights, strict=True)]
    total = sum(sums)
    return Belief(
        first_bad=tuple(value / total for value in sums),
        good=_means([one.good for one in rates], weights, sums),
        bad=_means([one.bad for one in rates], weights, sums),
    )


def _log_likelihoods(tallies: Sequence[Tally], rate: float) -> list[float]:
    passes, fails = math.log(1 - rate), math.log(rate)
    return [tally.passed * passes + tally.failed * fails for tally in tallies]


def _means(
    values: Sequence[float], weights: Sequence[Sequence[float]], sums: Sequence[float]
) -> tuple[float, ...]:
    columns = zip(*weights, strict=True)
    pairs = zip(columns, sums, strict=True)
    return tuple(
        sum(map(float.__mul__, values, column)) / total if total > 1e-300 else 0.5  # noqa: PLR2004 - as above
        for column, total in pairs
    )


def choose_next(belief: Belief, positions: Collection[int]) -> int:
    """Return the position whose next run is expected to reveal the most about the first bad commit.

    Of an item that never misleads, that is the one that halves the probability.

    Args:
        belief: After the runs so far.
        positions: That can be run; not empty.
    """
    chances = belief.first_bad
    later_fails = sum(map(float.__mul__, chances, belief.good))  # the first bad one comes later
    later_bits = sum(p * _bits(rate) for p, rate in zip(chances, belief.good, strict=True))
    best, most = min(positions), -1.0
    earlier_fails = earlier_bits = 0.0
    for position in range(len(chances) - 1):
        chance, good, bad = chances[position], belief.good[position], belief.bad[position]
        later_fails -= chance * good
        later_bits -= chance * _bits(good)
        earlier_fails += chance * bad
        earlier_bits += chance * _bits(bad)
        gain = _bits(earlier_fails + later_fails) - earlier_bits - later_bits
        if position in positions and gain > most:
            best, most = position, gain
    return best


def _bits(rate: float) -> float:
    """Return the entropy of an outcome with two values."""
    if not 0 < rate < 1:
        return 0.0
    return -(rate * math.log2(rate) + (1 - rate) * math.log2(1 - rate))


def suspects(belief: Belief, untestable: Collection[int]) -> tuple[range, float]:
    """Return the most probable first bad commit and its probability.

    Commits that cannot be run stay together with the next one that can, as no run separates them.

    Args:
        belief: After the runs so far.
        untestable: Positions that cannot be run.
    """
    groups: list[range] = []
    start = 1
    for position in range(1, len(belief.first_bad) - 1):
        if position not in untestable:
            groups.append(range(start, position + 1))
            start = position + 1
    found = [(sum(belief.first_bad[group.start : group.stop]), group) for group in groups]
    chance, group = max(found, key=lambda pair: pair[0])
    return group, chance
