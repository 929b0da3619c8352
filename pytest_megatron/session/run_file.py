"""Files that a session leaves: `run.json`, pages and the history, for `megatron_fail_flaky` too.

The plugins for workloads and for distributed tests share them; reports carry their data. When
everything has ended, secrets are removed from the files of the run directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.base.files import write_text_atomically
from pytest_megatron.base.schema import validate
from pytest_megatron.runs import environment as patch
from pytest_megatron.runs.environment import kept_variables, utc_now
from pytest_megatron.runs.history import HistoryEntry, append, known_items
from pytest_megatron.runs.layout import RUN_FILE, make_own_dir, seed_of_examples
from pytest_megatron.runs.record import (
    OptionValue,
    RecordedItem,
    RecordedPatch,
    RecordedTest,
    RecordedWorkload,
    Result,
    is_variable,
    item_line,
    item_to_json,
    run_text,
)
from pytest_megatron.runs.redact import Redactor
from pytest_megatron.session.options import ON_ONE_PROCESS, Options
from pytest_megatron.session.state import RunSession, link_latest
from pytest_megatron.session.time_limit import limit_of_session

_ATTRIBUTES: dict[str, type[RecordedWorkload | RecordedTest]] = {
    "megatron_workload": RecordedWorkload,
    "megatron_test": RecordedTest,
}


def put_record(report: pytest.TestReport, record: RecordedItem) -> None:
    """Put the record of an item on its last report; `RecordCarrier` dumps it for a worker."""
    name = next(name for name, kind in _ATTRIBUTES.items() if isinstance(record, kind))
    report.__dict__[name] = record


def record_on(report: pytest.TestReport) -> RecordedItem | None:
    """Return the record on a report, or None; one from a worker is read once."""
    for name, kind in _ATTRIBUTES.items():
        found = report.__dict__.get(name)
        if found is not None:
            record = found if isinstance(found, kind) else validate(kind, found)
            report.__dict__[name] = record
            return record
    return None


class RecordCarrier:
    """Base of the plugins that put records on reports: those cross to other processes as JSON."""

    @pytest.hookimpl(wrapper=True)
    def pytest_report_to_serializable(self) -> Generator[None, dict[str, object], object]:
        """Dump the record of an item."""
        data = yield
        for name, kind in _ATTRIBUTES.items():
            record = data.get(name)
            if isinstance(record, kind):
                data[name] = item_to_json(record)
        return data


def _session_env(session: RunSession) -> dict[str, str]:
    """Return the variables to keep, redacted; only names that a shell can set."""
    decision = session.options.decision
    own = {} if decision is None else decision.env
    kept = kept_variables({**os.environ, **own}, own, names=session.project.kept_variables)
    return {k: v for k, v in session.redactor.env(kept).items() if is_variable(k)}


def keep_patch(session: RunSession) -> RecordedPatch | None:
    """Write the changes of the working tree into the run directory; None for a clean tree.

    Raises:
        OSError: They cannot be written.
    """
    if not session.facts.is_dirty:
        return None
    made = patch.make_patch(session.root, session.facts.new)
    if made.text:
        path = session.run_dir / patch.NAME
        write_text_atomically(path, session.redactor.text(made.text))
    return RecordedPatch(file="dirty.patch" if made.text else None, problem=made.problem)


def _seeds(config: pytest.Config, run_id: str) -> dict[str, str | None]:
    """Return the seeds that pytest's plugins and Python have, each null if it has none."""
    seeds: dict[str, str | None] = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED")}
    for name in ("randomly_seed", "random_order_seed"):
        value = getattr(config.option, name, None)
        if value is not None and not str(value).startswith("default"):  # one that is not in use
            seeds[name] = str(value)
    if hasattr(config.option, "hypothesis_seed"):
        seeds["hypothesis_seed"] = str(config.option.hypothesis_seed or seed_of_examples(run_id))
    return seeds


def _options(config: pytest.Config, session: RunSession) -> dict[str, OptionValue]:
    """Return the options that change how an item runs, without secrets."""
    options = session.options
    found = replace(options, rank_timeout_s=_rank_timeout_s(config, options)).of_items
    return {name: _redacted(value, session.redactor) for name, value in found.items()}


