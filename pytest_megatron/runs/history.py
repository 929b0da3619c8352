"""Outcomes of items in past runs: a file of JSON lines beside the run directories.

Appended to under a lock and kept bounded; a line that cannot be read costs that line and nothing
else. Knows no pytest and no training.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.files import (
    append_lines,
    parse_json,
    read_bytes,
    write_text_atomically,
)
from pytest_megatron.base.schema import SchemaError, parse, validate
from pytest_megatron.runs.record import Real, RecordedFile, to_json

MAX_BYTES = 16 << 20  # some 50,000 lines; half of it is kept when it is full
_NODE_ID = re.compile(rb'"node_id": ("(?:[^"\\]|\\.)*")')
_GOOD = frozenset(("passed", "flaky"))
_NUM_RECENT = 5  # executions from which the next duration is estimated


@dataclass(frozen=True, kw_only=True)
class HistoryEntry(RecordedFile):
    """One item in one run.

    Attributes:
        time: `2026-01-31T12:00:00Z`, when it ended.
        run: Name of the run directory.
        kind: `workload`, `test`, or `tests` for those of a file that passed, together; its node
            id is the file.
        verdict: Verdict in `run.json`.
        num_attempts: Attempts of all repeats together.
        causes: Signature of each attempt that failed, "unknown" where it matched none.
        platform: A workload's platform, a test's device and world size.
        is_quarantined: Whether its failure did not count.
        quarantined_until: Last day of its quarantine, also of one that is over; else empty.
    """

    time: str
    run: str
    node_id: str
    kind: str
    verdict: str
    num_attempts: int
    causes: tuple[str, ...]
    duration_s: Real
    commit: str | None
    is_dirty: bool
    platform: str
    is_quarantined: bool = False
    quarantined_until: str = ""

    @property
    def is_in_quarantine(self) -> bool:
        """True if it had a quarantine, even one that was over."""
        return self.is_quarantined or self.quarantined_until != ""

    @property
    def is_counted(self) -> bool:
        """True if the outcome is one of a revision: it ran to an end of its own in a clean tree.

        A test with causes failed once more after failures that are known as transient.
        """
        is_known = self.commit is not None and not self.is_dirty
        is_transient = self.kind == "test" and self.verdict == "failed" and bool(self.causes)
        return is_known and self.verdict not in ("broken", "skipped") and not is_transient

    @property
    def is_good(self) -> bool:
        """True if it passed in the end."""
        return self.verdict in _GOOD

    def as_line(self) -> str:
        """Return it as a line of the file."""
        return json.dumps(to_json(self)) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Content of a file.

    Attributes:
        problems: A line for each line of the file that could not be read.
    """

    entries: tuple[HistoryEntry, ...] = ()
    problems: tuple[str, ...] = ()


def append(path: Path, entries: Iterable[HistoryEntry]) -> None:
    """Add entries to the end of a file.

    Raises:
        OSError: It cannot be made or written.
    """
    text = "".join(entry.as_line() for entry in entries)
    if not text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path):
        if append_lines(path, text) > MAX_BYTES:
            _drop_oldest(path)


def read(path: Path, node_ids: Collection[str] | None = None) -> History:
    """Read a file; none is an empty history.

    Args:
        path: The file.
        node_ids: Only the entries of these items are read; None for all.

    Raises:
        OSError: It is there and cannot be read.
    """
    entries: list[HistoryEntry] = []
    problems: list[str] = []
    try:
        text = read_bytes(path)
    except FileNotFoundError:
        return History()
    for number, line in enumerate(text.splitlines(), 1):
        if node_ids is not None:
            found = _NODE_ID.search(line)
            if found is not None and parse_json(found[1]) not in node_ids:
                continue
        try:
            entries.append(_entry(line))
        except (ValueError, SchemaError):
            problems.append(f"{path}:{number}: is no entry of a history, skipped")
    return History(entries=tuple(entries), problems=tuple(problems))


def _entry(line: bytes) -> HistoryEntry:
    """Return the entry in a line, where a surrogate without its pair is U+FFFD."""
    has_escapes = b"\\u" in line
    return validate(HistoryEntry, parse_json(line)) if has_escapes else parse(HistoryEntry, line)


def known_items(path: Path) -> frozenset[str]:
    """Return the node ids that a file has, without reading all of each line.

    Raises:
        OSError: It is there and cannot be read.
    """
    try:
        text = read_bytes(path)
    except FileNotFoundError:
        return frozenset()
    return frozenset(str(parse_json(found)) for found in set(_NODE_ID.findall(text)))


def typical_durations(path: Path) -> dict[str, float]:
    """Return the recent durations of items by a history file; none where it cannot be read."""
    try:
        return durations_of(read(path).entries)
    except OSError:
        return {}


def durations_of(entries: Iterable[HistoryEntry]) -> dict[str, float]:
    """Return the recent duration of one attempt of each item in seconds.

    The median of the last executions that came to their end; an item without one is not there.
    """
    took: dict[str, deque[float]] = {}
    for entry in entries:
        if entry.verdict in _GOOD and entry.num_attempts:
            recent = took.setdefault(entry.node_id, deque(maxlen=_NUM_RECENT))
            recent.append(entry.duration_s / entry.num_attempts)
    return {node_id: statistics.median(recent) for node_id, recent in took.items()}


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Keep other sessions out; the file itself may be replaced meanwhile."""
    import filelock  # noqa: PLC0415 - not for sessions that write nothing

    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        yield


def _drop_oldest(path: Path) -> None:
    """Keep the newer half of a file."""
    text = path.read_bytes()
    start = text.index(b"\n", len(text) - MAX_BYTES // 2) + 1
    write_text_atomically(path, text[start:].decode(errors="replace"))
