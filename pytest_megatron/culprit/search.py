"""The state of a search for the first bad commit, and its decisions. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pytest_megatron.base.text import counted
from pytest_megatron.culprit.posterior import (
    CONFIDENCE,
    Belief,
    Tally,
    choose_next,
    rates_of,
    runs_of_an_end,
    suspects,
    update,
)
from pytest_megatron.errors import CulpritError
from pytest_megatron.runs.record import Real, RecordedFile

Outcome: TypeAlias = Literal["passed", "failed", "broken", "untestable"]
SHORT = 12
MOST_BROKEN = 3  # runs of a commit without a judgement; then it counts as untestable
_MOST_NO_CHANGE = 0.025  # once the ends differ


@dataclass(frozen=True, kw_only=True)
class CulpritRun:
    """A run of the item at a commit.

    Attributes:
        position: Of the commit; 0 is the good end.
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
        return f"{self.commits[position][:SHORT]} {self.subjects[position]}"

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
                f"{state.item} cannot run there: {untestable[end]}; give another commit",
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
