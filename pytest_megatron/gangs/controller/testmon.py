"""pytest-testmon on gangs: ranks note which lines they execute, the controller keeps them.

A rank is to it what a worker of pytest-xdist is: it selects as its controller does, by
`config.workerinput`, and never writes to the file of records. Everything here does nothing in a
session without `--testmon`. Knows release 2.2.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Protocol, TypeAlias, cast

import pytest

from pytest_megatron.gangs.ipc.messages import Lines
from pytest_megatron.gangs.merge import RunEnd
from pytest_megatron.gangs.rank import coverage as measure

_FoundLines: TypeAlias = dict[str, dict[str, set[int]]]  # node id -> file -> lines
_COLLECT = "TestmonCollect"  # the plugin that records
_LINES = "nodes_files_lines"  # of the report of a teardown
_OF_TEST = pytest.StashKey[dict[str, set[int]]]()
_OPTIONS = ("testmon", "testmon_noselect", "testmon_nocollect", "testmon_forceselect", "tmnet")


class _LineRecorder(Protocol):
    """`TestmonCollector`."""

    batched_test_names: set[str]
    cov_plugin: object

    def get_batch_coverage_data(self) -> _FoundLines:
        """Return the lines of the tests since the last call; empty while further tests follow."""


class _Collect(Protocol):
    """The plugin that records."""

    testmon: _LineRecorder
    reports: dict[str, dict[str, pytest.TestReport]]


class _Data(Protocol):
    """`TestmonData`."""

    exec_id: int
    files_of_interest: list[str]
    system_packages_change: bool


def _collect(config: pytest.Config) -> _Collect | None:
    return cast("_Collect | None", config.pluginmanager.get_plugin(_COLLECT))


# In the controller


def is_asked_for(config: pytest.Config) -> bool:
    """Return whether an option of the plugin is given; call it before plugins are configured."""
    return any(getattr(config.option, name, False) for name in _OPTIONS)


def is_recording(config: pytest.Config) -> bool:
    """Return whether the lines of tests are recorded; no coverage of ranks is measured then."""
    return bool(config.pluginmanager.has_plugin(_COLLECT))


def input_for_rank(config: pytest.Config) -> dict[str, object]:
    """Return what the plugin's controller sends a worker, by which that only reads records."""
    data: _Data | None = getattr(config, "testmon_data", None)
    if data is None:
        return {}
    return {
        "testmon_exec_id": data.exec_id,
        "testmon_system_packages_change": data.system_packages_change,
        "testmon_files_of_interest": list(data.files_of_interest),
    }


class _RecorderOfRanks:
    """Stands in for the controller's recorder while a test runs on ranks.

    What the controller executes meanwhile is not of the test.
    """

    def __init__(
        self, own: _LineRecorder, item: pytest.Item, end: Callable[[], RunEnd | None]
    ) -> None:
        self._own = own
        self._item = item
        self._end = end

    def start_testmon(self, *_: object) -> None:
        """Leave it to the ranks."""

    def discard_current(self) -> None:
        """Have nothing to discard."""

    def get_batch_coverage_data(self) -> _FoundLines:
        """Return the lines of the test, and of tests that the controller ran before it."""
        found: _FoundLines = {}
        if self._own.batched_test_names:
            vars(self._own)["_next_test_name"] = None  # as after the last test
            found = self._own.get_batch_coverage_data()
        lines: dict[str, set[int]] = {}
        end = self._end()
        for rank in () if end is None else end.ranks:
            for file, numbers in ({} if rank.done is None else rank.done.lines).items():
                lines.setdefault(file, set()).update(numbers)
        node_id = self._item.nodeid
        lines.setdefault(node_id.partition("::")[0], {1})  # where no rank ended the test
        self._item.stash[_OF_TEST] = lines
        return {**found, node_id: lines}


@contextlib.contextmanager
def recorded_by_ranks(item: pytest.Item, end: Callable[[], RunEnd | None]) -> Generator[None]:
    """Have the plugin keep the lines of all ranks for a test.

    Args:
        item: The test.
        end: Returns its result on the gang, once there is one.
    """
    collect = _collect(item.config)
    if collect is None:
        yield
        return
    own = collect.testmon
    collect.testmon = cast("_LineRecorder", _RecorderOfRanks(own, item, end))
    try:
        yield
    finally:
        collect.testmon = own


def add_lines(report: pytest.TestReport, *items: pytest.Item) -> None:
    """Have the plugin keep tests again, of which a late teardown failed.

    Args:
        report: Of that teardown.
        items: The test that had set the fixture up last, and the one that the report is of.
    """
    kept = {item.nodeid: item.stash[_OF_TEST] for item in items if _OF_TEST in item.stash}
    if kept:
        vars(report)[_LINES] = kept


def keep_late_failure(config: pytest.Config, report: pytest.TestReport) -> None:
    """Have tests stay selected although a teardown that failed is not the last report of them."""
    collect = _collect(config)
    if collect is not None and report.failed and report.when == "teardown":
        for node_id in (report.nodeid, *getattr(report, _LINES, ())):
            collect.reports[node_id]["late"] = report


# In ranks


def record_in_rank(config: pytest.Config) -> None:
    """Have each test leave its lines on its report, and nothing be written."""
    collect = _collect(config)
    if collect is not None:
        measure.leave_running()
        vars(collect)["_running_as"] = "worker"
        collect.testmon.cov_plugin = None  # that of the controller, which measures no ranks
        vars(sys.modules["testmon.testmon_core"])["TEST_BATCH_SIZE"] = 1


def take_lines(report: pytest.TestReport) -> Lines:
    """Take the lines of a test from the report of its teardown; empty for other reports."""
    found: _FoundLines = vars(report).pop(_LINES, {})
    return {file: sorted(lines) for file, lines in found.get(report.nodeid, {}).items()}
