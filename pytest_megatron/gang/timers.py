"""How long a gang may take for what it does, and the states of its life: pure."""

from __future__ import annotations

from enum import Enum

START_LIMIT_S = 300.0  # to import torch and collect; slow file systems exist


class GangState(Enum):
    """Where a gang is in its life."""

    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    STOPPING = "stopping"
    CLOSING = "closing"
    KILLING = "killing"
    GONE = "gone"


class Timers:
    """The times that count for one gang, in seconds of one monotonic clock.

    Attributes:
        began_at: When the running test began, or the gang.
        first_failure_at: When a rank first failed, skipped or died in the running test, or None.
        after_failure_s: How long others may take from then on.
        closing_s: How long the last teardown may take.
    """

    def __init__(self, grace_s: float, now: float) -> None:
        self._grace_s = grace_s
        self.closing_s = grace_s
        self._stop_by = 0.0
        self._debugging: set[int] = set()
        self.begin(now)

    def begin(self, now: float) -> None:
        """Count for a new test."""
        self.began_at = self._phase_at = now
        self.first_failure_at: float | None = None
        self.after_failure_s = self._grace_s

    def begin_phase(self, now: float) -> None:
        """Count anew for a phase."""
        self._phase_at = now

    def record_failure(self, now: float) -> None:
        """Take note of a sign of trouble; the first one counts."""
        if self.first_failure_at is None:
            self.first_failure_at = now

    def hurry(self, most_s: float) -> None:
        """Give others less time after the sign."""
        self.after_failure_s = min(self._grace_s, most_s)

    def begin_closing(self, limit_s: float, now: float) -> None:
        """Count for the last teardown: it has the time of a phase."""
        self.closing_s = max(self._grace_s, limit_s)
        self._stop_by = now + self.closing_s

    def begin_stopping(self, limit_s: float, now: float) -> None:
        """Count for answers to a question."""
        self._stop_by = now + limit_s

    def suspend(self, rank: int) -> None:
        """Stop counting while a rank is in its debugger."""
        self._debugging.add(rank)

    def forget(self, rank: int) -> None:
        """Take note that a rank is no longer there to be debugged."""
        self._debugging.discard(rank)

    def resume(self, rank: int, state: GangState, now: float) -> None:
        """Count anew when a rank has left its debugger."""
        self._debugging.discard(rank)
        self._phase_at = now
        if self.first_failure_at is not None:
            self.first_failure_at = now
        if state is GangState.CLOSING:
            self._stop_by = now + self.closing_s

    def deadline(self, state: GangState, limit_s: float) -> float | None:
        """Return when it ends, None if it does not.

        Args:
            state: Of the gang.
            limit_s: Of a phase of the running test; 0 is no limit.
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
