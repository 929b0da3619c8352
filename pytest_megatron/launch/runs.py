"""Finds run directories below a directory, and removes old ones (effects: files)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.files import read_json
from pytest_megatron.launch.layout import RUN_FILE
from pytest_megatron.launch.own_dir import RUNS_DIR

_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]+").fullmatch  # in the order in which runs began


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """A run in our own directory.

    Attributes:
        exit_code: Of pytest; None of a run that has not ended, or that was killed.
    """

    directory: Path
    exit_code: int | None
    num_items: int


def runs_below(root: Path, *, depth: int, skipped: Collection[str] = ()) -> Iterator[Path]:
    """Yield the run directories at or below `root`, in order of their paths.

    Follows no link, looks for no run within a run, and passes over what it may not read.

    Args:
        root: A directory.
        depth: How many directories below `root` are looked into.
        skipped: Names of directories that hold none.
    """
    for directory, names, _ in os.walk(root):
        here = Path(directory)
        if (here / RUN_FILE).is_file():
            names.clear()
            yield here
            continue
        is_deepest = len(here.relative_to(root).parts) >= depth
        names[:] = [] if is_deepest else sorted(name for name in names if name not in skipped)


def kept_runs(root: Path) -> tuple[KeptRun, ...]:
    """Return the runs that a project keeps in our own directory, the latest first."""
    found = sorted((root / RUNS_DIR).glob("*/" + RUN_FILE), reverse=True)
    places = [file.parent for file in found]
    return tuple(_read(path) for path in places if _NAME(path.name) and not path.is_symlink())


def remove_old_runs(root: Path, keep: int, *, spared: Path | None = None) -> tuple[Path, ...]:
    """Remove the runs in our own directory that have ended, but for the latest `keep`.

    A run that has not ended may be going on, or be taken over, and stays; it counts.

    Args:
        root: The project's.
        keep: At least 1.
        spared: A run that stays whichever it is.

    Raises:
        OSError: One cannot be removed.
    """
    removed: list[Path] = []
    for run in kept_runs(root)[keep:]:
        is_spared = spared is not None and run.directory.resolve() == spared.resolve()
        if run.exit_code is None or is_spared:
            continue
        # First another name: what is half removed must not be taken for a run.
        doomed = run.directory.with_name(f".removed-{run.directory.name}")
        with contextlib.suppress(FileNotFoundError):  # another session was faster
            run.directory.replace(doomed)
            shutil.rmtree(doomed)
            removed.append(run.directory)
    return tuple(removed)


def _read(directory: Path) -> KeptRun:
    try:
        run = read_json(directory / RUN_FILE)
    except (OSError, ValueError):
        run = None
    said = run if isinstance(run, dict) else {}
    code, items = said.get("exit_code"), said.get("items")
    return KeptRun(
        directory=directory,
        exit_code=code if isinstance(code, int) else None,
        num_items=len(items) if isinstance(items, dict) else 0,
    )
