"""Finds the runs at a path: a run directory, anything in it, an artifact, a folder of artifacts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePath

from pydantic import TypeAdapter, ValidationError

from pytest_megatron.errors import ReproError, TriageError
from pytest_megatron.files import read_bytes
from pytest_megatron.launch.layout import RUN_FILE
from pytest_megatron.launch.patch import NAME as PATCH_NAME
from pytest_megatron.launch.runs import runs_below
from pytest_megatron.triage.archives import is_archive, unpack

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
