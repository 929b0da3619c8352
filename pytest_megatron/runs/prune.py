"""Lists the runs that a project keeps, and removes old ones (effects: files).

Every session imports this, so not the readers of archives that finding runs elsewhere needs.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.runs.layout import RUN_FILE, RUNS_DIR
from pytest_megatron.runs.record import RecordedRun, read_if_whole

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


def _kept(directory: Path) -> KeptRun:
    run = read_if_whole(directory / RUN_FILE, RecordedRun) or RecordedRun(items={})
    return KeptRun(directory=directory, exit_code=run.exit_code, num_items=len(run.items))