def _redacted(value: OptionValue, redactor: Redactor) -> OptionValue:
    """Return the value of an option without secrets."""
    if isinstance(value, tuple):
        return tuple(map(redactor.text, value))
    return redactor.text(value) if isinstance(value, str) else value


def _rank_timeout_s(config: pytest.Config, options: Options) -> float:
    """Return the limit of tests on gangs, whoever set it; one that is wrong limited none."""
    try:
        return limit_of_session(config, options).seconds
    except pytest.UsageError:
        return options.rank_timeout_s


_RUN_FILE = "megatron-run-file"
_MOST_SHOWN = 5
_CHEAP_S = 0.1
_SPARINGLY = 20  # a dear file is written in one twentieth of the time


class RunFile(RecordCarrier):
    """`run.json`, of workloads and distributed tests alike.

    Attributes:
        problem: Why the file lacks something, or None.
    """

    def __init__(self, config: pytest.Config, session: RunSession) -> None:
        self._config = config
        self._session = session
        self._lines: dict[str, str] = {}  # of the items, without secrets
        self._started = utc_now()
        self._patch: RecordedPatch | None = None
        self._has_patch = False
        self._is_redacted = False
        self._is_there = False
        self._next_at = 0.0
        self._unclean: tuple[str, ...] = ()
        self._ended: str | None = None
        self._exit_code: int | None = None
        self.problem: str | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        """Record the end of the run, after all other plugins could change it."""
        yield
        self._ended, self._exit_code = utc_now(), int(session.exitstatus)
        if self._lines or self._is_there or self._is_asked_for():
            self.write()

    def _is_asked_for(self) -> bool:
        """Return true to record a run without items of ours; never over an earlier run."""
        if self._exit_code == pytest.ExitCode.USAGE_ERROR:  # corrected and typed again
            return False
        options = self._session.options
        if options.run_dir is None or options.is_plan or self._config.option.collectonly:
            return False
        return not (self._session.run_dir / RUN_FILE).exists()

    def keep(self, node_id: str, record: RecordedItem) -> None:
        """Take the record of an item; the next `write` has it."""
        redactor, item = self._session.redactor, item_to_json(record)
        # Of a test that passed there is no text that it wrote; there may be many thousands.
        is_plain = isinstance(record, RecordedTest) and record.outcome == "passed"
        name = redactor.text(node_id)
        self._lines[name] = item_line(name, item if is_plain else redactor.json(item))

    def update(self) -> None:
        """Write the known results, unless that was done a moment ago and takes its time."""
        if time.monotonic() >= self._next_at:
            self.write()

    def write(self) -> None:
        """Write the known results, which a run that is killed later leaves behind."""
        before = time.monotonic()
        try:
            self._write()
            self._is_there = True
            self.problem = None
        except OSError as error:  # the disk is full; the terminal still shows the results
            self.problem = self._session.cannot_write(error)
        cost_s = time.monotonic() - before  # grows with the number of items: thousands, in a queue
        self._next_at = before + (0.0 if cost_s < _CHEAP_S else cost_s * _SPARINGLY)

    @pytest.hookimpl(specname="pytest_sessionfinish", trylast=True)
    def pytest_megatron_redact(self) -> None:
        """Remove secrets from the run's files, when everything has ended."""
        from pytest_megatron.runs.redact import redact_file, redact_tree  # noqa: PLC0415 - late

        run_dir, redactor = self._session.run_dir, self._session.redactor
        if run_dir.is_dir():
            self._unclean = redact_tree(run_dir, redactor)
        junit = getattr(self._config.option, "xmlpath", None)
        if junit and Path(junit).is_file():
            try:
                redact_file(Path(junit), redactor)
            except OSError as error:
                self._unclean += (f"{junit}: {error.strerror}",)
        self._is_redacted = not self._unclean

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report files that may still hold secrets."""
        for text in self._unclean[:_MOST_SHOWN]:
            line = f"megatron: secrets may be left in {self._session.shorten(text)}"
            terminalreporter.write_line(line, red=True)

    def _write(self) -> None:
        """Write run.json, as far as the session has come."""
        run_dir = self._session.run_dir
        if not self._session.has_results:
            if self._lines or not self._is_asked_for():
                return  # nothing could be started
            run_dir.mkdir(parents=True, exist_ok=True)
        if not self._has_patch:
            self._patch, self._has_patch = keep_patch(self._session), True
        config, session = self._config, self._session
        run = Result(
            started=self._started,
            updated=utc_now(),
            is_redacted=self._is_redacted,
            ended=self._ended,
            exit_code=self._exit_code,
            arguments=tuple(session.arguments),
            directory=os.path.relpath(config.invocation_params.dir, session.root),
            env=_session_env(session),
            seeds=_seeds(config, session.run_dir.name),
            options=_options(config, session),
            **vars(session.facts.recorded()),
            patch=self._patch,
            on_one_process=tuple(map(session.redactor.text, config.stash.get(ON_ONE_PROCESS, ()))),
            items={},
        )
        write_text_atomically(run_dir / RUN_FILE, run_text(run, self._lines.values()))
        if self._session.options.run_dir is None:
            link_latest(run_dir)


_OWN = pytest.StashKey[RunFile]()


def run_file_of(config: pytest.Config, session: RunSession) -> RunFile:
    """Return the one `run.json` of a session, which all plugins share."""
    if _OWN not in config.stash:
        config.stash[_OWN] = RunFile(config, session)
        config.pluginmanager.register(config.stash[_OWN], _RUN_FILE)
    return config.stash[_OWN]


_HISTORY = "megatron-history"


class HistoryPlugin:
    """Writes a line for each item and run, and fails a session that was flaky, if asked to."""

    def __init__(self, session: RunSession) -> None:
        self._session = session
        self._path = None if session.options.history == "off" else session.history_file
        self._kept: dict[str, HistoryEntry] = {}
        self._others: dict[tuple[object, ...], list[RecordedTest]] = {}  # tests without own lines
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
        elif isinstance(record, RecordedTest):
            file = report.nodeid.partition("::")[0]
            key = (file, record.device, record.world_size)
            self._others.setdefault(key, []).append(record)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the rest, and fail a session that was flaky, if asked to."""
        for (file, *rest), records in self._others.items():
            self._kept[f"{file} {rest}"] = self._entry_of_file(str(file), records)
        self._write()
        is_failure = self._num_flaky > 0 and self._session.options.is_flaky_failure
        if is_failure and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report that flaky items fail the session, and that the history lacks something."""
        if self._num_flaky and self._session.options.is_flaky_failure:
            items = "1 item was" if self._num_flaky == 1 else f"{self._num_flaky} items were"
            terminalreporter.write_line(
                f"megatron: {items} flaky, and megatron_fail_flaky is set", red=True
            )
        if self._problem is not None:
            terminalreporter.write_line(f"megatron: {self._problem}", yellow=True)

    def _is_worth_a_line(self, node_id: str, record: RecordedItem) -> bool:
        """Return true for every workload, and for tests with a failure now, once or expected."""
        if record.verdict == "flaky" and not record.is_held:
            self._num_flaky += 1
        if self._path is None:
            return False
        if isinstance(record, RecordedWorkload) or record.quarantine is not None:
            return True
        return record.verdict in ("flaky", "failed") or self._knows(node_id)

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
        """Return the line of an item for the history."""
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
            quarantined_until="" if record.quarantine is None else record.quarantine.until,
        )

    def _entry_of_file(self, file: str, records: Sequence[RecordedTest]) -> HistoryEntry:
        """Return one line for tests of a file that passed or were skipped."""
        attempts = tuple(attempt for record in records for attempt in record.attempts)
        together = replace(records[0], verdict="passed", attempts=attempts, quarantine=None)
        took_s = round(sum(attempt.duration_s for attempt in attempts), 3)
        return replace(self._entry(file, together), kind="tests", causes=(), duration_s=took_s)

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
            self._problem = (
                f"{where}: {error.strerror}; the history lacks this run; "
                "set megatron_history to another file, or to off"
            )


def register_history(config: pytest.Config, session: RunSession) -> None:
    """Register the plugin, once for a session."""
    if not session.is_worker and not config.pluginmanager.has_plugin(_HISTORY):
        config.pluginmanager.register(HistoryPlugin(session), _HISTORY)
