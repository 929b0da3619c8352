"""The further attempts that a run has used, and how many it may use.

The budget is one file in the run directory, which all processes of the run share under a lock. It
stays there as the record of what was run again and why not more. Each process reads only what is
new in it: a run may have many thousands of items.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pytest_megatron.base.files import JsonValue, json_objects

DEFAULT_MAX_RETRIES = 10
_FILE = "retries.jsonl"
_MOSTLY_BROKEN = "more than half of the run failed for causes of the machine or the network"
_LEAST_ENDED = 3  # before that, "more than half" says nothing about the machine


class RunLedger:
    """Further attempts that a run has used."""

    def __init__(self, *, run_dir: Path, max_retries: int = DEFAULT_MAX_RETRIES) -> None:
        """Begin without reading the ledger.

        Args:
            run_dir: Is there before the first call.
            max_retries: How many incidents all items of the run together may be run again for. One
                that is a machine's is one for all items under which that machine failed so.
        """
        self._path = run_dir / _FILE
        self._max_retries = max_retries
        self._counts = _RetryCounts()

    def claim(self, node_id: str, signature: str, hosts: Sequence[str] = ()) -> str | None:
        """Take one further attempt for an item; return why it cannot have one, or None.

        Args:
            node_id: The item.
            signature: Id of what the last attempt failed of.
            hosts: The machines that failed under it; none where it was not theirs.
        """
        row: dict[str, JsonValue] = {"event": "retry", "node_id": node_id, "signature": signature}
        if hosts:
            row["hosts"] = list[JsonValue](sorted(hosts))
        try:
            with self._open() as counts:
                if counts.is_infrastructure:
                    return _MOSTLY_BROKEN
                if counts.num_incidents_with(row) > self._max_retries:
                    return f"the run's {self._max_retries} further attempts are used up"
                counts.append(row)
        except OSError as error:  # the disk is full, most likely
            return f"{self._path}: {error.strerror}"
        return None

    def note_end(self, node_id: str, broken_by: str | None) -> str | None:
        """Count an item that ended; return a text about the whole run, once, or None.

        Args:
            node_id: The item.
            broken_by: Id of the transient cause that it failed with to the end, or None.
        """
        with contextlib.suppress(OSError), self._open() as counts:
            counts.append({"event": "end", "node_id": node_id, "broken_by": broken_by})
            if counts.is_infrastructure and not counts.was_said:
                counts.append({"event": "infrastructure"})
                return counts.text
        return None

    def infrastructure(self) -> str | None:
        """Return the text about the run, if it was printed already, else None."""
        if not self._path.exists():
            return None
        with contextlib.suppress(OSError), self._open() as counts:
            return counts.text if counts.was_said else None
        return None

    @contextmanager
    def _open(self) -> Iterator[_RetryCounts]:
        """Have the file locked and all of it counted."""
        counts = self._counts
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        with os.fdopen(descriptor, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(counts.num_bytes)
            text = file.read()
            if text and not text.endswith(b"\n"):  # a writer was killed within a line
                text += b"\n"
                os.write(descriptor, b"\n")
            counts.take(text)
            counts.descriptor = descriptor
            yield counts


class _RetryCounts:
    """Sums of the rows of the file.

    Attributes:
        num_bytes: That were counted.
        descriptor: Descriptor of the file while it is locked.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._num_alone = 0
        self._of_hosts: set[tuple[str, str]] = set()
        self.num_ended = 0
        self.was_said = False
        self.descriptor = -1
        self._broken: Counter[str] = Counter()

    def num_incidents_with(self, row: dict[str, JsonValue]) -> int:
        """Return how many incidents there are with one more further attempt."""
        alone, of_hosts = _incidents(row)
        return self._num_alone + alone + len(self._of_hosts | of_hosts)

    @property
    def is_infrastructure(self) -> bool:
        """True if the machine or the network is the matter of the run."""
        return self.num_ended >= _LEAST_ENDED and 2 * self._broken.total() > self.num_ended

    @property
    def text(self) -> str:
        """Text for the user in that case."""
        known = ", ".join(sorted(self._broken))
        return (
            f"infrastructure: {self._broken.total()} of {self.num_ended} workloads failed for "
            f"causes of the machine or the network ({known}); nothing more is run again"
        )

    def append(self, row: dict[str, JsonValue]) -> None:
        """Add a row to the file and to what was counted."""
        line = json.dumps(row).encode() + b"\n"
        os.write(self.descriptor, line)
        self.take(line)

    def take(self, lines: bytes) -> None:
        """Count rows; those that were not finished are left out."""
        self.num_bytes += len(lines)
        for row in json_objects(lines):
            self._count(row)

    def _count(self, row: dict[str, JsonValue]) -> None:
        """Count a line of the ledger."""
        match row.get("event"):
            case "retry":
                alone, of_hosts = _incidents(row)
                self._num_alone += alone
                self._of_hosts |= of_hosts
            case "end":
                self.num_ended += 1
                if row["broken_by"] is not None:
                    self._broken[str(row["broken_by"])] += 1
            case "infrastructure":
                self.was_said = True
            case _:
                pass


def _incidents(row: dict[str, JsonValue]) -> tuple[int, set[tuple[str, str]]]:
    """Return what a further attempt counts: one, or machines and what they failed of."""
    hosts = row.get("hosts")
    if not isinstance(hosts, list) or not hosts:
        return 1, set()
    return 0, {(str(row.get("signature")), str(host)) for host in hosts}
