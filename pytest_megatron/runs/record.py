"""The files of a run directory as data: `run.json`, the records beside it, and charts of them.

Writers build these classes and dump them by `to_json`; readers get them from `read_run` and
`read_record`. `schemas/run.schema.json` is made from here. Keys that a later release adds
are ignored; a file of a later format is refused.

An artifact is untrusted: its texts are data. Nothing here follows a path that they name.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias, TypeVar, cast

from annotated_types import Ge, Le

from pytest_megatron.base import schema
from pytest_megatron.base.files import JsonValue, encodable, read_json
from pytest_megatron.base.schema import (
    FINITE,
    AnyJson,
    Number,
    OneOf,
    SchemaError,
    matches,
    validate,
)
from pytest_megatron.errors import RunError
from pytest_megatron.features import ExtensionPoint
from pytest_megatron.gpu.health import Fault
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.runs.environment import RecordedFacts
from pytest_megatron.runs.layout import RUN_FILE

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


FORMAT_VERSION = 1  # files of before this key are of the first format
_VERSION_KEY = "format_version"
RELATIVE = "relative"
_Record = TypeVar("_Record")

Real: TypeAlias = Annotated[float, FINITE]
_Seconds: TypeAlias = Annotated[float, Ge(0), FINITE]
_Count: TypeAlias = Annotated[int, Ge(0), Le(1 << 53)]
_Number: TypeAlias = Annotated[int, Ge(1), Le(1_000_000)]
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]{0,199}$"
_Variables: TypeAlias = dict[Annotated[str, matches(_VARIABLE)], str]
OptionValue: TypeAlias = bool | _Count | _Seconds | str | tuple[str, ...] | None
RecordedVerdict: TypeAlias = Literal["passed", "failed", "flaky", "broken", "skipped"]


@dataclass(frozen=True, kw_only=True)
class RecordedFile:
    """The keys at the top of every JSON file of a run."""

    schema: int = 1
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, kw_only=True)
class RecordedHealth:
    """The findings of `health.json`."""

    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedAttempt:
    """An attempt of a workload.

    Attributes:
        note: What is odd about one that trained as it should: its exit code does not count.
    """

    repeat: _Number | None = None
    attempt: _Number | None = None
    directory: str = ""
    duration_s: Real = 0.0
    exit_codes: tuple[int, ...] = ()
    num_left: _Count = 0
    cause: str | None = None
    root_rank: _Count | None = None
    signature: str | None = None
    is_transient: bool = False
    health: RecordedHealth | None = None
    fingerprint: str | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedExecution:
    """An execution of a distributed test.

    Attributes:
        run: Place in the session; those of one directory ran in that order.
        end: Name of a reason in lower case.
    """

    gang: _Number | None = None
    run: _Number | None = None
    directory: str = ""
    duration_s: Real = 0.0
    end: str = ""
    is_gang_kept: bool = False
    signature: str | None = None
    is_transient: bool = False


@dataclass(frozen=True, kw_only=True)
class RecordedQuarantine:
    """The quarantine of an item; `holds` if its failure did not count."""

    reason: str = "no reason given"
    until: str = ""
    is_expired: bool = False
    holds: bool = False


@dataclass(frozen=True, kw_only=True)
class RecordedGolden:
    """The golden that a workload disagrees with, lacks, or is to get.

    Attributes:
        target: Where it belongs in the project.
        digests: File in the workload's directory -> SHA-256; None where none was noted.
        is_offered: Whether the session was to write it.
        problem: Why there is no candidate.
        uncommitted: What the tree had beside its commit when the run began, by name.
        changed: What of the tree was not as it was then when the workload had trained.
    """

    target: str | None = None
    candidate: str | None = None
    digests: dict[str, str] | None = None
    is_offered: bool | None = None
    problem: str | None = None
    uncommitted: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedFault:
    """Something on which ranks disagree that ran on fake process groups.

    Attributes:
        kind: `failed`, `groups`, `collective`, `message`, `cycle`, `micro-batches`, `parameters`,
            `memory`, `undecided`.
        ranks: Those that disagree.
        lines: (rank, line of code) of each side.
    """

    kind: str
    ranks: tuple[_Count, ...] = ()
    text: str = ""
    lines: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of a rank, in bytes.

    Attributes:
        peak: The most at one time.
        activations: The part of the peak that is none of the others.
    """

    peak: _Count = 0
    parameters: _Count = 0
    gradients: _Count = 0
    optimizer: _Count = 0
    activations: _Count = 0


