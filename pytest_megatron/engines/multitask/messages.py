"""Messages between task 0 of a job and its other tasks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from pytest_megatron.gpu.health import Health

# Of which a job may already have its own.
PLACE_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
OrderWord: TypeAlias = Literal["stop", "kill", "stacks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A task introduces itself, once.

    Attributes:
        host: Slurm's name of its node.
        devices: CUDA_VISIBLE_DEVICES of the task, or None.
        given: Those of `PLACE_VARIABLES` that its job has set.
        seen_at: Address of node 0 that it came by; of task 0 itself "".
    """

    kind: Literal["here"] = "here"
    task: int
    node: int
    local: int
    host: str
    devices: str | None
    given: dict[str, str]
    seen_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Run a command, and report its output and its end.

    Attributes:
        number: Number of the phase: messages about another one are old.
        env: Variables over those of the task's own job; `unset` are not passed on.
        defaults: Variables for where its job has none of that name.
        output: File of its stdout; of stderr as well where there are no `errors`.
        is_rank: Whether it is a rank itself and no launcher of ranks.
        is_copied: Whether its lines are sent.
    """

    kind: Literal["begin"] = "begin"
    number: int
    argv: tuple[str, ...]
    env: dict[str, str]
    unset: tuple[str, ...] = ()
    defaults: dict[str, str] = field(default_factory=dict)
    cwd: Path
    output: Path
    errors: Path | None = None
    is_rank: bool = False
    is_copied: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Tell the command to end, or to print its stacks first."""

    kind: Literal["tell"] = "tell"
    order: OrderWord


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Output of a command."""

    kind: Literal["lines"] = "lines"
    number: int
    text: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A command is over.

    Attributes:
        returncode: `Popen.returncode`; None where it could not be started, or its guard died.
        pid: The command's.
        problem: Why, in that case.
        told: The signal by which the task was to end, or "".
    """

    kind: Literal["finished"] = "finished"
    number: int
    returncode: int | None
    pid: int = 0
    num_left: int = 0
    problem: str = ""
    told: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The attempt is over."""

    kind: Literal["goodbye"] = "goodbye"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAck:
    """The answer to it: what became of the node's GPUs meanwhile."""

    kind: Literal["farewell"] = "farewell"
    health: Health | None = None


Message: TypeAlias = Join | Begin | Tell | Lines | Finished | Goodbye | LeaveAck
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """Return a message as a frame."""
    return _MESSAGE.dump_json(message)


def decode(frame: bytes) -> Message | None:
    """Return the message of a frame; None where it is none of this version."""
    try:
        return _MESSAGE.validate_json(frame)
    except ValidationError:
        return None
