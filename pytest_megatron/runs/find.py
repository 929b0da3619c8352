"""Finds run directories below a directory, and removes old ones (effects: files)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from pydantic import TypeAdapter, ValidationError

from pytest_megatron.base.files import read_bytes, read_json
from pytest_megatron.errors import ReproError, TriageError
from pytest_megatron.runs.archives import is_archive, unpack
from pytest_megatron.runs.environment import NAME as PATCH_NAME
from pytest_megatron.runs.layout import RUN_FILE, RUNS_DIR

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


SUMMARY_FILE = "summary.json"
_WANTED = (RUN_FILE, "plan.json", "triage.json", "comparison.json", PATCH_NAME)
_SKIPPED = frozenset(("checkpoints", "data_cache", "home", "project", "tensorboard"))
_DEEPEST = 8


@dataclass(frozen=True, kw_only=True)
class _SummaryJob:
    """A job in a summary."""

    artifact: str | None = None


@dataclass(frozen=True, kw_only=True)
class _SummaryFile:
    """What of a summary tells where runs are."""

    jobs: list[_SummaryJob]


_SUMMARY = TypeAdapter(_SummaryFile)


def find_runs(path: Path, scratch: Path, *, with_checkpoints: bool = False) -> list[Path]:
    """Return the run directories at a path.

    Args:
        path: A run directory or anything in it; an artifact; a directory with several of either;
            what `pytest-megatron ci summary` wrote.
        scratch: A directory for what artifacts hold; made where one has to be unpacked.
        with_checkpoints: Whether checkpoints are unpacked as well.

    Raises:
        ReproError: There is none, or an artifact is refused.
    """
    if not path.exists():
        raise ReproError(str(path), "is not there; give a run directory or an artifact of one")
    if path.is_file() and is_archive(path):
        return _required(_unpacked(path, scratch, with_checkpoints=with_checkpoints), path)
    above = _above(path)
    if above is not None:
        return [above]
    summary = path / SUMMARY_FILE if path.is_dir() else path
    if summary.name == SUMMARY_FILE and summary.is_file():
        named = _named_by(summary)
        found = [
            find_runs(artifact, scratch / str(number), with_checkpoints=with_checkpoints)
            for number, artifact in enumerate(named)
        ]
        return [run for runs in found for run in runs]
    runs = list(runs_below(path, depth=_DEEPEST, skipped=_SKIPPED)) if path.is_dir() else []
    if not runs and path.is_dir():
        for number, archive in enumerate(sorted(filter(is_archive, path.rglob("*")))):
            runs += _unpacked(archive, scratch / str(number), with_checkpoints=with_checkpoints)
    return _required(runs, path)


def _named_by(summary: Path) -> list[Path]:
    """Return the artifacts of what `pytest-megatron ci summary` wrote.

    Raises:
        ReproError: It is none, or none of its artifacts is here.
    """
    try:
        jobs = _SUMMARY.validate_json(read_bytes(summary)).jobs
    except (OSError, ValidationError) as error:
        raise ReproError(str(summary), f"is no summary of jobs: {error}") from None
    names = [job.artifact.partition("!")[0] for job in jobs if job.artifact]
    bases = (Path(), summary.parent, summary.parent.parent)
    found = [next((b / name for b in bases if (b / name).exists()), None) for name in names]
    artifacts = list(dict.fromkeys(path for path in found if path is not None))
    if not artifacts:
        said = ", ".join(names[:5]) or "none"
        raise ReproError(
            str(summary), f"names artifacts that are not here: {said}; give the path of one"
        )
    return artifacts


def _required(runs: list[Path], path: Path) -> list[Path]:
    if not runs:
        raise ReproError(
            str(path), f"holds no {RUN_FILE}, expected a run directory or an artifact of one"
        )
    return runs


def _above(path: Path) -> Path | None:
    """Return the run that a path is the directory of, or lies in."""
    for directory in (path, *path.absolute().parents)[:_DEEPEST]:
        if (directory / RUN_FILE).is_file():
            return directory
    return None


def _unpacked(archive: Path, scratch: Path, *, with_checkpoints: bool) -> list[Path]:
    def is_wanted(name: PurePath) -> bool:
        is_saved = with_checkpoints and "checkpoints" in name.parts
        return is_saved or (name.name in _WANTED and "project" not in name.parts)

    target = scratch / "artifact"
    target.mkdir(parents=True)
    try:
        unpack(archive, target, is_wanted)
    except TriageError as error:
        raise ReproError(error.where, error.problem) from None
    return list(runs_below(target, depth=_DEEPEST, skipped=_SKIPPED))
