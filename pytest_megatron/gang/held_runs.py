"""Which tests a gang has: the one that it runs, and those that were sent ahead. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pytest_megatron.gang.messages import Run

MOST_AHEAD = 64  # tests that a gang may hold beside the one that it runs


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
        """Number of the execution that runs, 0 without one."""
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
        """How many were sent ahead, and have not begun."""
        return len(self._ahead)

    @property
    def has_enough(self) -> bool:
        """Whether it can go on for a while with what was sent ahead."""
        return self.num_ahead > MOST_AHEAD // 2

    def begin(self, run: Run, limit_s: float) -> None:
        """Take a test as the running one."""
        self.current, self.limit_s = run, limit_s

    def add(self, runs: Sequence[tuple[Run, float]]) -> None:
        """Take tests that follow, each with the limit of its phases."""
        for run, limit_s in runs:
            assert run.after == self.last
            self._ahead.append((run, limit_s))

    def next(self) -> tuple[Run, float]:
        """Return the test that follows, which is no longer ahead then, with its limit."""
        return self._ahead.popleft()

    def drop(self) -> None:
        """Have none any more."""
        self.current = None
        self._ahead.clear()
