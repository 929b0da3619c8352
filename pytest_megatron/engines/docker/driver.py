"""Runs containers for the Docker engine, in a process of its own, and outlives none of them.

Started by `engine.py` with the descriptor of a socket. nemo-run's DockerExecutor makes the
container; what it has no field for goes to Docker beside it: labels by which leftovers are found,
exactly the leased GPUs, the user, bind mounts that must exist, limits, and a network that needs no
making. There is one container at a time. It is ended by an order of the controller, by SIGTERM or
SIGINT, or when the socket closes because the controller is gone. Should this process be killed, the
container sees a lock go (`inside.py`) and ends; what is left even so, the next driver removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self
from urllib.parse import urlsplit

import docker
import docker.errors
import docker.types
import docker.utils
import requests.exceptions
from docker.models.containers import ContainerCollection
from typing_extensions import override

from pytest_megatron.engines.docker.messages import (
    ANSWER,
    JOB_DIR,
    REQUEST,
    Answer,
    ContainerStarted,
    ContainerWaiting,
    DriverReady,
    Gone,
    RunContainer,
    StartRefused,
    StopContainer,
)
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


_POLL_S = 0.1
_GRACE_S = 25.0  # longer than a worker takes to end a training
_MAX_FDS = 64
_PACKET_BYTES = 1 << 20
_DAEMON_S = 60  # for one answer of the daemon, and between two signs of life of a registry
_SAY_EVERY_S = 10.0  # how far the fetching of an image is
_DEFAULT_HOST = "unix:///var/run/docker.sock"


class EndError(Exception):
    """This process is to end: by an order, or since the controller is gone."""


class StoppedError(Exception):
    """The controller does not want the container any more, which has not been started."""


class DaemonError(Exception):
    """The daemon cannot be reached."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(where, text)
        self.refused = StartRefused(where=where, text=text)


def main(arguments: list[str]) -> int:
    """Serve a controller; return the exit code."""
    link = socket.socket(fileno=int(arguments[0]))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # As if the controller were gone: never in the middle of a start that nobody knows of then.
        signal.signal(number, lambda *_: link.shutdown(socket.SHUT_RD))
    try:
        client = connect(_host())
    except DaemonError as error:
        link.send(ANSWER.dump_json(error.refused))
        return 1
    with contextlib.suppress(EndError, BrokenPipeError):
        Driver(link, client).serve()
    return 0


def connect(host: str) -> docker.DockerClient:
    """Return a client of a daemon that answers.

    Raises:
        DaemonError: It does not; with what to do about it.
    """
    path = urlsplit(host).path
    try:
        if host.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(path)
        return docker.from_env(timeout=_DAEMON_S)
    except PermissionError as error:
        raise DaemonError(
            host,
            f"no permission to talk to the Docker daemon as user {os.getuid()}; become a member "
            f"of the group that owns the socket, or name a daemon of your own in DOCKER_HOST",
        ) from error
    except OSError as error:
        raise DaemonError(
            host,
            f"no Docker daemon answers ({error.strerror or error}); start it, or name it in "
            f"DOCKER_HOST",
        ) from error
    except docker.errors.DockerException as error:
        raise DaemonError(
            host, f"the Docker daemon cannot be used: {error}; see that `docker info` works"
        ) from error


def remove_leftovers(client: docker.DockerClient) -> int:
    """Remove the containers of drivers that have died; return how many there were."""
    num_removed = 0
    for found in client.containers.list(all=True, filters={"label": LABEL_OWNER}):
        if is_dead(found.labels[LABEL_OWNER]):
            with contextlib.suppress(docker.errors.APIError):  # it may be going by itself
                found.remove(force=True)
            num_removed += 1
    return num_removed


