"""Tests that a session leaves out, each with the option or the plugin that did so.

Workers of pytest-xdist collect for their controller, and send theirs with `workeroutput`.
"""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_megatron.runs.nowhere import Deselected

REASON = pytest.StashKey[str]()  # of an item that a role of ours leaves out
_TESTS = pytest.StashKey[list[tuple[str, str]]]()
_FILES = pytest.StashKey[dict[str, str]]()
_FOLDED = pytest.StashKey["Deselected"]()
_OUTPUT = "megatron_deselected"
_OPTIONS = {
    "_pytest.main": "--deselect",
    "_pytest.cacheprovider": "--lf",
    "_pytest.stepwise": "--stepwise",
}
_WORDS = {"deselect_by_keyword": ("-k", "keyword"), "deselect_by_mark": ("-m", "markexpr")}


def note_deselected(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Note tests that were left out after they were collected; called by a hook of pytest."""
    by = f"deselected by {_caller(config)}"
    noted = config.stash.setdefault(_TESTS, [])
    noted += [(item.nodeid, item.stash.get(REASON, by)) for item in items]


def note_ignored(config: pytest.Config, file: str, reason: str) -> None:
    """Note a file of tests that is not collected."""
    config.stash.setdefault(_FILES, {})[file] = reason


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
