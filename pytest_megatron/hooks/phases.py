"""Pytest's own protocol with the phases of some items replaced."""

from __future__ import annotations

import faulthandler
from typing import Protocol

import pluggy
import pytest


def show_no_stacks() -> None:
    """Have pytest not show this process's stacks after `faulthandler_timeout`, or end it.

    It only waits for others. Call it in `pytest_runtest_protocol`, once its wrappers have begun.
    """
    faulthandler.cancel_dump_traceback_later()


class Phases(Protocol):
    """What runs in the place of pytest's own phases."""

    def is_ours(self, item: pytest.Item) -> bool:
        """Whether an item runs on a gang."""

    def set_up(self, item: pytest.Item) -> None:
        """Run it up to the end of its setup."""

    def call(self, item: pytest.Item) -> None:
        """Run the test itself."""

    def tear_down(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Run its teardown, with what the next one no longer needs."""

    def report_phase(self, item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport:
        """Return what the ranks say of a phase."""


class PhaseHooks:
    """Pytest's hooks, with the phases of items of gangs replaced."""

    def __init__(self, hooks: pluggy.HookRelay, gangs: Phases) -> None:
        self._hooks = hooks
        self._gangs = gangs

    def __getattr__(self, name: str) -> object:
        return getattr(self._hooks, name)

    def pytest_runtest_setup(self, *, item: pytest.Item) -> object:
        """Set up on the gang."""
        if self._gangs.is_ours(item):
            self._gangs.set_up(item)
            return None
        return self._hooks.pytest_runtest_setup(item=item)

    def pytest_runtest_call(self, *, item: pytest.Item) -> object:
        """Call on the gang."""
        if self._gangs.is_ours(item):
            self._gangs.call(item)
            return None
        return self._hooks.pytest_runtest_call(item=item)

    def pytest_runtest_teardown(self, *, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        """Tear down on the gang."""
        if self._gangs.is_ours(item):
            self._gangs.tear_down(item, nextitem)
            return None
        return self._hooks.pytest_runtest_teardown(item=item, nextitem=nextitem)

    def pytest_runtest_makereport(
        self, *, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> pytest.TestReport:
        """Report what ranks say."""
        if self._gangs.is_ours(item) and call.excinfo is None:
            return self._gangs.report_phase(item, call)
        found: pytest.TestReport = self._hooks.pytest_runtest_makereport(item=item, call=call)
        return found
