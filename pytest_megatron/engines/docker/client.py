"""The controller's side of the Docker engine's child process: starts it, orders it about."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_megatron.engines.docker.messages import (
    ANSWER,
    REQUEST,
    Answer,
    DriverReady,
    Request,
    StartRefused,
)
from pytest_megatron.errors import LaunchError

_START_S = 60.0
_END_S = 60.0
_PACKET_BYTES = 1 << 20


class DriverGoneError(Exception):
    """The child process ended without being asked."""


class DriverLink:
    """The child process that talks to Docker.

    It ends, and takes its container with it, when our end of the socket closes, for whatever
    reason.

    Attributes:
        ready: Its first answer, once it had reached the daemon.
    """

    ready: DriverReady

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        """Start it.

        Args:
            directory: For its log, and for what nemo-run keeps.
            env: The controller's; may name the daemon.

        Raises:
            LaunchError: nemo-run is not installed, or the daemon cannot be reached.
        """
        for package in ("docker", "nemo_run"):
            if importlib.util.find_spec(package) is None:
                raise LaunchError(
                    "--executor docker",
                    f"needs the package {package}, which is not installed; "
                    f"pip install 'pytest-megatron[cluster]'",
                )
        directory.mkdir(parents=True, exist_ok=True)
        self._log = directory / f"driver-{os.getpid()}.log"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        module = "pytest_megatron.engines.docker.driver"
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                # -P: the project may well have a directory `docker` of its own.
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                env={**env, "NEMORUN_HOME": str(directory / "nemo")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the controller, which decides
            )
        try:
            answer = self.receive(_START_S)
        except DriverGoneError as error:
            raise LaunchError(str(self._log), f"{error}; see there") from error
        if not isinstance(answer, DriverReady):
            self.close()
            if isinstance(answer, StartRefused):
                raise LaunchError(answer.where, answer.text)
            raise LaunchError("--executor docker", f"the daemon says nothing for {_START_S:g} s")
        self.ready = answer

    def send(self, request: Request, descriptors: Sequence[int] = ()) -> None:
        """Send a request, with descriptors that are to stay open while its container lives.

        Raises:
            DriverGoneError: The child process ended.
        """
        try:
            socket.send_fds(self._socket, [REQUEST.dump_json(request)], list(descriptors))
        except OSError as error:
            raise self._gone() from error

    def receive(self, timeout_s: float) -> Answer | None:
        """Return the next answer, or None where none comes in time.

        Raises:
            DriverGoneError: The child process ended.
        """
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        try:
            packet = self._socket.recv(_PACKET_BYTES)
        except ConnectionResetError:
            packet = b""
        if not packet:
            raise self._gone()
        return ANSWER.validate_json(packet)

    def close(self) -> None:
        """End the child process, and with it the container that it has."""
        self._socket.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            if not self._log.stat().st_size:
                self._log.unlink()

    def _gone(self) -> DriverGoneError:
        """Return how the child process ended."""
        self._socket.close()
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return DriverGoneError(f"the process that runs containers ended by itself ({how})")
