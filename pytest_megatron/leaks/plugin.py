"""The plugin of a rank that fails tests for what they leave behind in it.

It looks after the teardown of each test, and at the set-up of fixtures with a wider scope, whose
things are expected until they are torn down.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pluggy
import pytest

from pytest_megatron.gangs.ipc.messages import RankConfig
from pytest_megatron.leaks.look import Look, Things, cuda_bytes, describe, free_workspaces
from pytest_megatron.process.originals import time

_MOST_BYTES = 1 << 20  # of CUDA memory
_ENDING_S = 0.2  # for threads and processes that were asked to end
_TICK_S = 0.005


class LeakPlugin:
    """Hooks that fail the teardown of a test that passed and left something behind."""

    def __init__(self, rank_config: RankConfig) -> None:
        """Look at this process for the first time, before any test."""
        self._look = Look(rank_config.env)
        self._initial = self._last = self._look.things()
        self._bytes = cuda_bytes()
        self._of_fixtures: dict[object, Things] = {}
        self._has_passed = True
        self._text = ""  # of the failure of the running test

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Begin a test."""
        self._has_passed, self._text = True, ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note that a phase or a subtest did not pass; a leak is shown at the test's own line."""
        report = yield
        self._has_passed = self._has_passed and call.excinfo is None
        place = getattr(report.longrepr, "reprcrash", None)
        if self._text and place is not None:
            path, line, _ = item.location
            place.path, place.lineno, place.message = path, (line or 0) + 1, self._text
        return report

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item
    ) -> Generator[None, pluggy.Result[object], None]:
        """Fail for what is new, unless the test has failed, or its processes end with it."""
        outcome = yield
        left: list[str] = []
        try:
            left = self._find()
        except Exception:  # noqa: BLE001 - of what a test or a fixture has patched
            return
        is_judged = self._has_passed and outcome.exception is None
        if left and is_judged and item.get_closest_marker("isolated") is None:
            self._text = f"the test left behind: {'; '.join(left)}"
            outcome.force_exception(pytest.fail.Exception(self._text, pytrace=False))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, pluggy.Result[object], None]:
        """Expect what a fixture with a wider scope makes until it is torn down."""
        before = None if fixturedef.scope == "function" else self._try_to_look()
        yield
        after = None if before is None else self._try_to_look()
        if before is not None and after is not None:
            self._of_fixtures[fixturedef] = after[0] - before[0]
            self._bytes += after[1] - before[1]

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[object]) -> None:
        """Expect nothing of that fixture any longer."""
        self._last -= self._of_fixtures.pop(fixturedef, frozenset())

    def _try_to_look(self) -> tuple[Things, int] | None:
        """Return what this process holds; None where a fixture has patched what tells it."""
        try:
            return self._look.things(), cuda_bytes()
        except Exception:  # noqa: BLE001
            return None

    def _find(self) -> list[str]:
        """Return what is new, in words, and expect it from now on."""
        now, grown = self._look.things(), cuda_bytes() - self._bytes
        if self._new(now) or grown > _MOST_BYTES:
            gc.collect()
            free_workspaces()
            until = time.monotonic() + _ENDING_S
            while self._is_ending(now := self._look.things()) and time.monotonic() < until:
                time.sleep(_TICK_S)
            grown = cuda_bytes() - self._bytes
        new = self._new(now)
        self._last, self._bytes = now, self._bytes + grown
        memory = [f"{grown / (1 << 20):.1f} MiB of CUDA memory"] * (grown > _MOST_BYTES)
        return [*memory, *describe(new)]

    def _new(self, now: Things) -> Things:
        """Return what was there neither at first, nor after the test before, nor of a fixture."""
        return now.difference(self._initial, self._last, *self._of_fixtures.values())

    def _is_ending(self, now: Things) -> bool:
        """Return whether something is new that may be about to end."""
        return any(kind in ("threads", "processes") for kind, _ in self._new(now))
