"""Workloads of a session as pytest collects and selects them.

What runs them is imported where they are to run, as to import it takes longer than to collect.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_megatron.base.text import counted, grouped, listed
from pytest_megatron.errors import MegatronError, SelectionError
from pytest_megatron.runs.environment import tree_at_start
from pytest_megatron.session.arguments import RECIPE_SUFFIXES
from pytest_megatron.session.options import LOCAL, WORKLOADS_PLUGIN, usage_errors
from pytest_megatron.session.state import RunSession, session_of
from pytest_megatron.workloads.items.collect import WorkloadItem
from pytest_megatron.workloads.recipe.model import Vocabulary, Workload, project_words, select


def register_roles(config: pytest.Config) -> None:
    """Register the plugins of a session with workloads.

    Raises:
        pytest.UsageError: The project's settings or the policy are wrong.
    """
    session = session_of(config)
    options = session.options
    if session.signature_files:
        _ = session.table  # one that cannot be read is refused before anything runs
    with usage_errors():
        vocabulary = project_words(session.root)
        if options.script == "bash":
            from pytest_megatron.workloads.recipe.megatron_row import require_yq  # noqa: PLC0415 - for few

            require_yq("-o megatron_script=bash")
    plugin = SelectionPlugin(session, vocabulary)
    config.pluginmanager.register(plugin, WORKLOADS_PLUGIN)
    if not config.option.collectonly:
        from pytest_megatron.workloads.items.training import register_training  # noqa: PLC0415

        register_training(config, session)
    if options.is_plan:
        config.option.dist = "no"  # pytest-xdist's workers have no terminal to print to
    # One malformed recipe is an error of this run and must not keep the others from running.
    config.option.continue_on_collection_errors = True


def _is_of_recipe(name: str) -> bool:
    """Return whether a file or a node id is of a recipe."""
    return name.partition("::")[0].endswith(RECIPE_SUFFIXES)


_USAGE_ERROR_KEY = "megatron_usage_error"


class SelectionPlugin:
    """Reads recipes, selects workloads, and skips those that this host cannot run."""

    def __init__(self, session: RunSession, vocabulary: Vocabulary) -> None:
        self._session = session
        self._vocabulary = vocabulary
        self._usage_error: str | None = None  # of a worker

    def load(self, path: Path) -> Sequence[Workload]:
        """Return the rows of a recipe.

        Raises:
            RecipeError: It is no sound recipe, or a row names a signature that does not exist.
        """
        from pytest_megatron.workloads.recipe.load import load_recipe  # noqa: PLC0415 - pydantic

        workloads: Sequence[Workload] = load_recipe(path, vocabulary=self._vocabulary)
        if any(row.calls_driver for row in workloads):
            workloads = self._with_scripts(workloads)
        for workload in workloads:
            if workload.transient or workload.never_transient:
                from pytest_megatron.workloads.verdict.retry import policy_of  # noqa: PLC0415 - in few rows

                policy_of(workload, max_attempts=None, backoff_s=0.0, table=self._session.table)
        return workloads

    def _with_scripts(self, workloads: Sequence[Workload]) -> Sequence[Workload]:
        """Replace rows that call Megatron-LM's driver: by what it would start, or by bash."""
        from pytest_megatron.workloads.recipe.megatron_row import (  # noqa: PLC0415 - reads cases
            native_rows,
            require_yq,
            run_by_bash,
        )

        if self._session.options.script == "native":
            rows = native_rows(workloads, os.environ, self._session.root)
        else:
            why = "megatron_script = bash"
            rows = tuple(
                run_by_bash(row, os.environ, why) if row.calls_driver else row for row in workloads
            )
        if (by_bash := next((row for row in rows if row.by_bash is not None), None)) is not None:
            require_yq(f"{by_bash.file}: {by_bash.by_bash}")
        return rows

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Look at the tree before recipes are read, and have pytest-testmon leave out no row.

        That does not see what a training executes.
        """
        tree_at_start(self._session.root)
        select = session.config.pluginmanager.get_plugin("TestmonSelect")
        for name in () if select is None else ("deselected_tests", "deselected_files"):
            kept = [one for one in vars(select)[name] if not _is_of_recipe(one)]
            vars(select)[name] = kept

    @pytest.hookimpl(tryfirst=True)  # before -k and -m: an empty selection is about ours alone
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the workloads that the options select; skip those that this host cannot run.

        Raises:
            pytest.UsageError: Nothing is selected, or a word is unknown.
        """
        workloads = [item for item in items if isinstance(item, WorkloadItem)]
        if not workloads and (session.testsfailed or (items and self._is_about_python_tests())):
            return  # recipes that could not be collected are the one error
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

    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> list[str]:
        """Say which scripts bash runs and why, and what of others is not run."""
        rows = [item.workload for item in items if isinstance(item, WorkloadItem)]
        by_bash = grouped(((row.file, row.by_bash), row) for row in rows if row.by_bash)
        lines = [
            f"megatron: bash runs {counted(len(found), 'row')} of {file}, and their exit code "
            f"counts: {why}"
            for (file, why), found in by_bash.items()
        ]
        read = {row.file: row for row in rows if row.of_driver is not None}
        if read:
            from pytest_megatron.workloads.recipe.megatron_row import setup_lines  # noqa: PLC0415 - is loaded
        for file, row in read.items():
            if found := list(setup_lines(str(row.spec.get("script_setup") or ""))):
                lines.append(f"megatron: script_setup of {file} is not run: {listed(found, 3)}")
        return lines

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
            return list(select(workloads, words, self._vocabulary))
        except SelectionError:
            if options.is_empty_allowed:
                return []
            raise

    def _skip_what_does_not_fit(self, items: list[WorkloadItem]) -> None:
        """Skip workloads whose hardware this host lacks."""
        if self._session.options.executor != LOCAL or self._session.options.fake_ranks is not None:
            return  # the machine is another one, or does not matter
        host = self._session.facts.host
        skips: dict[tuple[str, int], pytest.MarkDecorator | None] = {}
        for item in items:
            needs = item.workload.platform, item.workload.nodes * item.workload.gpus
            if needs not in skips:
                lacking = host.lacks(*needs)
                skips[needs] = None if lacking is None else pytest.mark.skip(reason=lacking)
            if (skip := skips[needs]) is not None:
                item.add_marker(skip)
