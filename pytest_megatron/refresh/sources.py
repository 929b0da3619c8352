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
from pytest_megatron.runs.find import find_runs
from pytest_megatron.runs.layout import COMPARISON_FILE, PLAN_FILE

_WANTED = (
    *(CANDIDATE, PLAN_FILE, COMPARISON_FILE, "metrics.json", "metrics.jsonl"),
    "generated.json",
)
_SKIPPED = ("checkpoints", "data_cache", "frozen_checkpoint", "project")


@contextlib.contextmanager
def open_runs(paths: Sequence[Path]) -> Iterator[tuple[Path, ...]]:
    """Yield the run directories in `paths`; unpacked files are gone afterwards.

    Raises:
        RunError: There is no run in one of them, or an archive is refused.
    """
    with tempfile.TemporaryDirectory() as scratch:
        found = find_runs(paths, Path(scratch), _is_wanted)
        yield tuple(run.directory for run in found)


def read_candidates(
    runs: Sequence[Path], root: Path, policy: ComparisonPolicy
) -> tuple[Candidate, ...]:
    """Return the workloads of several runs.

    Raises:
        GoldenError, RunError: As from `read_run`.
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


def _is_wanted(path: PurePath) -> bool:
    return path.name in _WANTED and not set(_SKIPPED) & set(path.parts[:-1])
