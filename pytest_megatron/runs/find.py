"""Finds run directories below paths and in artifacts; removes old ones."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from pytest_megatron.errors import RunError, TriageError
from pytest_megatron.runs.archives import is_archive, unpack
from pytest_megatron.runs.layout import RUN_FILE, RUNS_DIR
from pytest_megatron.runs.record import (
    Result,
    read_if_whole,
)

_SKIPPED = frozenset(("checkpoints", "data_cache"))
_DEEPEST = 8


def runs_below(
    root: Path, *, depth: int = _DEEPEST, skipped: Collection[str] = _SKIPPED
) -> Iterator[Path]:
    """Return the run directories at or below `root`, in order of their paths.

    Args:
        root: A directory.
        depth: The number of levels below `root` to search.
        skipped: Names of directories that hold none.
    """
    found = directories_below(root, depth=depth, skipped=skipped)
    return (directory for directory in found if (directory / RUN_FILE).is_file())


def directories_below(root: Path, *, depth: int, skipped: Collection[str]) -> Iterator[Path]:
    """Yield a directory and those below it, in order of their paths.

    Follows no link, enters no run, and passes over what it may not read.

    Args:
        root: A directory.
        depth: The number of levels below `root` to search.
        skipped: Names of directories to pass over.
    """
    for directory, names, _ in os.walk(root):
        here = Path(directory)
        is_run = (here / RUN_FILE).is_file()
        is_end = is_run or len(here.relative_to(root).parts) >= depth
        names[:] = [] if is_end else sorted(name for name in names if name not in skipped)
        yield here


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """A run directory in something that was named.

    Attributes:
        name: For a person; of an artifact its own, and the place in it.
        is_unpacked: Whether it lies in the scratch directory.
    """

    directory: Path
    name: str
    is_unpacked: bool = False


@dataclass(frozen=True, slots=True)
class _RunFinder:
    """Finds runs at a path.

    Attributes:
        is_wanted: Which members of an artifact are unpacked beside `run.json`.
        looks_up: Whether a path may lie in a run.
        refused: Collects the errors of artifacts that cannot be unpacked; None raises the first.
    """

    is_wanted: Callable[[PurePath], bool]
    looks_up: bool
    refused: list[RunError] | None

    def find(self, path: Path, scratch: Path) -> Iterator[FoundRun]:
        """Yield the runs in a path: a run, an archive, or a folder."""
        if path.is_file() and is_archive(path):
            yield from self._unpacked(path, scratch)
        elif self.looks_up and (above := _above(path)) is not None:
            yield _here(above)
        elif path.is_dir():
            runs = [_here(directory) for directory in runs_below(path)]
            yield from runs
            archives = () if runs else sorted(filter(is_archive, path.rglob("*")))
            for number, archive in enumerate(archives):
                yield from self._unpacked(archive, scratch / str(number))

    def _unpacked(self, archive: Path, scratch: Path) -> Iterator[FoundRun]:
        """Yield the runs in an archive, whose records are unpacked."""
        target = scratch / "artifact"
        target.mkdir(parents=True)
        try:
            unpack(archive, target, lambda name: name.name == RUN_FILE or self.is_wanted(name))
        except TriageError as error:
            refused = RunError(error.where, error.problem)
            if self.refused is None:
                raise refused from None
            self.refused.append(refused)
            return
        name = archive.name.split(".")[0]
        for directory in runs_below(target):
            below = directory.relative_to(target).as_posix()
            shown = name if below == "." else f"{name}/{below}"
            yield FoundRun(directory=directory, name=shown, is_unpacked=True)


def find_runs(
    paths: Sequence[Path],
    scratch: Path,
    is_wanted: Callable[[PurePath], bool],
    *,
    looks_up: bool = False,
    refused: list[RunError] | None = None,
) -> list[FoundRun]:
    """Return the runs in some paths, in that order.

    Args:
        paths: Each a run directory; an artifact; a directory with several of either.
        scratch: A directory for the files of artifacts; made where one has to be unpacked.
        is_wanted: Which members of an artifact are unpacked beside `run.json`.
        looks_up: Whether a path may also be of anything in a run.
        refused: Gets the error of each artifact that is refused, instead of raising it.

    Raises:
        RunError: A path is not there or holds no run, or an artifact is refused.
    """
    finder = _RunFinder(is_wanted, looks_up, refused)
    found: list[FoundRun] = []
    for number, path in enumerate(paths):
        if not path.exists():
            raise RunError(
                str(path), "is not there, expected a run directory or an artifact of one"
            )
        num_refused = len(refused or ())
        mine = list(finder.find(path, scratch / str(number)))
        if not mine and len(refused or ()) == num_refused:
            is_read = path.is_dir() or is_archive(path)
            what = f"holds no {RUN_FILE}" if is_read else "is no directory and no archive"
            raise RunError(str(path), f"{what}, expected a run directory, or a zip or tar of one")
        found += mine
    return found


def _here(directory: Path) -> FoundRun:
    return FoundRun(directory=directory, name=directory.resolve().name)


def _above(path: Path) -> Path | None:
    """Return the run that a path is the directory of, or lies in."""
    for directory in (path, *path.resolve().parents)[:_DEEPEST]:
        if (directory / RUN_FILE).is_file():
            return directory
    return None


_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]+").fullmatch  # in the order in which runs began


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """A run in our own directory.

    Attributes:
        exit_code: Exit code of pytest; None of a run that has not ended, or that was killed.
    """

    directory: Path
    exit_code: int | None
    num_items: int


def kept_runs(root: Path) -> tuple[KeptRun, ...]:
    """Return the runs that a project keeps in our own directory, the latest first."""
    found = sorted((root / RUNS_DIR).glob("*/" + RUN_FILE), reverse=True)
    places = [file.parent for file in found]
    return tuple(_kept(path) for path in places if _NAME(path.name) and not path.is_symlink())


def remove_old_runs(root: Path, keep: int) -> tuple[Path, ...]:
    """Remove the runs in our own directory that have ended, but for the latest `keep`.

    A run that has not ended may be going on, or be taken over, and stays; it counts.

    Args:
        root: The project's.
        keep: At least 1.

    Raises:
        OSError: One cannot be removed.
    """
    removed: list[Path] = []
    for run in kept_runs(root)[keep:]:
        if run.exit_code is None:
            continue
        # First another name: what is half removed must not be taken for a run.
        doomed = run.directory.with_name(f".removed-{run.directory.name}")
        with contextlib.suppress(FileNotFoundError):  # another session was faster
            run.directory.replace(doomed)
            shutil.rmtree(doomed)
            removed.append(run.directory)
    return tuple(removed)


def _kept(directory: Path) -> KeptRun:
    run = read_if_whole(directory / RUN_FILE, Result) or Result(items={})
    return KeptRun(directory=directory, exit_code=run.exit_code, num_items=len(run.items))
