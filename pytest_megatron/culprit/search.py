"""The search for the first bad commit: its state, probabilities and decisions. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pytest_megatron.base.project import SHORT_COMMIT
from pytest_megatron.base.text import counted
from pytest_megatron.errors import CulpritError
from pytest_megatron.runs.record import Real, RecordedFile

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
        flake_rate: Rate for `rates_of`; where it is not known, a usual one is taken.
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
        tallies: Outcomes at each position, the good end first.
        rates: Rates from `rates_of`.
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
    """Return the mean of the values under each column of weights."""
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


Outcome: TypeAlias = Literal["passed", "failed", "broken", "untestable"]
MOST_BROKEN = 3  # runs of a commit without a judgement; then it counts as untestable
_MOST_NO_CHANGE = 0.025  # once the ends differ


@dataclass(frozen=True, kw_only=True)
class CulpritRun:
    """A run of the item at a commit.

    Attributes:
        position: Position of the commit; 0 is the good end.
        outcome: `broken` where nothing was judged and another run may, `untestable` where none can.
        problem: Why, in a line.
        log: File with the output, relative to the directory of the search.
    """

    position: int
    outcome: Outcome
    problem: str = ""
    duration_s: Real = 0.0
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class CulpritState(RecordedFile):
    """`state.json`: a search as far as it is.

    Attributes:
        prefix: The project's directory in the repository, empty or with a slash at its end.
        commits: The good end first, the bad end last.
        flake_rate: None where it is not known.
        argv: Command of a run, with `RUN_DIR` for its directory.
        setup: Shell line that prepares a worktree, or empty.
    """

    item: str
    prefix: str
    commits: tuple[str, ...]
    subjects: tuple[str, ...]
    flake_rate: Real | None
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    setup: str = ""
    time_limit_s: Real = 3600.0
    max_runs: int = 200
    runs: tuple[CulpritRun, ...] = ()

    @property
    def bad_end(self) -> int:
        """Position of the bad end."""
        return len(self.commits) - 1

    @property
    def tallies(self) -> list[Tally]:
        """The judged runs of each position."""
        runs = Counter((run.position, run.outcome) for run in self.runs)
        return [
            Tally(runs[place, "passed"], runs[place, "failed"])
            for place in range(len(self.commits))
        ]

    @property
    def untestable(self) -> dict[int, str]:
        """Positions that no run can judge, with the reason."""
        found = {run.position: run.problem for run in self.runs if run.outcome == "untestable"}
        broken = Counter(run.position for run in self.runs if run.outcome == "broken")
        for position, number in broken.items():
            if number >= MOST_BROKEN:
                problem = self.of(position, "broken")[-1].problem
                found.setdefault(position, f"broken {counted(number, 'time')}: {problem}")
        return found

    def of(self, position: int, outcome: Outcome) -> list[CulpritRun]:
        """Return the runs of a position with an outcome."""
        return [run for run in self.runs if (run.position, run.outcome) == (position, outcome)]

    def name(self, position: int) -> str:
        """Return a commit as it is printed."""
        return f"{self.commits[position][:SHORT_COMMIT]} {self.subjects[position]}"

    def counts(self, position: int) -> str:
        """Return the number of failed runs of a commit in words."""
        tally = self.tallies[position]
        return f"failed in {tally.failed} of {tally.passed + tally.failed} runs"


def believe(state: CulpritState) -> Belief:
    """Return the knowledge of a search."""
    return update(state.tallies, rates_of(state.flake_rate))


def next_position(state: CulpritState) -> int | None:
    """Return the commit to run next; None where the search is over.

    Raises:
        CulpritError: An end is not as it has to be.
    """
    ends, tallies, untestable = (0, state.bad_end), state.tallies, state.untestable
    limits = runs_of_an_end(state.flake_rate)
    for end, limit, option in zip(ends, limits, ("--good", "--bad"), strict=True):
        if end in untestable:
            raise CulpritError(
                f"{option} {state.name(end)}",
                f"{state.item} cannot run there: {untestable[end]}; give another commit, "
                "or for a newer test a --setup that takes its file from a commit that has it",
            )
        tally = tallies[end]
        as_expected, other = (tally.passed, tally.failed)[:: 1 if end == 0 else -1]
        if other >= limit and not as_expected:
            raise _no_change(state, end)
        if not as_expected:
            return end if len(state.runs) < state.max_runs else None
    belief = believe(state)
    if belief.no_change >= CONFIDENCE:
        raise _no_change(state, 0 if belief.first_bad[0] > belief.first_bad[-1] else state.bad_end)
    if len(state.runs) >= state.max_runs:
        return None
    if belief.no_change > _MOST_NO_CHANGE:
        return choose_next(belief, ends)
    if suspects(belief, untestable)[1] >= CONFIDENCE:
        return None
    return choose_next(belief, set(range(len(state.commits))) - untestable.keys())


def _no_change(state: CulpritState, end: int) -> CulpritError:
    """Return the error that one end of the search is not as it has to be."""
    found = f"{state.item} {state.counts(end)} there"
    if end == 0:
        return CulpritError(
            f"--good {state.name(end)}",
            f"{found}, expected passes; give an older commit, or --setup if the code that runs is "
            "not that of the worktree",
        )
    return CulpritError(
        f"--bad {state.name(end)}",
        f"{found}, expected failures; if it fails now and then only, give --flake-rate, and the "
        "options of its run by --run or --pytest-args",
    )


@dataclass(frozen=True, kw_only=True)
class CulpritCommit:
    """Evidence of one commit.

    Attributes:
        untestable: Why it could not be run, or None.
        probability: To be the first bad one.
    """

    commit: str
    subject: str
    passed: int
    failed: int
    broken: int
    untestable: str | None
    probability: Real
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CulpritReport(RecordedFile):
    """`culprit.json`: the result of a search.

    Attributes:
        commit: The first bad one; None where it is one of several `candidates`.
        probability: That it is among the candidates.
        commits: Those that were run, and the candidates, in the order of history.
    """

    item: str
    good: str
    bad: str
    commit: str | None
    subject: str | None
    probability: Real
    candidates: tuple[str, ...]
    num_runs: int
    flake_rate: Real | None
    commits: tuple[CulpritCommit, ...]


def report_of(state: CulpritState) -> CulpritReport:
    """Return the result of a search that is over."""
    belief, untestable = believe(state), state.untestable
    group, probability = suspects(belief, untestable)
    if probability < CONFIDENCE:  # stopped by the number of runs
        group, probability = _likely(belief)
    is_found = len(group) == 1 and probability >= CONFIDENCE
    seen = sorted({*group, *(run.position for run in state.runs)})
    return CulpritReport(
        item=state.item,
        good=state.commits[0],
        bad=state.commits[-1],
        commit=state.commits[group[0]] if is_found else None,
        subject=state.subjects[group[0]] if is_found else None,
        probability=round(probability, 4),
        candidates=tuple(state.commits[place] for place in group),
        num_runs=len(state.runs),
        flake_rate=state.flake_rate,
        commits=tuple(_evidence(state, belief, untestable, seen)),
    )


def _likely(belief: Belief) -> tuple[range, float]:
    """Return the shortest range of commits that holds the first bad one."""
    chances = belief.first_bad
    best = range(1, len(chances) - 1)
    for start in best:
        total = 0.0
        for stop in range(start, min(len(chances) - 1, start + len(best))):
            total += chances[stop]
            if total >= CONFIDENCE:
                best = min(best, range(start, stop + 1), key=len)
                break
    return best, sum(chances[best.start : best.stop])


def _evidence(
    state: CulpritState, belief: Belief, untestable: dict[int, str], positions: Iterable[int]
) -> Iterable[CulpritCommit]:
    """Yield what is known of each commit: outcomes, probability, failures."""
    for place in positions:
        tally = state.tallies[place]
        failures = [*state.of(place, "failed"), *state.of(place, "broken")]
        yield CulpritCommit(
            commit=state.commits[place],
            subject=state.subjects[place],
            passed=tally.passed,
            failed=tally.failed,
            broken=len(state.of(place, "broken")),
            untestable=untestable.get(place),
            probability=round(belief.first_bad[place], 4),
            problems=tuple(dict.fromkeys(run.problem for run in failures if run.problem)),
        )
