"""Results of distributed tests: header, `run.json`, summary.

Active only in the controller: records of workers arrive as attributes of reports.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_megatron.gangs.controller.rank_config import refuse_unfit_host
from pytest_megatron.gangs.controller.testmon import keep_late_failure
from pytest_megatron.gangs.nodes.leader import first_gang, room_on_gpus
from pytest_megatron.gangs.record import flaky_lines, header_line
from pytest_megatron.gangs.topology import count_gpus
from pytest_megatron.gpu.host import this_host
from pytest_megatron.runs.record import RecordedTest
from pytest_megatron.session.options import Options
from pytest_megatron.session.run_file import RunFile, record_on
from pytest_megatron.session.state import RunSession

NAME = "megatron-gangs-results"


class GangResults:
    """Header, `run.json` and summary of a session with gangs."""

    def __init__(self, config: pytest.Config, run: RunSession, file: RunFile) -> None:
        self._config = config
        self._run = run
        self._file = file
        self._records: dict[str, RecordedTest] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Refuse to start without the requested devices, or if ranks cannot connect."""
        if not session.config.option.collectonly:
            _refuse_lack(self._run.options)
            if self._run.options.asks_for_gangs:
                refuse_unfit_host(self._run.options)

    def pytest_report_header(self) -> list[str]:
        """Describe the gangs of tests without a marker."""
        options = self._run.options
        if not options.asks_for_gangs:
            return []
        gpus = None if options.device == "cpu" else this_host().gpus
        return [header_line(first_gang(options), gpus, self._run.shorten(str(self._run.run_dir)))]

    @pytest.hookimpl(specname="pytest_runtest_logreport", tryfirst=True)
    def pytest_megatron_keep_selected(self, report: pytest.TestReport) -> None:
        """Have pytest-testmon know of late teardowns that failed."""
        keep_late_failure(self._config, report)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the record of a test; an error that follows makes it a failure."""
        record, kept = record_on(report), self._records.get(report.nodeid)
        if record is None and report.failed and report.when == "teardown" and kept is not None:
            problem = kept.problem or report.longreprtext.strip().split("\n")[-1]
            record = replace(kept, verdict="failed", outcome="failed", problem=problem)
        if not isinstance(record, RecordedTest):
            return
        self._records[report.nodeid] = record
        self._file.keep(report.nodeid, record)
        if record.outcome == "failed":
            self._file.update()  # a run that is killed has results

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Write `run.json`, if any test ran on a gang."""
        if self._records:
            self._file.write()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List tests that passed at a rerun."""
        lines = flaky_lines(self._records)
        if self._records and self._file.problem is not None:
            lines.append(f"run.json is not complete: {self._file.problem}")
        if lines:
            terminalreporter.section("distributed tests", sep="-")
        for line in lines:
            terminalreporter.write_line(line)


def _refuse_lack(options: Options) -> None:
    """Make sure that this host has the requested GPUs.

    Raises:
        pytest.UsageError: It has too few.
    """
    wanted = options.num_ranks if options.device == "cuda" else None
    wanted = wanted if options.num_gpus is None else options.num_gpus
    num_found = len(this_host().gpus)
    if wanted is None or (num_found and wanted <= room_on_gpus(options)):
        return
    raise pytest.UsageError(
        f"--{'device' if options.num_gpus is None else 'gpus'}: needs "
        f"{count_gpus(wanted, options.ranks_per_gpu) or 'some'} GPUs, this host has "
        f"{num_found or 'none'}; lower the number of ranks, have them share GPUs by "
        f"--ranks-per-gpu, or give --ranks without --device"
    )
