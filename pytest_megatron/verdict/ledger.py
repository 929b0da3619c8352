"""The attempts that a whole run may add, counted over all its processes.

One file in the run directory, which pytest-xdist's workers share under a lock. It stays there as
the record of what was run again and why not more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.files import JsonValue

DEFAULT_MAX_RETRIES = 10
_FILE = "retries.jsonl"
_MOSTLY_BROKEN = "more than half of the run failed for causes of the machine or the network"
_LEAST_ENDED = 3  # before that, "more than half" says nothing about the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLedger:
    """What a run has spent on further attempts.

    Attributes:
        run_dir: Is there before the first call.
        max_retries: How many further attempts all items of the run may have together.
    """

    run_dir: Path
    max_retries: int = DEFAULT_MAX_RETRIES

    def claim(self, node_id: str, signature: str) -> str | None:
        """Take one further attempt for an item; return why it cannot have one, or None."""
        try:
            with self._open() as (rows, append):
                if _is_infrastructure(rows):
                    return _MOSTLY_BROKEN
                num_retries = sum(row["event"] == "retry" for row in rows)
                if num_retries >= self.max_retries:
                    return f"the run's {self.max_retries} further attempts are used up"
                append({"event": "retry", "node_id": node_id, "signature": signature})
        except OSError as error:  # the disk is full, most likely
            return f"{self.run_dir / _FILE}: {error.strerror}"
        return None

    def note_end(self, node_id: str, broken_by: str | None) -> str | None:
        """Take note of an item that ended; return what to say of the whole run, once, or None.

        Args:
            node_id: The item.
            broken_by: Id of the transient cause that it failed with to the end, or None.
        """
        with contextlib.suppress(OSError), self._open() as (rows, append):
            append({"event": "end", "node_id": node_id, "broken_by": broken_by})
            if _is_infrastructure(rows) and not _was_said(rows):
                append({"event": "infrastructure"})
                return _text(rows)
        return None

    def infrastructure(self) -> str | None:
        """Return what is to be said of the run, if that was said already, else None."""
        if not (self.run_dir / _FILE).exists():
            return None
        with contextlib.suppress(OSError), self._open() as (rows, _):
            return _text(rows) if _was_said(rows) else None
        return None

    @contextmanager
    def _open(self) -> Iterator[tuple[list[dict[str, JsonValue]], _Append]]:
        descriptor = os.open(self.run_dir / _FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read()
            rows = [row for line in text.splitlines() if (row := _parse(line)) is not None]
            if text and not text.endswith("\n"):  # a writer was killed within a line
                os.write(descriptor, b"\n")
            yield rows, _Append(rows, descriptor)


class _Append:
    """Adds rows to the file and to what was read from it."""

    def __init__(self, rows: list[dict[str, JsonValue]], descriptor: int) -> None:
        self._rows = rows
        self._descriptor = descriptor

    def __call__(self, row: dict[str, JsonValue]) -> None:
        self._rows.append(row)
        os.write(self._descriptor, (json.dumps(row) + "\n").encode())


def _parse(line: str) -> dict[str, JsonValue] | None:
    """Return a row; None for a line that was not finished."""
    try:
        row: JsonValue = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "event" in row else None


def _ends(rows: list[dict[str, JsonValue]]) -> tuple[int, list[str]]:
    """Return how many items ended, and the causes of those that were broken."""
    ends = [row for row in rows if row["event"] == "end"]
    return len(ends), [str(row["broken_by"]) for row in ends if row["broken_by"] is not None]


def _was_said(rows: list[dict[str, JsonValue]]) -> bool:
    return any(row["event"] == "infrastructure" for row in rows)


def _is_infrastructure(rows: list[dict[str, JsonValue]]) -> bool:
    num_ended, broken = _ends(rows)
    return num_ended >= _LEAST_ENDED and 2 * len(broken) > num_ended


def _text(rows: list[dict[str, JsonValue]]) -> str:
    num_ended, broken = _ends(rows)
    known = ", ".join(sorted(set(broken)))
    return (
        f"infrastructure: {len(broken)} of {num_ended} workloads failed for causes of the machine "
        f"or the network ({known}); nothing more is run again"
    )
