"""One command on the node of a task: runs it under guard, and tells what it prints and its end."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from pytest_megatron.engines.task_messages import Begin, Finished, Lines, OrderWord
from pytest_megatron.errors import LaunchError
from pytest_megatron.launch.follow import FollowedFile
from pytest_megatron.launch.local import STOP_GRACE_S
from pytest_megatron.launch.plan import inherited
from pytest_megatron.launch.process import GuardedProcess


class TaskCommand:
    """A command that was begun; as a context manager it never leaves a process behind.

    Attributes:
        finished: How it ended, once it has.
    """

    def __init__(self, begin: Begin, env: Mapping[str, str]) -> None:
        """Start a command.

        Args:
            begin: What task 0 wants.
            env: The task's own environment, below.
        """
        self._begin = begin
        self._process: GuardedProcess | None = None
        self.finished: Finished | None = None
        self._is_over = False
        files = (begin.output,) if begin.errors is None else (begin.output, begin.errors)
        self._followed = [FollowedFile(path) for path in files] if begin.is_copied else []
        try:
            begin.output.parent.mkdir(parents=True, exist_ok=True)
            self._process = GuardedProcess(
                begin.argv,
                env=task_env(begin, env),
                cwd=begin.cwd,
                output=begin.output if begin.errors is None else (begin.output, begin.errors),
                grace_s=STOP_GRACE_S,
            )
        except (LaunchError, OSError) as error:
            self._fail(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.__exit__(kind, error, trace)
            self._process = None

    def poll(self) -> list[Lines | Finished]:
        """Return what is new; its end comes last, and once."""
        if self._is_over:
            return []
        if self._process is not None:
            self._look(self._process)
        found: list[Lines | Finished] = []
        while lines := [line for file in self._followed for line in file.new_lines()]:
            found.append(Lines(number=self._begin.number, text=tuple(lines)))
        if self.finished is not None:
            self._is_over = True
            rest = tuple(line for file in self._followed if (line := file.last_line()))
            found += [Lines(number=self._begin.number, text=rest)] if rest else []
            found.append(self.finished)
        return found

    def _look(self, process: GuardedProcess) -> None:
        """Note the end of the command."""
        try:
            ended = process.poll(0.0)
        except LaunchError as error:
            self._fail(error)
            return
        if ended is not None:
            self.finished = Finished(
                number=self._begin.number,
                returncode=ended.returncode,
                pid=ended.pid,
                num_left=ended.num_left,
            )

    def tell(self, order: OrderWord) -> None:
        """Carry out an order."""
        process = self._process
        if process is None:
            return
        match order:
            case "stop":
                process.stop()
            case "kill":
                process.kill()
            case "stacks":
                process.dump_stacks(of_all=self._begin.is_rank)

    def _fail(self, error: LaunchError | OSError) -> None:
        self.finished = Finished(number=self._begin.number, returncode=None, problem=str(error))


def task_env(begin: Begin, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command: that of the task's own job, with what task 0 says."""
    kept = {name: value for name, value in inherited(env).items() if name not in begin.unset}
    return {**begin.defaults, **kept, **begin.env}
