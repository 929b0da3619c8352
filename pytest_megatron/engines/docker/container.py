"""Starts one container through nemo-run's DockerExecutor.

What the executor has no field for goes to Docker beside it: labels by which leftovers are found,
exactly the leased GPUs, the user, bind mounts that must exist, limits, and a network that needs no
making. The only place in the package that imports nemo-run for Docker.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self

import docker
import docker.errors
import docker.types
import docker.utils
import requests.exceptions
from docker.models.containers import ContainerCollection
from typing_extensions import override

from pytest_megatron.engines.docker.messages import JOB_DIR, Gone, RunContainer
from pytest_megatron.process.tree import large_imports


class ImageRefusedError(Exception):
    """The image cannot be found or fetched, for the reason in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that is on the daemon's machine.

    Attributes:
        id: `sha256:...`; nemo-run takes it as it is, and asks no registry for it.
        name: For provenance: with the registry's digest, where it came from one.
        entrypoint: What Docker puts before the command.
    """

    id: str
    name: str
    entrypoint: tuple[str, ...]


def find_image(
    client: docker.DockerClient,
    name: str,
    pull: Literal["missing", "never"],
    on_step: Callable[[str], None],
) -> Image:
    """Return an image by its name.

    Args:
        client: Client of the daemon.
        name: Name of the image, as `docker run` takes it.
        pull: Whether to ask a registry for one that is missing.
        on_step: Called often while an image is fetched, with what is done.

    Raises:
        ImageRefusedError: It is missing and cannot be fetched, or must not.
    """
    try:
        found = client.images.get(name)
    except docker.errors.ImageNotFound as error:
        if pull == "never" or name.startswith("sha256:"):
            raise ImageRefusedError(
                "is not on this machine, and is not to be fetched; name one of `docker images`, "
                "or say `pull: missing`"
            ) from error
        _pull(client, name, on_step)
        found = client.images.get(name)
    attributes = found.attrs
    digests = attributes.get("RepoDigests") or []
    entrypoint = attributes.get("Config", {}).get("Entrypoint") or []
    return Image(
        id=found.id,
        name=digests[0] if digests else f"{name} {found.id[:19]}",
        entrypoint=tuple(entrypoint),
    )


def _pull(client: docker.DockerClient, name: str, on_step: Callable[[str], None]) -> None:
    """Fetch an image; nothing that stops answering keeps it for longer than the client's limit."""
    repository, tag = docker.utils.parse_repository_tag(name)
    on_step(f"fetching the image {name}")
    try:
        steps = client.api.pull(repository, tag=tag or "latest", stream=True, decode=True)
        for step in steps:
            if "error" in step:
                raise ImageRefusedError(_not_fetched(step["error"]))
            on_step(_line(name, step))
    except docker.errors.APIError as error:
        raise ImageRefusedError(_not_fetched(error.explanation)) from error
    except requests.exceptions.RequestException as error:
        raise ImageRefusedError(_not_fetched(error)) from error


def _line(name: str, step: Mapping[str, object]) -> str:
    return f"fetching the image {name}: {step.get('status', '')} {step.get('id', '')}".rstrip()


def _not_fetched(why: object) -> str:
    """Describe that an image cannot be fetched, and what to do."""
    return (
        f"is not on this machine and cannot be fetched ({why}); see that `docker pull` works, or "
        f"name one of `docker images`"
    )


LABEL_OWNER = "pytest-megatron.owner"
LABEL_KEY = "pytest-megatron.key"
LABEL_RUN = "pytest-megatron.run"
_LOG = logging.getLogger("pytest_megatron.engines")
_START_FIELD = 19  # of those behind the name in /proc/PID/stat: clock ticks from boot to start
_PARTS = 4


def owner() -> str:
    """Return this process as a label has it; no other process of any machine has the same."""
    return "/".join((*_machine(), str(os.getpid()), _started(os.getpid()) or ""))


def is_dead(label: str) -> bool:
    """Return if the process of a label has ended; False where this process cannot know.

    Args:
        label: Label from `owner`, maybe of another machine or another container.
    """
    parts = label.split("/")
    if len(parts) != _PARTS or tuple(parts[:2]) != _machine() or not parts[2].isdigit():
        return False
    return _started(int(parts[2])) != parts[3]


def _machine() -> tuple[str, str]:
    """Return what tells this machine and its PID namespace from others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot, str(Path("/proc/self/ns/pid").readlink())


def _started(pid: int) -> str | None:
    """Return when a process started; None where there is none, or only what is left of one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()  # a name may hold anything
    return None if state in "ZX" else rest[_START_FIELD - 1]


