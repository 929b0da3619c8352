"""Messages between controller, agents and ranks, and the reports of tests in them.

A frame is a JSON array: the name of the type, then its fields by name. Nothing is executed or
unpickled: a peer that knows the key can forge outcomes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import PurePath
from typing import Literal, Protocol, TypeAlias, cast

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import cut_middle
from pytest_megatron.process.originals import json

Outcome: TypeAlias = Literal["passed", "failed", "skipped"]
JsonObject: TypeAlias = Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """One phase as one rank reported it.

    Attributes:
        when: setup, call or teardown.
        start: Seconds since the epoch; 0 where it is not known.
        stop: The same.
        full: pytest's report as it serialises it; None of a phase that passed without output.
    """

    when: str
    outcome: Outcome
    start: float = 0.0
    stop: float = 0.0
    full: JsonObject | None = None

    @property
    def is_subtest(self) -> bool:
        """True if it is of a subtest."""
        full = self.full or {}
        kind = full.get("$report_type", full.get("_report_type"))
        return kind not in (None, "TestReport")

    @property
    def is_xfail(self) -> bool:
        """True if it was expected to fail, regardless of its outcome."""
        return self.full is not None and "wasxfail" in self.full

    @property
    def longrepr(self) -> JsonValue:
        """The serialised traceback, or the reason of a skip."""
        return None if self.full is None else self.full.get("longrepr")

    @property
    def text(self) -> str:
        """The failure as text, to compare failures and detect consequences."""
        return longrepr_text(self.longrepr)

    @property
    def place(self) -> tuple[str, str] | None:
        """The line that raised, `file:line`, and the exception, "" of an assertion, if known."""
        crash = _mapping(self.longrepr, "reprcrash")
        if not crash:
            return None
        kind = self.message.partition(":")[0]
        return f"{crash.get('path')}:{crash.get('lineno')}", "" if " " in kind else kind

    @property
    def where(self) -> str:
        """The line that raised, `test_moe.py:14`; empty where it is not known."""
        return "" if self.place is None else PurePath(self.place[0]).name

    @property
    def message(self) -> str:
        """The line with the exception."""
        return "" if self.full is None else crash_message(self.longrepr)


def skip_reason(report: JsonObject | None) -> str:
    """Return the reason of a skip, from the report as pytest serialised it."""
    longrepr = None if report is None else report.get("longrepr")
    if isinstance(longrepr, list) and longrepr:
        return str(longrepr[-1]).removeprefix("Skipped: ")
    return "without a reason"


def crash_message(longrepr: JsonValue) -> str:
    """Return the line with the exception."""
    if crash := _mapping(longrepr, "reprcrash"):
        return str(crash.get("message", "")).strip().split("\n")[0]
    lines = longrepr_text(longrepr).strip().splitlines()
    return lines[-1].strip() if lines else "failed"


def longrepr_text(longrepr: JsonValue) -> str:
    """Return a serialised traceback as plain text, similar to pytest's output."""
    if isinstance(longrepr, str):
        return longrepr
    if not isinstance(longrepr, Mapping):
        return "" if longrepr is None else str(longrepr)
    chain = cast("list[list[JsonValue]]", longrepr.get("chain") or [])
    trace = chain[-1][0] if chain else longrepr.get("reprtraceback")
    lines: list[str] = []
    for entry in _list(trace, "reprentries"):
        data = _mapping(entry, "data")
        lines += [str(line) for line in _list(data, "lines")]
        if place := _mapping(data, "reprfileloc"):
            lines.append(f"{place.get('path')}:{place.get('lineno')}: {place.get('message')}")
    return "\n".join(lines) or str(_mapping(longrepr, "reprcrash").get("message", ""))


