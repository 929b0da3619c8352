"""The logs of one launch, and the events in them by rank.

`find` names the logs, `gather` reads the events, `root_cause` judges them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePath

from pytest_megatron.triage.logs.exits import ProcessExit
from pytest_megatron.triage.signatures import LineRole, Signature


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

    @property
    def short_name(self) -> str:
        """What a rank's log is called in its launch: `3/stderr.log`."""
        return f"{self.rank}/{PurePath(self.shown).name}"


class End(Enum):
    """Reason for the end of a launch, where who started it knows."""

    EXITED = "exited"  # by itself, well or not
    TIME_LIMIT = "time limit"  # stopped by us
    HUNG_COLLECTIVE = "hung collective"  # stopped by us once a rank's watchdog said so
    NO_CHECKPOINT = "no checkpoint"  # by itself, without what is resumed from or compared
    SCRIPT = "script"  # the case's own script failed, before the training or after a clean one
    STOPPED = "stopped early"  # by us, since a loss is not finite
    NOT_EXITED = "not exited"  # stopped by us: it had done its work, and ranks did not exit


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
        outlived: Logs behind whose last traceback their rank went on, as `3/stderr.log`.
        record: A failed comparison with a golden, or the health of GPUs, in our run directory.
    """

    program: str | None = None
    returncode: int | None = None
    ended: End | None = None
    limit_s: float | None = None
    iteration: tuple[int, int | None] | None = None
    far: str | None = None
    quiet_s: float = 0.0
    outlived: tuple[str, ...] = ()
    world_size: int | None = None
    record: LogFile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The logs of one launch.

    Attributes:
        name: Where it is, for a person.
        root: The directory of its ranks, or of its one log.
        error_files: Rank -> torch's `error.json`.
        notes: Problems met on the way, such as a file that cannot be read.
    """

    name: str
    root: Path
    logs: tuple[LogFile, ...]
    error_files: Mapping[int, Path] = field(default_factory=dict)
    known: Known = field(default_factory=Known)
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that left a file of their own."""
        found = {log.rank for log in self.logs if log.rank is not None}
        return tuple(sorted(found | self.error_files.keys()))


# The first line of a message with the next one where it ends in a colon, and with the first line of
# a block below it, which may stand under a name, as what a field of a record lacks.
_SAID_FIRST = re.compile(
    r".*:[ \t]*\n(?:(?:.*:[ \t]*|[^\w\n]*)\n)*.*|.*(?:\n\S+(?=\n(?:  |\t)))?(?:\n(?:  |\t).*)?"
)
_LINE_ENDS = re.compile(r"\s*\n(?:[^\w\n]*\n)*\s*")
_OF_AGENT = re.compile(r"run\.py:|launch\.py:\d+ in (?:\w+_launcher|sigkill_handler)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line in a log.

    Attributes:
        offset: Place of a byte of the line in the file.
        text: The line, without what is put in front of it.
    """

    log: LogFile
    offset: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A line that a signature matches.

    Attributes:
        rank: Whose, None where it is not known.
        time_s: By the clock of that log.
    """

    signature: Signature
    rank: int | None
    time_s: float | None
    place: LogLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Fatal:
    """The exception that ended a rank.

    Attributes:
        message: `Type: text`, of several lines perhaps.
        frame: The deepest `file:line in name` outside of libraries, or None.
        frames: All of them, outermost first.
        time_s: By the clock of the log, or None.
        epoch_s: As torch's error file has it, or None.
        place: None where only the error file knows it.
        verb: For a sentence; `wrote` where it is a line of a logger.
        rank: That its line names in a log of several, or None.
    """

    signature: Signature
    message: str
    frame: str | None = None
    frames: tuple[str, ...] = ()
    time_s: float | None = None
    epoch_s: float | None = None
    place: LogLine | None = None
    verb: str = "raised"
    rank: int | None = None

    @property
    def headline(self) -> str:
        """What the message says first, in one line."""
        found = _SAID_FIRST.match(self.message)
        return "" if found is None else _LINE_ENDS.sub(" ", found[0])

    @property
    def places(self) -> tuple[LogLine, ...]:
        """The line in a log; none where only the error file knows it."""
        return () if self.place is None else (self.place,)

    @property
    def is_of_agent(self) -> bool:
        """True if a launcher raised it about its ranks: torch's, accelerate's or DeepSpeed's."""
        return any(map(_OF_AGENT.match, self.frames))

    @property
    def is_lone(self) -> bool:
        """True if a child or a pipe of a rank's own told it so, and no collective."""
        is_of_others = self.signature.family.startswith(("nccl_", "store_"))
        return self.signature.role is LineRole.CASCADE and not is_of_others


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """Progress of a rank's collectives when its watchdog reported a timeout.

    Attributes:
        timed_out: Number of the collective that did not finish, or None.
        last: The last one that the rank called, or None.
        op: What it was, `ALLREDUCE`; `num_elements` of its input.
    """

    group: str
    timed_out: int | None
    last: int | None
    op: str | None
    num_elements: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStory:
    """Events of one rank, or of the launcher.

    Attributes:
        rank: None is the launcher.
        exit: As the launcher reported it, or None; `exit_place` is where.
        events: In the order of its logs.
        stack_frame: Where its main thread was when it was stopped or crashed, or None.
        last_words: The end of its log, a few lines that are no noise.
    """

    rank: int | None
    exit: ProcessExit | None = None
    exit_place: LogLine | None = None
    fatal: Fatal | None = None
    events: tuple[Event, ...] = ()
    enqueued: tuple[Enqueued, ...] = ()
    stack_frame: str | None = None
    last_words: tuple[LogLine, ...] = ()

    @property
    def how(self) -> str:
        """End as the launcher reported it: `SIGKILL`, `exit code 3`; empty if it did not."""
        return "" if self.exit is None else self.exit.how


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """Events of one launch.

    Attributes:
        iteration: The furthest that any rank printed: N of M; or None.
        is_presumed_clean: Whether nothing failed as far as the launcher, or who started it, knows.
        success: The last line that shows that a part of it came to a good end, or None.
        notes: What could not be read.
    """

    unit: Unit
    ranks: Mapping[int, RankStory]
    launcher: RankStory
    iteration: tuple[int, int | None] | None
    is_presumed_clean: bool = False
    success: LogLine | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def world_size(self) -> int:
        """Number of ranks, as far as it is known."""
        return max(self.unit.known.world_size or 0, max(self.ranks, default=-1) + 1)

    @property
    def has_exits(self) -> bool:
        """True if the launcher reported how ranks ended."""
        return any(story.exit is not None for story in self.ranks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Start of a failure.

    Attributes:
        ranks: Those that failed by themselves in the same way, lowest first; empty if it was none,
            or it is not known.
        what: What that rank did, for a sentence: `raised ValueError: x`, `was killed by SIGKILL`.
        who: Who did it, where the ranks do not say that; empty where `what` is a sentence.
        places: Lines that show it.
        frame: `file:line in name` where it happened, or None.
        message: What it raised, whole, or None.
        where: The same in words, where it is not one frame.
        is_all: Whether every rank failed in this way.
        also: Sentences about what else is known, such as which collective a rank missed.
        then: What it did after that: `did not exit afterwards`.
    """

    signature: Signature
    ranks: tuple[int, ...]
    what: str
    places: tuple[LogLine, ...] = ()
    frame: str | None = None
    message: str | None = None
    is_all: bool = False
    also: tuple[str, ...] = ()
    who: str | None = None
    where: str = ""
    then: str = ""
