"""Ends a session in order when Slurm ends its job, in the seconds between SIGTERM and SIGKILL.

`scancel`, a time limit and a preemption send SIGTERM to every task first. It is taken as Ctrl-C is:
ranks tear down, and JUnit XML and run directory say what was finished. On nodes that follow it is
node 0 that ends the session.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType

import pytest

_FOLLOWER_S = 20.0  # for node 0 to end the session; Slurm gives 30 by default (KillWait)


class CancelledPlugin:
    """Has SIGTERM's handler while tests run."""

    def __init__(self, job: str, *, is_follower: bool) -> None:
        self._text = f"SIGTERM: Slurm cancelled job {job}, or its time was up"
        self._is_follower = is_follower
        self._has_ended = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Run the tests."""
        if threading.current_thread() is not threading.main_thread():
            return (yield)  # only the main thread may have handlers
        before = [(number, signal.signal(number, handle)) for number, handle in self._handlers()]
        try:
            return (yield)
        finally:
            if not self._has_ended:  # else it comes again, while results are written
                for number, handler in before:
                    signal.signal(number, handler)

    def _handlers(self) -> list[tuple[int, Callable[[int, FrameType | None], None]]]:
        if self._is_follower:
            return [(signal.SIGTERM, self._wait), (signal.SIGALRM, self._end)]
        return [(signal.SIGTERM, self._end)]

    def _wait(self, number: int, frame: FrameType | None) -> None:
        """Leave node 0 time to tell how the session ends."""
        del number, frame
        signal.setitimer(signal.ITIMER_REAL, _FOLLOWER_S)

    def _end(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._has_ended = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt(self._text)
