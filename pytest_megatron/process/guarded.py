"""The controller's side of a guarded process: starts it, orders it about, learns how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from pytest_megatron.errors import LaunchError
from pytest_megatron.process.host_name import launcher_env
from pytest_megatron.process.tree import Activity, activity_below

_GUARD = Path(__file__).with_name("guard.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """End of a guarded command.

    Attributes:
        returncode: `Popen.returncode`: negative means killed by that signal.
        num_left: Processes of it that outlived it and were killed.
        duration_s: From start to end, by the monotonic clock.
        pid: The command's, while it lived.
    """

    returncode: int
    num_left: int
    duration_s: float
    pid: int = 0


class RunningCommand(Protocol):
    """Something that was started, here or on several machines; none of it outlives the context."""

    def __enter__(self) -> Self:
        """Enter the context."""

    def __exit__(self, *_: object) -> None:
        """End it if it has not ended."""

    def poll(self, timeout_s: float) -> CommandEnd | None:
        """Return how it ended, or None if it runs for `timeout_s` more seconds."""

    def wait(self) -> CommandEnd:
        """Wait for the end, however long it takes."""

    def stop(self) -> None:
        """Ask it to end; after its grace it is killed."""

    def dump_stacks(self) -> None:
        """Abort every rank; with faulthandler on, each prints its stacks."""

    def activity(self) -> Activity | None:
        """Return what its processes have used; None where some of them are on other machines."""
        return None


class GuardedProcess:
    """A command under `guard.py`; as a context manager it never leaves a process behind."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        output: Path | tuple[Path, Path],
        grace_s: float,
        kept_open: Sequence[int] = (),
    ) -> None:
        """Start `command` with its output going to files.

        Args:
            command: Program and arguments, no shell.
            env: The environment of the command; a launcher below it may get this host's address.
            cwd: Working directory of the command.
            output: One file for stdout and stderr, or one for each; created, or emptied.
            grace_s: How long it may take to end after the order.
            kept_open: Descriptors that the guard, not the command, holds until all is over.

        Raises:
            LaunchError: The output or the working directory is not usable.
        """
        control_read, self._control = os.pipe()
        self._result, result_write = os.pipe()
        self._started = time.monotonic()
        self._answer = b""
        self._ended: CommandEnd | None = None
        paths = output if isinstance(output, tuple) else (output,)
        own = [str(control_read), str(result_write), str(grace_s)]
        try:
            with contextlib.ExitStack() as opened:
                files = [opened.enter_context(path.open("wb")) for path in paths]
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_GUARD), *own, *command],
                    env={**launcher_env(), **env},
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=files[0],
                    stderr=files[-1],
                    pass_fds=(control_read, result_write, *kept_open),
                    start_new_session=True,
                )
        except BaseException as error:
            os.close(self._control)
            os.close(self._result)
            if not isinstance(error, OSError):
                raise
            raise LaunchError(
                str(error.filename or paths[0]), f"{error.strerror}; nothing was run"
            ) from error
        finally:
            os.close(control_read)
            os.close(result_write)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ended is None:
            # Ctrl-C: first politely, so that the agent can end its ranks. A second Ctrl-C comes
            # through the wait below and leaves it to the guard, which sees our pipe close.
            self.stop()
            with contextlib.suppress(LaunchError):
                self.wait()
        os.close(self._control)
        os.close(self._result)
        self._guard.wait()

    def poll(self, timeout_s: float) -> CommandEnd | None:
        """Return how the command ended, or None if it runs for `timeout_s` more seconds.

        Raises:
            LaunchError: The command could not be started, or the guard itself was killed.
        """
        if self._ended is None and (self._has_answer(timeout_s) or self._has_answer(0.0)):
            chunk = os.read(self._result, 65536)
            self._answer += chunk
            if not chunk or self._answer.endswith(b"\n"):
                self._ended = self._parse(self._answer)
        return self._ended

    def _has_answer(self, timeout_s: float) -> bool:
        """Wait for the guard; no answer is none only of a second look, as `fg` interrupts waits."""
        return bool(select.select([self._result], [], [], timeout_s)[0])

    def wait(self) -> CommandEnd:
        """Wait for the end, however long it takes."""
        while (ended := self.poll(1.0)) is None:
            pass
        return ended

    def stop(self) -> None:
        """Ask the command to end; after its grace it is killed."""
        self._order(b"t")

    def kill(self) -> None:
        """Kill the command and everything below it."""
        self._order(b"k")

    def activity(self) -> Activity:
        """Return what the processes below its guard have used."""
        return activity_below(self._guard.pid)

    def dump_stacks(self, *, of_all: bool = False) -> None:
        """Abort every process below the command; with faulthandler on, each prints its stacks.

        Args:
            of_all: The command as well, where it is a rank itself and no launcher.
        """
        self._order(b"A" if of_all else b"a")

    def _order(self, order: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control, order)

    def _parse(self, answer: bytes) -> CommandEnd:
        """Return the end of the command from the guard's answer."""
        if not answer:
            raise LaunchError(
                f"process {self._guard.pid}",
                "the guard of a training was killed, and the training with it; run it again",
            )
        found = json.loads(answer)
        if "error" in found:
            raise LaunchError(found["error"], "cannot be started; is it installed and executable?")
        return CommandEnd(
            returncode=found["returncode"],
            num_left=found["num_left"],
            duration_s=time.monotonic() - self._started,
            pid=found["pid"],
        )
