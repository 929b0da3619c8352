"""What can change between two sessions: files of the project, and libraries."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from pytest_megatron.runs.layout import RUN_FILE

Versions: TypeAlias = dict[str, tuple[int, ...]]
_WATCHED = (".py", ".toml", ".ini", ".cfg", ".yaml", ".yml")
# What an installation changes at the top of `site-packages`; not the folders that get a cache.
_INSTALLED = (".py", ".pth", ".so", ".egg-link", ".egg-info", ".dist-info")


def project_files(root: Path) -> Versions:
    """Return the versions of files below a root that a session may read.

    Hidden folders, caches, virtual environments and run directories are left out.
    """
    return dict(_files([str(root)]))


def is_of_project(file: object, root: Path) -> bool:
    """Return whether a file is below a root, and of no package that is installed there."""
    if not isinstance(file, str) or not Path(file).is_relative_to(root):
        return False
    return not any(file.startswith(f"{directory}/") for directory in _site_directories())


def loaded_files() -> set[str]:
    """Return the files of the modules of this process, and of the libraries that they use."""
    maps = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    mapped = {name for line in maps for name in line.split(None, 5)[5:] if name.startswith("/")}
    modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return mapped | {file for file in modules if isinstance(file, str)}


def library_versions(loaded: Iterable[str], root: Path) -> Versions:
    """Return the versions of what is loaded, installed, or an editable install elsewhere.

    Args:
        loaded: Files.
        root: Of the project, whose files are left out unless they are loaded.
    """
    found = {file: _version(file) for file in loaded}
    for directory in _site_directories():
        for entry in _entries(directory):
            if entry.name.endswith(_INSTALLED):
                found[entry.path] = _version(entry.path)
    elsewhere = {path for path in _editable_directories() if not Path(path).is_relative_to(root)}
    found.update((f, v) for f, v in _files(elsewhere) if not Path(f).is_relative_to(root))
    return found


def _site_directories() -> list[str]:
    return [*site.getsitepackages(), site.getusersitepackages()]


def _editable_directories() -> Iterator[str]:
    """Yield folders that are imported from and are neither Python's nor `site-packages`."""
    finders = (sys.modules.get(getattr(finder, "__module__", "")) for finder in sys.meta_path)
    mapped = [str(path) for finder in finders for path in getattr(finder, "MAPPING", {}).values()]
    own = (sys.prefix, sys.base_prefix, *_site_directories())
    for path in (*sys.path, *mapped):
        if os.path.isdir(path) and not any(Path(path).is_relative_to(place) for place in own):  # noqa: PTH112 - a name
            yield path


def _files(directories: Iterable[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    todo = list(directories)
    while todo:
        entries = list(_entries(todo.pop()))
        if any(entry.name in ("pyvenv.cfg", RUN_FILE) for entry in entries):
            continue
        for entry in entries:
            if entry.name.endswith(_WATCHED) and entry.is_file():
                yield entry.path, _version(entry.path)
            elif entry.is_dir(follow_symlinks=False) and not entry.name.startswith((".", "__py")):
                todo.append(entry.path)


def _entries(directory: str) -> Iterator[os.DirEntry[str]]:
    try:
        yield from os.scandir(directory)
    except OSError:  # it was removed meanwhile, or cannot be read
        return


def _version(path: str) -> tuple[int, ...]:
    """Return time, size and number of a file, empty if it is gone."""
    try:
        found = os.stat(path)  # noqa: PTH116 - of thousands of files
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
