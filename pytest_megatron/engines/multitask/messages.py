"""What the tasks of a job step leave for one another, each a file of JSON."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pytest_megatron.base.files import read_bytes, write_bytes_atomically
from pytest_megatron.base.schema import SchemaError, adapter, parse

# Of which a job may already have its own.
PLACE_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
LOOK_S = 0.2  # between two looks at the files of other tasks
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A task introduces itself, once.

    Attributes:
        host: Slurm's name of its node.
        devices: CUDA_VISIBLE_DEVICES of the task, or None.
        given: Those of `PLACE_VARIABLES` that its job has set.
        launched_from: Address of srun, as Slurm gave it to this task; "" where it did not.
        has_gpus: Whether it says at its end how the GPUs of its node are.
    """

    task: int
    node: int
    local: int
    host: str
    devices: str | None
    given: dict[str, str]
    launched_from: str = ""
    has_gpus: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """A command that a task runs.

    Attributes:
        env: Variables over those of the task's own job; `unset` are not passed on.
        defaults: Variables for where its job has none of that name.
        head: Address of node 0.
        output: File of its stdout; of stderr as well where there are no `errors`.
        is_rank: Whether it is a rank itself and no launcher of ranks.
        is_copied: Whether its lines are copied to the phase's `launcher.log`.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    unset: tuple[str, ...] = ()
    defaults: dict[str, str] = field(default_factory=dict)
    head: str = ""
    cwd: Path
    output: Path
    errors: Path | None = None
    is_rank: bool = False
    is_copied: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Commands of a phase, by task; the others run nothing."""

    begins: dict[int, Begin]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A command is over.

    Attributes:
        returncode: `Popen.returncode`; None where it could not be started, or its guard died.
        at: When, in seconds since 1970.
        pid: The command's.
        problem: Why, in that case.
    """

    returncode: int | None
    at: float = 0.0
    pid: int = 0
    num_left: int = 0
    problem: str = ""


class Meeting:
    """The directory in which tasks leave their files; only its owner can enter it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: frozenset[str] = frozenset()

    def open(self) -> None:
        """Make the directory, if no other task has.

        Raises:
            OSError: It cannot be made.
        """
        self._directory.parent.mkdir(parents=True, exist_ok=True)
        self._directory.mkdir(mode=0o700, exist_ok=True)

    def leave(self, name: str, value: object = None) -> None:
        """Leave a file, whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        content = b"" if value is None else adapter(type(value)).dump_json(value)
        write_bytes_atomically(self._directory / name, content)

    def names(self) -> frozenset[str]:
        """Return the files that are there; none where the directory is gone.

        A network file system looks again where a directory is listed. While it fails, nothing has
        changed.
        """
        try:
            self._names = frozenset(path.name for path in self._directory.iterdir())
        except FileNotFoundError:
            self._names = frozenset()
        except OSError:
            pass
        return self._names

    def has_within(self, name: str, limit_s: float) -> bool:
        """Wait for a file; return whether it came in time, or the directory has gone since."""
        give_up_at = time.monotonic() + limit_s
        while (names := self.names()) and name not in names:
            if time.monotonic() >= give_up_at:
                return False
            time.sleep(LOOK_S)
        return True

    def read(self, name: str, kind: type[_T]) -> _T | None:
        """Return the content of a file, None where it is none of this version."""
        try:
            return parse(kind, read_bytes(self._directory / name))
        except (OSError, SchemaError):
            return None

    def close(self) -> None:
        """Remove the directory: tasks that still look for something end."""
        shutil.rmtree(self._directory, ignore_errors=True)
