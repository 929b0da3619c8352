"""The plugin for quarantine: failures of items that are known to fail do not fail the session.

The item runs as ever. Where pytest reports, in the controller or in a worker of pytest-xdist, its
failure becomes what an expected failure is, with a word of its own; the controller sums up. An item
that has failed more often in a row than one that is as flaky as it was fails the session: that may
be a regression. Must not touch what was found: the records say `failed`, and a session that writes
goldens has no quarantine of workloads.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, replace

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.project import (
    Quarantine,
    QuarantineError,
    load_config,
    parse_quarantine,
    today,
)
from pytest_megatron.flaky.quarantine import TABLE, matches, project_quarantines
from pytest_megatron.flaky.statistics import FailureStreak, failure_streak
from pytest_megatron.gangs.markers import QUARANTINE, is_quarantined_by_us
from pytest_megatron.runs.history import HistoryEntry, read
from pytest_megatron.runs.record import RecordedQuarantine
from pytest_megatron.session.options import usage_errors
from pytest_megatron.session.run_file import put_record, record_on
from pytest_megatron.session.state import session_of

NAME = "megatron-quarantine"
_STATE = "megatron_quarantine"  # attribute of a report, which crosses from a worker
_UNKNOWN = FailureStreak(num_failed=0, num_needed=2, since="", num_bad_before=0, num_before=0)


class QuarantinePlugin:
    """Marks reports of quarantined items, and prints a summary.

    Attributes:
        found: Node id -> quarantine; of what this process runs itself.
        streaks: Node id -> its failures in a row before this session.
    """

    def __init__(self) -> None:
        self.found: dict[str, Quarantine] = {}
        self.streaks: dict[str, FailureStreak] = {}
        self._broken: dict[str, str] = {}  # node id -> why it counts: it may be a regression
        self._day: dt.date = today()
        self._seen: dict[str, dict[str, JsonValue]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None]:
        """Turn a failure into an expected one, before anybody counts it."""
        quarantine = self.found.get(report.nodeid)
        if quarantine is not None:
            self._mark(report, quarantine)
        state: dict[str, JsonValue] | None = getattr(report, _STATE, None)
        if state is not None:
            earlier = self._seen.get(report.nodeid)
            if earlier is None or not earlier["failure"]:
                self._seen[report.nodeid] = state
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(
        self, report: pytest.TestReport
    ) -> tuple[str, str, tuple[str, Mapping[str, bool]]] | None:
        """Return `quarantined` where a failure does not count."""
        state: dict[str, JsonValue] | None = getattr(report, _STATE, None)
        if state is None or not state["failure"] or not state["holds"]:
            return None
        return "quarantined", "q", ("QUARANTINED", {"yellow": True})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line for each item in quarantine, and for each whose quarantine is over."""
        if self._seen:
            terminalreporter.section("quarantine", sep="-")
        for node_id, state in self._seen.items():
            terminalreporter.line(_line(node_id, state))

    def _mark(self, report: pytest.TestReport, quarantine: Quarantine) -> None:
        """Turn the failure of an item in quarantine into an expected one."""
        is_expired = not quarantine.holds_on(self._day)
        streak = self.streaks.get(report.nodeid, _UNKNOWN)
        if not is_expired and report.failed and streak.num_failed + 1 >= streak.num_needed:
            self._broken[report.nodeid] = _regression(streak)
        problem = self._broken.get(report.nodeid, "")
        holds = not (is_expired or problem)
        failure = _headline(report) if report.failed else ""
        state = RecordedQuarantine(
            reason=quarantine.reason,
            until=quarantine.until.isoformat(),
            is_expired=is_expired,
            holds=holds,
        )
        report.__dict__[_STATE] = {**asdict(state), "failure": failure, "problem": problem}
        record = record_on(report)
        if record is not None:
            advice = problem or record.advice
            put_record(report, replace(record, quarantine=state, advice=advice))
        if problem and report.failed:
            report.sections.append((TABLE, problem))
        text = f"until {quarantine.until}: {quarantine.reason}"
        if holds:
            report.user_properties.append(("megatron.quarantine", text))
        if holds and report.failed:
            report.outcome = "skipped"
            report.wasxfail = f"quarantined {text}"


