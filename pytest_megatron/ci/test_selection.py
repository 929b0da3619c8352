"""The plugin that keeps the python tests of a bucket, an environment, a tag and a platform.

Lives wherever tests are collected: in the controller, in workers of pytest-xdist, and in ranks that
collect for themselves, which must find the same tests.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from pytest_megatron.base.project import load_config
from pytest_megatron.base.text import one_of
from pytest_megatron.ci.decide import matches_any
from pytest_megatron.ci.table import CiTable, load_table
from pytest_megatron.ci.test_files import (
    MarkChoice,
    base_of,
    known_marks,
    reason_to_leave_out,
    wanted_launch_marks,
)
from pytest_megatron.session.decision import Decision
from pytest_megatron.session.options import Options, usage_errors
from pytest_megatron.workloads.recipe.model import Vocabulary, project_words

PLUGIN_NAME = "megatron-units"
_COUNTS = "megatron_left_out"
_SOURCE = ".py"
_NEVER_TESTS = ("__init__.py", "conftest.py")


def register_units(config: pytest.Config, options: Options) -> None:
    """Register the plugin, and the marks that it reads.

    Raises:
        pytest.UsageError: The project's table is wrong.
    """
    with usage_errors():
        words = project_words(config.rootpath)
        table = load_table(load_config(config.rootpath), words)
    for mark, meaning in known_marks(table).items():
        config.addinivalue_line("markers", f"{mark}: {meaning}")
    _check_words(options, table, words)
    choice = MarkChoice(
        environments=options.selection["environment"],
        tags=options.selection["tag"],
        platforms=options.selection["platform"],
        experimental=options.experimental,
    )
    if options.experimental == "only" and hasattr(config.option, "experimental"):
        config.option.experimental = True  # Megatron-LM's conftest.py has such an option
    config.pluginmanager.register(UnitPlugin(config, options, choice, table), PLUGIN_NAME)


def _check_words(options: Options, table: CiTable, vocabulary: Vocabulary) -> None:
    """Refuse a word that nothing knows: it would leave nothing out, silently.

    Tags of workloads are free; with a bucket, those of the table are all that mean something.
    """
    tags = {table.tag, *(tag for rule in table.marks for tag in rule.tag)} - {""}
    known = {"environment": vocabulary.environments, "platform": vocabulary.platforms}
    if options.bucket:
        known["tag"] = frozenset(tags)
    for name, choices in known.items():
        for word in options.selection[name]:
            if word not in choices:
                raise pytest.UsageError(
                    f"--{name}: unknown {name} {word!r}, expected {one_of(word, choices)}"
                )


class UnitPlugin:
    """Ignores files of other buckets, and deselects tests by their marks."""

    def __init__(
        self, config: pytest.Config, options: Options, choice: MarkChoice, table: CiTable
    ) -> None:
        self._config = config
        self._options = options
        self._choice = choice
        self._table = table
        self._launch_marks = wanted_launch_marks(choice.platforms, table)
        self._launch = f"without {' or '.join(self._launch_marks)}"
        self._left_out: Counter[str] = Counter()
        self._ignored: set[Path] = set()
        self._unlaunched: set[Path] = set()
        self._has_reports = False

    def pytest_report_header(self) -> list[str] | None:
        """Print the decision for labels and the event."""
        decision = self._options.decision
        return None if decision is None else _header_of(decision)

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Keep files of other buckets from being imported, and those without a platform's mark."""
        if collection_path.suffix != _SOURCE or collection_path.name in _NEVER_TESTS:
            return None
        if self._options.bucket and not matches_any(
            self._from_root(collection_path), self._options.bucket
        ):
            self._ignored.add(collection_path)
            return True
        if self._options.bucket and not self._may_launch(collection_path):
            self._unlaunched.add(collection_path)
            return True
        return None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Deselect the tests whose marks leave them out."""
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            reason = None
            if isinstance(item, pytest.Function):
                reason = reason_to_leave_out(_marks_of(item), self._choice, self._table)
            if reason is None:
                kept.append(item)
            else:
                dropped.append(item)
                self._left_out[reason] += 1
        if dropped:
            self._config.hook.pytest_deselected(items=dropped)
            items[:] = kept

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> object:
        """Have zero tests be no success, whatever a conftest.py of the project makes of it."""
        workeroutput = getattr(self._config, "workeroutput", None)
        if workeroutput is not None:
            workeroutput[_COUNTS] = dict(self._left_out)
            return (yield)
        result = yield
        may_be_empty = self._options.is_empty_allowed or self._config.option.collectonly
        may_be_empty = may_be_empty or self._is_unchanged()
        is_green = session.exitstatus == pytest.ExitCode.OK
        is_idle = not self._has_reports and not session.testscollected
        if is_green and is_idle and not may_be_empty and self._options.node_rank == 0:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        return result

    def _is_unchanged(self) -> bool:
        """Return true if pytest-testmon left out tests of the bucket, so that there may be none."""
        select = self._config.pluginmanager.get_plugin("TestmonSelect")
        gone: list[str] = [] if select is None else select.deselected_tests
        files = {node_id.partition("::")[0] for node_id in gone}
        patterns = self._options.bucket
        return any(not patterns or matches_any(file, patterns) for file in files)

    def pytest_runtest_logreport(self) -> None:
        """Note that something ran, also where workers of pytest-xdist collect."""
        self._has_reports = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Take the numbers of a worker of pytest-xdist; all workers leave out the same tests."""
        counts: dict[str, int] = getattr(node, "workeroutput", {}).get(_COUNTS, {})
        self._left_out = Counter(counts) | self._left_out

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print numbers of tests that were left out, and the reasons."""
        parts = [f"{number} {reason}" for reason, number in sorted(self._left_out.items())]
        for files, what in ((self._unlaunched, self._launch), (self._ignored, "of other buckets")):
            if files:
                parts.append(f"{len(files)} file{'' if len(files) == 1 else 's'} {what}")
        if parts:
            terminalreporter.write_line(f"megatron: left out {', '.join(parts)}")

    def _may_launch(self, path: Path) -> bool:
        """Return true if a file's text has a mark of the platform; it need not be importable."""
        if not self._launch_marks:
            return True
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return True  # pytest reports it
        return any(mark in text for mark in self._launch_marks)

    def _from_root(self, path: Path) -> str:
        return Path(os.path.relpath(path, self._config.rootpath)).as_posix()


