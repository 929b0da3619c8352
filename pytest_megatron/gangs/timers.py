"""States of a gang and the time limits of each: pure."""

from __future__ import annotations

from enum import Enum

START_LIMIT_S = 300.0  # to import torch and collect from a slow file system


class GangState(Enum):
    """State of a gang."""

    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    STOPPING = "stopping"
    CLOSING = "closing"
    KILLING = "killing"
    GONE = "gone"


class Timers:
    """Timers of one gang, in seconds of one monotonic clock.

    Attributes:
        began_at: Start of the running test, or of the gang.
        first_failure_at: When a rank first failed, skipped or died in the running test, or None.
        after_failure_s: Time for the other ranks from then on.
        closing_s: Time limit of the last teardown.
    """

    def __init__(self, grace_s: float, now: float) -> None:
        self._grace_s = grace_s
        self.closing_s = grace_s
        self._stop_by = 0.0
        self._debugging: set[int] = set()
        self.begin(now)

    def begin(self, now: float) -> None:
        """Restart for a new test."""
        self.began_at = self._phase_at = now
        self.first_failure_at: float | None = None
        self.after_failure_s = self._grace_s

    def begin_phase(self, now: float) -> None:
        """Restart the limit of a phase."""
        self._phase_at = now

    def record_failure(self, now: float) -> None:
        """Record the time of a failure, if it is the first."""
        if self.first_failure_at is None:
            self.first_failure_at = now

    def hurry(self, most_s: float) -> None:
        """Reduce the time for the other ranks after the first failure."""
        self.after_failure_s = min(self._grace_s, most_s)

    def begin_closing(self, limit_s: float, now: float) -> None:
        """Start the limit of the last teardown, which is that of a phase."""
        self.closing_s = max(self._grace_s, limit_s)
        self._stop_by = now + self.closing_s

    def begin_stopping(self, limit_s: float, now: float) -> None:
        """Start the limit for stacks to arrive."""
        self._stop_by = now + limit_s

    def suspend(self, rank: int) -> None:
        """Stop the timers while a rank is in its debugger."""
        self._debugging.add(rank)

    def forget(self, rank: int) -> None:
        """Ignore the debugger of a rank that died."""
        self._debugging.discard(rank)

    def resume(self, rank: int, state: GangState, now: float) -> None:
        """Restart the timers when a rank has left its debugger."""
        self._debugging.discard(rank)
        self._phase_at = now
        if self.first_failure_at is not None:
            self.first_failure_at = now
        if state is GangState.CLOSING:
            self._stop_by = now + self.closing_s

    def deadline(self, state: GangState, limit_s: float) -> float | None:
        """Return the deadline of a state, or None.

        Args:
            state: State of the gang.
            limit_s: Limit of a phase of the running test; 0 is no limit.
        """
        match state:
            case GangState.CLOSING if self._debugging:
                return None
            case GangState.STOPPING | GangState.CLOSING:
                return self._stop_by
            case GangState.STARTING:
                return self.began_at + START_LIMIT_S
            case GangState.RUNNING if not self._debugging:
                if self.first_failure_at is not None:
                    return self.first_failure_at + self.after_failure_s
                return self._phase_at + limit_s if limit_s else None
            case _:
                return None
