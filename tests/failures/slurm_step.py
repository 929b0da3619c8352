"""Starts tasks as a step of Slurm does, and says what Slurm says when they end.

The tasks, their signals and exit codes are real; the words and the order of things are those of
srun and slurmstepd 23.11 with `--kill-on-bad-exit` and a time limit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

STEP = "4711.0"
NODE = "node017"
KILL_WAIT_S = 2.0
_POLL_S = 0.05
_NAMES = {
    signal.SIGKILL: "Killed",
    signal.SIGTERM: "Terminated",
    signal.SIGSEGV: "Segmentation fault",
    signal.SIGABRT: "Aborted",
    signal.SIGBUS: "Bus error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        words: The program and its arguments, the same for every task.
        directory: Where its output goes.
        is_labelled: One file with `3: ` before each line, as of `srun --label`; else one a task.
        limit_s: When it is ended from outside.
        reason: What Slurm says of that: `DUE TO TIME LIMIT`.
    """

    words: tuple[str, ...]
    env: Mapping[str, str]
    directory: str
    num_tasks: int
    is_labelled: bool
    limit_s: float
    reason: str = ""


class Task(Protocol):
    """A process of the step; what `subprocess.Popen` has of it."""

    returncode: int | None
    pid: int
    stdout: IO[bytes] | None

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""

    def wait(self) -> int:
        """Wait for its end."""


class _Output:
    """The step's one file with labels, or a file for each task and one for srun."""

    def __init__(self, directory: Path, *, is_labelled: bool) -> None:
        self._directory = directory
        self._is_labelled = is_labelled
        self._lock = threading.Lock()
        self._main = (directory / f"slurm-{STEP.partition('.')[0]}.out").open("wb")

    def say(self, text: str) -> None:
        with self._lock:
            self._main.write(f"{text}\n".encode())
            self._main.flush()

    def follow(self, task: int, stream: IO[bytes]) -> threading.Thread:
        thread = threading.Thread(target=self._copy, args=(task, stream), daemon=True)
        thread.start()
        return thread

    def _copy(self, task: int, stream: IO[bytes]) -> None:
        if not self._is_labelled:
            with (self._directory / f"task_{task}.out").open("wb") as file:
                for line in stream:
                    file.write(line)
                    file.flush()
            return
        for line in stream:
            with self._lock:
                self._main.write(f"{task}: ".encode() + line)
                self._main.flush()

    def close(self) -> None:
        self._main.close()


def run_step(
    step: Step,
    start: Callable[[Sequence[str], Mapping[str, str]], Task] | None = None,
) -> int:
    """Run a step to its end; return srun's exit code.

    Args:
        step: What to run.
        start: Starts one task, its output in a pipe; by default as a new program.
    """
    output = _Output(Path(step.directory), is_labelled=step.is_labelled)
    tasks = [
        (start or _start)(step.words, {**step.env, **_task_env(number, step.num_tasks)})
        for number in range(step.num_tasks)
    ]
    threads = [
        output.follow(number, task.stdout)
        for number, task in enumerate(tasks)
        if task.stdout is not None
    ]
    deadline = time.monotonic() + step.limit_s
    first = None
    while first is None and None in [task.poll() for task in tasks]:
        first = next((n for n, task in enumerate(tasks) if task.returncode), None)
        if first is None and time.monotonic() > deadline:
            output.say("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.")
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
            said = f"CANCELLED AT {stamp} {step.reason}".strip()
            output.say(f"slurmstepd: error: *** STEP {STEP} ON {NODE} {said} ***")
            break
        time.sleep(_POLL_S)
    first = next((n for n, task in enumerate(tasks) if task.returncode), first)
    if first is not None:
        _say_end(output, tasks, [first])
        output.say(f"srun: Terminating StepId={STEP}")
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
        output.say(f"slurmstepd: error: *** STEP {STEP} ON {NODE} CANCELLED AT {stamp} ***")
    _end(tasks)
    for thread in threads:
        thread.join(10)
    _say_end(output, tasks, [n for n in range(step.num_tasks) if n != first])
    output.close()
    return max((abs(task.wait()) for task in tasks), default=0)


def _task_env(task: int, num_tasks: int) -> dict[str, str]:
    return {
        "RANK": str(task),
        "LOCAL_RANK": str(task),
        "WORLD_SIZE": str(num_tasks),
        "SLURM_PROCID": str(task),
    }


def _start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _end(tasks: Sequence[Task]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, number)
        deadline = time.monotonic() + KILL_WAIT_S
        while any(task.poll() is None for task in tasks) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    for task in tasks:
        task.wait()


def _say_end(output: _Output, tasks: Sequence[Task], numbers: Sequence[int]) -> None:
    """Say how tasks ended, those that ended alike together; nothing of a good end."""
    ends: dict[str, list[str]] = {}
    for number in numbers:
        code = tasks[number].returncode
        if code is None or code == 0:
            continue
        how = (
            _NAMES.get(signal.Signals(-code), "Killed")
            if code < 0
            else f"Exited with exit code {code}"
        )
        ends.setdefault(how, []).append(str(number))
    for how, who in ends.items():
        word = "task" if len(who) == 1 else "tasks"
        output.say(f"srun: error: {NODE}: {word} {','.join(who)}: {how}")
