"""Facts of the last session whose ranks collected for themselves, kept in pytest's cache.

With them ranks begin to collect beside the controller. Facts that are no longer true cost time
only.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

if TYPE_CHECKING:
    from pytest_megatron.gangs.spec import GangSpec

_CACHE = "megatron/ranks_that_collect"
_MOST_SUITES = 8
_CONFTEST = "conftest.py"
_PACKAGE = str(Path(__file__).parents[2])
_LIBRARIES = ("site-packages", "dist-packages")


class RankReaders(Protocol):
    """Readers of variables that differ between ranks, as `EnvWatch` records them."""

    rank_readers: list[str]
    size_readers: list[str]
    loaded: frozenset[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntStart:
    """Facts of one suite: the arguments of pytest that name files, with the number of ranks.

    Attributes:
        conftest: Directory of the conftest.py that reads the rank, from the project's root; None
            where another file does.
        gang: World size and device of the gang that has most ranks, or those typed.
        modules: Modules of third-party packages, in the order of their import.
    """

    conftest: str | None
    gang: tuple[int, str]
    modules: tuple[str, ...]


def is_library(file: str) -> bool:
    """Return whether a file is one of an installed package."""
    return any(part in _LIBRARIES for part in Path(file).parts) or file.startswith(_PACKAGE)


def recall(config: pytest.Config, size: tuple[int, int]) -> LearntStart | None:
    """Return what was learnt of the suite that a session is about to collect, or None.

    Args:
        config: Before its conftest files are loaded.
        size: Ranks of a node, and nodes.
    """
    if vars(config.known_args_namespace).get("cacheclear"):
        return None
    try:
        directory = pytest.Cache.cache_dir_from_config(config, _ispytest=True)
        known = pytest.Cache(directory, config, _ispytest=True).get(_CACHE, {})
        entries = {key: _entry(value) for key, value in known.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # there is no cache plugin, or it is of another version, or damaged
    found = entries.get(_key(config, size))
    if found is not None:
        return found
    folders = [Path(file) for file in _files(config)]
    for key, entry in entries.items():
        top = entry.conftest
        is_below = top is not None and all(folder.is_relative_to(top) for folder in folders)
        if is_below and folders and key.startswith(_size_text(size)):
            return entry
    return None


def learn(
    config: pytest.Config,
    size: tuple[int, int],
    specs: Iterable[GangSpec],
    readers: RankReaders,
    *,
    is_forkable: bool,
) -> None:
    """Keep what the next session of a suite has to know; its tests are collected.

    Args:
        config: Configuration of the session.
        size: Ranks of a node, and nodes.
        specs: Gangs of its tests.
        readers: Readers of rank variables; without any, the suite is forgotten.
        is_forkable: Whether a process with all of its modules can be forked.
    """
    cache: pytest.Cache | None = getattr(config, "cache", None)
    if cache is None:
        return
    known = cache.get(_CACHE, {})
    known = known if isinstance(known, dict) else {}
    before, key = dict(known), _key(config, size)
    known.pop(key, None)
    if readers.rank_readers:
        file = Path(readers.rank_readers[0].partition(" in ")[2].rpartition(":")[0])
        typed = size[0] * size[1]
        first = max(specs, key=lambda spec: (spec.world_size == typed, spec.world_size))
        entry = LearntStart(
            conftest=_folder(file, config.rootpath) if file.name == _CONFTEST else None,
            gang=(first.world_size, first.device),
            modules=_modules(config, readers) if is_forkable else (),
        )
        known = {key: asdict(entry), **dict(list(known.items())[: _MOST_SUITES - 1])}
    if json.dumps(known) != json.dumps(before):
        cache.set(_CACHE, known)


def _modules(config: pytest.Config, readers: RankReaders) -> tuple[str, ...]:
    """Return the third-party modules that can be imported before any code of the user.

    None where a library reads the rank while it is imported. Those that were imported after code
    of the user had changed variables may depend on these.
    """
    places = (*readers.rank_readers, *readers.size_readers)
    if any(is_library(text.partition(" in ")[2]) for text in places):
        return ()
    plugins = {_top(getattr(p, "__name__", "")) for p in config.pluginmanager.get_plugins()}
    plugins.add(_top(__name__))
    return tuple(
        name
        for name, module in list(sys.modules.items())
        if (readers.loaded is None or name in readers.loaded)
        and _is_plain(name, module)
        and _top(name) not in plugins
    )


def _is_plain(name: str, module: ModuleType) -> bool:
    """Return whether a module is a library's, which pytest does not rewrite."""
    spec = getattr(module, "__spec__", None)
    return (
        spec is not None
        and spec.name == name
        and isinstance(spec.origin, str)
        and is_library(spec.origin)
        and not isinstance(spec.loader, AssertionRewritingHook)
    )


def _top(name: str) -> str:
    return str(name).partition(".")[0]


def _entry(value: Mapping[str, object]) -> LearntStart:
    """Return an entry of the cache.

    Raises:
        KeyError, TypeError, ValueError: It is damaged.
    """
    conftest, gang, modules = value["conftest"], value["gang"], value["modules"]
    if not isinstance(gang, list) or not isinstance(modules, list):
        raise TypeError
    world_size, device = gang
    return LearntStart(
        conftest=None if conftest is None else str(conftest),
        gang=(int(world_size), str(device)),
        modules=tuple(str(name) for name in modules),
    )


def _key(config: pytest.Config, size: tuple[int, int]) -> str:
    return " ".join([_size_text(size), *sorted(_files(config))])


def _size_text(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}:"


def _files(config: pytest.Config) -> set[str]:
    """Return the files and folders that a session was given, from the project's root."""
    words = getattr(config.known_args_namespace, "file_or_dir", None) or ()
    start = config.invocation_params.dir
    return {
        Path(os.path.relpath(start / str(word).partition("::")[0], config.rootpath)).as_posix()
        for word in words
    }


def _folder(file: Path, root: Path) -> str | None:
    """Return the folder of a file, from the project's root; None outside of it."""
    with contextlib.suppress(ValueError):
        return file.parent.relative_to(root).as_posix()
    return None
