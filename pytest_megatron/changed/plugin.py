"""The roles that record what tests use, and leave out those for which nothing changed.

The recorder lives in every process that runs tests: the controller, workers of pytest-xdist and
ranks. The controller alone joins what all of them noted.
"""

from __future__ import annotations

import functools
import json
import os
import posixpath
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

import pytest

from pytest_megatron.base.project import ask_git
from pytest_megatron.base.text import counted, listed
from pytest_megatron.changed import watch
from pytest_megatron.changed.record import (
    COLLECT,
    DEFAULT_FILE,
    FinishedTest,
    Joiner,
    ProjectState,
    TestRecord,
    WindowNotes,
    merge_records,
    read_notes,
    read_record,
    restamped,
    write_record,
)
from pytest_megatron.changed.select import FILE_NAME as DRAWN
from pytest_megatron.changed.select import (
    Changes,
    DrawnRun,
    append_drawn,
    blocks_at,
    draw,
    open_failures,
    read_drawn,
    summary,
)
from pytest_megatron.changed.sources import (
    ParsedFiles,
    Sources,
    checkout_of,
    digest,
    environment,
    files_of,
)
from pytest_megatron.runs.environment import utc_now
from pytest_megatron.runs.layout import OWN_DIR, make_own_dir
from pytest_megatron.session.deselected import REASON
from pytest_megatron.session.options import (
    COLLECTING_PLUGIN,
    LEFT_OUT,
    WORKLOADS_PLUGIN,
    Options,
    dest,
    usage_errors,
)

if TYPE_CHECKING:
    from pytest_megatron.gangs.ipc.messages import RankConfig
    from pytest_megatron.gangs.spec import GangSpec
    from pytest_megatron.workloads.items.collect import WorkloadItem

RECORDER = "changed-recorder"  # ranks keep it, as it has no name of a role of the controller
SELECTOR = "megatron-changed"
_PARSED_FILE = "parsed.z"
_COUNTS = "collected"  # key of the note with the number of tests of each file
_OUTPUT = "megatron_changed"
_WORKLOAD = "workload"
_LEFT_OUT_FILE = "PYTEST_MEGATRON_LEFT_OUT"  # variable: tests that ranks leave out as well