def quarantine_items(
    config: pytest.Config, items: Sequence[pytest.Item], *, has_own_items: bool, is_writing: bool
) -> None:
    """Find the items that are in quarantine, and register the plugin if there are any.

    Args:
        config: The session's.
        items: Those that will run.
        has_own_items: Whether workloads or gangs are in this session: only then the project's
            settings are read.
        is_writing: Whether the session writes goldens: then no workload is in quarantine.

    Raises:
        pytest.UsageError: A mark or a setting is wrong.
    """
    patterns: dict[str, Quarantine] = {}
    if has_own_items:
        with usage_errors():
            patterns = project_quarantines(load_config(config.rootpath))
    found: dict[str, Quarantine] = {}
    for item in items:
        if is_writing and hasattr(item, "workload"):
            continue
        quarantine = _quarantine_by_marks(item, has_own_items=has_own_items) or next(
            (q for pattern, q in patterns.items() if matches(pattern, item.nodeid)), None
        )
        if quarantine is not None:
            found[item.nodeid] = quarantine
    if found:
        plugin = register_quarantine(config)
        plugin.found = found
        plugin.streaks = _streaks(config, [item for item in items if item.nodeid in found])


def _streaks(config: pytest.Config, items: Sequence[pytest.Item]) -> dict[str, FailureStreak]:
    """Return the current failure streak of each item, by node id, from the history.

    Empty where the session keeps no history.

    Raises:
        pytest.UsageError: The history cannot be read.
    """
    session = session_of(config)
    if session.options.history == "off":
        return {}
    names = {item.nodeid: session.redactor.text(item.nodeid) for item in items}
    try:
        entries = read(session.history_file, frozenset(names.values())).entries
    except OSError as error:
        where = session.shorten(str(session.history_file))
        raise pytest.UsageError(f"{where}: cannot be read: {error.strerror}") from None
    earlier = defaultdict[str, list[HistoryEntry]](list)
    for entry in entries:
        if entry.run != session.run_dir.name:
            earlier[entry.node_id].append(entry)
    return {
        item.nodeid: failure_streak(earlier[names[item.nodeid]], _platform_of(item))
        for item in items
    }


def _platform_of(item: pytest.Item) -> str:
    """Return the platform under which the history has an item."""
    if hasattr(item, "workload"):
        return str(item.workload.platform)
    gangs = item.config.pluginmanager.get_plugin("megatron-gangs")
    spec = None if gangs is None else gangs.spec_of(item)
    return "" if spec is None else f"{spec.device} x{spec.world_size}"


def _regression(streak: FailureStreak) -> str:
    """Return why a failure counts, and what to do."""
    number, since = streak.num_failed + 1, streak.since[:12]
    before = f"before, {streak.num_bad_before} of {streak.num_before} runs failed"
    if streak.num_before == streak.num_bad_before:
        before = "no run is known that passed"
    return (
        f"may be a regression: failed {number} times in a row, since {since}; {before}; fix it, "
        f"or find its commit with git bisect run pytest-megatron repro"
    )


def register_quarantine(config: pytest.Config) -> QuarantinePlugin:
    """Return the plugin of this session; register it first if there is none."""
    plugin = config.pluginmanager.get_plugin(NAME)
    if plugin is None:
        plugin = QuarantinePlugin()
        config.pluginmanager.register(plugin, NAME)
    assert isinstance(plugin, QuarantinePlugin)
    return plugin


def _quarantine_by_marks(item: pytest.Item, *, has_own_items: bool) -> Quarantine | None:
    """Return the quarantine that a mark of a test gives, None without one."""
    mark = item.get_closest_marker(QUARANTINE)
    if mark is None or not (has_own_items or is_quarantined_by_us(item)):
        return None
    where = f"{item.nodeid}: mark {QUARANTINE}"
    if mark.args:
        given = ", ".join(map(repr, mark.args))
        raise pytest.UsageError(
            f'{where}: {given} is given, expected reason="..." and until="2026-12-31"'
        )
    try:
        return parse_quarantine(mark.kwargs)
    except QuarantineError as problem:
        raise pytest.UsageError(f"{where}: {problem}") from None


def _headline(report: pytest.TestReport) -> str:
    """Return the first line of a failure, as the short summary has it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext if crash is None else str(crash.message)
    line = (text.strip() or "failed").splitlines()[0]
    return line.removeprefix("Failed: ")


def _line(node_id: str, state: Mapping[str, JsonValue]) -> str:
    """Return the line of the summary on an item in quarantine."""
    until, reason, failure = state["until"], state["reason"], state["failure"]
    if state["is_expired"]:
        return f"expired     {node_id}  was in quarantine until {until}, and counts again: {reason}"
    if state["problem"]:
        return f"counts      {node_id}  in quarantine until {until}: {reason}; {state['problem']}"
    what = f"failed: {failure}" if failure else "passed; if that lasts, end its quarantine"
    return f"quarantined {node_id}  until {until}: {reason}; {what}"
