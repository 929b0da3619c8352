"""Counts distributed tests that passed on one process, where nothing between ranks was tested.

The fixtures work without a gang as well, so that a test whose collective is missing passes there.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from pytest_megatron.gangs import fixtures
from pytest_megatron.runs.headline import one_process_problem
from pytest_megatron.session.options import ON_ONE_PROCESS, typed

NAME = "megatron-one-process"
_ON_REPORT = "megatron_on_one_process"
_RANK_PLUGIN = "megatron-rank"
_FIXTURES = ("process_group", "world_size")
_CI = ("CI", "BUILD_NUMBER")  # as in pytest


class OneProcess:
    """Notes tests that used a fixture of ranks in pytest's own process; in CI they fail it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._is_ci = typed(config, "bucket") is not None or any(map(os.environ.get, _CI))
        self._found: list[str] = []
        config.stash[ON_ONE_PROCESS] = self._found

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note a test that passed; the report carries it out of a worker of pytest-xdist."""
        report = yield
        is_rank = self._config.pluginmanager.has_plugin(_RANK_PLUGIN)
        if report.when == "call" and report.passed and not is_rank and _is_alone(item):
            vars(report)[_ON_REPORT] = True
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the tests, also those of workers."""
        if hasattr(report, _ON_REPORT) and report.nodeid not in self._found:
            self._found.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the session in CI."""
        if self._found and self._is_ci and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the tests, and the ways out."""
        if self._found:
            colour = {"red": True} if self._is_ci else {"yellow": True}
            line = f"megatron: {one_process_problem(self._found)}"
            terminalreporter.write_line(f"{line}; this fails CI" if self._is_ci else line, **colour)


def _is_alone(item: pytest.Item) -> bool:
    """Return whether a test used a fixture of ours that says it is the only rank, unmeant."""
    if item.get_closest_marker("controller") is not None:
        return False
    used = getattr(getattr(item, "_request", None), "_fixture_defs", {})  # has dynamic ones, too
    of_ours = (
        used[name].func.__module__ == fixtures.__name__ for name in _FIXTURES if name in used
    )
    return any(of_ours) and used["world_size"].cached_result[0] == 1
