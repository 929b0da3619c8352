"""Ends a session in order on SIGTERM, in the seconds before SIGKILL.

GitLab, Jenkins, Kubernetes and `timeout` send SIGTERM first; so do `scancel`, a time limit and a
preemption of Slurm, to every task. It is taken as Ctrl-C is: ranks tear down, jobs and containers
are cancelled, and JUnit XML and run directory hold the results so far. Other nodes
ignore it, as node 0 ends their sessions.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType

import pytest

NAME = "megatron-cancelled"
# Where a terminal is lost, and with Ctrl-\ in one, pytest ends as it would without us.
_OFF_TERMINAL = (signal.SIGHUP, signal.SIGQUIT)

_Handler = Callable[[int, FrameType | None], None]


class CancelledPlugin:
    """Has the handlers of signals that end a session while tests run.

    A signal that is ignored (`nohup`), or has a handler of somebody's, stays theirs.
    """

    def __init__(self, job: str | None) -> None:
        """Take the job of Slurm that this process is in, if it is in one."""
        self._why = (
            "whoever started pytest ended it"
            if job is None
            else f"Slurm cancelled job {job}, or its time was up"
        )
        self._ours: list[signal.Signals] = []
        # A process that a test forks, or a rank, ends by these signals as it would without us.
        os.register_at_fork(after_in_child=self.pytest_unconfigure)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Have signals end the session while tests run.

        Raises:
            KeyboardInterrupt: The session is to end; further signals are ignored meanwhile.
        """
        if threading.current_thread() is not threading.main_thread():
            return (yield)  # only the main thread may have handlers
        for number, handle in self._handlers():
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, handle)
                self._ours.append(number)
        try:
            result = yield
        except KeyboardInterrupt:  # another signal may come while results are written
            for number in self._ours:
                signal.signal(number, signal.SIG_IGN)
            raise
        except BaseException:
            self.pytest_unconfigure()
            raise
        self.pytest_unconfigure()
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Restore the handlers that signals had."""
        for number in self._ours:
            signal.signal(number, signal.SIG_DFL)
        self._ours.clear()

    def _handlers(self) -> list[tuple[signal.Signals, _Handler]]:
        """Return the signals that end the session, with their handlers."""
        is_terminal = sys.__stdout__ is not None and sys.__stdout__.isatty()
        numbers = (signal.SIGTERM, *(() if is_terminal else _OFF_TERMINAL))
        return [(number, self._end) for number in numbers]

    def _end(self, number: int, frame: FrameType | None) -> None:
        """End the session as Ctrl-C does, with the signal's name."""
        del frame
        for known in self._ours:
            signal.signal(known, signal.SIG_IGN)  # once is enough; ending takes a while
        name = signal.Signals(number).name
        raise KeyboardInterrupt(f"{name}: {self._why}")
