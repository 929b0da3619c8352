"""The role that keeps what workloads came to: `run.json`, goldens, the summary."""

from __future__ import annotations

import pytest

from pytest_megatron.files import JsonValue
from pytest_megatron.golden.policy import ComparisonPolicy
from pytest_megatron.hooks.goldens import GoldenWriter
from pytest_megatron.hooks.options import LOCAL
from pytest_megatron.hooks.run_file import RunFile
from pytest_megatron.hooks.session import RunSession
from pytest_megatron.hooks.terminal import print_summary


class ResultsPlugin:
    """Lives in the controller alone: a worker's records reach it on the reports."""

    def __init__(
        self, session: RunSession, goldens: GoldenWriter, policy: ComparisonPolicy, file: RunFile
    ) -> None:
        self._session = session
        self._goldens = goldens
        self._policy = policy
        self._file = file
        self._records: dict[str, JsonValue] = {}

    def pytest_report_header(self) -> str:
        """Say on what the workloads will run, and where their results go."""
        gpus = self._session.facts.host.gpus
        found = f"{len(gpus)} x {gpus[0].name}" if gpus else "no GPU"
        where = self._session.shorten(str(self._session.run_dir))
        engine = self._session.options.executor
        found = found if engine == LOCAL else f"engine {engine}"
        return f"megatron: {found}, goldens: {self._session.options.golden}, results in {where}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep `run.json` up to date."""
        record: JsonValue = getattr(report, "megatron_workload", None)
        if record is None:
            return
        self._records[report.nodeid] = record
        self._file.keep(report.nodeid, record)
        self._file.update()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write goldens, if all of the run was clean."""
        is_written = self._goldens.finish(self._records, self._policy, session.exitstatus)
        is_whole = is_written and self._file.problem is None
        if not is_whole and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line for each workload, and what became of goldens."""
        lines = list(self._goldens.lines)
        if self._records and (text := self._session.retry_budget.infrastructure()):
            lines.insert(0, f"megatron: {text}")
        if self._file.problem is not None:
            lines.append(f"run.json is not complete: {self._file.problem}")
        print_summary(terminalreporter, self._records, lines, self._session.shorten)
