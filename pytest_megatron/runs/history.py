"""Outcomes of items in past runs: a file of JSON lines beside the run directories.

Appended to under a lock and kept bounded; a line that cannot be read costs that line and nothing
else. Knows no pytest and no training.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.files import parse_json, read_bytes, write_text_atomically
from pytest_megatron.base.schema import SchemaError, parse, validate
from pytest_megatron.runs.record import Real, RecordedFile, to_json

FILE_NAME = "history.jsonl"
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
        kind: `workload` or `test`.
        verdict: As in `run.json`.
        num_attempts: Of all repeats together.
        causes: Signature of each attempt that failed, "unknown" where it matched none.
        platform: A workload's platform, a test's device and world size.
        is_quarantined: Whether its failure did not count.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRecord:
    """Outcomes of an item in the chosen runs.

    Attributes:
        num_runs: In which it ran and was noted.
        num_flaky: Of them, in which it passed only when it was run again.
        num_bad: In which it failed or was broken.
        causes: Signature -> how many attempts failed of it, the most frequent first.
        num_contradictory: Runs in which it failed at a commit at which it also passed.
        first_seen, last_seen: When it was first and last flaky, failed or broken.
    """

    node_id: str
    num_runs: int
    num_flaky: int
    num_bad: int
    causes: tuple[tuple[str, int], ...]
    num_contradictory: int
    first_seen: str
    last_seen: str

    @property
    def share(self) -> float:
        """Share of runs in which it was flaky, or failed at a commit at which it also passed."""
        return (self.num_flaky + self.num_contradictory) / self.num_runs

    @property
    def is_contradictory(self) -> bool:
        """True if it passed and failed at the same commit."""
        return self.num_contradictory > 0


def append(path: Path, entries: Iterable[HistoryEntry]) -> None:
    """Add entries to the end of a file.

    Raises:
        OSError: It cannot be made or written.
    """
    text = "".join(entry.as_line() for entry in entries)
    if not text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path), path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        if end and _last_byte(path) != b"\n":  # a writer was killed within a line
            text = "\n" + text
        file.write(text.encode())
        is_full = end + len(text) > MAX_BYTES
        file.flush()
        if is_full:
            _drop_oldest(path)


def read(path: Path) -> History:
    """Read a file; none is an empty history.

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


def flaky_records(
    entries: Sequence[HistoryEntry], *, since: str = "", min_runs: int = 1
) -> tuple[HistoryRecord, ...]:
    """Return the items that were flaky or contradicted themselves, the worst first.

    Args:
        entries: Of any order.
        since: Entries before this time are left out.
        min_runs: Items with fewer runs are left out.
    """
    by_item: dict[str, list[HistoryEntry]] = {}
    for entry in sorted(entries, key=lambda e: e.time):
        if entry.time >= since:
            by_item.setdefault(entry.node_id, []).append(entry)
    records = [_record(name, found) for name, found in by_item.items() if len(found) >= min_runs]
    kept = [record for record in records if record.num_flaky or record.is_contradictory]
    return tuple(sorted(kept, key=lambda r: (-r.share, -r.num_flaky, -r.num_bad, r.node_id)))


def misleading_share(entries: Iterable[HistoryEntry], node_id: str) -> tuple[int, int] | None:
    """Return the number of runs of an item that others of the same commit contradict, and of all.

    Counts the rarer outcome of each commit with several runs; None where no commit has two
    outcomes.
    """
    outcomes = _outcomes([entry for entry in entries if entry.node_id == node_id]).values()
    repeated = [found for found in outcomes if len(found) > 1]
    rarer = sum(min(found.count(True), found.count(False)) for found in repeated)
    return (rarer, sum(map(len, repeated))) if rarer else None


def outcomes_that_count(
    entries: Iterable[HistoryEntry],
) -> dict[tuple[str, str], list[bool]]:
    """Return commit and node id -> whether each run was good, of items not in quarantine."""
    by_item: dict[str, list[HistoryEntry]] = {}
    for entry in entries:
        if not entry.is_quarantined:
            by_item.setdefault(entry.node_id, []).append(entry)
    return {
        (commit, node_id): outcomes
        for node_id, found in by_item.items()
        for commit, outcomes in _outcomes(found).items()
    }


def _outcomes(entries: Iterable[HistoryEntry]) -> dict[str, list[bool]]:
    """Return commit -> whether each run of it was good; changed trees are of no commit."""
    outcomes: dict[str, list[bool]] = {}
    for entry in entries:
        is_known = entry.commit is not None and not entry.is_dirty
        if is_known and entry.verdict not in ("broken", "skipped"):
            outcomes.setdefault(str(entry.commit), []).append(entry.verdict in _GOOD)
    return outcomes


def _record(node_id: str, entries: Sequence[HistoryEntry]) -> HistoryRecord:
    odd = [e for e in entries if e.verdict not in ("passed", "skipped")]
    causes = Counter(cause for entry in entries for cause in entry.causes)
    outcomes = _outcomes(entries)
    return HistoryRecord(
        node_id=node_id,
        num_runs=len(entries),
        num_flaky=sum(e.verdict == "flaky" for e in entries),
        num_bad=sum(e.verdict not in (*_GOOD, "skipped") for e in entries),
        causes=tuple(causes.most_common()),
        num_contradictory=sum(found.count(False) for found in outcomes.values() if any(found)),
        first_seen=odd[0].time if odd else "",
        last_seen=odd[-1].time if odd else "",
    )


def days_ago(days: float) -> str:
    """Return that time in the form of `Entry.time`."""
    then = dt.datetime.now(dt.UTC) - dt.timedelta(days=days)
    return then.strftime("%Y-%m-%dT%H:%M:%SZ")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Keep other sessions out; the file itself may be replaced meanwhile."""
    import filelock  # noqa: PLC0415 - not for sessions that write nothing

    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        yield


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def _drop_oldest(path: Path) -> None:
    """Keep the newer half of a file."""
    text = path.read_bytes()
    start = text.index(b"\n", len(text) - MAX_BYTES // 2) + 1
    write_text_atomically(path, text[start:].decode(errors="replace"))
