"""Replay `--changed` on past commits: what it would have left out, and what of that failed later.

A record has what an item used at one commit. It fits another commit if nothing of that differs
there, as the item then ran the same code. So between a commit and the one before, an item is

- skipped, if a record fits both, and no file changed for which all items run;
- run, if it fits one of them alone, as then something that the item used changed;
- assumed to be skipped, if it fits neither, and nothing changed that the item uses in the record:
  it may have used other functions then, so this proves nothing, and counts as run;
- unknown otherwise, where code changed that the record does not have. This counts as run.

Reads git's objects, and nothing of the working tree.
"""

from __future__ import annotations

import functools
import itertools
import os
import posixpath
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from pytest_megatron.base.project import ask_git, read_git
from pytest_megatron.changed.record import ProjectState, TestRecord, num_gpus, restamped
from pytest_megatron.changed.select import Changes
from pytest_megatron.changed.sources import (
    EXECUTABLE,
    EXISTS,
    KINDS,
    LINK,
    Sources,
    blocks_of,
    checkout_of,
    digest,
)
from pytest_megatron.errors import SelectionError

_WHERE = "--replay"
_LINK_MODE = "120000"
_MOST_LINKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FalseGreen:
    """A failure that `--changed` would not have shown.

    Attributes:
        commit: At which the item failed.
        since: First commit from which on it was skipped without an outcome.
        is_contradictory: Whether it passed at that commit as well.
    """

    node_id: str
    commit: str
    since: str
    is_contradictory: bool