class ChangedRecorder:
    """Opens windows of the process's recorder for tests, fixtures and files."""

    def __init__(self, config: pytest.Config, directory: str) -> None:
        """Start recording; functions that ran before are known by the files that are loaded."""
        self._config = config
        top, self._start = _checkout_of(config)
        self.directory = directory
        self.watch = watch.Watch(str(top), directory, has_windows=True)
        self.watch.note_loaded(
            str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())
        )
        for module in list(sys.modules.values()):
            self.watch.find_caches(module)
        self._keys: dict[object, set[str]] = {}  # definition of a fixture -> its windows

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Record the collection of a file; all of its tests depend on it."""
        if not collector.path.is_file():
            return (yield)
        with self.watch.window(f"{COLLECT}{self._place(collector)}"):
            report = yield
        if isinstance(collector, pytest.Module) and report.passed:
            self.watch.find_caches(collector.obj)
        return report

    def pytest_plugin_registered(self, plugin: object) -> None:
        """Know the cached functions of a `conftest.py`."""
        if isinstance(plugin, ModuleType):
            self.watch.find_caches(plugin)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record what a test uses while it runs."""
        with self.watch.window(item.nodeid) as add:
            try:
                return (yield)
            finally:
                keys = [self._keys.get(definition, ()) for definition in _fixtures_of(item)]
                add({"uses": sorted({key for some in keys for key in some})})
                add({"file": self._place(item), **_place_of(item)})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, object, object]:
        """Record a fixture that several tests share; all of them depend on it."""
        if fixturedef.scope == "function":
            return (yield)
        keys = self._keys.setdefault(fixturedef, set())
        key = f"fixture:{os.getpid()}:{len(self._keys)}:{len(keys)}"
        keys.add(key)
        with self.watch.window(key):
            return (yield)

    def _place(self, node: pytest.Item | pytest.Collector) -> str:
        """Return the file of a test, relative to the checkout."""
        return posixpath.normpath(posixpath.join(self._start, file_of(node)))

    def count(self, items: list[pytest.Item]) -> None:
        """Note how many tests the files have, before any is left out."""
        self.watch.note({"key": _COUNTS, "counts": Counter(map(file_of, items))})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Write what a worker of pytest-xdist did outside of tests."""
        if hasattr(self._config, "workerinput"):
            self.watch.end()


def _checkout_of(config: pytest.Config) -> tuple[Path, str]:
    with usage_errors():
        return checkout_of(config.rootpath)


def _fixtures_of(item: pytest.Item) -> list[object]:
    """Return the definitions of the fixtures that a test asked for, also while it ran."""
    info = getattr(item, "_fixtureinfo", None)
    named = info.name2fixturedefs.values() if info is not None else ()
    request = getattr(item, "_request", None)
    return [d for some in named for d in some] + list(
        getattr(request, "_fixture_defs", {}).values()
    )


def file_of(node: pytest.Item | pytest.Collector) -> str:
    """Return the file of a test, relative to the root."""
    return Path(os.path.relpath(node.path, node.config.rootpath)).as_posix()


def _place_of(item: pytest.Item) -> dict[str, object]:
    """Return how a test runs, and the rank that this process is."""
    rank = item.config.pluginmanager.get_plugin("megatron-rank")
    if rank is None:
        return {"mode": mode_of(item)}
    config = rank.rank_config
    return {"mode": _gang_mode(config), "rank": config.rank, "world": config.world_size}


def _gang_mode(gang: GangSpec | RankConfig) -> str:
    return f"{gang.device} x{gang.world_size}"


def mode_of(item: pytest.Item) -> str:
    """Return the kind and the number of the processes that run a test."""
    gangs = item.config.pluginmanager.get_plugin("megatron-gangs")
    spec = None if gangs is None else gangs.spec_of(item)
    if spec is not None:
        return _gang_mode(spec)
    is_workload = item.config.pluginmanager.has_plugin(WORKLOADS_PLUGIN) and not isinstance(
        item, pytest.Function
    )
    if not is_workload:
        return "plain"
    workload = cast("WorkloadItem", item).workload
    return f"{_WORKLOAD} {workload.platform} x{workload.nodes * workload.gpus}"


class Selector:
    """Leaves out tests in the controller, and writes the record at its end."""

    def __init__(self, config: pytest.Config, options: Options) -> None:
        self._config = config
        self._options = options
        self._root = config.rootpath
        self._top, self._start = _checkout_of(config)
        self._file = options.changed_file or DEFAULT_FILE
        self._started = self._described = time.time()
        self._drawn_path = self._path.with_name(DRAWN)
        self._drawn: list[str] = []
        self._seed = 0
        self._bad: set[str] = set()
        self._skipped: set[str] = set()
        self._parsed = ParsedFiles(self._root / OWN_DIR / _PARSED_FILE)
        self._state: ProjectState | None = None
        self._record = TestRecord()
        self._left_out: list[str] = []
        self._lines: list[str] = []
        self._failed: dict[str, str] = {}
        self._durations: Counter[str] = Counter()
        self._output: dict[str, list[str]] = {}
        self._problem = ""

    @property
    def _path(self) -> Path:
        return self._root / self._file

    @property
    def _sources(self) -> Sources:
        """The project as it is now."""
        return Sources(self._top, _import_paths(), parse=self._parsed.parse)

    @functools.cached_property
    def _earlier(self) -> set[str]:
        """The tests that failed when they were drawn, and have not passed since."""
        with usage_errors():
            return open_failures(read_drawn(self._drawn_path))

    def _prepare(self) -> ProjectState:
        """Return the state of the project, read and computed on the first call."""
        if self._state is None:
            with usage_errors():
                self._record = read_record(self._path)
                self._state = ProjectState(
                    environment=environment(self._top),
                    files=files_of(self._top, self._path, self._drawn_path),
                    root=self._start,
                )
                self._described = time.time()
        return self._state

    def select(self, items: list[pytest.Item]) -> None:
        """Leave out the tests for which nothing changed."""
        state = self._prepare()
        if self._options.changed is None:
            return
        with usage_errors():
            base = self._options.changed
            blocks = blocks_at(self._top, base) if base else {}
        changes = Changes(self._record, self._sources, state, blocks)
        reasons: dict[str, str] = {}
        for item in items:
            reason = changes.reason(item.nodeid, mode_of(item))
            if reason is None and item.nodeid in self._earlier:
                reason = "it failed when it was drawn"
            if reason is not None:
                reasons[item.nodeid] = reason
        unchanged = [item for item in items if item.nodeid not in reasons]
        self._lines = [f"--changed: {line}" for line in summary(reasons, len(items))]
        self._draw(unchanged)
        kept = reasons.keys() | set(self._drawn)
        dropped = [item for item in unchanged if item.nodeid not in kept]
        self._left_out = [item.nodeid for item in dropped]
        if dropped:
            self._config.stash[LEFT_OUT] = len(dropped)
            for item in dropped:
                item.stash[REASON] = "deselected by --changed"
            self._config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if item.nodeid in kept]
            gangs = self._config.pluginmanager.get_plugin("megatron-gangs")
            if gangs is not None:
                gangs.leave_out(dropped)
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[_OUTPUT] = {
                "lines": self._lines,
                "left_out": self._left_out,
                "drawn": self._drawn,
                "seed": self._seed,
            }
        if _LEFT_OUT_FILE in os.environ:  # not where the plugin was loaded late
            text = json.dumps(self._left_out)
            Path(os.environ[_LEFT_OUT_FILE]).write_text(text, encoding="utf-8")

    def _draw(self, unchanged: list[pytest.Item]) -> None:
        """Draw the tests that run although nothing changed for them."""
        chosen = self._options.changed_draw
        if chosen == "off" or not unchanged:
            return
        if chosen:
            self._seed = int(chosen)
        else:  # the same in all workers of pytest-xdist
            worker: dict[str, str] = getattr(self._config, "workerinput", {})
            text = worker.get("testrunuid") or secrets.token_hex(4)
            self._seed = int(digest(text.encode())[:8], 16)
        durations = {i.nodeid: self._record.tests[i.nodeid].duration_s for i in unchanged}
        costly = {i.nodeid for i in unchanged if mode_of(i).startswith(_WORKLOAD)}
        self._drawn = draw(durations, self._seed, costly=costly)
        if self._drawn:
            number = f"{len(self._drawn)} of the {len(unchanged)} others"
            verb = "runs" if len(self._drawn) == 1 else "run"
            self._lines.append(
                f"--changed: {number} {verb} as well, "
                f"drawn by -o megatron_changed_draw={self._seed}"
            )

    def _note_drawn(self) -> None:
        """Note how the drawn tests ended, and those that failed when they were drawn before."""
        ran = {node_id for node_id in self._durations if node_id not in self._skipped}
        drawn = [node_id for node_id in self._drawn if node_id in ran]
        followed = self._earlier & ran
        if not drawn and not followed:
            return
        run = DrawnRun(
            time=utc_now(),
            commit=ask_git(self._root, "rev-parse", "HEAD"),
            seed=self._seed,
            num_left_out=len(self._left_out) + len(self._drawn),
            drawn=tuple(drawn),
            failed=tuple(sorted(self._bad & {*drawn, *followed})),
            passed=tuple(sorted(followed - self._bad)),
        )
        try:
            make_own_dir(self._root)
            append_drawn(self._drawn_path, run)
        except OSError as error:
            self._problem = f"{self._drawn_path}: {error.strerror}; drawn tests are not noted"

    def pytest_report_collectionfinish(self) -> list[str]:
        """Print how many tests run, and why."""
        return self._lines

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Take what a worker of pytest-xdist left out; all of them leave out the same."""
        found = getattr(node, "workeroutput", {}).get(_OUTPUT)
        if found is not None:
            self._left_out, self._output = found["left_out"], found
            self._drawn, self._seed = found["drawn"], found["seed"]
            self._config.stash[LEFT_OUT] = len(self._left_out)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what workers of pytest-xdist left out."""
        for line in self._output.get("lines", ()):
            terminalreporter.write_line(line)
        missed = [node_id for node_id in self._drawn if node_id in self._bad]
        if missed:
            terminalreporter.write_line(
                f"--changed: {len(missed)} of {counted(len(self._drawn), 'drawn test')} failed, "
                f"for which nothing changed: {listed(missed, 3)}; it is flaky, or uses what no "
                f"record shows: run all tests",
                red=True,
            )
        if self._problem:
            terminalreporter.write_line(f"megatron: {self._problem}", yellow=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test ended, for its entry in the record."""
        self._durations[report.nodeid] += int(report.duration * 1000)
        if report.outcome == "failed":
            self._bad.add(report.nodeid)
        elif report.outcome == "skipped":
            self._skipped.add(report.nodeid)
        if report.outcome != "passed":
            self._failed.setdefault(report.nodeid, f"it {report.outcome} last time")

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Write the record; a session that left out everything has succeeded."""
        result = yield
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and (
            self._config.stash.get(LEFT_OUT, 0)
        ):
            session.exitstatus = pytest.ExitCode.OK
        if not hasattr(self._config, "workerinput"):
            with _unrecorded():
                self._note_drawn()
        recorder = self._config.pluginmanager.get_plugin(RECORDER)
        if recorder is not None and not hasattr(self._config, "workerinput"):
            recorder.watch.end()
            with _unrecorded():
                self._write(recorder)
        return result

    def _write(self, recorder: ChangedRecorder) -> None:
        """Join what all processes noted, and add it to the file."""
        state = self._prepare()
        notes = read_notes(Path(recorder.directory))
        joiner = Joiner(notes, self._sources, self._started, self._described)
        tests = {
            node_id: self._finished(node_id, found)
            for node_id, found in notes.items()
            if found.file and node_id in self._durations
        }
        counts = notes.get(_COUNTS, WindowNotes()).counts
        now = time.time()
        new = joiner.record(tests, state, counts, now)
        kept = restamped(self._record, self._left_out, state)
        try:
            make_own_dir(self._root)
            write_record(self._path, merge_records([self._record, kept, new]))
            self._parsed.write()
        except OSError as error:
            self._problem = f"{self._path}: {error.strerror}; what tests used is not kept"
        shutil.rmtree(recorder.directory, ignore_errors=True)

    def _finished(self, node_id: str, notes: WindowNotes) -> FinishedTest:
        """Return what the record keeps of a test that ended.

        With a problem the test runs again whatever changed: it failed, or its training was not
        recorded or not compared with a golden.
        """
        problem = self._failed.get(node_id, "")
        is_training_noted = notes.num_processes > 1  # besides the controller
        is_workload = notes.mode.startswith(_WORKLOAD)
        if is_workload and not problem:
            options = self._options
            if options.is_lightweight or options.golden != "check":
                problem = "its last run was not compared with a golden"
            elif not is_training_noted:
                problem = "its training was not recorded"
        return FinishedTest(
            file=notes.file,
            mode=notes.mode,
            num_ranks=0 if is_workload else int(notes.mode.partition(" x")[2] or 0),
            duration_s=self._durations[node_id] / 1000,
            problem=problem,
        )


def _import_paths() -> list[Path]:
    return [Path(path) for path in dict.fromkeys(sys.path) if path and Path(path).is_dir()]


_recorders: list[ChangedRecorder] = []  # of this process; a recorder cannot be stopped


def _unrecorded() -> AbstractContextManager[None]:
    """Return a context in which files that the roles open do not count for tests."""
    return _recorders[0].watch.paused() if _recorders else nullcontext()


def start_recording(config: pytest.Config) -> None:
    """Record this process from now on, once.

    Raises:
        pytest.UsageError: Other tools leave no place for the recorder.
    """
    if _recorders:
        return
    # A worker of pytest-xdist and a fresh rank have no window; a pytest that a test starts has.
    directory = "" if os.environ.get(watch.KEY) else os.environ.get(watch.NOTES, "")
    directory = directory or tempfile.mkdtemp(prefix="pytest-megatron-changed-")
    os.environ[watch.NOTES] = directory
    early = sys.modules.get("_megatron_changed_watch")  # as `changed/site` loads it
    if early is not None and not os.environ.get(watch.KEY):
        early.stop_from_environment()
    try:
        _recorders.append(ChangedRecorder(config, directory))
    except RuntimeError as error:
        raise pytest.UsageError(f"--record-changed: {error}") from error


def begin_early(early_config: pytest.Config, *, is_rank: bool) -> None:
    """Start recording, and name the file of tests that ranks leave out, before they are started."""
    if not is_rank:
        directory = Path(tempfile.mkdtemp(prefix="pytest-megatron-"))
        early_config.add_cleanup(partial(shutil.rmtree, directory, ignore_errors=True))
        os.environ[_LEFT_OUT_FILE] = str(directory / "left_out.json")
    if vars(early_config.known_args_namespace).get(dest("record-changed")):
        start_recording(early_config)


def register_changed(config: pytest.Config, options: Options, *, is_rank: bool) -> None:
    """Register the roles that the options ask for."""
    if options.is_recording_changed:
        start_recording(config)
        config.pluginmanager.register(_recorders[0], RECORDER)
    if not is_rank and options.node_rank == 0:
        config.pluginmanager.register(Selector(config, options), SELECTOR)


def count_collected(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have the recorder note the tests of each file, if it runs."""
    recorder = config.pluginmanager.get_plugin(RECORDER)
    if recorder is not None:
        recorder.count(items)


def leave_out_unchanged(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove items for which nothing changed: the controller decides, ranks follow.

    A rank that collects for itself reads the names from a file that the controller wrote.
    """
    selector: Selector | None = config.pluginmanager.get_plugin(SELECTOR)
    if selector is not None:
        with _unrecorded():
            selector.select(items)
        return
    path = os.environ.get(_LEFT_OUT_FILE)
    if path and Path(path).exists() and config.pluginmanager.has_plugin(COLLECTING_PLUGIN):
        left_out = set(cast("list[str]", json.loads(Path(path).read_text(encoding="utf-8"))))
        items[:] = [item for item in items if item.nodeid not in left_out]
