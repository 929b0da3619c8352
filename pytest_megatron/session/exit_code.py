"""Ends a failed session with its own exit code, whatever a test module or a hook of others ends.

`os._exit(0)` in a function of `atexit`, in a fixture's teardown or in a thread, and `sys.exit(0)`
in a hook at the end of a session, would have failed tests end with 0. What C code ends cannot be
held; `run.json` says how far the session came, and `ci summary` reads it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from os import getpid  # a test may put another function in its place
from typing import TYPE_CHECKING, NoReturn, cast

import pytest

if TYPE_CHECKING:
    from types import FrameType

    from _pytest.capture import CaptureManager

NAME = "megatron-exit-code"


class ExitCodePlugin:
    """Holds the exit code of a session that was started from the command line."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._session: pytest.Session | None = None
        self._is_over = False
        self._owner = getpid()
        self._exit = os._exit
        os._exit = self._end

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Know the session from now on."""
        self._session = session

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Know that all tests have ended: a hook may end pytest now, so as not to wait for it."""
        try:
            return (yield)
        finally:
            self._is_over = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None]:
        """Hold the code where a hook calls `sys.exit`."""
        self._is_over = True
        with self._held():
            yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_unconfigure(self) -> Generator[None]:
        """Hold the code where a hook calls `sys.exit`."""
        with self._held():
            yield

    @contextlib.contextmanager
    def _held(self) -> Generator[None]:
        """Have `sys.exit(0)` end with the session's code."""
        try:
            yield
        except SystemExit as end:
            if end.code or not self._code:
                raise
            self._tell("sys.exit(0) was called by a hook")
            raise SystemExit(self._code) from end

    @property
    def _code(self) -> int:
        """The session's exit code so far; one that has not ended has failed."""
        if self._session is None:
            return 0
        if self._is_over:
            return int(self._session.exitstatus)
        return int(pytest.ExitCode.TESTS_FAILED)

    def _end(self, status: int) -> NoReturn:
        """Stand for `os._exit`."""
        if status == 0 and self._code and getpid() == self._owner:
            status = self._code
            caller = sys._getframe().f_back
            code = None if caller is None else caller.f_code
            who = "atexit" if code is None else f"{code.co_name} of {code.co_filename}"
            with contextlib.suppress(Exception):  # it ends in any case
                self._tell(f"os._exit(0) was called by {who}")
        self._exit(status)

    def _tell(self, what: str) -> None:
        """Report what would have ended the session with 0, and its output so far."""
        capture = cast(
            "CaptureManager | None", self._config.pluginmanager.getplugin("capturemanager")
        )
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        sys.stdout.flush()
        when = "failed" if self._is_over else "had not ended"
        sys.stderr.write(f"megatron: {what}; the session {when}, exit code {self._code}\n")
        sys.stderr.flush()


def register(config: pytest.Config) -> None:
    """Hold the exit code of a process that is pytest's; a program that calls pytest has its own."""
    is_held = getattr(os._exit, "__func__", None) is ExitCodePlugin._end  # noqa: SLF001
    if _is_pytests_own() and not is_held:  # else one session runs inside another
        config.pluginmanager.register(ExitCodePlugin(config), NAME)


def _is_pytests_own() -> bool:
    """Return whether this process was started as `pytest`, and ends with what pytest returns."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        is_pytests = frame.f_globals.get("__name__") == "_pytest.config"
        if is_pytests and frame.f_code.co_name.endswith("console_main"):
            return True
        frame = frame.f_back
    return False
