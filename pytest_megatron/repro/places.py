"""Finds the runs at a path: a run directory, anything in it, an artifact, a folder of artifacts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePath

from pytest_megatron.errors import ReproError, TriageError
from pytest_megatron.launch.patch import NAME as PATCH_NAME
from pytest_megatron.triage.archives import is_archive, unpack

RUN_FILE = "run.json"
_WANTED = (RUN_FILE, "plan.json", "triage.json", "comparison.json", PATCH_NAME)
_SKIPPED = frozenset(
    ("checkpoints", "data_cache", "project", "home", "logs", "tensorboard", "ranks")
)
_DEEPEST = 8


def find_runs(path: Path, scratch: Path, *, with_checkpoints: bool = False) -> list[Path]:
    """Return the run directories at a path.

    Args:
        path: A run directory or anything in it; an artifact; a directory with several of either.
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
    runs = list(_below(path)) if path.is_dir() else []
    if not runs and path.is_dir():
        for number, archive in enumerate(sorted(filter(is_archive, path.rglob("*")))):
            runs += _unpacked(archive, scratch / str(number), with_checkpoints=with_checkpoints)
    return _required(runs, path)


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


def _below(root: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(root):
        depth = len(Path(directory).relative_to(root).parts)
        names[:] = [n for n in sorted(names) if n not in _SKIPPED and depth < _DEEPEST]
        if RUN_FILE in files:
            names.clear()
            yield Path(directory)


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
    return list(_below(target))