@dataclass(frozen=True, kw_only=True)
class RecordedFakeRank(RankMemory):
    """A rank that ran on fake process groups; sizes are bytes.

    Attributes:
        end: `whole`, `cut` after its steps, `failed`, or `lost` without a record.
        sent: Size of the group -> bytes that the rank gave to its calls, in a step.
    """

    rank: _Count
    end: str = "whole"
    num_calls: _Count = 0
    micro_batches: tuple[_Count, ...] = ()
    sent: dict[str, _Count] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RecordedLayout:
    """Ranks of a layout that ran on fake process groups, compared with one another.

    Attributes:
        undecided: What only the data of other ranks decides.
        left_out: What was not compared.
        num_compared: Calls that were compared with those of another rank.
    """

    world_size: _Number
    ranks: tuple[RecordedFakeRank, ...] = ()
    faults: tuple[RecordedFault, ...] = ()
    undecided: tuple[RecordedFault, ...] = ()
    left_out: tuple[str, ...] = ()
    num_compared: _Count = 0


@dataclass(frozen=True, kw_only=True)
class _RecordedItem:
    """The keys of workloads and tests alike.

    Attributes:
        problem: Why it did not pass: the headline, then lines that show it.
        advice: What to do about it, in one line.
        num_devices: GPUs that it held, on the CPU its processes; None in records of before this
            key.
    """

    verdict: RecordedVerdict
    problem: str | None = None
    advice: str | None = None
    fingerprint: str | None = None
    duration_s: Real | None = None
    quarantine: RecordedQuarantine | None = None
    num_devices: _Count | None = None

    @property
    def headline(self) -> str:
        """The line that every place shows of why it did not pass; empty if it did."""
        return (self.problem or "").partition("\n")[0]

    @property
    def is_held(self) -> bool:
        """True if its failure does not count, by quarantine."""
        return self.quarantine is not None and self.quarantine.holds


@dataclass(frozen=True, kw_only=True)
class RecordedWorkload(_RecordedItem):
    """A row of a recipe.

    Attributes:
        compared: None in records of before this key.
        layout: None where its ranks did not run on fake process groups.
    """

    __pydantic_config__: ClassVar = {"json_schema_extra": {"not": {"required": ["world_size"]}}}

    summary: str = ""
    is_expected: bool = False
    directory: str | None = None
    compared: bool | None = None
    policy: dict[str, AnyJson] | None = None
    not_run_again: str | None = None
    golden: RecordedGolden | None = None
    layout: RecordedLayout | None = None
    platform: str | None = None
    attempts: tuple[RecordedAttempt, ...] = ()

    @property
    def is_on_gpus(self) -> bool:
        """True if it needs GPUs."""
        return self.platform not in (None, CPU_PLATFORM)

    @property
    def causes(self) -> tuple[str, ...]:
        """The signature of each attempt that failed, `unknown` where it matched none."""
        failed = (a for a in self.attempts if a.cause or a.is_transient)
        return tuple(a.signature or "unknown" for a in failed)


@dataclass(frozen=True, kw_only=True)
class RecordedTest(_RecordedItem):
    """A test that ran on a gang.

    Attributes:
        report: (title, text) of what the terminal shows of a failure: tracebacks, stacks, output.
    """

    world_size: _Number
    outcome: str | None = None
    device: Annotated[str, matches(r"^(cpu|cuda)$")] | None = None
    is_isolated: bool = False
    ranks: dict[str, str] = field(default_factory=dict)
    report: tuple[tuple[str, str], ...] = ()
    attempts: tuple[RecordedExecution, ...] = ()

    @property
    def is_on_gpus(self) -> bool:
        """True if it needs GPUs."""
        return self.device == "cuda"

    @property
    def causes(self) -> tuple[str, ...]:
        """The signature for which each execution but the last was followed by another."""
        return tuple(a.signature or "unknown" for a in self.attempts if a.is_transient)


