"""What goes over the wire between controller, fork servers and ranks, as frozen types.

A frame is a JSON array: the name of the type, then its fields by name. Nothing here is executed or
unpickled: whoever speaks on the wire can at most lie about outcomes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Protocol, TypeAlias, cast

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import cut_middle
from pytest_megatron.gang.originals import json


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What node 0 tells another node that called.

    Attributes:
        ranks_per_node: Ranks that each node has room for.
        num_gpus: CUDA devices that the node leases for the session.
        node_ids: Items that node 0 collected, in order.
        collecting: How ranks that collect for themselves are started, `fork` or `fresh`; "" where
            ranks are forked from what the node's session collected.
    """

    num_nodes: int
    ranks_per_node: int
    num_gpus: int
    node_ids: tuple[str, ...]
    collecting: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What the session of another node answers.

    Attributes:
        problem: Why it cannot take part, or "".
        missing: Node ids that only node 0 collected.
        extra: Node ids that only this node collected.
    """

    problem: str = ""
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """Something that pytest was told on node 0 and shall be told on every node.

    Attributes:
        hook: Name of pytest's hook.
        data: Its arguments, in the form of `hooks.mirror`.
    """

    hook: str
    data: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """The session of node 0 ended.

    Attributes:
        exit_code: Pytest's.
        kind: How it ended before its last test: `failed`, `interrupted` or `exit`, or "".
        text: What it said then.
    """

    exit_code: int
    kind: str = ""
    text: str = ""


INTERRUPTED_LINE = "\x03"  # what a `DebuggerLine` holds where the user pressed Ctrl-C


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerWanted:
    """A rank would enter the debugger and waits for leave.

    Attributes:
        reason: `exception` or `breakpoint`.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerWrote:
    """The debugger of a rank printed something."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerReads:
    """The debugger of a rank wants a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerLeft:
    """The debugger of a rank ended; the test goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerAnswer:
    """Whether a rank may enter the debugger."""

    may_enter: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerLine:
    """A line that the user typed; empty at the end of input."""

    text: str


JsonObject: TypeAlias = dict[str, JsonValue]
# In the place of the test that comes next: there is none, or it is not known yet.
NOTHING = -1
UNKNOWN = -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """First message of every connection, to the controller.

    Attributes:
        role: `rank`, `fork server`, or `node` for the session of another node.
        gang: The gang of a rank; else 0.
        rank: The rank; for a fork server the one that it forks, or -1 for all of its node.
        node_rank: Index of its host.
        world_size: Of the gangs that a fork server of one rank forks for; 0 for a node's.
    """

    role: str
    gang: int
    rank: int
    node_rank: int
    pid: int
    world_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The fork server of one rank has collected, and can start it.

    Attributes:
        is_same: Whether it found what the controller found.
        node_ids: What it found, if that is something else.
        problems: Node id of a collector -> why it could not be collected.
        obstacle: Why it cannot fork ranks and has to become one itself, or "".
    """

    is_same: bool
    node_ids: tuple[str, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)
    obstacle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A rank can take tests.

    Attributes:
        missing: Node id -> why this rank has no such test; the controller has it.
    """

    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnded:
    """A phase of a test ended; sent at once where it did not pass or took long.

    Attributes:
        run: Which execution of which test.
        when: setup, call or teardown.
        outcome: passed, failed or skipped.
        report: As in `Done`, where it did not pass: the rank may never come to say `Done`.
    """

    run: int
    when: str
    outcome: str
    report: JsonValue = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A test ended on a rank, all phases.

    Attributes:
        reports: In order, subtests included, as pytest serialises them; `[when, start, stop]` for
            a phase that passed and says nothing more.
        warnings: What pytest recorded.
        num_collectives: Collectives that the default group counted so far; -1 without a group.
        num_rendezvous: Process groups that were set up so far.
        num_unmatched: Sends within the default group so far, less receives.
        poison: Why this rank cannot run another test (a CUDA error that sticks), or "".
        stop: `[kind, reason, exit code]` if the test asked pytest itself to end, or empty.
        printed: What pytest wrote to its terminal in this rank (`--setup-show`).
        printed_late: The same from the teardown on.
        late: Report of the teardown of what the test before this one left; None if it went well.
        is_clean: Whether every phase passed, so that ranks may go on by themselves.
    """

    run: int
    reports: tuple[JsonValue, ...]
    warnings: tuple[JsonValue, ...] = ()
    num_collectives: int = -1
    num_rendezvous: int = 0
    num_unmatched: int = 0
    poison: str = ""
    stop: tuple[JsonValue, ...] = ()
    printed: str = ""
    printed_late: str = ""
    late: JsonValue = None
    is_clean: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A rank tore everything down and ends.

    Attributes:
        problem: Text of an error in a fixture's teardown, or "".
        late: The same as a report of the last test's teardown; None if there is none.
        workeroutput: What plugins of a rank that collected left for the controller.
    """

    problem: str
    late: JsonValue = None
    workeroutput: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Pytest itself failed in a rank.

    Attributes:
        problem: The traceback.
    """

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run a test.

    Attributes:
        run: Number of this execution, unique in the session.
        index: Place of the item in the controller's list.
        next_index: Place of the item that comes next on this gang, `NOTHING` (all is torn down) or
            `UNKNOWN` (only the test itself is).
        shared_dir: One directory for all ranks, for this execution.
        is_last_if_failed: Whether a failure ends the session, so that everything is torn down.
        after: The execution that all ranks have to end well first, else this one is dropped; 0
            for one that starts at once.
        call_limit_s: Of the call, where it is another than that of setup and teardown; each phase
            that ends is then reported. 0 is no limit.
    """

    run: int
    index: int
    node_id: str
    next_index: int
    next_node_id: str
    shared_dir: str
    is_last_if_failed: bool
    after: int = 0
    call_limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Tear down every fixture and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """Everything that a new rank has to know.

    Attributes:
        node_rank: Index of its host.
        device: `cuda` or `cpu`.
        env: Variables to set; what `torch.distributed.run` would set, and more.
        log_dir: Directory of its stdout.log and stderr.log.
        base_temp: Where its `tmp_path`s go.
        is_capturing: Whether what a test prints goes into its report.
        coverage: Settings of a running coverage.py, or empty.
        coverage_file: Where it puts its data.
        avoided: Node id of a collector that a rank died in -> what to say of it instead.
        workerinput: What plugins of the controller have for a rank that collects.
    """

    gang: int
    rank: int
    world_size: int
    node_rank: int
    device: str
    env: Mapping[str, str]
    log_dir: str
    base_temp: str
    is_capturing: bool = True
    coverage: Mapping[str, JsonValue] = field(default_factory=dict)
    coverage_file: str = ""
    avoided: Mapping[str, str] = field(default_factory=dict)
    workerinput: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Start ranks. File descriptors of GPU locks may come along."""

    configs: tuple[RankConfig, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """Take the fork server of one rank, which becomes that rank, for a rank of a gang.

    Attributes:
        collector: The number that it was started under in place of a gang's.
        log_dir: Directory of its logs from now on.
    """

    collector: int
    gang: int
    rank: int
    device: str
    log_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The process of a rank is gone. Written by a fork server, never by a rank.

    Attributes:
        exit_code: As `Popen.returncode`: negative means killed by that signal.
        phase: The phase of a test that it was in: setup, call, teardown, or "" between tests; of
            a rank that collects, the node id that it was at.
        run: The execution that it began last, 0 before the first.
    """

    gang: int
    rank: int
    exit_code: int
    phase: str = ""
    run: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStore:
    """Open a key-value store for a gang to meet in.

    Attributes:
        host: What its ranks call it by.
    """

    gang: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpened:
    """A store listens.

    Attributes:
        problem: Why there is none, or "".
    """

    gang: int
    port: int
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Kill the ranks of a gang and whatever descends from them."""

    gang: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """Nothing of a gang is left here."""

    gang: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """Send SIGINT to the ranks of a gang, as Ctrl-C would."""

    gang: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskStacks:
    """Ask ranks of a gang for their Python stacks, and NCCL's flight recorder."""

    gang: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """What ranks answered; a rank that said nothing is not in it.

    Attributes:
        stacks: Rank -> text of faulthandler.
        flights: Rank -> JSON of NCCL's flight recorder.
        phases: Rank -> the phase of a test that it is in.
    """

    gang: int
    stacks: Mapping[str, str]
    flights: Mapping[str, str]
    phases: Mapping[str, str]


Message: TypeAlias = (
    Register
    | Collected
    | Ready
    | PhaseEnded
    | Done
    | Closed
    | Broken
    | DebuggerWanted
    | DebuggerWrote
    | DebuggerReads
    | DebuggerLeft
    | Run
    | Close
    | DebuggerAnswer
    | DebuggerLine
    | Fork
    | Adopt
    | Died
    | OpenStore
    | StoreOpened
    | Kill
    | Killed
    | Interrupt
    | AskStacks
    | Stacks
    | Welcome
    | Joined
    | Mirrored
    | SessionEnded
)


class _Make(Protocol):
    """Makes a message of fields that may be anything."""

    def __call__(self, **fields: object) -> Message: ...


_TYPES: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__args__}
_FIELDS = {kind: tuple(f.name for f in fields(kind)) for kind in _TYPES.values()}


