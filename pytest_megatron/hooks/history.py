"""The role that remembers: the history of past outcomes, and `--fail-flaky`.

Lives in the controller alone, beside the roles for workloads and for distributed tests; what it
knows comes on the reports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.hooks.session import RunSession
from pytest_megatron.runs.environment import utc_now
from pytest_megatron.runs.history import FILE_NAME, HistoryEntry, append, known_items, read
from pytest_megatron.runs.layout import OWN_DIR, make_own_dir

NAME = "megatron-history"
RECORDS = {"megatron_workload": "workload", "megatron_test": "test"}


class HistoryPlugin:
    """Writes a line for each item and run, and fails a session that was flaky, if asked to."""

    def __init__(self, session: RunSession) -> None:
        self._session = session
        chosen = session.options.history
        if chosen == "off":
            self._path: Path | None = None
        elif chosen:
            self._path = session.root / chosen
        else:
            self._path = session.root / OWN_DIR / FILE_NAME
        self._kept: dict[str, HistoryEntry] = {}
        self._earlier = self._of_this_run() if session.options.is_attached else frozenset()
        self._known: frozenset[str] | None = None
        self._num_flaky = 0
        self._problem: str | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take note of an item; write what cost a training at once."""
        for attribute, kind in RECORDS.items():
            record: dict[str, JsonValue] | None = getattr(report, attribute, None)
            if record is not None and self._is_worth_a_line(report.nodeid, record, kind):
                self._kept[report.nodeid] = self._entry(report.nodeid, record, kind)
                if kind == "workload":
                    self._write()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the rest, and fail a session that was flaky, if asked to."""
        self._write()
        is_failure = self._num_flaky > 0 and self._session.options.is_flaky_failure
        if is_failure and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say that flaky items fail the session, and that the history lacks something."""
        if self._num_flaky and self._session.options.is_flaky_failure:
            items = "1 item was" if self._num_flaky == 1 else f"{self._num_flaky} items were"
            terminalreporter.write_line(
                f"megatron: {items} flaky, and --fail-flaky is given", red=True
            )
        if self._problem is not None:
            terminalreporter.write_line(f"megatron: {self._problem}", yellow=True)

    def _is_worth_a_line(self, node_id: str, record: Mapping[str, JsonValue], kind: str) -> bool:
        """Whether to write of an item: every workload, and tests that were odd, once or now."""
        verdict = record["verdict"]
        if verdict == "flaky" and not _is_quarantined(record):
            self._num_flaky += 1
        if self._path is None or node_id in self._earlier:
            return False
        return kind == "workload" or verdict in ("flaky", "failed") or self._knows(node_id)

    def _of_this_run(self) -> frozenset[str]:
        """Return the items of which the controller that is gone wrote already."""
        if self._path is None:
            return frozenset()
        with contextlib.suppress(OSError):  # `_knows` says it
            entries = read(self._path).entries
            return frozenset(e.node_id for e in entries if e.run == self._session.run_dir.name)
        return frozenset()

    def _knows(self, node_id: str) -> bool:
        """Whether the history has an item already: then its passes count as well."""
        if self._known is None:
            assert self._path is not None
            try:
                self._known = known_items(self._path)
            except OSError as error:
                self._known = frozenset()
                self._problem = f"{self._session.shorten(str(self._path))}: {error.strerror}"
        return node_id in self._known

    def _entry(self, node_id: str, record: Mapping[str, JsonValue], kind: str) -> HistoryEntry:
        facts = self._session.facts
        attempts = record["attempts"]
        assert isinstance(attempts, list)
        failed = [a for a in attempts if isinstance(a, dict) and _is_failed(a)]
        duration_s = record.get("duration_s", 0.0)
        assert isinstance(duration_s, int | float)
        return HistoryEntry(
            time=utc_now(),
            run=self._session.run_dir.name,
            node_id=self._session.redactor.text(node_id),
            kind=kind,
            verdict=str(record["verdict"]),
            num_attempts=len(attempts),
            causes=tuple(str(a.get("signature") or "unknown") for a in failed),
            duration_s=duration_s,
            commit=facts.commit,
            is_dirty=facts.is_dirty,
            platform=str(record.get("platform") or _platform_of_test(record)),
            is_quarantined=_is_quarantined(record),
        )

    def _write(self) -> None:
        """Append what is not written yet; a history that cannot be written is only said."""
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


def _is_failed(attempt: Mapping[str, JsonValue]) -> bool:
    """Whether an attempt of a workload or an execution of a test was no good."""
    return bool(attempt.get("cause") or attempt.get("is_transient"))


def _is_quarantined(record: Mapping[str, JsonValue]) -> bool:
    quarantine = record.get("quarantine")
    return isinstance(quarantine, dict) and bool(quarantine["holds"])


def _platform_of_test(record: Mapping[str, JsonValue]) -> str:
    return f"{record.get('device')} x{record.get('world_size')}"