# What the daemon says, and what it means to who asked for the container.
_MEANINGS: Mapping[str, str] = {
    'exec: "bash"': "has no bash, which nemo-run starts programs with; add it to the image",
    "could not select device driver": "the Docker daemon cannot give GPUs to containers; "
    "install nvidia-container-toolkit and restart the daemon",
    "setting rlimit": "the Docker daemon may not raise limits that far; lower `ulimits`, or say "
    "`ulimits: {}`",
    "bind source path does not exist": "what is to be mounted is not on the daemon's machine; "
    "mend `mounts`, or run where the daemon is",
}


class StartRefusedError(Exception):
    """Docker refuses to start the container, now and later, for the reason in the text."""


class Container:
    """A container that was started; as a context manager it closes what it holds.

    Attributes:
        entrypoint: Entrypoint of the image.
        was_let_go: Whether we ended it.
    """

    def __init__(
        self, client: docker.DockerClient, found: str, entrypoint: tuple[str, ...], lifeline: int
    ) -> None:
        self.id = found
        self.entrypoint = entrypoint
        self.was_let_go = False
        self._client = client
        self._lifeline: int | None = lifeline

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Have the container end: the process in it waits for this lock."""
        self.was_let_go = True
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def remove(self) -> None:
        """Kill and remove the container, if it is still there."""
        self.let_go()
        with contextlib.suppress(docker.errors.APIError, requests.exceptions.RequestException):
            self._client.api.remove_container(self.id, force=True)


class _OwnedContainers(ContainerCollection):  # type: ignore[misc]  # docker has no types
    """Containers with our labels, on a network that exists: nemo-run has no field for these."""

    @override
    def run(self, image: str, command: str, **options: object) -> object:
        """Start a container with nemo-run's options and ours."""
        found = options["labels"]
        assert isinstance(found, dict)
        ours = {"labels": {**found, **self.client.labels}, "network": self.client.network}
        return super().run(image, command, **{**options, **ours})


class _OwningClient(docker.DockerClient):  # type: ignore[misc]  # as above
    """Docker client for one container of ours.

    Attributes:
        labels: For the owner of the container.
        network: That it is connected to.
    """

    labels: Mapping[str, str]
    network: str

    @property
    def containers(self) -> _OwnedContainers:
        """The containers that it starts."""
        return _OwnedContainers(client=self)


def start(client: docker.DockerClient, request: RunContainer, image: Image) -> Container:
    """Start a container.

    Raises:
        StartRefusedError: Docker will not have it.
    """
    owning = _OwningClient.from_env(timeout=client.api.timeout)
    owning.network = request.network
    owning.labels = {LABEL_OWNER: owner(), LABEL_KEY: request.key, LABEL_RUN: request.run_dir}
    job_dir = Path(request.job_dir)
    lifeline = os.open(job_dir / "lifeline", os.O_RDONLY | os.O_CREAT, 0o644)
    fcntl.flock(lifeline, fcntl.LOCK_EX)
    try:
        with contextlib.closing(owning):
            found = _run(owning, request, image)
    except docker.errors.APIError as error:
        os.close(lifeline)
        raise StartRefusedError(_meaning(str(error.explanation))) from error
    except requests.exceptions.RequestException as error:
        os.close(lifeline)
        raise StartRefusedError(f"the Docker daemon does not answer: {error}") from error
    return Container(client, str(getattr(found, "id", "")), image.entrypoint, lifeline)


def _run(client: _OwningClient, request: RunContainer, image: Image) -> object:
    """Have nemo-run start a container; return docker-py's."""
    with large_imports(without=["torch"]):  # half of it is torch, if that is there
        from nemo_run import DockerExecutor, Packager  # noqa: PLC0415 - takes seconds
        from nemo_run.core.execution.docker import DockerContainer  # noqa: PLC0415

    executor = DockerExecutor(
        container_image=image.id,
        packager=Packager(),
        runtime=request.settings.runtime,
        shm_size=request.settings.shm_size,
        ipc_mode=request.settings.ipc,
        ulimits=[f"{name}:{limit}" for name, limit in request.settings.ulimits.items()],
        privileged=request.settings.privileged,
        # nemo-run makes a network that it never removes, unless it is told this one.
        network="host",
        env_vars={**request.env, "PYTEST_MEGATRON_IMAGE": image.name},
        additional_kwargs=_more(request),
    )
    executor.experiment_id = "pytest-megatron"
    container = DockerContainer(
        name=request.name, command=["bash", f"{JOB_DIR}/start"], executor=executor, extra_env={}
    )
    return container.run(client=client, id=request.name)


