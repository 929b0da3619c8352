"""Decide which tests run: those that used what has changed, and all of which that is not known.

A session that leaves out tests also draws some of them to run, and appends a line about these to a
file: a test that fails then was to be selected, or is flaky.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import random
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from pytest_megatron.base.files import append_lines, parse_json, read_bytes
from pytest_megatron.base.project import ask_git, read_git
from pytest_megatron.base.schema import SchemaError, validate
from pytest_megatron.base.text import counted, grouped
from pytest_megatron.changed.record import (
    DEFAULT_FILE,
    ProjectState,
    TestEntry,
    TestRecord,
    merge_records,
    read_record,
)
from pytest_megatron.changed.sources import (
    CONFTEST,
    EXISTS,
    KINDS,
    LINK,
    LISTING,
    MODULE,
    WHOLE,
    Sources,
    blocks_of,
    checkout_of,
    files_of,
    is_listed,
)
from pytest_megatron.errors import ConfigError, SelectionError

FILE_NAME = "drawn.jsonl"
SHARE = 0.05  # of the time that is saved
_LEAST_S = 0.01  # of a test, whose duration is rounded


@dataclass(frozen=True, kw_only=True)
class DrawnRun:
    """A session that left out tests.

    Attributes:
        time: `2026-01-31T12:00:00Z`, when it ended.
        commit: None outside of a commit.
        seed: With which the same tests are drawn from the same ones.
        num_left_out: Tests that nothing changed for, the drawn ones among them.
        drawn: Node ids of those that ran.
        failed: Those of them that failed, and those that failed when drawn before and now again.
        passed: Those that failed when drawn before, and passed now.
    """

    time: str
    commit: str | None
    seed: int
    num_left_out: int
    drawn: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()

    @property
    def missed(self) -> frozenset[str]:
        """The drawn that failed."""
        return frozenset(self.drawn) & frozenset(self.failed)


def draw(durations_s: Mapping[str, float], seed: int, *, costly: Collection[str]) -> list[str]:
    """Return items drawn by a seed, of a share of the time of all.

    Args:
        durations_s: Node id -> recorded duration.
        seed: Any number.
        costly: Items that are only drawn if they fit into that share; of all others one is
            drawn in any case.
    """
    names = sorted(durations_s)
    random.Random(seed).shuffle(names)  # noqa: S311 - no secret
    costs = {name: max(_LEAST_S, durations_s[name]) for name in names}
    left = SHARE * sum(costs.values())
    found: list[str] = []
    for name in names:
        if costs[name] <= left:
            found.append(name)
            left -= costs[name]
    return found or [name for name in names if name not in costly][:1]


def open_failures(runs: Iterable[DrawnRun]) -> set[str]:
    """Return the tests that failed when they were drawn, and have not passed since."""
    found: set[str] = set()
    for run in runs:
        found = (found | set(run.failed)) - set(run.passed)
    return found


def read_drawn(path: Path) -> list[DrawnRun]:
    """Return the lines of a file, in their order; none where it is not there.

    A line that a killed session left unfinished is left out.

    Raises:
        ConfigError: It cannot be read, or a line is none of such a file.
    """
    try:
        lines = read_bytes(path).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            value = parse_json(line)
        except ValueError:
            continue
        try:
            found.append(validate(DrawnRun, value))
        except SchemaError:
            problem = "is no line about drawn tests; remove it"
            raise ConfigError(f"{path}:{number}", problem) from None
    return found


def append_drawn(path: Path, run: DrawnRun) -> None:
    """Add a line to a file, in one piece.

    Raises:
        OSError: It cannot be written.
    """
    append_lines(path, f"{json.dumps(asdict(run))}\n")


FOR_ALL = (  # a change of these is one of the environment
    *("pyproject.toml", "setup.py", "setup.cfg", "pytest.ini", "pytest.toml", "tox.ini"),
    *("*.lock", "requirements*.txt", "constraints*.txt", "environment.y*ml", "Dockerfile*"),
    "sitecustomize.py",
)
IRRELEVANT = ("*.md", "*.rst", "LICENSE*", ".gitignore", ".gitattributes", "CODEOWNERS")
_NEW = "it is not in the record"


class Changes:
    """What differs between a recorded state and now, and why a test has to run for it."""

    def __init__(
        self,
        record: TestRecord,
        sources: Sources,
        now: ProjectState,
        base_blocks: Mapping[str, Mapping[str, str]] | None = None,
        before: Sources | None = None,
    ) -> None:
        """Compare the project as it is now with the states of a record.

        Args:
            record: Record of earlier runs.
            sources: The project now.
            now: The files as they are, and the environment; an empty one is not compared.
            base_blocks: Path -> blocks in a base revision, of the files that differ from it.
            before: The project as the entries' states have it; by default the blocks of the record
                are compared, which are the same unless the entries are of other code.
        """
        self._record = record
        self._sources = sources
        self._now = now
        self._base = base_blocks or {}
        self._before = before
        self._reasons: dict[int, str] = {}
        self._new_conftests: dict[int, list[str]] = {}
        self._changed_blocks: dict[int, dict[int, str]] = {}

    def reason(self, node_id: str, mode: str | None) -> str | None:
        """Return why a test runs; None for one that nothing changed for.

        Args:
            node_id: Node id of the test.
            mode: Mode in which it would run now; None if that is not known.
        """
        entry = self._record.tests.get(node_id)
        if entry is None:
            return _NEW
        if entry.problem:
            return entry.problem
        if mode is not None and entry.mode != mode:
            return f"it was recorded as {entry.mode}, and would run as {mode}"
        if self._record.states[entry.state].root != self._now.root:
            return "it was recorded by a session with another root directory"
        return self._reason_of_state(entry.state, node_id) or self._changed_block(entry)

    def _changed_block(self, entry: TestEntry) -> str | None:
        """Return a changed block that a test used, None without one."""
        if entry.state not in self._changed_blocks:
            self._changed_blocks[entry.state] = dict(self._find_changed(entry.state))
        reasons = self._changed_blocks[entry.state]
        if reasons.keys().isdisjoint(entry.blocks):
            return None
        return next(reasons[number] for number in entry.blocks if number in reasons)

    @functools.cached_property
    def _blocks_of_files(self) -> dict[str, list[int]]:
        """Path -> numbers of its blocks."""
        return grouped((path, number) for number, (path, _, _) in enumerate(self._record.blocks))

    def _find_changed(self, state: int) -> Iterator[tuple[int, str]]:
        """Yield the blocks that changed since a state, and the reasons that they are."""
        old_files, new_imports = self._record.states[state].files, self._importers(state)
        for path, numbers in self._blocks_of_files.items():
            old = old_files.get(path, "")
            is_same = old and old == self._now.files.get(path) and not old.startswith(LINK)
            if path in new_imports:
                yield from ((number, f"{path} imports a new file") for number in numbers)
            elif path in self._base or not is_same:
                now = self._sources.blocks(path)
                before = None if self._before is None else self._before.blocks(path)
                for number in numbers:
                    _, name, value = self._record.blocks[number]
                    was = value if before is None else before.get(name)
                    is_changed = not is_same and now.get(name) != was
                    if is_changed or self._base.get(path, now).get(name) != now.get(name):
                        shown = "" if name in (MODULE, WHOLE, LISTING, EXISTS) else f"::{name}"
                        yield number, f"{path}{shown} changed"

    def _reason_of_state(self, state: int, node_id: str) -> str | None:
        """Return why a test runs that was recorded in a state, whatever it used."""
        if state not in self._reasons:
            old = self._record.states[state]
            self._reasons[state] = self._find_reason(old)
            new = sorted(self._now.files.keys() - old.files.keys())
            self._new_conftests[state] = [p for p in new if PurePosixPath(p).name == CONFTEST]
        if self._reasons[state]:
            return self._reasons[state]
        for path in self._new_conftests[state]:
            file = PurePosixPath(self._now.file_of(node_id))
            if file.is_relative_to(PurePosixPath(path).parent):
                return f"{path} is new"
        return None

    def _find_reason(self, state: ProjectState) -> str:
        """Return why all tests of a state have to run, "" if they need not."""
        if self._now.environment and self._now.environment != state.environment:
            return f"the environment changed: {_difference(state, self._now)}"
        for path in sorted(self._changed_since(state)):
            if _matches(path, FOR_ALL):
                return f"{path} changed, which all tests depend on"
            if not (path.endswith(".py") or self._is_known(path, state)):
                return f"{path} changed, and no record shows who uses it"
        return ""

    def _changed_since(self, state: ProjectState) -> set[str]:
        """Return the paths that differ from those of a state, or from the base."""
        paths = self._now.files.keys() | state.files.keys()
        changed = {path for path in paths if self._now.files.get(path) != state.files.get(path)}
        return changed | self._base.keys()

    def _is_known(self, path: str, state: ProjectState) -> bool:
        """Return true if tests that used a file that is no Python are known, or none can have."""
        if not {(path, WHOLE), (path, EXISTS)}.isdisjoint(self._used):
            return True
        is_gone_or_new = (path in state.files) != (path in self._now.files)
        place = PurePosixPath(path)
        if is_gone_or_new and is_listed(place.name) and (str(place.parent), LISTING) in self._used:
            return True
        return _matches(path, IRRELEVANT)

    @functools.cached_property
    def _used(self) -> set[tuple[str, str]]:
        """The files and names of the blocks of all tests."""
        numbers = set[int]().union(*(entry.blocks for entry in self._record.tests.values()))
        return {self._record.blocks[number][:2] for number in numbers}

    def _importers(self, state: int) -> frozenset[str]:
        """Return files as they were that may import a new Python file, as in `try: import it`."""
        now, old = self._now.files, self._record.states[state].files
        new = {path for path in now.keys() - old.keys() if path.endswith(".py")}
        same = [p for p in old if new and p.endswith(".py") and old[p] == now.get(p)]
        return frozenset(path for path in same if self._sources.imports(path) & new)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    name = PurePosixPath(path).name
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _difference(old: ProjectState, new: ProjectState) -> str:
    """Describe how the environment differs: the first difference, and how many more."""
    names = old.environment.keys() | new.environment.keys()
    found = [
        f"{name} {new.environment.get(name, 'is gone')}, was {old.environment.get(name, 'absent')}"
        for name in sorted(names)
        if old.environment.get(name) != new.environment.get(name)
    ]
    more = f" and {counted(len(found) - 1, 'other')}" if len(found) > 1 else ""
    return f"{found[0]}{more}"


def blocks_at(root: Path, base: str) -> dict[str, Mapping[str, str]]:
    """Return path -> blocks at the merge base with a revision, of files that differ from it now.

    Raises:
        SelectionError: git does not know the revision, or there is no repository.
    """
    where = f"--changed {base}"
    if base.startswith("-") or not re.fullmatch(r"\S+", base):
        raise SelectionError(where, "is no revision, expected a branch, a tag or a commit")
    commit = ask_git(root, "merge-base", "HEAD", base)
    words = "diff", "--raw", "--no-renames", "-z", commit or ""
    differing = None if commit is None else read_git(root, *words)
    if commit is None or differing is None:
        shallow = ask_git(root, "rev-parse", "--is-shallow-repository") == "true"
        problem = (
            "git has no commit in common with it, as the clone is shallow; fetch more history"
            if shallow
            else "git does not know it here, expected a branch, a tag or a commit; fetch it, or "
            "write --changed=BASE in front of the tests"
        )
        raise SelectionError(where, problem)
    entries = os.fsdecode(differing).split("\0")
    modes = dict(zip(entries[1::2], (facts[1:7] for facts in entries[::2]), strict=False))
    return {name: _blocks_at(root, commit, name, mode) for name, mode in modes.items()}


def _blocks_at(root: Path, commit: str, path: str, mode: str) -> Mapping[str, str]:
    """Return the digests of the blocks of a file at a commit."""
    exists = {EXISTS: KINDS.get(mode, "nothing")}
    source = read_git(root, "show", f"{commit}:./{path}")
    if source is None:
        return exists
    found = blocks_of(source)
    return {**(found if path.endswith(".py") else {WHOLE: found[WHOLE]}), **exists}


def summary(reasons: Mapping[str, str], num_items: int, most: int = 3) -> list[str]:
    """Return lines for the terminal: how many of the items run, and for which changes."""
    lines = [f"{len(reasons)} of {num_items} run"]
    ordered = sorted(Counter(reasons.values()).items(), key=lambda pair: (-pair[1], pair[0]))
    lines += [f"  {number}: {reason}" for reason, number in ordered[:most]]
    if len(ordered) > most:
        lines.append(f"  and {counted(len(ordered) - most, 'other reason')}")
    return lines


def find_unaffected(record: TestRecord, changes: Changes) -> frozenset[str]:
    """Return the items of a record that need not run: node ids of tests and workloads.

    Files of tests are among them, all of whose tests are recorded and need not run.
    """
    node_ids = frozenset(n for n in record.tests if changes.reason(n, None) is None)
    of_files = Counter(node_id.partition("::")[0] for node_id in node_ids)
    files = (file for file, number in record.collected.items() if of_files[file] == number > 0)
    return node_ids.union(files)


def unaffected_since(root: Path, base: str, files: Sequence[Path]) -> frozenset[str]:
    """Return the items of the records in files for which nothing changed; never the environment.

    Without files, the record is the project's.

    Raises:
        ConfigError: A record cannot be read.
        SelectionError: git is missing, or does not know the base.
    """
    top, start = checkout_of(root.resolve())
    paths = [file.resolve() for file in files or (DEFAULT_FILE,)]
    record = merge_records(map(read_record, paths))
    paths += [path.with_name(FILE_NAME) for path in paths]
    now = ProjectState(environment={}, files=files_of(top, *paths), root=start)
    return find_unaffected(record, Changes(record, Sources(top), now, blocks_at(top, base)))
