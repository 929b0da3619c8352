"""What a run left about itself: `run.json` and `plan.json`, checked before anything is believed.

An artifact is anybody's: its texts are data. Nothing here follows a path that they name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from pytest_megatron.base.files import read_bytes
from pytest_megatron.errors import ReproError
from pytest_megatron.runs.layout import item_dirs

_Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
_Count = Annotated[int, Field(ge=0, le=1_000_000)]
_Number = Annotated[int, Field(ge=1, le=1_000_000)]
_Read = TypeVar("_Read")
# Takes what later versions add, and no other types than were written.
_STRICT = ConfigDict(extra="ignore", strict=True)


@with_config(_STRICT)
@dataclass(frozen=True, kw_only=True)
class RecordedAttempt:
    """An attempt of a workload, or an execution of a distributed test.

    Attributes:
        run: Place of an execution in its session; those of one directory ran in that order.
    """

    directory: str = ""
    repeat: _Number | None = None
    attempt: _Number | None = None
    run: _Number | None = None
    gang: _Number | None = None
    cause: str | None = None
    fingerprint: str | None = None
    signature: str | None = None
    is_transient: bool = False


@with_config(_STRICT)
@dataclass(frozen=True, kw_only=True)
class RecordedItem:
    """A workload or a distributed test."""

    verdict: Literal["passed", "failed", "flaky", "broken", "skipped"]
    problem: str | None = None
    fingerprint: str | None = None
    is_expected: bool = False
    world_size: _Number | None = None
    device: Literal["cpu", "cuda"] | None = None
    platform: str | None = None
    attempts: list[RecordedAttempt] = field(default_factory=list)

    @property
    def is_workload(self) -> bool:
        """Whether it is the row of a recipe; else it is a test that ran on a gang."""
        return self.world_size is None


@with_config(_STRICT)
@dataclass(frozen=True, kw_only=True)
class RecordedPatch:
    """What the tree had beside its commit."""

    file: Literal["dirty.patch"] | None = None
    problem: str | None = None


@with_config(_STRICT)
@dataclass(frozen=True, kw_only=True)
class _RecordedFacts:
    """Where and with what something ran."""

    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,64}$")] | None = None
    is_dirty: bool = False
    image: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w./:@+#-]*$", max_length=500)] | None = None
    python: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    driver: str | None = None
    gpus: list[str] = field(default_factory=list)
    cpu: str | None = None


@with_config(_STRICT)
@dataclass(frozen=True, kw_only=True)
class RecordedRun(_RecordedFacts):
    """`run.json`."""

    arguments: list[str] = field(default_factory=list)
    directory: str = "."
    env: dict[_Name, str] = field(default_factory=dict)
    seeds: dict[str, str | None] = field(default_factory=dict)
    options: dict[str, bool | int | float | str | list[str] | None] = field(default_factory=dict)
    patch: RecordedPatch | None = None
    ended: str | None = None
    items: dict[str, RecordedItem] = field(default_factory=dict)


@with_config(_STRICT)
@dataclass(frozen=True, kw_only=True)
class RecordedPhase:
    """One start of a training program."""

    number: _Number
    argv: list[str] = field(default_factory=list)
    env: dict[_Name, str] = field(default_factory=dict)
    world_size: _Count = 1


@with_config(_STRICT)
@dataclass(frozen=True, kw_only=True)
class RecordedPlan(_RecordedFacts):
    """`plan.json`."""

    node_id: str
    cwd: str = ""
    repeat: _Number | None = None
    attempt: _Number | None = None
    phases: list[RecordedPhase] = field(default_factory=list)
    script: str | None = None
    world_size: _Count = 1
    nodes: _Number = 1
    seed: str | int | None = None
    is_lightweight: bool = False


def read_run(path: Path) -> RecordedRun:
    """Read a `run.json`.

    Raises:
        ReproError: It cannot be read, or an item has a name that no item has.
    """
    run = _read(path, RecordedRun)
    for node_id in run.items:
        check_node_id(node_id, str(path))
    return run


def find_plan(run_dir: Path, node_id: str, repeat: int, attempt: int) -> tuple[Path, RecordedPlan]:
    """Return the plan of an attempt and where it is; its place follows from the node id alone.

    Raises:
        ReproError: It is not there or cannot be read.
    """
    path = item_dirs(run_dir, node_id).attempt(repeat=repeat, attempt=attempt).plan
    plan = _read(path, RecordedPlan)
    if plan.node_id != node_id:
        raise ReproError(str(path), f"is of {plan.node_id!r}, expected {node_id!r}")
    return path, plan


def check_node_id(node_id: str, where: str) -> None:
    """Make sure that a node id names a test below the project, and is no option of pytest's.

    Raises:
        ReproError: It does not.
    """
    file, colons, _ = node_id.partition("::")
    path = PurePosixPath(file)
    is_inside = not path.is_absolute() and ".." not in path.parts
    is_plain = node_id.isprintable() and not node_id.startswith(("-", "@")) and "\\" not in file
    if not (colons and is_inside and is_plain):
        raise ReproError(where, f"{node_id!r} is no node id of a test in the project; refused")


def _read(path: Path, model: type[_Read]) -> _Read:
    try:
        if path.is_symlink() or not path.is_file():
            raise ReproError(str(path), "is not there, or no plain file; is the artifact whole?")
        return TypeAdapter(model).validate_json(read_bytes(path))
    except OSError as error:
        raise ReproError(str(path), f"cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ReproError(f"{path}: {place!r}", f"{first['msg']}; is it of this version?") from None