def _kind(value: RecordedWorkload | RecordedTest | Mapping[str, JsonValue]) -> str:
    """Return the name of the class of a record."""
    if isinstance(value, Mapping):
        return "RecordedTest" if "world_size" in value else "RecordedWorkload"
    return type(value).__name__


RecordedItem: TypeAlias = Annotated[RecordedWorkload | RecordedTest, OneOf(_kind)]
# Keys that an item has only with a value, as `run-directory.md` has it.
_ABSENT = frozenset(
    (
        *("compared", "directory", "duration_s", "golden", "platform", "quarantine"),
        *("num_devices", "advice", "report", "layout"),
    )
)


@dataclass(frozen=True, kw_only=True)
class RecordedPatch:
    """The changes of a tree beside its commit."""

    file: Literal["dirty.patch"] | None = None
    problem: str | None = None


_INTERRUPTED = 2  # exit code of pytest


@dataclass(frozen=True, kw_only=True)
class Result(RecordedFacts, RecordedFile):
    """`run.json`.

    Attributes:
        options: Options of the plugin that change how an item runs or is judged, where they were
            given; null in a file of an earlier version is one that was not.
        on_one_process: Tests that use fixtures of ranks and passed in pytest's own process.
    """

    started: str | None = None
    updated: str | None = None
    ended: str | None = None
    exit_code: int | None = None
    is_redacted: bool = False
    arguments: tuple[str, ...] | None = None
    directory: str = "."
    env: _Variables = field(default_factory=dict)
    seeds: dict[str, str | None] = field(default_factory=dict)
    options: dict[str, OptionValue] = field(default_factory=dict)
    patch: RecordedPatch | None = None
    on_one_process: tuple[str, ...] = ()
    items: dict[str, RecordedItem]

    @property
    def was_stopped(self) -> bool:
        """True if it did not come to its own end: it was killed, or interrupted."""
        return self.ended is None or self.exit_code == _INTERRUPTED


@dataclass(frozen=True, kw_only=True)
class RecordedPhase:
    """One start of a training program."""

    number: _Number = 1
    name: str = ""
    argv: tuple[str, ...] = ()
    env: _Variables = field(default_factory=dict)
    world_size: _Count = 1
    last_iteration: _Count | None = None
    rewind_to: _Count | None = None
    before_script: str | None = None
    after_script: str | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedPlan(RecordedFacts, RecordedFile):
    """`plan.json`."""

    node_id: str
    repeat: _Number | None = None
    attempt: _Number | None = None
    recipe: str | None = None
    case: str | None = None
    cwd: str = ""
    phases: tuple[RecordedPhase, ...] = ()
    script: str | None = None
    world_size: _Count | None = None
    nodes: _Number = 1
    platform: str | None = None
    time_limit_s: Real | None = None
    until_iteration: _Count | None = None
    gradient_tolerance: Real | None = None
    seed: str | int | None = None
    is_lightweight: bool = False
    python_hash_seed: str | None = None
    planned: str | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedLayer:
    """Result of one test that a metric was put to, whether or not it decided.

    Attributes:
        measured: The value found; None where there was nothing to measure.
        limit: How much may be; more of it, in the layer's direction, fails.
        unit: Unit of both: `relative`, a deviation as a part of the golden, or things.
        place: Where it was found, as in `step 19`; None for all steps.
        layer: The name of its rule.
    """

    passed: bool
    measured: Number | None = None
    limit: Number | None = None
    unit: str = RELATIVE
    place: str | None = None
    layer: str


