"""The logs of one launch, and what is known about it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class Stream(Enum):
    """Stream of a rank that a log holds."""

    STDERR = "stderr"
    STDOUT = "stdout"
    BOTH = "both"
    LAUNCHER = "launcher"  # of torch's agent, srun, a job: lines of several ranks perhaps


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """One log.

    Attributes:
        shown: What a person knows it as; of a member of an archive `artifact.zip!name`.
        rank: Whose it is, None for a launcher's.
    """

    path: Path
    shown: str
    rank: int | None = None
    stream: Stream = Stream.BOTH


class LaunchEnd(Enum):
    """End of a launch, where the launching program knows it."""

    EXITED = "exited"
    TIME_LIMIT = "time limit"
    HUNG_COLLECTIVE = "hung collective"
    STOPPED = "stopped early"  # since what it measured could only fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Facts about a launch beside its logs; everything may be missing.

    Attributes:
        program: What was started, for a sentence: `the script`; None where that is not known.
        returncode: Exit code of the launcher, negative for a signal.
        limit_s: Time limit of the launch.
        iteration: How far it is known to have come: N of M.
        far: The same, such as `logged value 9`, where no iteration is known.
        quiet_s: Seconds in which nothing was logged before it was stopped.
        command: What runs it again, as typed in a shell.
        record: A failed comparison with a golden, or the health of GPUs, in our run directory.
    """

    program: str | None = None
    returncode: int | None = None
    ended: LaunchEnd | None = None
    limit_s: float | None = None
    iteration: tuple[int, int | None] | None = None
    far: str | None = None
    quiet_s: float = 0.0
    world_size: int | None = None
    command: str | None = None
    record: LogFile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The logs of one launch.

    Attributes:
        name: Where it is, for a person.
        root: The directory of its ranks, or of its one log.
        error_files: Rank -> torch's `error.json`.
        flights: Rank -> a flight recorder's dump.
        notes: Problems met on the way, such as a file that cannot be read.
    """

    name: str
    root: Path
    logs: tuple[LogFile, ...]
    error_files: Mapping[int, Path] = field(default_factory=dict)
    flights: Mapping[int, Path] = field(default_factory=dict)
    known: Known = field(default_factory=Known)
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that left a file of their own."""
        found = {log.rank for log in self.logs if log.rank is not None}
        return tuple(sorted(found | self.error_files.keys() | self.flights.keys()))
