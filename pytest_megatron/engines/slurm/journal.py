"""Write-ahead log of submissions (effects).

Where a controller was killed, it has the id of every job that may be in the queue, and the name of
one of which that is not known. Lines of JSON, appended.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from pytest_megatron.errors import LaunchError
from pytest_megatron.workloads.engine.api import EngineError

_FILE = "journal.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class _JournalRun:
    id: str
    event: Literal["run"] = "run"
    schema: Literal[1] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Intent:
    batch: int
    key: str
    event: Literal["intent"] = "intent"


@dataclass(frozen=True, slots=True, kw_only=True)
class _JournalJob:
    batch: int
    job_id: int
    event: Literal["job"] = "job"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Withdrawn:
    batch: int
    event: Literal["withdrawn"] = "withdrawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """End of a submission, beside the record of its job.

    Attributes:
        key: The submission's.
        hosts: Hosts, for `Outcome.hosts`.
    """

    key: str
    trouble: EngineError | None
    hosts: tuple[str, ...] = ()
    event: Literal["end"] = "end"


_Line: TypeAlias = _JournalRun | _Intent | _JournalJob | _Withdrawn | JobEnd
_LINE: TypeAdapter[_Line] = TypeAdapter(Annotated[_Line, Field(discriminator="event")])


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One call of sbatch.

    Attributes:
        number: Counted from 1 within a run; it is part of the job's name.
        key: Key of the submission; None if it was withdrawn.
        job_id: None as long as it is not known whether the job was submitted.
    """

    number: int
    key: str | None
    job_id: int | None = None


class Journal:
    """The journal of one run.

    Attributes:
        run_id: Eight hexadecimal digits that no other run has.
        batches: Those that may be in Slurm's queue, or were, by number; without a key if not.
        places: Number of the batch that a submission was submitted with last.
    """

    def __init__(self, descriptor: int, run_id: str) -> None:
        self._descriptor = descriptor
        self.run_id = run_id
        self.batches: dict[int, Batch] = {}
        self.places: dict[str, int] = {}

    @classmethod
    def open(cls, directory: Path) -> Journal:
        """Begin the journal of a run.

        Raises:
            LaunchError: It cannot be written.
        """
        path = directory / _FILE
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            journal = cls(descriptor, secrets.token_hex(4))
            journal._write(_JournalRun(id=journal.run_id))
        except OSError as error:
            raise LaunchError(str(path), f"cannot be written: {error.strerror}") from error
        return journal

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def intend(self, key: str) -> Batch:
        """Note that a submission is about to be submitted.

        Raises:
            OSError: It cannot be written; do not submit it.
        """
        number = max(self.batches, default=0) + 1
        line = _Intent(batch=number, key=key)
        self._write(line)
        self._take(line)
        return self.batches[number]

    def submitted(self, number: int, job_id: int) -> None:
        """Note the job id that Slurm gave to a batch.

        Raises:
            OSError: It cannot be written; the job is found by its name again.
        """
        self._note(_JournalJob(batch=number, job_id=job_id))

    def withdrawn(self, number: int) -> None:
        """Note that a batch was not submitted after all, such as one that sbatch refused.

        Raises:
            OSError: It cannot be written.
        """
        self._note(_Withdrawn(batch=number))

    def ended(self, end: JobEnd) -> None:
        """Note how a submission ended.

        Raises:
            OSError: It cannot be written.
        """
        self._note(end)

    def _note(self, line: _Line) -> None:
        """Keep what has happened, also where that cannot be written."""
        self._take(line)
        self._write(line)

    def _take(self, line: _Line) -> None:
        """Apply a line of the journal to what is known."""
        match line:
            case _Intent(batch=number, key=key):
                self.batches[number] = Batch(number=number, key=key)
                self.places[key] = number
            case _JournalJob(batch=number, job_id=job_id):
                self.batches[number] = replace(self.batches[number], job_id=job_id)
            case _Withdrawn(batch=number):
                self.places.pop(self.batches[number].key or "", None)
                self.batches[number] = replace(self.batches[number], key=None)
            case _JournalRun() | JobEnd():
                pass

    def _write(self, line: _Line) -> None:
        """Append a line; it is on the disk afterwards."""
        os.write(self._descriptor, _LINE.dump_json(line) + b"\n")
        os.fsync(self._descriptor)
