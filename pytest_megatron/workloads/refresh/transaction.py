"""Acceptance of candidates: the gate, then all goldens are replaced, or none (effects: files).

A rename is atomic for one file only. So the set is written beside its targets first, under names
that a journal lists; the journal's own name is its state, and a rename of the journal is the
instant at which the new set counts:

    goldens.preparing.json   new files are being written: recovery deletes them
    goldens.replacing.json   all are on the disk: recovery renames the rest
    goldens.undoing.json     a rename failed: recovery restores the old files

A killed process leaves one of the three, and the next command or session finishes or undoes it.
Writing and renaming happen under a lock; a reader needs it only where a journal lies. The
change of state needs no room on the disk. A journal names files relative to the project, which
hosts may see under different paths.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import filelock

from pytest_megatron.base.files import digest_of, write_json_atomically, write_text_atomically
from pytest_megatron.errors import GoldenError, RunError
from pytest_megatron.runs.layout import OWN_DIR, make_own_dir
from pytest_megatron.runs.record import RecordedFile, read_record, to_json
from pytest_megatron.workloads.golden.model import Golden, Provenance
from pytest_megatron.workloads.golden.store import golden_text, project_form, read_golden
from pytest_megatron.workloads.refresh.difference import FileChange, FileDifference, differ
from pytest_megatron.workloads.refresh.gate import (
    Candidate,
    GateRule,
    Refusal,
    early_refusals,
    hard,
    refusals_of,
    refuse_mass,
)
from pytest_megatron.workloads.refresh.pull_request import commit_message, markdown

LOCK = OWN_DIR / "goldens.lock"
_PREPARING, _REPLACING, _UNDOING = (
    OWN_DIR / f"goldens.{state}.json" for state in ("preparing", "replacing", "undoing")
)
_JOURNALS = (_PREPARING, _REPLACING, _UNDOING)
_LOCK_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _TransactionEntry:
    """One file of a set, relative to the project.

    Attributes:
        has_old: Whether the target was there before.
    """

    target: PurePosixPath
    has_old: bool

    @property
    def new(self) -> PurePosixPath:
        """The new file until it is renamed, beside its target."""
        return self.target.with_name(f".{self.target.name}.new")

    @property
    def old(self) -> PurePosixPath:
        """A second name of the old file, until all is done."""
        return self.target.with_name(f".{self.target.name}.old")


@dataclass(frozen=True, kw_only=True)
class _TransactionJournal(RecordedFile):
    """The journal of one set of files.

    Attributes:
        made: Directories that were not there before, the outer ones first.
    """

    entries: tuple[_TransactionEntry, ...]
    made: tuple[PurePosixPath, ...]


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the lock of a project's goldens, after recovering an interrupted transaction.

    Raises:
        GoldenError: Another refresh holds it and does not end, or nothing can be written here.
    """
    try:
        make_own_dir(root)
        with filelock.FileLock(root / LOCK, timeout=_LOCK_WAIT_S):
            _recover(root)
            yield
    except filelock.Timeout as error:
        raise GoldenError(
            str(root / LOCK),
            f"another refresh has held the goldens for {_LOCK_WAIT_S:g} s; wait for it, or end it",
        ) from error


def recover(root: Path) -> None:
    """Finish or undo a killed refresh of this project; costs three look-ups if there is none.

    Raises:
        GoldenError: It cannot be ended: until then the goldens may be a mixture of two sets.
    """
    if not any(_is_there(root / journal) for journal in _JOURNALS):
        return
    try:
        with locked(root):
            pass
    except OSError as error:
        raise GoldenError(
            str(error.filename or root),
            f"a refresh was interrupted and cannot be ended: {error.strerror}; make the project "
            "writable, then repeat this",
        ) from error


def _is_there(path: Path) -> bool:
    """Return whether a path is there."""
    try:
        return path.exists()
    except PermissionError:  # the directory of somebody else, above the project
        return False


def recover_above(directory: Path) -> None:
    """Do so for the project that a directory lies in, wherever its root is.

    Raises:
        GoldenError: The files cannot be put back, see `recover`.
    """
    for root in (directory.absolute(), *directory.absolute().parents):
        recover(root)


