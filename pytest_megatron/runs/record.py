"""The files of a run directory as data: `run.json` and the records beside it.

Writers build these classes and dump them by `to_json`; readers get them from `read_run` and
`read_record`. `schemas/run.schema.json` is made from here. Keys that a later release adds
are ignored; a file of a later format is refused.

An artifact is untrusted: its texts are data. Nothing here follows a path that they name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import ConfigDict, Discriminator, Field, Strict, Tag, with_config
from pydantic import JsonValue as AnyJson
from pydantic import ValidationError as Invalid

from pytest_megatron.base import schema
from pytest_megatron.base.files import JsonValue, encodable, read_json
from pytest_megatron.base.schema import adapter, explain
from pytest_megatron.errors import RunError
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.runs.layout import RUN_FILE

FORMAT_VERSION = 1  # files of before this key are of the first format
_VERSION_KEY = "format_version"
_Record = TypeVar("_Record")

Text: TypeAlias = Annotated[str, Strict()]
Texts: TypeAlias = tuple[Text, ...]
Flag: TypeAlias = Annotated[bool, Strict()]
_Integer: TypeAlias = Annotated[int, Strict()]
_Count: TypeAlias = Annotated[int, Strict(), Field(ge=0, le=1 << 53)]
_Number: TypeAlias = Annotated[int, Strict(), Field(ge=1, le=1_000_000)]
Real: TypeAlias = Annotated[float, Strict(), Field(allow_inf_nan=False)]
_Measured: TypeAlias = "Real | Text | None"  # a number that is not finite is a text
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]{0,199}$"
_Variables: TypeAlias = dict[Annotated[str, Field(pattern=_VARIABLE)], Text]
RecordedVerdict: TypeAlias = Literal["passed", "failed", "flaky", "broken", "skipped"]


@dataclass(frozen=True, kw_only=True)
class RecordedFile:
    """The keys at the top of every JSON file of a run."""

    schema: _Integer = 1
    format_version: _Integer = FORMAT_VERSION


@dataclass(frozen=True, kw_only=True)
class RecordedHealth:
    """The findings of `health.json`."""

    faults: Texts = ()
    notes: Texts = ()


@dataclass(frozen=True, kw_only=True)
class RecordedAttempt:
    """An attempt of a workload."""

    repeat: _Number | None = None
    attempt: _Number | None = None
    directory: Text = ""
    duration_s: Real = 0.0
    exit_codes: tuple[_Integer, ...] = ()
    num_left: _Count = 0
    cause: Text | None = None
    root_rank: _Count | None = None
    signature: Text | None = None
    is_transient: Flag = False
    health: RecordedHealth | None = None
    fingerprint: Text | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedExecution:
    """An execution of a distributed test.

    Attributes:
        run: Place in the session; those of one directory ran in that order.
        end: Name of a reason in lower case.
    """

    gang: _Number | None = None
    run: _Number | None = None
    directory: Text = ""
    duration_s: Real = 0.0
    end: Text = ""
    is_gang_kept: Flag = False
    signature: Text | None = None
    is_transient: Flag = False


@dataclass(frozen=True, kw_only=True)
class RecordedQuarantine:
    """The quarantine of an item; `holds` if its failure did not count."""

    reason: Text = "no reason given"
    until: Text = ""
    is_expired: Flag = False
    holds: Flag = False


@dataclass(frozen=True, kw_only=True)
class RecordedGolden:
    """The golden that a workload disagrees with, lacks, or is to get.

    Attributes:
        target: Where it belongs in the project.
        digests: File in the workload's directory -> SHA-256; None where none was noted.
        is_offered: Whether the session was to write it.
        problem: Why there is no candidate.
    """

    target: Text | None = None
    candidate: Text | None = None
    digests: dict[Text, Text] | None = None
    is_offered: Flag | None = None
    problem: Text | None = None


@dataclass(frozen=True, kw_only=True)
class _RecordedItem:
    """The keys of workloads and tests alike."""

    verdict: RecordedVerdict
    problem: Text | None = None
    fingerprint: Text | None = None
    duration_s: Real | None = None
    quarantine: RecordedQuarantine | None = None

    @property
    def is_held(self) -> bool:
        """True if its failure does not count, by quarantine."""
        return self.quarantine is not None and self.quarantine.holds


@with_config(ConfigDict(json_schema_extra={"not": {"required": ["world_size"]}}))  # a test's
@dataclass(frozen=True, kw_only=True)
class RecordedWorkload(_RecordedItem):
    """A row of a recipe.

    Attributes:
        compared: None in records of before this key.
    """

    summary: Text = ""
    is_expected: Flag = False
    directory: Text | None = None
    compared: Flag | None = None
    policy: dict[Text, AnyJson] | None = None
    not_run_again: Text | None = None
    golden: RecordedGolden | None = None
    platform: Text | None = None
    attempts: tuple[RecordedAttempt, ...] = ()

    @property
    def is_on_gpus(self) -> bool:
        """True if it needs GPUs."""
        return self.platform not in (None, CPU_PLATFORM)

    @property
    def causes(self) -> Texts:
        """The signature of each attempt that failed, `unknown` where it matched none."""
        failed = (a for a in self.attempts if a.cause or a.is_transient)
        return tuple(a.signature or "unknown" for a in failed)


@dataclass(frozen=True, kw_only=True)
class RecordedTest(_RecordedItem):
    """A test that ran on a gang."""

    world_size: _Number
    outcome: Text | None = None
    device: Annotated[str, Strict(), Field(pattern=r"^(cpu|cuda)$")] | None = None
    is_isolated: Flag = False
    ranks: dict[Text, Text] = field(default_factory=dict)
    attempts: tuple[RecordedExecution, ...] = ()

    @property
    def is_on_gpus(self) -> bool:
        """True if it needs GPUs."""
        return self.device == "cuda"

    @property
    def causes(self) -> Texts:
        """The signature for which each execution but the last was followed by another."""
        return tuple(a.signature or "unknown" for a in self.attempts if a.is_transient)


def _kind(value: RecordedWorkload | RecordedTest | Mapping[str, JsonValue]) -> str:
    if isinstance(value, Mapping):
        return "RecordedTest" if "world_size" in value else "RecordedWorkload"
    return type(value).__name__


RecordedItem: TypeAlias = Annotated[
    Annotated[RecordedWorkload, Tag("RecordedWorkload")]
    | Annotated[RecordedTest, Tag("RecordedTest")],
    Discriminator(_kind),
]
# Keys that an item has only with a value, as `run-directory.md` has it.
_ABSENT = frozenset(("compared", "directory", "duration_s", "golden", "platform", "quarantine"))


@dataclass(frozen=True, kw_only=True)
class RecordedPatch:
    """The changes of a tree beside its commit."""

    file: Literal["dirty.patch"] | None = None
    problem: Text | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedOptions:
    """Options of the plugin that change how an item runs or is judged; None is not recorded."""

    golden: Text | None = None
    golden_policy: Text | None = None
    lightweight: Flag = False
    rank_timeout: Real | None = None
    rank_grace: Real | None = None
    gang_start: Text | None = None
    ranks_per_gpu: _Number | None = None
    signatures: Texts = ()


@dataclass(frozen=True, kw_only=True)
class _RecordedFacts(RecordedFile):
    """Environment of a run or an attempt."""

    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,64}$")] | None = None
    is_dirty: Flag = False
    image: Text | None = None
    python: Text | None = None
    versions: dict[Text, Text] = field(default_factory=dict)
    driver: Text | None = None
    gpus: Texts = ()
    cpu: Text | None = None
    num_cpus: _Count | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedRun(_RecordedFacts):
    """`run.json`."""

    started: Text | None = None
    updated: Text | None = None
    ended: Text | None = None
    exit_code: _Integer | None = None
    is_redacted: Flag = False
    arguments: Texts | None = None
    directory: Text = "."
    positional: Texts | None = None
    env: _Variables = field(default_factory=dict)
    seeds: dict[Text, Text | None] = field(default_factory=dict)
    options: RecordedOptions = field(default_factory=RecordedOptions)
    patch: RecordedPatch | None = None
    items: dict[Text, RecordedItem]


@dataclass(frozen=True, kw_only=True)
class RecordedPhase:
    """One start of a training program."""

    number: _Number = 1
    name: Text = ""
    argv: Texts = ()
    env: _Variables = field(default_factory=dict)
    world_size: _Count = 1
    last_iteration: _Count | None = None
    rewind_to: _Count | None = None
    before_script: Text | None = None
    after_script: Text | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedPlan(_RecordedFacts):
    """`plan.json`."""

    node_id: Text
    repeat: _Number | None = None
    attempt: _Number | None = None
    recipe: Text | None = None
    case: Text | None = None
    cwd: Text = ""
    phases: tuple[RecordedPhase, ...] = ()
    script: Text | None = None
    world_size: _Count | None = None
    nodes: _Number = 1
    platform: Text | None = None
    time_limit_s: Real | None = None
    until_iteration: _Count | None = None
    gradient_tolerance: Real | None = None
    seed: Text | _Integer | None = None
    is_lightweight: Flag = False
    python_hash_seed: Text | None = None
    planned: Text | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedLayer:
    """One test that a metric was put to."""

    layer: Text
    passed: Flag
    measured: _Measured = None
    limit: _Measured = None
    unit: Text | None = None
    place: Text | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedBand:
    """The distance from its golden that a metric may have.

    Attributes:
        relative: First step -> the share of the value that is allowed from there on.
    """

    relative: dict[Annotated[str, Field(pattern=r"^[0-9]{1,15}$")], _Measured] = field(
        default_factory=dict
    )
    absolute: _Measured = None


@dataclass(frozen=True, kw_only=True)
class RecordedMetric:
    """The comparison of one metric, of the keys of `golden check --format json`."""

    metric: Text
    passed: Flag
    rule: Text = ""
    first_step: _Integer | None = None
    largest_relative: _Measured = None
    allowed: RecordedBand | None = None
    layers: tuple[RecordedLayer, ...] = ()
    golden_path: Text = ""
    text: Text = ""


@dataclass(frozen=True, kw_only=True)
class RecordedRepeat:
    """The comparisons of one repeat."""

    repeat: _Number = 1
    against: Text = "golden"
    comparisons: tuple[RecordedMetric, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedComparison(RecordedFile):
    """`comparison.json`."""

    passed: Flag | None = None
    repeats: tuple[RecordedRepeat, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedEvidence:
    """A line of a log that shows a cause."""

    file: Text | None = None
    line: _Count | None = None
    rank: _Count | None = None
    text: Text | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedDiagnosis:
    """An attempt that failed, of the keys of `triage --format json`."""

    attempt: Text = ""
    phase_number: _Number = 1
    ended: Text | None = None
    returncode: _Integer | None = None
    signature: Text | None = None
    evidence: tuple[RecordedEvidence, ...] = ()
    text: Text | None = None
    reason: Text | None = None
    advice: Text | None = None
    next: Text | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedTriage(RecordedDiagnosis, RecordedFile):
    """`triage.json`: the last attempt that failed, and all of them."""

    attempt: Text = ""
    attempts: tuple[RecordedDiagnosis, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedFault:
    """A failure of the hardware."""

    gpu: Text | None = None
    signature: Text
    text: Text


@dataclass(frozen=True, kw_only=True)
class RecordedHealthFile(RecordedFile):
    """`health.json`."""

    faults: tuple[RecordedFault, ...] = ()


def finite(value: float | str | None) -> float | None:
    """Return a measured number; None for one that is not finite, which is written as a text."""
    return None if isinstance(value, str) else value


def read_run(run_dir: Path) -> RecordedRun:
    """Return the content of `run.json` in a run directory.

    Raises:
        RunError: It cannot be read.
    """
    return read_record(run_dir / RUN_FILE, RecordedRun)


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
        return from_json(value, model)
    except Invalid as error:
        first = explain(model, error.errors(include_url=False))[0]
        raise RunError(str(path), f"{first.in_output}; give the file as the run wrote it") from None


def read_if_whole(path: Path, model: type[_Record]) -> _Record | None:
    """Return the record that a file of a run holds; None where `read_record` raises."""
    try:
        return read_record(path, model)
    except RunError:
        return None


def to_json(record: RecordedFile) -> dict[str, JsonValue]:
    """Return the content of a file."""
    found = _dumped(record)
    items = found.get("items")
    if isinstance(record, RecordedRun) and isinstance(items, dict):
        found["items"] = {name: _present(item) for name, item in items.items()}
    return found


def from_json(value: JsonValue, model: type[_Record]) -> _Record:
    """Return the record that a JSON value is.

    Raises:
        pydantic.ValidationError: It is none.
    """
    return adapter(model).validate_python(value)


def headed(content: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the content of a file with the keys that are at the top of every file of a run."""
    return {**to_json(RecordedFile()), **content}


def item_to_json(item: RecordedWorkload | RecordedTest) -> dict[str, JsonValue]:
    """Return an item as a report carries it from process to process; every text is UTF-8."""
    found = encodable(_present(_dumped(item)))
    assert isinstance(found, dict)
    return found


def _present(item: JsonValue) -> JsonValue:
    """Return an item without keys that have no value."""
    assert isinstance(item, dict)
    kept = {key: v for key, v in item.items() if v is not None or key not in _ABSENT}
    golden = kept.get("golden")
    if isinstance(golden, dict):
        kept["golden"] = {key: v for key, v in golden.items() if v is not None}
    return kept


def _dumped(record: object) -> dict[str, JsonValue]:
    found: dict[str, JsonValue] = adapter(type(record)).dump_python(record, mode="json")
    return found


def is_variable(name: str) -> bool:
    """Return whether a variable's name can be recorded: one that a shell can set."""
    return re.fullmatch(_VARIABLE, name) is not None


def json_schema() -> dict[str, JsonValue]:
    """Return the JSON schema of `run.json`."""
    return schema.json_schema(RecordedRun, "run.json of a pytest-megatron run")
