"""The role that remembers: the history of past outcomes, and `--fail-flaky`.

Lives in the controller alone, beside the roles for workloads and for distributed tests; the
reports carry its data.
"""

from __future__ import annotations

import contextlib

import pytest

from pytest_megatron.hooks.run_file import record_on
from pytest_megatron.hooks.session import RunSession
from pytest_megatron.runs.environment import utc_now
from pytest_megatron.runs.history import HistoryEntry, append, known_items, read
from pytest_megatron.runs.layout import make_own_dir
from pytest_megatron.runs.record import RecordedItem, RecordedTest, RecordedWorkload

NAME = "megatron-history"


class HistoryPlugin:
    """Writes a line for each item and run, and fails a session that was flaky, if asked to."""

    def __init__(self, session: RunSession) -> None:
        self._session = session
        self._path = None if session.options.history == "off" else session.history_file
        self._kept: dict[str, HistoryEntry] = {}
        self._earlier = self._of_this_run() if session.options.is_attached else frozenset()
        self._known: frozenset[str] | None = None
        self._num_flaky = 0
        self._problem: str | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the record of an item; write that of a training at once."""
        record = record_on(report)
        if record is not None and self._is_worth_a_line(report.nodeid, record):
            self._kept[report.nodeid] = self._entry(report.nodeid, record)
            if isinstance(record, RecordedWorkload):
                self._write()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the rest, and fail a session that was flaky, if asked to."""
        self._write()
        is_failure = self._num_flaky > 0 and self._session.options.is_flaky_failure
        if is_failure and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report that flaky items fail the session, and that the history lacks something."""
        if self._num_flaky and self._session.options.is_flaky_failure:
            items = "1 item was" if self._num_flaky == 1 else f"{self._num_flaky} items were"
            terminalreporter.write_line(
                f"megatron: {items} flaky, and --fail-flaky is given", red=True
            )
        if self._problem is not None:
            terminalreporter.write_line(f"megatron: {self._problem}", yellow=True)

    def _is_worth_a_line(self, node_id: str, record: RecordedItem) -> bool:
        """Return true for every workload, and for tests that are or were flaky or failed."""
        if record.verdict == "flaky" and not record.is_held:
            self._num_flaky += 1
        if self._path is None or node_id in self._earlier:
            return False
        is_workload = isinstance(record, RecordedWorkload)
        return is_workload or record.verdict in ("flaky", "failed") or self._knows(node_id)

    def _of_this_run(self) -> frozenset[str]:
        """Return the items of which the controller that is gone wrote already."""
        if self._path is None:
            return frozenset()
        with contextlib.suppress(OSError):  # `_knows` says it
            entries = read(self._path).entries
            return frozenset(e.node_id for e in entries if e.run == self._session.run_dir.name)
        return frozenset()

    def _knows(self, node_id: str) -> bool:
        """Return true if the history has an item: then its passes count as well."""
        if self._known is None:
            assert self._path is not None
            try:
                self._known = known_items(self._path)
            except OSError as error:
                self._known = frozenset()
                self._problem = f"{self._session.shorten(str(self._path))}: {error.strerror}"
        return node_id in self._known

    def _entry(self, node_id: str, record: RecordedItem) -> HistoryEntry:
        facts = self._session.facts
        if isinstance(record, RecordedTest):
            kind, platform = "test", f"{record.device} x{record.world_size}"
        else:
            kind, platform = "workload", str(record.platform)
        return HistoryEntry(
            time=utc_now(),
            run=self._session.run_dir.name,
            node_id=self._session.redactor.text(node_id),
            kind=kind,
            verdict=record.verdict,
            num_attempts=len(record.attempts),
            causes=record.causes,
            duration_s=round(record.duration_s or 0.0, 3),
            commit=facts.commit,
            is_dirty=facts.is_dirty,
            platform=platform,
            is_quarantined=record.is_held,
        )

    def _write(self) -> None:
        """Append new entries; a history that cannot be written is reported and fails nothing."""
        entries, self._kept = self._kept, {}
        if self._path is None or not entries:
            return
        try:
            if not self._session.options.history:
                make_own_dir(self._session.root)
            append(self._path, entries.values())
        except OSError as error:
            where = self._session.shorten(str(error.filename or self._path))
            self._problem = f"{where}: {error.strerror}; the history of this run is not complete"


def register_history(config: pytest.Config, session: RunSession) -> None:
    """Register the role, once for a session."""
    if not session.is_worker and not config.pluginmanager.has_plugin(NAME):
        config.pluginmanager.register(HistoryPlugin(session), NAME)