def replace_together(root: Path, texts: Mapping[PurePosixPath, str]) -> None:
    """Replace files of a project, or none of them; the caller holds `locked`.

    Args:
        root: The project.
        texts: The new content of the files, by their path relative to `root`.

    Raises:
        OSError: The disk is full, a directory is read only, a target is no file; every file is as
            it was, unless the process is killed before it ends this, see `recover`.
    """
    journal = _TransactionJournal(
        entries=tuple(
            _TransactionEntry(target=t, has_old=(root / t).is_file()) for t in sorted(texts)
        ),
        made=tuple(sorted({d for target in texts for d in _missing_above(root, target)})),
    )
    write_json_atomically(root / _PREPARING, to_json(journal))
    _sync(root / OWN_DIR)
    try:
        _stage(root, journal, texts)
        _move(root, _PREPARING, _REPLACING)
    except BaseException:
        _drop(root, journal)
        raise
    _replace(root, journal)


def _stage(root: Path, journal: _TransactionJournal, texts: Mapping[PurePosixPath, str]) -> None:
    """Put the new files and second names of the old ones beside the targets, onto the disk."""
    for directory in journal.made:
        (root / directory).mkdir(exist_ok=True)
    for entry in journal.entries:
        _write(root / entry.new, texts[entry.target].encode())
        if entry.has_old:
            _keep(root / entry.target, root / entry.old)
    parents = {directory.parent for directory in journal.made}
    for directory in {entry.target.parent for entry in journal.entries} | parents:
        _sync(root / directory)


def _replace(root: Path, journal: _TransactionJournal) -> None:
    """Rename what is not renamed yet; if that goes wrong, put everything back."""
    try:
        for entry in journal.entries:
            if (root / entry.new).exists():
                (root / entry.new).replace(root / entry.target)
        _sync_targets(root, journal)
    except OSError:
        _move(root, _REPLACING, _UNDOING)
        _undo(root, journal)
        raise
    for entry in journal.entries:
        (root / entry.old).unlink(missing_ok=True)
    (root / _REPLACING).unlink()


def _undo(root: Path, journal: _TransactionJournal) -> None:
    """Put the old goldens back."""
    for entry in journal.entries:
        if (root / entry.old).exists():
            (root / entry.old).replace(root / entry.target)
        elif not entry.has_old and (root / entry.target).is_file():
            (root / entry.target).unlink()
    _sync_targets(root, journal)
    _drop(root, journal)


def _drop(root: Path, journal: _TransactionJournal) -> None:
    """Delete the files beside the targets, and the journal last."""
    for entry in journal.entries:
        (root / entry.new).unlink(missing_ok=True)
        (root / entry.old).unlink(missing_ok=True)
    for directory in reversed(journal.made):
        with contextlib.suppress(OSError):  # somebody else may have put a file there
            (root / directory).rmdir()
    for name in _JOURNALS:
        (root / name).unlink(missing_ok=True)


def _recover(root: Path) -> None:
    """Finish or undo the transaction of a journal; the caller holds the lock.

    Raises:
        OSError: Something cannot be renamed or deleted.
        GoldenError: The journal is not one of ours.
    """
    found = next((name for name in reversed(_JOURNALS) if (root / name).exists()), None)
    if found is None:
        return
    journal = _read(root / found)
    if found == _REPLACING:
        try:
            _replace(root, journal)
        except OSError:
            if any((root / name).exists() for name in _JOURNALS):
                raise  # else everything is as it was before that refresh
    elif found == _UNDOING:
        _undo(root, journal)
    else:
        _drop(root, journal)


def _read(path: Path) -> _TransactionJournal:
    """Read the journal of a refresh that was cut off."""
    try:
        journal = read_record(path, _TransactionJournal)
    except RunError as error:
        raise GoldenError(
            str(path),
            f"is no journal of a refresh ({error.problem}); look at the goldens, then delete it",
        ) from error
    for name in (*(entry.target for entry in journal.entries), *journal.made):
        if name.is_absolute() or ".." in name.parts:
            raise GoldenError(str(path), f"{str(name)!r} leads out of the project; delete the file")
    return journal


