"""Tests that a session leaves out, each with the option or the plugin that did so.

Workers of pytest-xdist collect for their controller, and send theirs with `workeroutput`.
"""

from __future__ import annotations

import inspect
import itertools
import os
import shlex
from collections.abc import Generator, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from _pytest.pathlib import fnmatch_ex

if TYPE_CHECKING:
    from pytest_megatron.runs.nowhere import Deselected

REASON = pytest.StashKey[str]()  # of an item that a role of ours leaves out
_TESTS = pytest.StashKey[list[tuple[str, str]]]()
_FILES = pytest.StashKey[dict[str, str]]()
_FOLDED = pytest.StashKey["Deselected"]()
_OUTPUT = "megatron_deselected"
_MOST_FOLDERS = 1000  # below one that is ignored
_OPTIONS = {
    "_pytest.main": "--deselect",
    "_pytest.cacheprovider": "--lf",
    "_pytest.stepwise": "--stepwise",
}
_WORDS = {"deselect_by_keyword": ("-k", "keyword"), "deselect_by_mark": ("-m", "markexpr")}


def note_deselected(config: pytest.Config, items: Sequence[object]) -> None:
    """Note tests that were left out after they were collected; called by a hook of pytest.

    pytest-testmon passes objects without a name, which are counted by pytest alone.
    """
    by = f"deselected by {_caller(config)}"
    found = [item for item in items if isinstance(item, pytest.Item)]
    noted = config.stash.setdefault(_TESTS, [])
    noted += [(item.nodeid, item.stash.get(REASON, by)) for item in found]


def note_ignored(config: pytest.Config, path: Path, reason: str) -> None:
    """Note a file that is not collected, if it can hold tests; its first reason counts."""
    if any(fnmatch(path.name, pattern) for pattern in config.getini("python_files")):
        file = Path(os.path.relpath(path, config.rootpath)).as_posix()
        config.stash.setdefault(_FILES, {}).setdefault(file, reason)


class LeftOutFiles:
    """Notes files that are not collected, and tests that `--lf` drops from those that are."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._is_last_failed = bool(config.getoption("lf", default=False))
        self._full: dict[pytest.Collector, list[pytest.Item | pytest.Collector]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> Generator[None, bool, bool]:
        """Note the files of tests at a path that is ignored."""
        is_ignored = yield
        if is_ignored:
            is_folder = collection_path.is_dir()
            reason = self._reason(collection_path)
            paths = self._walk(collection_path) if is_folder else [collection_path]
            for path in paths if reason else ():
                note_ignored(self._config, path, reason)
        return is_ignored

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Note files that `--lf` skips whole, and tests that it drops from a file."""
        if not (self._is_last_failed and isinstance(collector, pytest.File)):
            return (yield)
        num_skipped = self._num_skipped()
        report = yield
        if self._num_skipped() > num_skipped:
            note_ignored(self._config, collector.path, "deselected by --lf")
        kept = set(report.result or ())
        dropped = [node for node in self._full.pop(collector, ()) if node not in kept]
        noted = self._config.stash.setdefault(_TESTS, [])
        noted += [(node.nodeid, "deselected by --lf") for node in dropped]
        return report

    @pytest.hookimpl(wrapper=True, trylast=True, specname="pytest_make_collect_report")
    def pytest_megatron_note_full_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Note all that a file holds, before `--lf` drops a part of it."""
        report = yield
        if self._is_last_failed and isinstance(collector, pytest.File):
            self._full[collector] = list(report.result or ())
        return report

    def _num_skipped(self) -> int:
        """Return the number of files that `--lf` has skipped so far."""
        plugin = self._config.pluginmanager.get_plugin("lfplugin")
        return getattr(plugin, "_skipped_files", 0)

    def _reason(self, path: Path) -> str:
        """Return why a path is ignored, or "" for a folder that pytest never enters."""
        option = self._config.option
        typed = {"--ignore": option.ignore, "--ignore-glob": option.ignore_glob}
        found = {by: [*map(os.path.abspath, paths or ())] for by, paths in typed.items()}
        for name in ("collect_ignore", "collect_ignore_glob"):
            found[name] = self._listed(name, path.parent)
        for by, paths in found.items():
            if any(
                str(path) == one or (by.endswith("glob") and fnmatch(str(path), one))
                for one in paths
            ):
                return f"ignored by {by}"
        return "" if self._is_never_entered(path) else "ignored by a conftest.py or a plugin"

    def _listed(self, name: str, folder: Path) -> list[str]:
        """Return the paths of `collect_ignore` or the like, of the nearest conftest.py."""
        modules = (p for p in self._config.pluginmanager.get_plugins() if isinstance(p, ModuleType))
        lists = {Path(m.__file__ or ""): vars(m)[name] for m in modules if name in vars(m)}
        for parent in (folder, *folder.parents):
            if (file := parent / "conftest.py") in lists:
                return [str(parent / path) for path in lists[file]]
        return []

    def _is_never_entered(self, path: Path) -> bool:
        """Return true for a folder such as `.git`, a cache or a virtual environment."""
        files = ("pyvenv.cfg", "conda-meta/history")
        return path.is_dir() and (
            path.name == "__pycache__"
            or any(fnmatch_ex(pattern, path) for pattern in self._config.getini("norecursedirs"))
            or any((path / file).is_file() for file in files)
        )

    def _walk(self, folder: Path) -> Iterator[Path]:
        """Yield the files below an ignored folder, which may be large: not all of it is read."""
        norecurse: list[str] = self._config.getini("norecursedirs")
        for directory, folders, files in itertools.islice(os.walk(folder), _MOST_FOLDERS):
            folders[:] = [f for f in folders if not any(fnmatch(f, p) for p in norecurse)]
            yield from (Path(directory, file) for file in files)


def fold(session: pytest.Session) -> None:
    """Keep what was left out, once all tests are collected."""
    stash = session.config.stash
    tests, files = stash.get(_TESTS, []), stash.get(_FILES, {})
    if tests or files:
        from pytest_megatron.runs.nowhere import fold_deselected  # noqa: PLC0415 - few need it

        found = fold_deselected(tests, [item.nodeid for item in session.items], files)
        stash[_FOLDED] = found
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_OUTPUT] = found


def take_deselected(config: pytest.Config, workeroutput: dict[str, Deselected]) -> None:
    """Take the tests that a worker left out; all workers leave out the same."""
    if _OUTPUT in workeroutput:
        config.stash[_FOLDED] = workeroutput[_OUTPUT]


def deselected_of(config: pytest.Config) -> Deselected:
    """Return the tests that the session left out: reason -> node id -> number of tests."""
    return config.stash.get(_FOLDED, {})


def _caller(config: pytest.Config) -> str:
    """Return the option, conftest.py or module of a plugin that called `pytest_deselected`."""
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in ("pluggy", "pytest_megatron"):
            break
        frame = frame.f_back
    if frame is None:
        return "pytest_megatron"
    if frame.f_code.co_name in _WORDS and module.startswith("_pytest."):
        option, name = _WORDS[frame.f_code.co_name]
        return shlex.join([option, str(config.getoption(name))])
    if module.rpartition(".")[2] == "conftest":
        return os.path.relpath(frame.f_code.co_filename, config.rootpath)
    return _OPTIONS.get(module, module)
