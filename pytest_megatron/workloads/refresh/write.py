"""Acceptance of candidates: the gate, then all goldens are replaced, or none (effects: files).

All new files are on the disk, beside their targets, before the first one is renamed; if a rename
fails, the old ones are put back. Git undoes what a killed process leaves: goldens of which each is
whole, some old and some new, and files that end in `.tmp`, all of which `git status` shows. Doing
the same again ends it. Refreshes of one project wait for one another at a lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import filelock

from pytest_megatron.base.files import write_texts_together
from pytest_megatron.errors import GoldenError
from pytest_megatron.runs.layout import OWN_DIR, make_own_dir
from pytest_megatron.workloads.golden.model import Golden, Provenance
from pytest_megatron.workloads.golden.store import golden_text, read_golden
from pytest_megatron.workloads.refresh.difference import FileDifference, differ
from pytest_megatron.workloads.refresh.gate import (
    Candidate,
    GateRule,
    Refusal,
    early_refusals,
    hard,
    refusals_of,
    refuse_mass,
)

LOCK = OWN_DIR / "goldens.lock"
_LOCK_WAIT_S = 60.0


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the lock of a project's goldens.

    Raises:
        GoldenError: Another refresh holds it and does not end.
        OSError: Nothing can be written here.
    """
    try:
        make_own_dir(root)
        with filelock.FileLock(root / LOCK, timeout=_LOCK_WAIT_S):
            yield
    except filelock.Timeout as error:
        raise GoldenError(
            str(root / LOCK),
            f"another refresh has held the goldens for {_LOCK_WAIT_S:g} s; wait for it, or end it",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms on which candidates are accepted.

    Attributes:
        reason: The reason that the user typed for changing goldens, or None.
        is_dirty_allowed: Accept a run without a commit.
    """

    reason: str | None = None
    is_dirty_allowed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptOutcome:
    """The outcome for a set of candidates.

    Attributes:
        refused: Which golden, and why; nothing is written if there is any.
        differences: Differences of all that were, or would be, written.
    """

    differences: tuple[FileDifference, ...]
    refused: tuple[tuple[str, Refusal], ...]


def consider(
    candidate: Candidate, root: Path, terms: Terms
) -> tuple[FileDifference | None, tuple[Refusal, ...]]:
    """Return how a candidate differs from its golden, and the reasons to refuse it.

    There is no difference where the run left no values. Soft refusals are left out where a reason
    was given.
    """
    old, broken = _old_golden(root, candidate.target)
    refusals = refusals_of(candidate, old, is_dirty_allowed=terms.is_dirty_allowed)
    difference = None
    if candidate.golden is not None:
        difference = differ(str(candidate.target), old, candidate.golden, broken=broken)
    return difference, _with_reason(refusals, terms)


def consider_early(prospect: Candidate, root: Path, terms: Terms) -> tuple[Refusal, ...]:
    """Return the reasons to refuse a candidate that are known before anything is measured."""
    old, _ = _old_golden(root, prospect.target)
    refusals = early_refusals(prospect, old, is_dirty_allowed=terms.is_dirty_allowed)
    return _with_reason(refusals, terms)


def accept(
    candidates: Sequence[Candidate], root: Path, terms: Terms, *, is_dry: bool = False
) -> AcceptOutcome:
    """Write the candidates of runs as goldens: every one, or none.

    The golden that each one is judged against is read under the lock, so that of two refreshes at
    a time the second one sees what the first one wrote.

    Raises:
        GoldenError: The goldens are locked by others, or cannot be read.
        OSError: They cannot be written; every file is as it was.
    """
    if is_dry:
        return _take(candidates, root, terms)[0]
    with locked(root):
        outcome, texts = _take(candidates, root, terms)
        if texts:
            write_texts_together({root / target: text for target, text in texts.items()})
    return outcome


def _with_reason(refusals: tuple[Refusal, ...], terms: Terms) -> tuple[Refusal, ...]:
    """Return the refusals that remain if a reason was typed."""
    return hard(refusals) if terms.reason else refusals


def _take(
    candidates: Sequence[Candidate], root: Path, terms: Terms
) -> tuple[AcceptOutcome, dict[PurePosixPath, str]]:
    """Apply the gate to a set; return the texts to write, none if anything is refused."""
    found = [consider(candidate, root, terms) for candidate in candidates]
    refused = [
        (candidate.node_id, refusal)
        for candidate, (_, refusals) in zip(candidates, found, strict=True)
        for refusal in refusals
    ]
    refused += _doubles(candidates)
    differences = tuple(difference for difference, _ in found if difference is not None)
    mass = None if terms.reason else refuse_mass(differences)
    if mass is not None:
        refused.append((f"{len(differences)} goldens", mass))
    outcome = AcceptOutcome(differences=differences, refused=tuple(refused))
    if refused:
        return outcome, {}
    return outcome, {c.target: _text_of(c, terms) for c in candidates}


def _doubles(candidates: Sequence[Candidate]) -> list[tuple[str, Refusal]]:
    """Refuse two candidates for one golden: the intended one cannot be known."""
    found: list[tuple[str, Refusal]] = []
    first: dict[PurePosixPath, Candidate] = {}
    for candidate in candidates:
        other = first.setdefault(candidate.target, candidate)
        if other is not candidate:
            text = f"{candidate.target} is offered by {other.directory} too; give one of the runs"
            found.append((candidate.node_id, Refusal(GateRule.DUPLICATE, text)))
    return found


def _old_golden(root: Path, target: PurePosixPath) -> tuple[Golden | None, str]:
    """Return the golden that is there, or why it cannot be read: then it is replaced whole."""
    path = root / target
    if not path.is_file():
        return None, ""
    try:
        return replace(read_golden(path), path=str(target)), ""
    except GoldenError as error:
        return None, error.problem


def _text_of(candidate: Candidate, terms: Terms) -> str:
    """Return the text to write."""
    golden = candidate.golden
    assert golden is not None
    provenance = replace(golden.provenance or Provenance(), reason=terms.reason)
    return golden_text(replace(golden, provenance=provenance))
