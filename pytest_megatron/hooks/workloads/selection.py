"""The role that keeps the workloads that the options select, and reports wrong options."""

from __future__ import annotations

import pytest

from pytest_megatron.errors import MegatronError, SelectionError
from pytest_megatron.hooks.options import LOCAL
from pytest_megatron.hooks.session import RunSession
from pytest_megatron.hooks.workloads.item import WorkloadItem
from pytest_megatron.recipe.model import Vocabulary
from pytest_megatron.recipe.select import Selection, select

_USAGE_ERROR_KEY = "megatron_usage_error"


class SelectionPlugin:
    """Selects workloads, and skips those that this host cannot run."""

    def __init__(self, session: RunSession, vocabulary: Vocabulary) -> None:
        self._session = session
        self._vocabulary = vocabulary
        self._usage_error: str | None = None  # of a worker

    @pytest.hookimpl(tryfirst=True)  # before -k and -m: an empty selection is about ours alone
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the workloads that the options select; skip those that this host cannot run.

        Raises:
            pytest.UsageError: Nothing is selected, or a word is unknown.
        """
        workloads = [item for item in items if isinstance(item, WorkloadItem)]
        if not workloads and items and self._is_about_python_tests():
            return
        try:
            chosen = {id(workload) for workload in self._selected(workloads)}
        except MegatronError as error:
            if not self._session.is_worker:
                raise pytest.UsageError(str(error)) from None
            # pytest-xdist would take an exception for a crash; the controller reports it instead.
            vars(config)["workeroutput"][_USAGE_ERROR_KEY] = str(error)
            items.clear()
            return
        dropped = [item for item in workloads if id(item.workload) not in chosen]
        if dropped:
            gone = set(dropped)
            config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if item not in gone]
        if not self._session.options.selection["platform"]:
            self._skip_what_does_not_fit(workloads)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Take the selection's error from a worker of pytest-xdist."""
        workeroutput: dict[str, str] = getattr(node, "workeroutput", {})
        self._usage_error = workeroutput.get(_USAGE_ERROR_KEY, self._usage_error)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Give a worker's usage error its exit code, and an allowed empty selection none."""
        if self._usage_error is not None:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        is_empty = session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
        if is_empty and self._session.options.is_empty_allowed:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report the error of a worker."""
        if self._usage_error is not None:
            terminalreporter.write_line(f"ERROR: {self._usage_error}", red=True)

    def _is_about_python_tests(self) -> bool:
        """Return true if every option of the selection applies to python tests as well."""
        used = {name for name, words in self._session.options.selection.items() if words}
        return used <= {"environment", "platform", "tag"}

    def _selected(self, items: list[WorkloadItem]) -> list[object]:
        """Return the workloads that the options select."""
        options = self._session.options
        workloads = [item.workload for item in items]
        if not options.has_selection:
            return list(workloads)
        words = {name.replace("-", "_"): w for name, w in options.selection.items()}
        try:
            return list(select(workloads, Selection(**words), self._vocabulary))
        except SelectionError:
            if options.is_empty_allowed:
                return []
            raise

    def _skip_what_does_not_fit(self, items: list[WorkloadItem]) -> None:
        if self._session.options.executor != LOCAL:
            return  # the engine checks the machine that is not this one
        host = self._session.facts.host
        for item in items:
            lacking = host.lacks(item.workload.platform, item.workload.nodes * item.workload.gpus)
            if lacking is not None:
                item.add_marker(pytest.mark.skip(reason=lacking))
