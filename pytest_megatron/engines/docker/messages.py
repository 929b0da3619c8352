"""Messages between the Docker engine and its child process, one in a packet. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from pytest_megatron.workloads.engine.config import DockerConfig

JOB_DIR = "/nemo_run"  # where nemo-run mounts a job's own directory in its container


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A directory or file of the host that a container sees."""

    source: str
    target: str
    is_read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContainer:
    """Start a container; the GPUs' lock files come as descriptors with it.

    Attributes:
        key: The submission's, for the container's label.
        run_dir: Run directory, for the container's label.
        name: Name of the container; its host name as well.
        settings: Those of the user; `mounts` and `env` beside it have what the container gets.
        job_dir: Directory on the host; is `JOB_DIR` in the container.
        user: `uid:gid`, or None for the image's own.
        groups: Further group ids.
        gpus: Exactly these, by UUID.
        env: What the container itself needs; all else is in the job's spec.
    """

    type: Literal["run"] = "run"
    key: str
    run_dir: str
    name: str
    settings: DockerConfig
    job_dir: str
    mounts: tuple[Mount, ...] = ()
    user: str | None = None
    groups: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    env: dict[str, str]

    @property
    def network(self) -> str:
        """Docker's word: `bridge`, `host`, `none` or the name of a network."""
        return self.settings.network or "bridge"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopContainer:
    """End the container: politely, and by force where that takes too long, or at once."""

    type: Literal["stop"] = "stop"
    is_at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReady:
    """The child process reached the daemon.

    Attributes:
        daemon: Version of the daemon.
        num_removed: Containers of dead runs that it removed.
    """

    type: Literal["ready"] = "ready"
    daemon: str
    num_removed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRefused:
    """Nothing was started, and would not be the next time either."""

    type: Literal["refused"] = "refused"
    where: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerWaiting:
    """Something takes its time."""

    type: Literal["waiting"] = "waiting"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerStarted:
    """The container was started."""

    type: Literal["running"] = "running"
    container: str
    image: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The container was removed.

    Attributes:
        exit_code: None where the daemon did not report it.
        was_oom: Whether the kernel killed a process in it for want of memory.
        signal: Sent to it by others (`docker stop`, `docker kill`), or None.
        entrypoint: Entrypoint of the image.
    """

    type: Literal["gone"] = "gone"
    exit_code: int | None
    was_oom: bool = False
    signal: str | None = None
    entrypoint: tuple[str, ...] = ()


Request: TypeAlias = RunContainer | StopContainer
Answer: TypeAlias = DriverReady | StartRefused | ContainerWaiting | ContainerStarted | Gone

REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="type")])
ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="type")])
