"""Has the GPUs of an attempt watched, and never fails or holds up a run for it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from pytest_megatron.base.schema import trusted
from pytest_megatron.gpu.health import GpuState, Health, Xid
from pytest_megatron.gpu.host import Gpu

_LIMIT_S = 20.0  # a GPU that is lost can keep NVML from answering for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class _MonitorAnswer:
    """One line of the watching process."""

    gpus: tuple[GpuState, ...] = ()
    xids: tuple[Xid, ...] = ()
    problem: str | None = None


class HealthWatch:
    """Watches GPUs from `with` to `finish`; without GPUs it does nothing.

    Attributes:
        health: What is known so far.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.health: Health | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        if not gpus:
            return
        self.health = Health()
        command = [sys.executable, "-m", "pytest_megatron.gpu.nvml_probe", *(g.uuid for g in gpus)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the training; stdin tells this one
            )
        except OSError as error:
            self.health = Health(problem=f"{command[0]}: {error.strerror}")
            return
        answer = self._answer("before")
        self.health = Health(before=answer.gpus, problem=answer.problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def finish(self) -> Health | None:
        """Return what changed since the start; None without GPUs."""
        if self._process is None or self.health is None:
            return self.health
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its answer says why
            self._process.stdin.close()
        answer = self._answer("after")
        problem = self.health.problem or answer.problem
        self.health = replace(self.health, after=answer.gpus, xids=answer.xids, problem=problem)
        self._end()
        return self.health

    def _answer(self, when: str) -> _MonitorAnswer:
        """Return the content of the next line."""
        line = self._read_line()
        if line is None:
            return _MonitorAnswer(problem=f"no answer {when} the attempt within {_LIMIT_S:g} s")
        try:
            return trusted(_MonitorAnswer, json.loads(line))
        except (KeyError, TypeError, ValueError, AssertionError):
            return _MonitorAnswer(problem=f"no answer {when} the attempt, NVML may have crashed")

    def _read_line(self) -> bytes | None:
        """Return the next line, empty where the process ended; None where it takes too long."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        give_up_at = time.monotonic() + _LIMIT_S
        while b"\n" not in self._rest:
            left_s = give_up_at - time.monotonic()
            if not any(  # a wait that `fg` interrupts ends without a look
                select.select([descriptor], [], [], wait_s)[0] for wait_s in (max(0.0, left_s), 0.0)
            ):
                return None
            chunk = os.read(descriptor, 65536)
            if not chunk:
                return b""
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _end(self) -> None:
        """Leave no process behind, unless the driver itself holds on to it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        # Stuck in the driver, it cannot be killed, and must not hold up the session.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
