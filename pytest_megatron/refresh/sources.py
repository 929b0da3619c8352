"""Search for finished runs: a run directory, several below a directory, or an archive.

An archive is untrusted: it is unpacked by triage's rules, into a directory of our own.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from pytest_megatron.errors import GoldenError
from pytest_megatron.golden.policy import ComparisonPolicy
from pytest_megatron.refresh.candidate import Candidate
from pytest_megatron.refresh.read import CANDIDATE, read_run
from pytest_megatron.runs.archives import is_archive, unpack
from pytest_megatron.runs.layout import RUN_FILE

_WANTED = (
    *(CANDIDATE, RUN_FILE, "plan.json", "comparison.json", "metrics.json", "metrics.jsonl"),
    "generated.json",
)
_SKIPPED = ("checkpoints", "data_cache", "frozen_checkpoint", "project")


@contextlib.contextmanager
def open_runs(paths: Sequence[Path]) -> Iterator[tuple[Path, ...]]:
    """Yield the run directories in `paths`; what was unpacked is gone afterwards.

    Raises:
        GoldenError: There is no run in one of them.
        TriageError: An archive cannot be unpacked, or holds what no run leaves.
    """
    with contextlib.ExitStack() as stack:
        found: list[Path] = []
        for path in paths:
            place = path
            if path.is_file() and is_archive(path):
                place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                unpack(path, place, _is_wanted)
            found += _runs_in(path, place)
        yield tuple(found)


def read_candidates(
    runs: Sequence[Path], root: Path, policy: ComparisonPolicy
) -> tuple[Candidate, ...]:
    """Return the workloads of several runs.

    Raises:
        GoldenError: As from `read_run`.
    """
    return tuple(candidate for run in runs for candidate in read_run(run, root, policy))


def select(candidates: Sequence[Candidate], only: Sequence[str]) -> tuple[Candidate, ...]:
    """Return those that `--only` names: by node id, part of one, or a pattern with `*`.

    Raises:
        GoldenError: One of the words names none.
    """
    if not only:
        return tuple(candidates)
    for word in only:
        if not any(_is_named(c, word) for c in candidates):
            known = ", ".join(sorted({c.node_id for c in candidates})) or "none"
            raise GoldenError("--only", f"{word!r} is no workload of these runs, they have {known}")
    return tuple(c for c in candidates if any(_is_named(c, word) for word in only))


def _is_named(candidate: Candidate, word: str) -> bool:
    return word in candidate.node_id or fnmatchcase(candidate.node_id, word)


def _runs_in(path: Path, place: Path) -> list[Path]:
    if not place.exists():
        raise GoldenError(str(path), "is not there, expected a run directory or an artifact of one")
    if (place / RUN_FILE).is_file():
        return [place]
    found = sorted(file.parent for file in place.rglob(RUN_FILE)) if place.is_dir() else []
    if not found:
        what = "holds no run.json" if place.is_dir() else "is no directory and no archive"
        raise GoldenError(
            str(path),
            f"{what}, expected a run directory, or a zip or tar of one; give --run-dir's",
        )
    return found


def _is_wanted(path: PurePath) -> bool:
    return path.name in _WANTED and not set(_SKIPPED) & set(path.parts[:-1])
