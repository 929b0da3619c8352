"""Runs one container for the Docker engine, in a process of its own that outlives none.

Started by `engine.py` as `python -m pytest_megatron.engines.docker.driver REQUEST ANSWER`, two JSON
files. The container is ended when the standard input closes, by the controller or because that is
gone, and by force on SIGTERM or SIGINT. Should this process be killed, the next one removes the
container by its label; without arguments nothing else is done.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import docker
import docker.errors
import docker.types
import requests.exceptions
from docker.models.containers import Container

from pytest_megatron.base.files import write_text_atomically
from pytest_megatron.engines.docker.messages import (
    ANSWER,
    REQUEST,
    Answer,
    Gone,
    RunContainer,
    StartRefused,
)

LABEL_OWNER = "pytest-megatron.owner"
_START_FIELD = 19  # of those behind the name in /proc/PID/stat: clock ticks from boot to start
_PARTS = 4
_POLL_S = 0.2
_GRACE_S = 25  # longer than a worker takes to end a training
_DAEMON_S = 60  # for one answer of the daemon, and between two signs of life of a registry
_NUM_LOG_LINES = 5
_DEFAULT_HOST = "unix:///var/run/docker.sock"


class RefusedError(Exception):
    """The container is not started, now and later; with where and why."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(where, text)
        self.refused = StartRefused(where=where, text=text)


class EndedError(BaseException):
    """This process was told to end its container at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that is on the daemon's machine.

    Attributes:
        id: `sha256:...`.
        name: For provenance: with the registry's digest, where it came from one.
    """

    id: str
    name: str


def main(arguments: list[str]) -> int:
    """Run the container that was asked for; return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)
    if not arguments:
        remove_leftovers(_connected(_host()))
        return 0
    request, answer = map(Path, arguments)
    found = _answer(REQUEST.validate_json(request.read_bytes()))
    write_text_atomically(answer, ANSWER.dump_json(found).decode())
    return 0


def _answer(request: RunContainer) -> Answer:
    """Run a container to its end; return how it ended, or why it was not started."""
    try:
        client = _connected(_host())
        remove_leftovers(client)
        image = _find_image(client, request)
        with _container(client, request, image) as container:
            return _follow(container)
    except RefusedError as error:
        return error.refused
    except EndedError:
        return Gone()
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        text = f"the Docker daemon went away: {error}; see that `docker info` works"
        return StartRefused(where=_host(), text=text)


def _connected(host: str) -> docker.DockerClient:
    """Return a client of a daemon that answers.

    Raises:
        RefusedError: It does not; with what to do about it.
    """
    try:
        return docker.from_env(timeout=_DAEMON_S)
    except docker.errors.DockerException as error:
        raise RefusedError(
            host,
            f"no Docker daemon can be used: {error}; start it, name another one in DOCKER_HOST, or "
            f"become a member of the group that owns its socket",
        ) from error


def _find_image(client: docker.DockerClient, request: RunContainer) -> Image:
    """Return the image of a request, which is fetched where it is missing.

    Raises:
        RefusedError: It is missing and cannot be fetched, or must not.
    """
    name = request.settings.image
    where = f"docker image {name!r}"
    try:
        found = client.images.get(name)
    except docker.errors.ImageNotFound as error:
        if name.startswith("sha256:"):
            raise RefusedError(
                where, "is not on this machine; name one of `docker images`"
            ) from error
        try:
            client.images.pull(name)  # `latest` where it names no tag
            found = client.images.get(name)
        except (docker.errors.APIError, requests.exceptions.RequestException) as problem:
            why = getattr(problem, "explanation", None) or problem
            raise RefusedError(
                where,
                f"is not on this machine and cannot be fetched ({why}); see that `docker pull` "
                f"works, or name one of `docker images`",
            ) from problem
    digests = found.attrs.get("RepoDigests") or []
    return Image(id=found.id, name=digests[0] if digests else f"{name} {found.id[:19]}")


@contextlib.contextmanager
def _container(
    client: docker.DockerClient, request: RunContainer, image: Image
) -> Iterator[Container]:
    """Start a container; remove it on any way out.

    Raises:
        RefusedError: Docker will not have it.
    """
    where = f"docker image {request.settings.image!r}"
    try:
        try:
            container = client.containers.create(
                image.id, list(request.command), **_options(request, image)
            )
            container.start()
        except docker.errors.APIError as error:
            raise RefusedError(where, _meaning(str(error.explanation))) from error
        yield container
    finally:
        with contextlib.suppress(docker.errors.APIError, requests.exceptions.RequestException):
            client.api.remove_container(request.name, force=True)


def _options(request: RunContainer, image: Image) -> dict[str, object]:
    """Return the options of a container as docker-py takes them."""
    settings = request.settings
    found: dict[str, object] = {
        "name": request.name,
        "hostname": request.name[-32:],
        "labels": {LABEL_OWNER: owner()},
        "environment": {**request.env, "PYTEST_MEGATRON_IMAGE": image.name},
        "mounts": [
            docker.types.Mount(
                target=mount.target, source=mount.source, type="bind", read_only=mount.is_read_only
            )
            for mount in request.mounts
        ],
        "user": request.user,
        "group_add": list(request.groups),
        "network": settings.network,
        "shm_size": settings.shm_size,
        "ulimits": [
            docker.types.Ulimit(name=name, soft=limit, hard=limit)
            for name, limit in settings.ulimits.items()
        ],
    }
    if settings.memory is not None:
        found |= {"mem_limit": settings.memory, "memswap_limit": settings.memory}
    if request.gpus:
        devices = docker.types.DeviceRequest(device_ids=list(request.gpus), capabilities=[["gpu"]])
        found["device_requests"] = [devices]
    if settings.network in ("host", "none"):  # only a bridge makes its own name known
        found["extra_hosts"] = {request.name[-32:]: "127.0.0.1"}
    return found


def _meaning(text: str) -> str:
    """Return what an error of the daemon means."""
    if "could not select device driver" in text:
        text += "; for GPUs install nvidia-container-toolkit and restart the daemon"
    return f"Docker does not start it: {text}"


def _follow(container: Container) -> Gone:
    """Wait for the end of a container, and end it when the controller closes our input.

    A daemon that is restarted is waited for: its containers may go on meanwhile.
    """
    answered_at = time.monotonic()
    while True:
        try:
            container.reload()
            answered_at = time.monotonic()
        except docker.errors.NotFound:  # somebody has removed it
            return Gone()
        except (docker.errors.APIError, requests.exceptions.RequestException):
            if time.monotonic() - answered_at > _DAEMON_S:
                raise
        if container.status in ("exited", "dead"):
            break
        if select.select([sys.stdin], [], [], _POLL_S)[0]:
            container.stop(timeout=_GRACE_S)
            container.reload()
            break
    state = container.attrs["State"]
    said = container.logs(tail=_NUM_LOG_LINES).decode(errors="replace").splitlines()
    return Gone(
        exit_code=state.get("ExitCode"),
        was_oom=bool(state.get("OOMKilled")),
        said=tuple(said),
    )


def remove_leftovers(client: docker.DockerClient) -> None:
    """Remove the containers of processes of this kind that have died."""
    for found in client.containers.list(all=True, filters={"label": LABEL_OWNER}):
        if is_dead(found.labels[LABEL_OWNER]):
            with contextlib.suppress(docker.errors.APIError):  # it may be going by itself
                found.remove(force=True)


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


def _host() -> str:
    return os.environ.get("DOCKER_HOST") or _DEFAULT_HOST


def _end(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise EndedError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
