"""The plugin for pages: a session leaves an index of its run, and a page of each workload."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from pytest_megatron.errors import MegatronError
from pytest_megatron.runs.layout import RUN_FILE
from pytest_megatron.runs.record import RecordedWorkload
from pytest_megatron.session.run_file import record_on
from pytest_megatron.session.state import RunSession

_PAGES = "megatron-pages"
_GOOD = ("passed", "skipped")


class PagesPlugin:
    """Writes `index.html` and every workload's `curves.html`; prints the path after failures."""

    def __init__(self, session: RunSession) -> None:
        self._session = session
        self._has_workloads = False
        self._has_failures = False
        self._line: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note whether there is anything to show."""
        record = record_on(report)
        self._has_workloads |= isinstance(record, RecordedWorkload)
        self._has_failures |= record is not None and record.verdict not in _GOOD

    @pytest.hookimpl(wrapper=True, trylast=True)  # `run.json` is whole, the summary comes later
    def pytest_sessionfinish(self) -> Generator[None]:
        """Write the pages; a run whose pages cannot be written is as good or bad as without."""
        yield
        run_dir = self._session.run_dir
        has_any = self._has_workloads or self._has_failures
        if not has_any or not (run_dir / RUN_FILE).is_file():
            return
        # Loads all of goldens and triage, which a run of tests that pass does without.
        from pytest_megatron.pages import read, write  # noqa: PLC0415

        try:
            index = write.write_in_place(read.RunReader(run_dir))
        except (MegatronError, OSError) as error:
            self._line = f"the pages of this run are not complete: {error}"
            return
        if self._has_failures:
            self._line = f"the page of this run: {index}"

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the path of the pages."""
        if self._line is not None:
            terminalreporter.write_line(self._session.shorten(f"megatron: {self._line}"))


def register_pages(config: pytest.Config, session: RunSession) -> None:
    """Have pages written at the end of a session, once, whoever asks."""
    if not config.pluginmanager.has_plugin(_PAGES):
        config.pluginmanager.register(PagesPlugin(session), _PAGES)
