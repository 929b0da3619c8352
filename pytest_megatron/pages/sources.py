"""What a user names as a run: directories, artifacts, folders of both (effects: files).

Archives are unpacked by `triage/archives.py`, which refuses what leads out of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from pytest_megatron.errors import ReportError
from pytest_megatron.launch.layout import RUN_FILE
from pytest_megatron.launch.runs import runs_below
from pytest_megatron.pages.gather import RunReader
from pytest_megatron.triage.archives import is_archive, unpack

_NAMES = frozenset(
    (RUN_FILE, "comparison.json", "triage.json", "golden.json", "metrics.json", "metrics.jsonl")
)
_MOST_DEPTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A run to show.

    Attributes:
        is_unpacked: Whether it lies in a directory of ours that goes away.
    """

    reader: RunReader
    is_unpacked: bool


def find_runs(paths: Sequence[Path], workspace: Path) -> list[Source]:
    """Return the runs in what was named, in that order.

    Args:
        paths: Run directories, artifacts (zip, tar), folders of either.
        workspace: An empty directory of our own, for what has to be unpacked.

    Raises:
        ReportError: One of them is not there, or holds no run.
        TriageError: An archive cannot be unpacked, or holds what no run leaves.
    """
    found: list[Source] = []
    for number, path in enumerate(paths):
        if not path.exists():
            raise ReportError(str(path), "no such file or directory, expected a run or an artifact")
        mine = list(_in(path, workspace / str(number)))
        if not mine:
            raise ReportError(
                str(path), f"holds no {RUN_FILE}; expected a run directory or an artifact"
            )
        found += mine
    return found


def _in(path: Path, workspace: Path) -> Iterator[Source]:
    if path.is_file():
        if not is_archive(path):
            raise ReportError(str(path), "is no run; expected a run directory, a zip or a tar")
        yield from _unpacked(path, workspace)
        return
    for directory in runs_below(path, depth=_MOST_DEPTH):
        yield Source(reader=RunReader(directory), is_unpacked=False)
    if (path / RUN_FILE).is_file():
        return
    for number, inner in enumerate(sorted(p for p in path.iterdir() if p.is_file())):
        if is_archive(inner):
            yield from _unpacked(inner, workspace / str(number))


def _unpacked(path: Path, workspace: Path) -> Iterator[Source]:
    workspace.mkdir(parents=True)
    unpack(path, workspace, is_wanted=_is_wanted)
    name = path.name.split(".")[0]
    for directory in runs_below(workspace, depth=_MOST_DEPTH):
        below = directory.relative_to(workspace).as_posix()
        shown = name if below == "." else f"{name}/{below}"
        yield Source(reader=RunReader(directory, shown), is_unpacked=True)


def _is_wanted(path: PurePath) -> bool:
    return path.name in _NAMES or "tfevents" in path.name
