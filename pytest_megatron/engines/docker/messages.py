"""What the Docker engine asks of its child process, and what that answers; each a file. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from pytest_megatron.engines.config import DockerConfig

JOB_DIR = "/pytest-megatron-job"  # where a container sees its own directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A directory or file of the host that a container sees."""

    source: str
    target: str
    is_read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContainer:
    """A container to run.

    Attributes:
        name: Name of the container; its host name as well.
        settings: Those of the user; `mounts` and `env` beside it have what the container gets.
        command: What the container runs.
        mounts: `JOB_DIR` among them.
        user: `uid:gid`, or None for the image's own.
        groups: Further group ids.
        gpus: Exactly these, by UUID.
        env: What the container itself needs; all else is in the job's spec.
    """

    name: str
    settings: DockerConfig
    command: tuple[str, ...]
    mounts: tuple[Mount, ...] = ()
    user: str | None = None
    groups: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    env: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRefused:
    """Nothing was started, and would not be the next time either."""

    type: Literal["refused"] = "refused"
    where: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The container ended, and was removed.

    Attributes:
        exit_code: None where the daemon did not report it.
        was_oom: Whether the kernel killed a process in it for want of memory.
        said: The last lines that it printed.
    """

    type: Literal["gone"] = "gone"
    exit_code: int | None = None
    was_oom: bool = False
    said: tuple[str, ...] = ()


Answer: TypeAlias = StartRefused | Gone

REQUEST: TypeAdapter[RunContainer] = TypeAdapter(RunContainer)
ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="type")])
