"""Runs containers for the Docker engine, in a process of its own, and outlives none of them.

Started by `client.py` with the descriptor of a socket. nemo-run's DockerExecutor makes the
container; what it has no field for is added on the way to Docker (`container.py`). There is one
container at a time. It is ended by an order of the controller, by SIGTERM or SIGINT, or when the
socket closes because the controller is gone. Should this process be killed, the container sees a
lock go (`inside.py`) and ends; what is left even so, the next driver removes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import docker
import docker.errors
import requests.exceptions

from pytest_megatron.engines.docker.container import (
    LABEL_OWNER,
    Container,
    Events,
    Image,
    ImageRefusedError,
    StartRefusedError,
    find_image,
    is_dead,
    start,
)
from pytest_megatron.engines.docker.messages import (
    ANSWER,
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
