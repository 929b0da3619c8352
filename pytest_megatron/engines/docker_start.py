"""Starts one container through nemo-run's DockerExecutor.

What the executor has no field for goes to Docker beside it: labels by which leftovers are found,
exactly the leased GPUs, the user, bind mounts that must exist, limits, and a network that needs no
making. The only place in the package that imports nemo-run for Docker.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import docker
import docker.errors
import docker.types
import requests.exceptions

from pytest_megatron.engines.docker_images import Image
from pytest_megatron.engines.docker_messages import JOB_DIR, RunContainer
from pytest_megatron.engines.docker_owner import LABEL_KEY, LABEL_OWNER, LABEL_RUN, owner

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
    """Docker did not start the container, and would not the next time; the text says why."""


class Container:
    """A container that was started; as a context manager it closes what it holds.

    Attributes:
        entrypoint: Of its image.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Let the container end by itself: what runs in it waits for this lock."""
        self.was_let_go = True
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def remove(self) -> None:
        """Kill and remove it, if it is still there."""
        self.let_go()
        with contextlib.suppress(docker.errors.APIError, requests.exceptions.RequestException):
            self._client.api.remove_container(self.id, force=True)


class _ContainerStarter:
    """What nemo-run takes for a Docker client, of which it asks `containers.run` only."""

    def __init__(self, client: docker.DockerClient, labels: dict[str, str], network: str) -> None:
        self.containers = self
        self._client = client
        self._labels = labels
        self._network = network

    def run(self, image: str, command: str, **options: object) -> object:
        """Start a container as nemo-run wants it, with our labels and network."""
        found = options.pop("labels", {})
        assert isinstance(found, dict)
        options |= {"labels": {**found, **self._labels}, "network": self._network}
        return self._client.containers.run(image, command, **options)


def start(client: docker.DockerClient, request: RunContainer, image: Image) -> Container:
    """Start a container.

    Raises:
        StartRefusedError: Docker will not have it.
    """
    job_dir = Path(request.job_dir)
    lifeline = os.open(job_dir / "lifeline", os.O_RDONLY | os.O_CREAT, 0o644)
    fcntl.flock(lifeline, fcntl.LOCK_EX)
    labels = {LABEL_OWNER: owner(), LABEL_KEY: request.key, LABEL_RUN: request.run_dir}
    try:
        found = _run(_ContainerStarter(client, labels, request.network), request, image)
    except docker.errors.APIError as error:
        os.close(lifeline)
        raise StartRefusedError(_meaning(str(error.explanation))) from error
    except requests.exceptions.RequestException as error:
        os.close(lifeline)
        raise StartRefusedError(f"the Docker daemon does not answer: {error}") from error
    return Container(client, str(getattr(found, "id", "")), image.entrypoint, lifeline)


def _run(starter: _ContainerStarter, request: RunContainer, image: Image) -> object:
    """Have nemo-run start a container; return docker-py's."""
    from nemo_run import DockerExecutor, Packager  # noqa: PLC0415 - takes seconds
    from nemo_run.core.execution.docker import DockerContainer  # noqa: PLC0415

    executor = DockerExecutor(
        container_image=image.id,
        packager=Packager(),
        runtime=request.runtime,
        shm_size=request.shm_size,
        ipc_mode=request.ipc,
        ulimits=[limit.replace("=", ":") for limit in request.ulimits],
        privileged=request.is_privileged,
        # nemo-run makes a network that it never removes, unless it is told this one.
        network="host",
        env_vars={**request.env, "PYTEST_MEGATRON_IMAGE": image.name},
        additional_kwargs=_more(request),
    )
    executor.experiment_id = "pytest-megatron"
    container = DockerContainer(
        name=request.name, command=["bash", f"{JOB_DIR}/start"], executor=executor, extra_env={}
    )
    return container.run(client=starter, id=request.name)


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
    if request.memory is not None:
        more |= {"mem_limit": request.memory, "memswap_limit": request.memory}
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
