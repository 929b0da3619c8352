"""Runs steps of trainings whose ranks are forked from a process that has imported torch.

    python warm_tasks.py < jobs

A job is a line of JSON; the answer is a line with the step's exit code. The ranks are processes of
their own in all else; importing torch takes each of them seconds otherwise.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import IO

import torch
import torch.distributed
import torch.utils.data  # what the ways of going wrong import themselves
import training
import ways
from slurm_step import Step, Task, run_step


def main() -> None:
    """Serve jobs until there are no more."""
    torch.set_num_threads(1)
    ways.load()
    print("up", flush=True)
    for line in sys.stdin:
        step = Step(**json.loads(line))
        code = run_step(step, _fork)
        print(code, flush=True)


class ForkedTask:
    """A rank, with what `subprocess.Popen` has of it."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        reader, writer = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            _be(words, env, writer)
        os.close(writer)
        self.stdout: IO[bytes] | None = os.fdopen(reader, "rb")

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _fork(words: Sequence[str], env: Mapping[str, str]) -> Task:
    return ForkedTask(words, env)


def _be(words: Sequence[str], env: Mapping[str, str], writer: int) -> None:
    """Be a rank, and end as a program ends; never returns."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((null, writer, writer)):
        os.dup2(descriptor, number)
    os.closerange(3, 256)
    os.environ.update(env)
    faulthandler.disable()
    sys.argv = list(words[1:])
    code = 0
    try:
        training.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - what ends a program
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