def encode(message: Message) -> bytes:
    """Return the message as one frame, without its length."""
    return json.dumps(_plain(message), separators=(",", ":"), default=_plain).encode()


def encode_within(message: Message, most_bytes: int) -> bytes:
    """Return the message as one frame; if it is too long, texts and lists in it are cut."""
    frame, most = encode(message), most_bytes // 16
    while len(frame) > most_bytes and most:
        frame, most = json.dumps(_cut(json.loads(frame), most)).encode(), most // 4
    return frame


def _cut(value: object, most: int) -> object:
    if isinstance(value, dict):
        return {cut_middle(k, most): _cut(v, most) for k, v in islice(value.items(), most)}
    if isinstance(value, list):
        return [_cut(v, most) for v in islice(value, most)]
    return cut_middle(value, most) if isinstance(value, str) else value


def decode(frame: bytes) -> Message:
    """Return the message of a frame.

    Raises:
        ValueError: It is none of ours.
    """
    try:
        name, values = json.loads(frame)
        if name == Fork.__name__:
            return Fork(configs=tuple(RankConfig(**config[1]) for config in values["configs"]))
        make = cast("_Make", _TYPES[name])
        return make(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"not a message: {frame[:200]!r}") from error


def _plain(value: object) -> list[object]:
    if isinstance(value, RankConfig):
        return ["RankConfig", {f.name: getattr(value, f.name) for f in fields(RankConfig)}]
    names = _FIELDS.get(cast("type[Message]", type(value)))
    if names is None:
        raise TypeError(f"cannot be sent: {value!r}")
    return [type(value).__name__, {name: getattr(value, name) for name in names}]