def _missing_above(root: Path, target: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield the directories that a target needs."""
    for directory in target.parents:
        if directory.parts and not (root / directory).exists():
            yield directory


def _write(path: Path, content: bytes) -> None:
    """Write a file, and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _keep(target: Path, old: Path) -> None:
    """Give a file a second name, or a copy where the file system knows no such thing."""
    old.unlink(missing_ok=True)
    try:
        os.link(target, old)
    except OSError:
        _write(old, target.read_bytes())
        shutil.copymode(target, old)


def _move(root: Path, name: Path, new_name: Path) -> None:
    (root / name).replace(root / new_name)
    _sync(root / OWN_DIR)


def _sync_targets(root: Path, journal: _TransactionJournal) -> None:
    for directory in {entry.target.parent for entry in journal.entries}:
        _sync(root / directory)


def _sync(directory: Path) -> None:
    """Put the names in a directory onto the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


PAGE = "goldens.md"
MESSAGE = "goldens_commit_message.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A candidate beside the golden that it would replace.

    Attributes:
        difference: None where the run left no values.
        refusals: Why it may not replace it; soft ones are left out where a reason was given.
    """

    candidate: Candidate
    old: Golden | None
    difference: FileDifference | None
    refusals: tuple[Refusal, ...]

    @property
    def is_taken(self) -> bool:
        """True if the golden is this candidate already."""
        if self.old is None or self.candidate.golden is None or self.difference is None:
            return False
        old, new = self.old.provenance, self.candidate.golden.provenance
        if old is None or new is None or self.difference.state is not FileChange.UNCHANGED:
            return False
        return (old.run, old.date) == (new.run, new.date)


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
    is_written: bool = False


def consider(candidate: Candidate, root: Path, terms: Terms) -> Offer:
    """Return a candidate beside its golden, with the reasons to refuse it."""
    old, broken = _old_golden(root, candidate.target)
    refusals = refusals_of(candidate, old, is_dirty_allowed=terms.is_dirty_allowed)
    refusals = _with_reason(refusals, terms)
    difference = None
    if candidate.golden is not None:
        difference = differ(str(candidate.target), old, candidate.golden, broken=broken)
    return Offer(candidate=candidate, old=old, difference=difference, refusals=refusals)


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
        if outcome.refused or not texts:
            return outcome
        replace_together(root, texts)
    return replace(outcome, is_written=True)


def write_pages(directory: Path, outcome: AcceptOutcome, reason: str | None) -> tuple[Path, Path]:
    """Write the page for the pull request and the commit message; return where they are.

    Raises:
        OSError: They cannot be written.
    """
    page, message = directory / PAGE, directory / MESSAGE
    write_text_atomically(page, markdown(outcome.differences, reason=reason) + "\n")
    write_text_atomically(message, commit_message(outcome.differences, reason=reason))
    return page, message


def _with_reason(refusals: tuple[Refusal, ...], terms: Terms) -> tuple[Refusal, ...]:
    """Return the refusals that remain if a reason was typed."""
    return hard(refusals) if terms.reason else refusals


def _take(
    candidates: Sequence[Candidate], root: Path, terms: Terms
) -> tuple[AcceptOutcome, dict[PurePosixPath, str]]:
    """Apply the gate to a set; return the texts to write, none if anything is refused."""
    offers = [consider(candidate, root, terms) for candidate in candidates]
    offers = [offer for offer in offers if not offer.is_taken]
    refused = [(o.candidate.node_id, refusal) for o in offers for refusal in o.refusals]
    refused += _doubles(candidates)
    differences = tuple(o.difference for o in offers if o.difference is not None)
    mass = None if terms.reason else refuse_mass(differences)
    if mass is not None:
        refused.append((f"{len(differences)} goldens", mass))
    outcome = AcceptOutcome(differences=differences, refused=tuple(refused))
    if refused:
        return outcome, {}
    return outcome, {o.candidate.target: _text_of(o, root, terms) for o in offers}


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


def _text_of(offer: Offer, root: Path, terms: Terms) -> str:
    """Return the text to write."""
    golden = offer.candidate.golden
    assert golden is not None
    old = root / offer.candidate.target
    provenance = replace(
        golden.provenance or Provenance(),
        reason=terms.reason,
        supersedes=digest_of(old) if old.is_file() else None,
    )
    return golden_text(replace(golden, provenance=provenance), project_form(root))