@dataclass(slots=True, kw_only=True)
class ReplayedCommit:
    """A commit beside the one before it.

    Attributes:
        run: Node id -> why it runs.
        unknown: Node id -> why no record reaches; these count as run.
        assumed: Node id -> why no record fits, of those that are assumed to be skipped.
        skipped: Node ids.
        num_judged: Skipped items with an outcome, there or later before they ran again.
        num_failed: Number of these that failed.
        saved: Cost of the skipped.
        total: Cost of all.
    """

    commit: str
    subject: str
    run: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    assumed: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    num_judged: int = 0
    num_failed: int = 0
    saved: float = 0.0
    total: float = 0.0

    @property
    def items(self) -> tuple[str, ...]:
        """The items that there were."""
        return (*self.run, *self.unknown, *self.assumed, *self.skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """The commits, the oldest first.

    Attributes:
        unit: Unit of costs; GPU-seconds, if an item has a GPU.
        is_short: Whether there are fewer commits than were asked for.
        assuming: The same, if what is assumed to be skipped is skipped.
    """

    commits: tuple[ReplayedCommit, ...]
    false_greens: tuple[FalseGreen, ...]
    unit: str
    is_short: bool
    assuming: ReplayReport | None = None


class _Objects:
    """Content of git's objects."""

    def __init__(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._requests, self._answers = requests, answers
        self._digests: dict[str, str] = {}
        self._names: dict[str, str] = {}  # by digest

    def digest(self, name: str) -> str:
        """Return the digest of an object."""
        if name not in self._digests:
            self._digests[name] = found = digest(self.read(name))
            self._names[found] = name
        return self._digests[name]

    def blocks(self, digest_of_file: str) -> Mapping[str, str]:
        """Return the blocks of a Python file of any tree that was read; none of another."""
        name = self._names.get(digest_of_file.removesuffix(EXECUTABLE))
        return {} if name is None else blocks_of(self.read(name))

    def read(self, name: str) -> bytes:
        """Return the content of an object.

        Raises:
            SelectionError: It is not there, as in a partial clone.
        """
        self._requests.write(f"{name}\n".encode())
        self._requests.flush()
        head = self._answers.readline().split()
        if len(head) != 3:  # noqa: PLR2004 - name, kind and size
            raise SelectionError(_WHERE, f"git has no object {name}; fetch the whole history")
        content = self._answers.read(int(head[2]))
        self._answers.read(1)
        return content


@contextmanager
def _open_objects(root: Path) -> Iterator[_Objects]:
    """Start git's reader of objects, and end it behind the block."""
    command = ["git", "-C", str(root), "cat-file", "--batch"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield _Objects(process.stdin, process.stdout)


class _CommitTree:
    """Files as a commit has them."""

    def __init__(self, objects: _Objects, listing: bytes) -> None:
        self._objects = objects
        self._files: dict[str, str] = {}
        self._links: dict[str, str] = {}
        self._modes: dict[str, str] = {}
        for line in filter(None, os.fsdecode(listing).split("\0")):
            head, _, path = line.partition("\t")
            mode, _, name = head.split(" ")
            if mode == _LINK_MODE:
                self._links[path] = os.fsdecode(objects.read(name))
            elif mode in KINDS:
                self._files[path], self._modes[path] = name, mode

    def _real(self, path: str) -> str:
        """Return a path with its links followed."""
        for _ in range(_MOST_LINKS):
            if path not in self._links:
                break
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), self._links[path]))
        return path

    def is_file(self, path: str) -> bool:
        """Return true for a file."""
        return self._real(path) in self._files

    def read(self, path: str) -> bytes | None:
        """Return the content of a file; None where there is none."""
        name = self._files.get(self._real(path))
        return None if name is None else self._objects.read(name)

    @functools.cached_property
    def _directories(self) -> Mapping[str, set[str]]:
        """Return the names in each directory of the commit."""
        found: dict[str, set[str]] = defaultdict(set)
        for path in (*self._files, *self._links):
            parent, name = posixpath.split(path)
            found[parent or "."].add(name)
            while parent and posixpath.basename(parent) not in found[posixpath.dirname(parent)]:
                parent, name = posixpath.split(parent)
                found[parent or "."].add(name)
        return dict(found)

    def names(self, path: str) -> Iterable[str] | None:
        """Return the names in a directory; None where there is none."""
        return self._directories.get(self._real(path))

    def kind(self, path: str) -> str:
        """Return the kind of a path: file, folder or nothing."""
        link = f"{LINK}{self._links[path]} " if path in self._links else ""
        real = self._real(path)
        what = (
            "folder"
            if real in self._directories
            else KINDS.get(self._modes.get(real, ""), "nothing")
        )
        return link + what

    @property
    def digests(self) -> dict[str, str]:
        """Path -> digest, as of the files of a working tree."""
        found = {path: self._objects.digest(name) for path, name in self._files.items()}
        for path, mode in self._modes.items():
            found[path] += EXECUTABLE if KINDS[mode] == "program" else ""
        return found | {path: f"{LINK}{target}" for path, target in self._links.items()}


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The project at a commit.

    Attributes:
        reasons: Reasons for each record, node id -> why it does not fit.
    """

    commit: str
    subject: str
    sources: Sources
    state: ProjectState
    reasons: tuple[Mapping[str, str], ...]


def _snapshot(
    place: tuple[Path, str],
    objects: _Objects,
    commit: str,
    subject: str,
    records: Sequence[TestRecord],
) -> _Snapshot:
    """Return the files of a commit, and what of the records fits it."""
    root, start = place
    listing = read_git(root, "ls-tree", "-r", "-z", commit)
    if listing is None:
        raise SelectionError(_WHERE, f"git cannot list the files of {commit}; fetch the history")
    tree = _CommitTree(objects, listing)
    sources = Sources(root, tree=tree)
    state = ProjectState(environment={}, files=tree.digests, root=start)
    reasons = []
    for record in records:
        changes = Changes(record, sources, state)
        found = {name: changes.reason(name, None) for name in record.tests}
        reasons.append({name: reason for name, reason in found.items() if reason is not None})
    return _Snapshot(commit, subject, sources, state, tuple(reasons))


def _compare(
    records: Sequence[TestRecord], objects: _Objects, before: _Snapshot, now: _Snapshot
) -> ReplayedCommit:
    """Return what runs at a commit, by the records that fit it or the one before.

    Where none fits, the record of the nearest code counts.
    """
    certain: dict[str, str | None] = {}
    guesses: dict[str, tuple[str, str]] = {}  # kind and reason
    fits = list(zip(records, before.reasons, now.reasons, strict=True))
    for record, old, new in sorted(fits, key=lambda fit: _distance(fit[0], before.state)):
        named = {block[:2] for block in record.blocks}
        fitting = restamped(record, record.tests.keys() - old.keys(), before.state)
        exact = Changes(fitting, now.sources, now.state)
        stamped = restamped(record, record.tests, before.state)
        guess = Changes(stamped, now.sources, now.state, before=before.sources)
        foreign = [_foreign(record, state, objects, before, now) for state in record.states]
        for node_id, entry in record.tests.items():
            if not _exists(node_id, now, named):
                continue
            if node_id not in old:
                certain[node_id] = certain.get(node_id) or exact.reason(node_id, None)
            elif node_id not in new:
                certain[node_id] = certain.get(node_id) or old[node_id]
            elif (reason := guess.reason(node_id, None)) is not None:
                guesses.setdefault(node_id, ("run", reason))
            elif foreign[entry.state].keys().isdisjoint(entry.blocks):
                guesses.setdefault(node_id, ("assumed", new[node_id]))
            else:
                names = (foreign[entry.state].get(number) for number in entry.blocks)
                guesses.setdefault(node_id, ("unknown", next(filter(None, names))))
    found = ReplayedCommit(commit=now.commit, subject=now.subject)
    kinds = {"run": found.run, "unknown": found.unknown, "assumed": found.assumed}
    for node_id, (kind, reason) in guesses.items():
        if node_id not in certain:
            kinds[kind][node_id] = reason
    found.run |= {node_id: reason for node_id, reason in certain.items() if reason is not None}
    found.skipped = [node_id for node_id, reason in certain.items() if reason is None]
    return found


def _distance(record: TestRecord, state: ProjectState) -> int:
    """Return the number of files that differ between the last state of a record and another."""
    return len(record.states[-1].files.items() ^ state.files.items())


def _foreign(
    record: TestRecord, state: ProjectState, objects: _Objects, before: _Snapshot, now: _Snapshot
) -> dict[int, str]:
    """Return the blocks of files with a change of code that the record's own state has not."""
    reasons = {}
    for path, _ in before.state.files.items() ^ now.state.files.items():
        if path.endswith(".py"):
            was, is_now = before.sources.blocks(path), now.sources.blocks(path)
            changed = {name for name in was.keys() | is_now if was.get(name) != is_now.get(name)}
            strange = changed - {EXISTS} - objects.blocks(state.files.get(path, "")).keys()
            if strange:
                shown = max(strange, key=len)
                reasons[path] = f"{path}::{shown} changed, and no record has it"
    return {
        number: reasons[path]
        for number, (path, _, _) in enumerate(record.blocks)
        if path in reasons
    }