def _more(request: RunContainer) -> dict[str, object]:
    """Return what nemo-run hands to Docker as it is."""
    job = docker.types.Mount(target=JOB_DIR, source=request.job_dir, type="bind")
    mounts = [
        docker.types.Mount(
            target=mount.target, source=mount.source, type="bind", read_only=mount.is_read_only
        )
        for mount in request.mounts
    ]
    more: dict[str, object] = {"mounts": [*mounts, job], "group_add": list(request.groups)}
    if request.user is not None:
        more["user"] = request.user
    if (memory := request.settings.memory) is not None:
        more |= {"mem_limit": memory, "memswap_limit": memory}
    if request.gpus:
        devices = docker.types.DeviceRequest(device_ids=list(request.gpus), capabilities=[["gpu"]])
        more["device_requests"] = [devices]
    if request.network in ("host", "none"):  # only a bridge makes its own name known
        more["extra_hosts"] = {request.name[-32:]: "127.0.0.1"}
    return more


def _meaning(text: str) -> str:
    """Return what an error of the daemon means, and the error."""
    for part, meaning in _MEANINGS.items():
        if part in text:
            return f"{meaning} ({text})"
    return f"Docker does not start it: {text}"


_LOOK_EVERY_S = 5.0  # at the container itself: events are lost when the daemon is restarted


class WatchedContainer(Protocol):
    """A container whose end is waited for."""

    id: str
    entrypoint: tuple[str, ...]
    was_let_go: bool


class Events:
    """The events of this process's containers; as a context manager it listens.

    Attributes:
        wakes: A descriptor that becomes readable when there may be something new.
    """

    def __init__(self) -> None:
        """Begin to read the daemon's events of a container.

        Raises:
            docker.errors.DockerException: The daemon cannot be reached.
        """
        self._client = docker.from_env(timeout=None)  # nothing may happen for hours
        self._seen: queue.SimpleQueue[tuple[str, dict[str, str]]] = queue.SimpleQueue()
        self._exit_code: int | None = None
        self._was_oom = False
        self._signal: str | None = None
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        self.wakes, self._wake = os.pipe()
        os.set_blocking(self.wakes, False)
        self._is_closed = False
        self._stream = self._client.events(
            decode=True, filters={"label": f"{LABEL_OWNER}={owner()}"}
        )
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        try:
            self._stream.close()
        except Exception:  # noqa: BLE001 - whatever the connection is in the middle of
            _LOG.debug("the stream of events is not closed", exc_info=True)
        self._thread.join(1.0)
        os.close(self.wakes)

    def end_of(self, container: WatchedContainer) -> Gone | None:
        """Return how a container ended once it is removed; None as long as it is there."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakes, 4096)
        while not self._seen.empty():
            action, attributes = self._seen.get()
            if self._take(action, attributes, container):
                return self._gone(container)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_EVERY_S
            if not self._is_there(container):
                return self._gone(container)
        return None

    def _take(self, action: str, attributes: dict[str, str], container: WatchedContainer) -> bool:
        """Keep an event; return if it was the last."""
        match action:
            case "oom":
                self._was_oom = True
            case "kill" if not container.was_let_go:
                self._signal = attributes.get("signal")
            case "die":
                code = attributes.get("exitCode", "")
                self._exit_code = int(code) if code.isdigit() else None
            case _:
                pass
        return action == "destroy"

    def _gone(self, container: WatchedContainer) -> Gone:
        """Return how the container ended."""
        return Gone(
            exit_code=self._exit_code,
            was_oom=self._was_oom,
            signal=self._signal,
            entrypoint=container.entrypoint,
        )

    def _is_there(self, container: WatchedContainer) -> bool:
        """Return whether the daemon still has the container."""
        try:
            self._client.containers.get(container.id)
        except docker.errors.NotFound:
            return False
        except (docker.errors.APIError, requests.exceptions.RequestException):
            return True  # the daemon is away; it removes the container when it is back
        return True

    def _listen(self) -> None:
        """Pass on the daemon's events, in a thread, until the stream ends."""
        try:
            for event in self._stream:
                attributes = event.get("Actor", {}).get("Attributes", {})
                self._seen.put((str(event.get("Action")), attributes))
                os.write(self._wake, b"x")
        except Exception:  # noqa: BLE001 - closed, or the daemon is gone: see _is_there
            _LOG.debug("the stream of events ended", exc_info=True)
        if self._is_closed:
            os.close(self._wake)