class Driver:
    """Carries out what the controller asks for, until the socket closes."""

    def __init__(self, link: socket.socket, client: docker.DockerClient) -> None:
        self._link = link
        self._client = client

    def serve(self) -> None:
        """Run containers as the engine requests, until it is gone.

        Raises:
            EndError: The controller is gone, or this process is to end; its container is gone.
        """
        version = str(self._client.version()["Version"])
        self._tell(DriverReady(daemon=version, num_removed=remove_leftovers(self._client)))
        while True:
            packet, descriptors, _, _ = socket.recv_fds(self._link, _PACKET_BYTES, _MAX_FDS)
            if not packet:
                raise EndError
            request = REQUEST.validate_json(packet)
            if isinstance(request, RunContainer):
                with _closing(descriptors):
                    self._run(request)

    def _run(self, request: RunContainer) -> None:
        """Run a container to its end; send the result."""
        try:
            with Events() as events:
                gone = self._contain(request, events)
        except (ImageRefusedError, StartRefusedError, StoppedError) as error:
            answer: Answer = StartRefused(
                where=f"docker image {request.settings.image!r}", text=str(error)
            )
        except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
            text = f"the Docker daemon went away: {error}; see that `docker info` works"
            answer = StartRefused(where=_host(), text=text)
        else:
            answer = gone
        self._tell(answer)

    def _contain(self, request: RunContainer, events: Events) -> Gone:
        """Run a container to its end, and remove it whatever happens."""
        image = self._image(request)
        with start(self._client, request, image) as container:
            try:
                self._tell(ContainerStarted(container=container.id, image=image.name))
                return self._follow(container, events)
            except BaseException:  # the controller is gone, or a mistake of ours
                self._end(container, events)
                raise

    def _follow(self, container: Container, events: Events) -> Gone:
        """Wait for the end of a container, and end it when the controller orders it."""
        force_at = float("inf")
        while True:
            if (gone := events.end_of(container)) is not None:
                return gone
            if time.monotonic() >= force_at:
                container.remove()
                force_at = time.monotonic() + _GRACE_S
            link = self._link.fileno()
            ready, _, _ = select.select([link, events.wakes], [], [], _POLL_S)
            if link in ready:
                request = self._receive()
                container.let_go()
                grace_s = 0.0 if request.is_at_once else _GRACE_S
                force_at = min(force_at, time.monotonic() + grace_s)

    def _end(self, container: Container, events: Events) -> None:
        """End a container whose controller is gone."""
        container.let_go()
        force_at = time.monotonic() + _GRACE_S
        while time.monotonic() < force_at:
            if events.end_of(container) is not None:
                return
            select.select([events.wakes], [], [], _POLL_S)
        container.remove()

    def _image(self, request: RunContainer) -> Image:
        """Find or fetch the image, as long as it is wanted.

        Raises:
            EndError: The controller is gone.
            ImageRefusedError: It is not to be had.
            StoppedError: The controller does not want it any more.
        """
        settings = request.settings
        steps: queue.SimpleQueue[str | Image | Exception] = queue.SimpleQueue()

        def find() -> None:
            """Find or fetch the image, in a thread, and pass on progress and result."""
            try:
                steps.put(find_image(self._client, settings.image, settings.pull, steps.put))
            except Exception as error:  # noqa: BLE001 - raised again below
                steps.put(error)

        threading.Thread(target=find, daemon=True).start()
        say_at = 0.0
        while True:
            if select.select([self._link], [], [], 0)[0]:
                self._receive()
                raise StoppedError("was not waited for")
            with contextlib.suppress(queue.Empty):
                match steps.get(timeout=_POLL_S):
                    case Image() as image:
                        return image
                    case Exception() as error:
                        raise error
                    case text if time.monotonic() >= say_at:
                        self._tell(ContainerWaiting(text=text))
                        say_at = time.monotonic() + _SAY_EVERY_S

    def _receive(self) -> StopContainer:
        """Return a message of the controller while there is a container.

        Raises:
            EndError: It is gone.
        """
        try:
            packet = self._link.recv(_PACKET_BYTES)
        except ConnectionResetError:
            packet = b""
        if not packet:
            raise EndError
        request = REQUEST.validate_json(packet)
        assert isinstance(request, StopContainer), "one container at a time"
        return request

    def _tell(self, answer: Answer) -> None:
        self._link.send(ANSWER.dump_json(answer))


@contextlib.contextmanager
def _closing(descriptors: list[int]) -> Iterator[None]:
    """Hold on to GPU locks while their container lives."""
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _host() -> str:
    return os.environ.get("DOCKER_HOST") or _DEFAULT_HOST


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # what nemo-run imported takes a second to end, and has nothing to say