def _exists(node_id: str, now: _Snapshot, named: Collection[tuple[str, str]]) -> bool:
    """Return false for an item whose file or function a commit does not have."""
    _, *names = node_id.partition("[")[0].split("::")
    file = now.state.file_of(node_id)
    name = ".".join(names)
    is_function = (file, name) in named
    return file in now.state.files and (not is_function or name in now.sources.blocks(file))


@dataclass(slots=True)
class _SkipJudge:
    """Follows the outcomes of items along the commits.

    Attributes:
        outcomes: Commit and node id -> whether each run was good.
        failed: Items that failed when they ran last, which run again therefore.
        waiting: Item -> commits that skipped it, without an outcome since.
    """

    outcomes: Mapping[tuple[str, str], Sequence[bool]]
    failed: set[str] = field(default_factory=set)
    waiting: dict[str, list[ReplayedCommit]] = field(default_factory=lambda: defaultdict(list))
    false_greens: list[FalseGreen] = field(default_factory=list)

    def note_runs(self, node_ids: Iterable[str], commit: str) -> None:
        """Note items that run at a commit."""
        for node_id in node_ids:
            self.waiting.pop(node_id, None)
            self.failed.discard(node_id)
            if not all(self.outcomes.get((commit, node_id), ())):
                self.failed.add(node_id)

    def follow(self, now: ReplayedCommit) -> None:
        """Judge what a commit skips; an item that failed last time runs instead."""
        again = dict.fromkeys(self.failed.intersection(now.skipped), "it failed last time")
        now.run |= again
        now.skipped = sorted(set(now.skipped) - again.keys())
        self.note_runs((*now.run, *now.unknown, *now.assumed), now.commit)
        for node_id in now.skipped:
            self.waiting[node_id].append(now)
            outcomes = self.outcomes.get((now.commit, node_id))
            if outcomes is not None:
                self._judge(node_id, now.commit, outcomes)

    def _judge(self, node_id: str, commit: str, outcomes: Sequence[bool]) -> None:
        """Judge earlier skips of an item by how it ended at a later commit."""
        skipping = self.waiting.pop(node_id)
        is_good = all(outcomes)
        for one in skipping:
            one.num_judged += 1
            one.num_failed += not is_good
        if not is_good:
            green = FalseGreen(
                node_id=node_id,
                commit=commit,
                since=skipping[0].commit,
                is_contradictory=any(outcomes),
            )
            self.false_greens.append(green)


