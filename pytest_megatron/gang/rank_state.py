"""State of one rank of a gang in the controller: pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from pytest_megatron.base.files import JsonValue
from pytest_megatron.gang.ipc.messages import Died, Done, Run
from pytest_megatron.gang.spec import RankResult, Reason


@dataclass(slots=True, kw_only=True)
class RankState:
    """State of one rank, and of the running test on it.

    Attributes:
        is_lost: Whether its connection ended for a reason that is not reported yet.
        death: Its death in a test that was sent ahead and is not the running one yet.
    """

    rank: int
    log_dir: str
    is_ready: bool = False
    is_lost: bool = False
    death: Died | None = None
    exit_code: int | None = None
    is_closed: bool = False
    problem: str = ""
    missing: dict[str, str] = field(default_factory=dict)
    # Of the current run:
    done: Done | None = None
    early: tuple[JsonValue, ...] = ()
    at: float | None = None
    failed_phase: str = ""
    outcome: str = ""
    ended_phase: str = ""  # the last one that was reported
    phase: str = ""
    stack: str = ""
    flight: str = ""

    def reset(self) -> None:
        """Clear the state of the test that ended."""
        self.done = self.at = None
        self.failed_phase = self.outcome = self.phase = self.ended_phase = ""
        self.problem = self.stack = self.flight = ""
        self.early = ()

    def undo(self) -> None:
        """Undo its end of the test: it was lost before the others ended it."""
        if self.done is not None:
            self.early = tuple(
                report
                for report in self.done.reports
                if isinstance(report, dict) and report.get("outcome") != "passed"
            )
            self.done = None

    @property
    def is_settled(self) -> bool:
        """True if it sends no more messages about this test."""
        is_ended = self.done is not None or self.exit_code is not None or bool(self.problem)
        return is_ended and not self.is_lost

    def end(self) -> RankResult:
        """Return its result of the test."""
        return RankResult(**{f.name: getattr(self, f.name) for f in fields(RankResult)})


def settle(ranks: Sequence[RankState], *, is_isolated: bool) -> tuple[Reason, bool] | None:
    """Return the reason of a test's end, and whether its gang may run another; None before."""
    if not all(r.is_settled for r in ranks):
        return None
    done = [r.done for r in ranks if r.done is not None]
    if len(done) < len(ranks):
        return kind_of_first_failure(ranks), False
    is_in_step = len({d.num_collectives for d in done}) == 1 or is_isolated
    if not is_in_step and all(r.outcome == "passed" for r in ranks):
        return Reason.DESYNCHRONISED, False
    # A rank that set up groups alone uses other keys of the store than the others; and a send
    # without a receive would be received in a later test.
    is_matched = len({d.num_rendezvous for d in done}) == 1 and not sum(
        d.num_unmatched for d in done
    )
    is_dead = any(r.exit_code is not None for r in ranks)
    is_sound = is_matched and not is_dead and not any(d.poison for d in done)
    return Reason.DONE, is_in_step and is_sound


def kind_of_first_failure(ranks: Sequence[RankState]) -> Reason:
    """Return the kind of the first failure."""
    first = min((r for r in ranks if r.at is not None), key=lambda r: (r.at, r.rank))
    is_death = first.exit_code is not None and not first.failed_phase
    return Reason.DIED if is_death else Reason.FAILED


MOST_AHEAD = 64  # tests of a gang beside the running one


class RunQueue:
    """The tests of one gang, in the order in which they run.

    Attributes:
        current: The running one, or the next of a gang that starts; None without any.
        limit_s: Of its phases; 0 is no limit. It stays when the test has ended.
    """

    def __init__(self) -> None:
        self.current: Run | None = None
        self.limit_s = 0.0
        self._ahead: deque[tuple[Run, float]] = deque()

    @property
    def number(self) -> int:
        """Number of the running execution, 0 without one."""
        return 0 if self.current is None else self.current.run

    @property
    def numbers(self) -> list[int]:
        """Numbers of all executions."""
        return [] if self.current is None else [self.number, *(run.run for run, _ in self._ahead)]

    @property
    def last(self) -> int:
        """Number of the last execution, 0 without any."""
        return self._ahead[-1][0].run if self._ahead else self.number

    @property
    def num_ahead(self) -> int:
        """Number of tests that were sent ahead and have not begun."""
        return len(self._ahead)

    @property
    def has_enough(self) -> bool:
        """True if enough tests were sent ahead for a while."""
        return self.num_ahead > MOST_AHEAD // 2

    def begin(self, run: Run, limit_s: float) -> None:
        """Set the running test."""
        self.current, self.limit_s = run, limit_s

    def add(self, runs: Sequence[tuple[Run, float]]) -> None:
        """Append tests, each with the limit of its phases."""
        for run, limit_s in runs:
            assert run.after == self.last
            self._ahead.append((run, limit_s))

    def next(self) -> tuple[Run, float]:
        """Remove and return the next test with its limit."""
        return self._ahead.popleft()

    def drop(self) -> None:
        """Remove all tests."""
        self.current = None
        self._ahead.clear()
