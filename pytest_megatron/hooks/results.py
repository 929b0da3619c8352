"""The role that keeps what workloads came to: `run.json`, goldens, the summary."""

from __future__ import annotations

import pytest

from pytest_megatron.files import JsonValue, write_json_atomically
from pytest_megatron.hooks.goldens import GoldenWriter
from pytest_megatron.hooks.session import RunSession, link_latest
from pytest_megatron.hooks.terminal import print_summary
from pytest_megatron.launch.facts import utc_now


class RunFile:
    """`run.json`, of workloads and distributed tests alike.

    Attributes:
        problem: Why the file lacks something, or None.
    """

    def __init__(self, session: RunSession) -> None:
        self._session = session
        self._records: dict[str, JsonValue] = {}
        self._started = utc_now()
        self.problem: str | None = None

    def keep(self, node_id: str, record: JsonValue) -> None:
        """Take the record of an item; the next `write` has it."""
        self._records[node_id] = record

    def write(self) -> None:
        """Write what is known, so that a run that is killed still says what it did."""
        try:
            self._write()
            self.problem = None
        except OSError as error:  # the disk is full; the terminal still says what it was
            self.problem = self._session.cannot_write(error)

    def _write(self) -> None:
        run_dir = self._session.run_dir
        if not run_dir.is_dir():
            return  # nothing could be started
        run: dict[str, JsonValue] = {
            "schema": 1,
            "started": self._started,
            "updated": utc_now(),
            "arguments": list[JsonValue](self._session.arguments),
            **self._session.facts.as_json(),
            "items": self._records,
        }
        write_json_atomically(run_dir / "run.json", run)
        if self._session.options.run_dir is None:
            link_latest(run_dir)


_RUN_FILE = pytest.StashKey[RunFile]()


def run_file_of(config: pytest.Config, session: RunSession) -> RunFile:
    """Return the one `run.json` of a session, which all roles share."""
    return config.stash.setdefault(_RUN_FILE, RunFile(session))


class ResultsPlugin:
    """Lives in the controller alone: a worker's records reach it on the reports."""

    def __init__(self, session: RunSession, goldens: GoldenWriter, file: RunFile) -> None:
        self._session = session
        self._goldens = goldens
        self._file = file
        self._records: dict[str, JsonValue] = {}

    def pytest_report_header(self) -> str:
        """Say on what the workloads will run, and where their results go."""
        gpus = self._session.facts.host.gpus
        found = f"{len(gpus)} x {gpus[0].name}" if gpus else "no GPU"
        where = self._session.shorten(str(self._session.run_dir))
        return f"megatron: {found}, goldens: {self._session.options.golden}, results in {where}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep `run.json` up to date."""
        record: JsonValue = getattr(report, "megatron_workload", None)
        if record is None:
            return
        self._records[report.nodeid] = record
        self._file.keep(report.nodeid, record)
        self._file.write()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write goldens, if all of the run was clean."""
        is_written = self._goldens.finish(list(self._records.values()), session.exitstatus)
        is_whole = is_written and self._file.problem is None
        if not is_whole and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line for each workload, and what became of goldens."""
        lines = list(self._goldens.lines)
        if self._file.problem is not None:
            lines.append(f"run.json is not complete: {self._file.problem}")
        print_summary(terminalreporter, self._records, lines, self._session.shorten)
