"""Finds the jobs in what a user names: run directories, artifacts, folders of artifacts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from pytest_megatron.ci.job import FILE_NAME
from pytest_megatron.ci.outcome import JobRun
from pytest_megatron.ci.runs import is_job, read_run
from pytest_megatron.errors import CiError, TriageError
from pytest_megatron.triage.archives import is_archive, unpack
from pytest_megatron.triage.names import is_worth_reading

_DEPTH = 4  # directories from what is named to a job's
_PLAN = "plan"  # an artifact of the plan is no job's
_SUMMARY = "summary.json"


def read_jobs(
    paths: Sequence[Path], workspace: Path, *, is_empty_allowed: bool = False
) -> list[JobRun]:
    """Read every job below some paths, in the order given and by name.

    Args:
        paths: Run directories, zips, tars, or folders of them.
        workspace: A directory of our own, where archives are unpacked.
        is_empty_allowed: Whether a folder may hold nothing: a plan says what is missing.

    Raises:
        CiError: A path is not there, or no job is.
    """
    found: list[JobRun] = []
    for path in paths:
        if not path.exists():
            raise CiError(str(path), "no such file or directory")
        if path.is_file() and not is_archive(path):
            raise CiError(
                str(path), "is no directory and no archive, expected a run or an artifact"
            )
        here = list(_in(path, workspace, str(path), _DEPTH))
        if not here and not (is_empty_allowed and path.is_dir()):
            raise CiError(
                str(path), "holds no run, expected run.json, job.json, JUnit XML or artifacts"
            )
        found += here
    return found


def _in(path: Path, workspace: Path, shown: str, depth: int) -> Iterator[JobRun]:
    if path.is_symlink() or (path / _SUMMARY).is_file():
        return  # a link may lead anywhere; a summary's own artifact is no job's
    if path.is_file():
        yield from _in_archive(path, workspace, shown)
    elif is_job(path):
        yield read_run(path, shown)
    elif depth:
        for child in sorted(path.iterdir()):
            if child.is_dir() or (child.is_file() and is_archive(child)):
                yield from _child(child, workspace, f"{shown}/{child.name}", depth - 1)


def _child(path: Path, workspace: Path, shown: str, depth: int) -> Iterator[JobRun]:
    """Yield the jobs in a child; one that is named as an artifact and holds none is a problem."""
    found = list(_in(path, workspace, shown, depth))
    yield from found
    if not found and path.name.startswith("logs-"):
        yield _damaged(path, shown, "is empty: the job left nothing")


def _in_archive(path: Path, workspace: Path, shown: str) -> Iterator[JobRun]:
    root = workspace / str(sum(1 for _ in workspace.iterdir()))
    root.mkdir()
    try:
        unpack(path, root, _is_wanted)
    except TriageError as error:
        yield _damaged(path, shown, error.problem)
        return
    found = list(_in(root, workspace, f"{shown}!", _DEPTH))
    yield from found
    is_other = path.name.startswith(_PLAN) or (root / _SUMMARY).is_file()
    if not found and not is_other:
        yield _damaged(path, shown, "holds no run, expected run.json, job.json or JUnit XML")


def _is_wanted(path: PurePath) -> bool:
    is_result = path.name in (FILE_NAME, _SUMMARY) or path.suffix == ".xml"
    return is_result or is_worth_reading(path)


def _damaged(path: Path, shown: str, problem: str) -> JobRun:
    return JobRun(
        name=path.stem if path.is_file() else path.name, artifact=shown, problems=(problem,)
    )