def replay(
    root: Path,
    number: int,
    records: Sequence[TestRecord],
    outcomes: Mapping[tuple[str, str], Sequence[bool]],
    durations: Mapping[str, float],
) -> ReplayReport:
    """Return what `--changed` would have done at the last commits, each beside the one before.

    Args:
        root: Root of the project.
        number: How many commits, along first parents.
        records: Records of any commits.
        outcomes: Commit and node id -> whether each run was good.
        durations: Node id -> seconds; where there are none, those of the record count.

    Raises:
        SelectionError: There is no git, no commit with one before it, or an object is missing.
    """
    words = (
        "log",
        "--no-show-signature",
        "--first-parent",
        "--reverse",
        f"-{number + 1}",
        "--format=%H %s",
    )
    listed = ask_git(root, *words)
    pairs = [line.partition(" ") for line in (listed or "").splitlines()]
    if len(pairs) < 2:  # noqa: PLR2004 - a commit and the one before
        is_shallow = ask_git(root, "rev-parse", "--is-shallow-repository") == "true"
        way = "the clone is shallow; fetch more history" if is_shallow else "run it in a checkout"
        raise SelectionError(_WHERE, f"git has no two commits here, one after the other; {way}")
    place = checkout_of(root)
    with _open_objects(root) as objects:
        steps = [_snapshot(place, objects, name, subject, records) for name, _, subject in pairs]
        compared = [
            _compare(records, objects, before, now) for before, now in itertools.pairwise(steps)
        ]
    tests = {name: entry for record in records for name, entry in record.tests.items()}
    has_gpus = any(num_gpus(entry.mode) for entry in tests.values())
    costs = {
        name: durations.get(name, entry.duration_s) * (num_gpus(entry.mode) if has_gpus else 1)
        for name, entry in tests.items()
    }

    def follow(commits: Sequence[ReplayedCommit], assuming: ReplayReport | None) -> ReplayReport:
        """Judge what each commit left out by later outcomes; note what it saved, and report.

        Args:
            commits: What was selected at each; their `saved` and `total` are set.
            assuming: The report in which what is assumed to be skipped was skipped.
        """
        judge = _SkipJudge(outcomes)
        judge.note_runs(tests, steps[0].commit)
        for one in commits:
            judge.follow(one)
            one.saved = sum(costs[name] for name in one.skipped)
            one.total = sum(costs[name] for name in one.items)
        return ReplayReport(
            commits=tuple(commits),
            false_greens=tuple(judge.false_greens),
            unit="GPU-seconds" if has_gpus else "seconds",
            is_short=len(commits) < number,
            assuming=assuming,
        )

    assumed = [
        replace(one, run=dict(one.run), assumed={}, skipped=[*one.skipped, *one.assumed])
        for one in compared
    ]
    return follow(compared, follow(assumed, None))