@dataclass(frozen=True, kw_only=True)
class RecordedBand:
    """The distance from its golden that a metric may have.

    Attributes:
        relative: First step -> the share of the value that is allowed from there on.
    """

    relative: dict[Annotated[str, matches(r"^[0-9]{1,15}$")], Number | None] = field(
        default_factory=dict
    )
    absolute: Number | None = None


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """The deviation of a run from its golden, over the steps at which both have a finite number.

    Attributes:
        num_compared: How many steps those are; the numbers below are 0 if there is none.
        worst_step: Where the relative deviation is largest; None if nothing deviates.
        largest_relative: |observed - golden| / |golden| there; inf over a golden of 0.
        largest_absolute: The largest |observed - golden|, maybe of another step.
        mean_signed_relative: Sum of (observed - golden) / sum of |golden|.
    """

    num_compared: int = 0
    worst_step: int | None = None
    largest_relative: Number = 0.0
    largest_absolute: Number = 0.0
    mean_signed_relative: Number = 0.0


@dataclass(frozen=True, kw_only=True)
class RecordedMetric(Deviation):
    """The comparison of one metric, under the keys of `golden check --format json`."""

    metric: str
    passed: bool
    rule: str = ""
    judged: bool = True
    first_step: int | None = None
    first_place: str | None = None
    summary: str | None = None
    observed: Number | str | None = None
    golden: Number | str | None = None
    tolerance: Number | None = None
    notes: tuple[str, ...] = ()
    allowed: RecordedBand | None = None
    layers: tuple[RecordedLayer, ...] = ()
    golden_path: str = ""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class RecordedRepeat:
    """The comparisons of one repeat."""

    repeat: _Number = 1
    against: str = "golden"
    comparisons: tuple[RecordedMetric, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedComparison(RecordedFile):
    """`comparison.json`."""

    passed: bool | None = None
    repeats: tuple[RecordedRepeat, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedEvidence:
    """A line that shows a cause.

    Attributes:
        file: Path that the user gave; `artifact.zip!name` in an archive.
        line: Counted from 1.
    """

    file: str
    line: _Count
    rank: _Count | None = None
    text: str


@dataclass(frozen=True, kw_only=True)
class RecordedDiagnosis:
    """Cause of the failure of one launch, under the keys of `triage --format json`.

    Attributes:
        root_rank: The rank to look at, the first of `root_ranks`; None where it was none or is not
            known.
        headline: Who did what, where and when, in one line.
        text: One paragraph for a person, which begins with the headline.
        reason: Why it is transient, or not.
        next: What to type next.
        root_ranks: Ranks that failed by themselves in this way.
        exits: Rank -> `SIGKILL`, `exit code 1`, as the launcher reported it.
        fingerprint: The same for failures of one cause.
        unit: Where its logs are.
    """

    family: str | None = None
    transient: bool = False
    root_rank: _Count | None = None
    signature: str | None = None
    evidence: tuple[RecordedEvidence, ...] = ()
    headline: str = ""
    text: str = ""
    reason: str | None = None
    policy: str | None = None
    advice: str | None = None
    source: str | None = None
    next: str | None = None
    root_ranks: tuple[int, ...] = ()
    is_every_rank: bool = False
    world_size: int = 1
    exits: dict[str, str] = field(default_factory=dict)
    iteration: int | None = None
    last_iteration: int | None = None
    fingerprint: str = ""
    unit: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedFailure(RecordedDiagnosis):
    """An attempt that failed, in `triage.json`; without a diagnosis it has only its end.

    Attributes:
        phase_number: Of the last phase.
        ended: How that ended.
        problem: Its headline.
        outlived: Logs behind whose last traceback their rank went on until it was stopped, as
            `3/stderr.log`.
    """

    attempt: str = ""
    phase_number: _Number = 1
    ended: str | None = None
    returncode: int | None = None
    problem: str | None = None
    outlived: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedTriage(RecordedDiagnosis, RecordedFile):
    """`triage.json`: the last attempt that failed, and all of them."""

    attempts: tuple[RecordedFailure, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedHealthFile(RecordedFile):
    """`health.json`, beside the fields of `Health`."""

    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()


def finite(value: float | None) -> float | None:
    """Return a measured number; None for one that is not finite."""
    return value if value is not None and math.isfinite(value) else None


def read_run(run_dir: Path) -> Result:
    """Return the content of `run.json` in a run directory.

    Raises:
        RunError: It cannot be read.
    """
    return read_record(run_dir / RUN_FILE, Result)


def read_record(path: Path, model: type[_Record]) -> _Record:
    """Return the record that a file of a run holds; a link is not followed.

    Raises:
        RunError: It is not there, cannot be read, or is of a later format.
    """
    try:
        if path.is_symlink() or not path.is_file():
            raise RunError(str(path), "is not there, or no plain file; is the artifact whole?")
        value = read_json(path)
    except OSError as error:
        raise RunError(str(path), f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(str(path), f"is no JSON, {error}; was the run cut off?") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise RunError(str(path), f"holds a {kind}, expected an object; is it of a run?")
    version = value.get(_VERSION_KEY, FORMAT_VERSION)
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise RunError(
            str(path),
            f"has format_version {version}, expected {FORMAT_VERSION}; read it with the release "
            "of pytest-megatron that wrote it, or a later one",
        )
    try:
        return validate(model, value)
    except SchemaError as error:
        first = error.problems[0].in_output
        raise RunError(str(path), f"{first}; give the file as the run wrote it") from None


def read_if_whole(path: Path, model: type[_Record]) -> _Record | None:
    """Return the record that a file of a run holds; None where `read_record` raises."""
    try:
        return read_record(path, model)
    except RunError:
        return None


def to_json(record: DataclassInstance) -> dict[str, JsonValue]:
    """Return the content of a file, or of a part of one."""
    found = _dumped(record)
    items = found.get("items")
    if isinstance(record, Result) and isinstance(items, dict):
        found["items"] = {name: _present(item) for name, item in items.items()}
    return found


def run_text(run: Result, items: Iterable[str]) -> str:
    """Return the text of `run.json`: indented, with one line for each item.

    Python indents at a tenth of the speed, which counts with thousands of items.

    Args:
        run: What there is beside the items.
        items: Their lines, from `item_line`.
    """
    found = to_json(run)
    del found["items"]
    head = json.dumps(found, indent=2, allow_nan=False).removesuffix("\n}")
    return head + ',\n  "items": {\n' + ",\n".join(items) + "\n  }\n}\n"


def item_line(node_id: str, item: JsonValue) -> str:
    """Return the line of an item in `run.json`, from its JSON."""
    return f"    {json.dumps(node_id)}: {json.dumps(item, allow_nan=False)}"


def item_to_json(item: RecordedWorkload | RecordedTest) -> dict[str, JsonValue]:
    """Return an item as a report carries it from process to process; every text is UTF-8."""
    found = encodable(_present(_dumped(item)))
    assert isinstance(found, dict)
    return found


def _present(item: JsonValue) -> JsonValue:
    """Return an item without keys that have no value."""
    assert isinstance(item, dict)
    kept = {key: v for key, v in item.items() if v not in (None, []) or key not in _ABSENT}
    golden = kept.get("golden")
    if isinstance(golden, dict):
        kept["golden"] = {key: v for key, v in golden.items() if v is not None}
    return kept


def _dumped(record: DataclassInstance) -> dict[str, JsonValue]:
    return {name: _plain(getattr(record, name)) for name in _names_of(type(record))}


@functools.cache
def _names_of(cls: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(one.name for one in fields(cls))


def _plain(value: object) -> JsonValue:
    """Return a value of a record as JSON; by hand, as each session writes and few read."""
    if value is None or type(value) in (str, int, float, bool):
        is_number = type(value) is not float or math.isfinite(value)
        return cast("JsonValue", value if is_number else str(value))
    if is_dataclass(value) and not isinstance(value, type):
        return _dumped(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, PurePath):
        return str(value)
    return cast("JsonValue", value)


def is_variable(name: str) -> bool:
    """Return whether a variable's name can be recorded: one that a shell can set."""
    return re.fullmatch(_VARIABLE, name) is not None


def json_schema() -> dict[str, JsonValue]:
    """Return the JSON schema of `run.json`."""
    return schema.json_schema(Result, "run.json of a pytest-megatron run")


# Writes pages of runs below a path; returns the index, and an error for each run that it lacks.
WRITE_PAGES: ExtensionPoint[
    Callable[[Sequence[Path], Path | None], tuple[Path, list[RunError]]]
] = ExtensionPoint("pages")
