"""Learns from the Docker daemon what becomes of a container.

nemo-run has Docker remove a container as soon as it ends, and its state with it. The daemon's
events say the rest: the exit code, and whether the kernel killed something in it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from types import TracebackType
from typing import Protocol, Self

import docker
import docker.errors
import requests.exceptions

from pytest_megatron.engines.docker_messages import Gone
from pytest_megatron.engines.docker_owner import LABEL_OWNER, owner

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
        """Ask for them.

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closed = True
        with contextlib.suppress(Exception):  # whatever the connection is in the middle of
            self._stream.close()
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
        """Remember what an event says; return whether it was the last."""
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
        return Gone(
            exit_code=self._exit_code,
            was_oom=self._was_oom,
            signal=self._signal,
            entrypoint=container.entrypoint,
        )

    def _is_there(self, container: WatchedContainer) -> bool:
        try:
            self._client.containers.get(container.id)
        except docker.errors.NotFound:
            return False
        except (docker.errors.APIError, requests.exceptions.RequestException):
            return True  # the daemon is away; it removes the container when it is back
        return True

    def _listen(self) -> None:
        with contextlib.suppress(Exception):  # closed, or the daemon is gone: see _is_there
            for event in self._stream:
                attributes = event.get("Actor", {}).get("Attributes", {})
                self._seen.put((str(event.get("Action")), attributes))
                os.write(self._wake, b"x")
        if self._is_closed:
            os.close(self._wake)