def _marks_of(item: pytest.Item) -> frozenset[str]:
    """Return the names of an item's marks; one with arguments is another plugin's.

    `flaky(reruns=3)` is pytest-rerunfailures': such a test is to be rerun, not left out.
    """
    return frozenset(
        mark.name
        for mark in item.iter_markers()
        if not mark.args and not mark.kwargs.keys() - {"reason"}
    )


def add_folders(early_config: pytest.Config, arguments: list[str], words: tuple[str, ...]) -> None:
    """Have pytest start in a bucket's folders, where nothing else is named.

    Runs before conftest files are loaded, so that the folders' own are.
    """
    namespace = early_config.known_args_namespace
    if namespace.file_or_dir:
        return
    directory = early_config.invocation_params.dir
    bases = dict.fromkeys(base_of(word) for word in words if not word.startswith("!"))
    folders = [os.path.relpath(early_config.rootpath / base, directory) for base in bases]
    arguments += folders
    namespace.file_or_dir = folders


def _header_of(decision: Decision) -> list[str]:
    """Return the lines of the session's header about a decision."""
    kind = ", lightweight" if decision.is_lightweight else ""
    repeats = f"{decision.n_repeat} repeat{'' if decision.n_repeat == 1 else 's'}"
    words = f"scope {','.join(decision.scope)}, cadence {','.join(decision.cadence) or 'any'}"
    what = f"{words}, {repeats}{kind}, environment {decision.environment}"
    lines = [f"megatron: {what}; {decision.reason}"]
    lines += [f"megatron: label {line}" for line in decision.label_effects]
    lines += [f"megatron: label {name}: nothing reads it" for name in decision.unknown_labels]
    return lines