def _mapping(value: object, key: str) -> JsonObject:
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _list(value: object, key: str) -> list[JsonValue]:
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, list) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Reply of node 0 to the session of another node.

    Attributes:
        ranks_per_node: Ranks that fit on each node.
        num_gpus: CUDA devices that the node leases for the session.
        node_ids: Items that node 0 collected, in order.
        is_collecting: Whether ranks collect for themselves, and are not forked from the session of
            their node.
    """

    num_nodes: int
    ranks_per_node: int
    num_gpus: int
    node_ids: tuple[str, ...]
    is_collecting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Reply of another node's session to `Welcome`.

    Attributes:
        problem: Reason why it cannot join, or "".
    """

    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """The session of node 0 ended.

    Attributes:
        exit_code: Pytest's.
        text: Why it ended before its last test, or "".
    """

    exit_code: int
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerWanted:
    """A rank asks for permission to enter the debugger, and waits.

    Attributes:
        reason: `exception` or `breakpoint`.
        pid: Its process, for Ctrl-C.
    """

    reason: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerLeft:
    """The debugger of a rank ended; the test goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerAnswer:
    """Permission to enter the debugger, or its refusal.

    Attached to a permission are stdin and stdout of the controller.
    """

    may_enter: bool


Lines: TypeAlias = Mapping[str, list[int]]
# Indices of the next test: there is none, or it is not known yet.
NOTHING = -1
UNKNOWN = -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """First message of a connection from another node.

    Attributes:
        role: `node` for the session of that node, `agent` for its agent.
        node_rank: Index of its host.
    """

    role: str
    node_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """An agent is ready to start ranks.

    Attributes:
        pid: Its process.
    """

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskToCollect:
    """Collect, once plugins and the first conftest files are loaded.

    Attributes:
        workerinput: `config.workerinput` of the rank, encoded.
        base_temp: Directory of its temporary files.
        digest: Digest of the controller's node ids; "" while it collects.
    """

    workerinput: str
    base_temp: str
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The agent of one rank has collected, and can start that rank.

    Attributes:
        is_same: Whether it collected the same tests as the controller.
        node_ids: Tests that the rank collected, if they differ.
        problems: Node id of a collector -> reason why it could not be collected.
        obstacle: Reason why it cannot fork ranks and becomes one itself, or "".
    """

    is_same: bool
    node_ids: tuple[str, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)
    obstacle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A rank is ready to run tests.

    Attributes:
        missing: Node id of a test of the controller -> reason why this rank lacks it.
    """

    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnded:
    """A phase of a test ended; sent at once if it did not pass or took long.

    Attributes:
        run: Number of the execution.
        when: setup, call or teardown.
        outcome: passed, failed or skipped.
        report: If it did not pass: the rank may never send `Done`, which does not repeat it.
    """

    run: int
    when: str
    outcome: str
    report: PhaseReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A test ended on a rank, all phases.

    Attributes:
        reports: In order, subtests included, those apart that were sent with the end of a phase.
        warnings: Warnings that pytest recorded.
        num_collectives: Collectives that the default group counted so far; -1 without a group.
        num_rendezvous: Process groups that were set up so far.
        num_unmatched: Sends within the default group so far, less receives.
        poison: Reason why this rank cannot run another test (a sticky CUDA error), or "".
        stop: `[kind, reason, exit code]` if the test asked pytest itself to end, or empty.
        printed: Terminal output of pytest in this rank (`--setup-show`).
        printed_late: The same from the teardown on.
        late: Report of a failed teardown of the fixtures of the test before, or None.
        is_clean: Whether every phase passed, so that ranks may start the next test in lockstep.
        lines: File -> numbers of the lines that ran, where pytest-testmon records them.
    """

    run: int
    reports: tuple[PhaseReport, ...] = ()
    warnings: tuple[JsonValue, ...] = ()
    num_collectives: int = -1
    num_rendezvous: int = 0
    num_unmatched: int = 0
    poison: str = ""
    stop: tuple[JsonValue, ...] = ()
    printed: str = ""
    printed_late: str = ""
    late: PhaseReport | None = None
    is_clean: bool = False
    lines: Lines = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A rank has torn down every fixture, and exits.

    Attributes:
        problem: Text of an error in a fixture's teardown, or "".
        late: The same as a report of the last test's teardown; None if there is none.
    """

    problem: str
    late: PhaseReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Pytest itself raised an error in a rank.

    Attributes:
        problem: The traceback.
    """

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run a test.

    Attributes:
        run: Number of this execution, unique in the session.
        index: Index of the item in the controller's session.
        next_index: Index of the next item on this gang, `NOTHING` (tear everything down) or
            `UNKNOWN` (tear only the test down).
        shared_dir: One directory for all ranks, for this execution.
        is_last_if_failed: Whether a failure ends the session, so that everything is torn down.
        after: The execution that has to pass on all ranks first, else this one is dropped; 0
            for one that starts at once.
    """

    run: int
    index: int
    node_id: str
    next_index: int
    next_node_id: str
    shared_dir: str
    is_last_if_failed: bool
    after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Tear down every fixture and exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """Configuration of one rank.

    Attributes:
        node_rank: Index of its host.
        device: `cuda` or `cpu`.
        env: Variables to set: those of `torch.distributed.run`, and more.
        log_dir: Directory of its stdout.log and stderr.log.
        base_temp: Directory of its `tmp_path`s.
        is_capturing: Whether the output of a test goes into its report.
        coverage: Settings of a running coverage.py, or empty.
        coverage_file: Data file of coverage.
        finds_leaks: Whether it fails tests for what they leave behind.
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
    finds_leaks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start ranks of a gang. Descriptors for them to keep open may be attached: GPU locks.

    Attributes:
        has_store: Whether the first descriptor is the socket of the gang's store, which listens.
        adopted: Number below 0 under which these ranks have collected; 0 starts new ones.
    """

    gang: int
    configs: tuple[RankConfig, ...]
    has_store: bool = False
    adopted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The process of a rank ended; sent by its agent after the last message of the rank.

    Attributes:
        exit_code: `Popen.returncode`: negative means killed by that signal.
        phase: The phase of a test that it was in: setup, call, teardown, or "" between tests; of
            a rank that collects, the node id that it collected.
        run: The last execution that it began, 0 before the first.
    """

    gang: int
    rank: int
    exit_code: int
    phase: str = ""
    run: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Kill the ranks of a gang and their descendants."""

    gang: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """No process of a gang is left below this agent."""

    gang: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """Send SIGINT to the ranks of a gang, as Ctrl-C would."""

    gang: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskStacks:
    """Request the Python stacks of ranks, and NCCL's flight recorder."""

    gang: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Stacks of the ranks that answered `AskStacks`.

    Attributes:
        stacks: Rank -> text of faulthandler.
        flights: Rank -> JSON of NCCL's flight recorder.
        phases: Rank -> its phase of a test.
    """

    gang: int
    stacks: Mapping[str, str]
    flights: Mapping[str, str]
    phases: Mapping[str, str]


Message: TypeAlias = (
    Register
    | Hello
    | AskToCollect
    | Collected
    | Ready
    | PhaseEnded
    | Done
    | Closed
    | Broken
    | DebuggerWanted
    | DebuggerLeft
    | Run
    | Close
    | DebuggerAnswer
    | Start
    | Died
    | Kill
    | Killed
    | Interrupt
    | AskStacks
    | Stacks
    | Welcome
    | Joined
    | SessionEnded
)


class _Make(Protocol):
    """Constructor of a message."""

    def __call__(self, **fields: object) -> Message: ...


_TYPES: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__args__}
_FIELDS = {kind: tuple(f.name for f in fields(kind)) for kind in _TYPES.values()}


def encode(message: Message) -> bytes:
    """Return the message as one frame, without its length prefix."""
    return json.dumps(_plain(message), separators=(",", ":"), default=_plain).encode()


def encode_within(message: Message, most_bytes: int) -> bytes:
    """Return the message as one frame, with texts and lists cut if it is too long."""
    frame, most = encode(message), most_bytes // 16
    while len(frame) > most_bytes and most:
        frame, most = json.dumps(_cut(json.loads(frame), most)).encode(), most // 4
    return frame


def _cut(value: object, most: int) -> object:
    """Return a value with its texts and lists cut to a length."""
    if isinstance(value, dict):
        return {cut_middle(k, most): _cut(v, most) for k, v in islice(value.items(), most)}
    if isinstance(value, list):
        return [_cut(v, most) for v in islice(value, most)]
    return cut_middle(value, most) if isinstance(value, str) else value


def decode(frame: bytes) -> Message:
    """Return the message of a frame.

    Raises:
        ValueError: It is not a known message.
    """
    try:
        name, values = json.loads(frame)
        make = cast("_Make", _TYPES[name])
        return make(**{key: _field(key, value) for key, value in values.items()})
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"not a message: {frame[:200]!r}") from error


def _field(name: str, value: object) -> object:
    """Return the value of a message's field."""
    match name, value:
        case "reports", list():
            return tuple(PhaseReport(*report) for report in value)
        case "report" | "late", list():
            return PhaseReport(*value)
        case "configs", list():
            return tuple(RankConfig(**config[1]) for config in value)
        case _:
            return tuple(value) if isinstance(value, list) else value


def _plain(value: object) -> list[object]:
    """Return a message as the name of its type and its fields."""
    if isinstance(value, PhaseReport):
        return [value.when, value.outcome, value.start, value.stop, value.full]
    if isinstance(value, RankConfig):
        return ["RankConfig", {f.name: getattr(value, f.name) for f in fields(RankConfig)}]
    names = _FIELDS.get(cast("type[Message]", type(value)))
    if names is None:
        raise TypeError(f"cannot be sent: {value!r}")
    return [type(value).__name__, {name: getattr(value, name) for name in names}]
