"""Tasks of a job step beside the first: they carry out the orders of task 0."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType
from typing import Self

from pytest_megatron.engines.multitask.messages import (
    PLACE_VARIABLES,
    Begin,
    Finished,
    Goodbye,
    Join,
    LeaveAck,
    Lines,
    Message,
    OrderWord,
    Tell,
    decode,
    encode,
)
from pytest_megatron.engines.multitask.topology import TaskPlace
from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.ipc.channel import Channel
from pytest_megatron.gpu.health import HealthWatch
from pytest_megatron.process.guarded import GuardedProcess
from pytest_megatron.workloads.training.plan.plan import inherited
from pytest_megatron.workloads.training.run.runner import STOP_GRACE_S, FollowedFile


class TaskCommand:
    """A command that was begun; as a context manager it never leaves a process behind.

    Attributes:
        finished: How it ended, once it has.
    """

    def __init__(self, begin: Begin, env: Mapping[str, str]) -> None:
        """Start the command of this task.

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

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.__exit__(*error)
            self._process = None

    def poll(self) -> list[Lines | Finished]:
        """Return new output of the command; its end comes last, and once."""
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
        """Stop, kill or dump the stacks of the command, as task 0 asks."""
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
    """Return the environment of a command: the task's own, with the variables of task 0."""
    kept = {name: value for name, value in inherited(env).items() if name not in begin.unset}
    return {**begin.defaults, **kept, **begin.env}


_BUSY_S = 0.05
_IDLE_S = 0.5
_ALONE_S = 3.0  # for ranks to end once task 0 is gone


class Participant:
    """Runs one command after the other for task 0."""

    def __init__(self, channel: Channel, env: Mapping[str, str], watch: HealthWatch) -> None:
        self._channel = channel
        self._env = env
        self._watch = watch
        self._work: TaskCommand | None = None
        self._told = ""

    def run(self) -> int:
        """Serve until task 0 sends goodbye or is gone; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        try:
            while True:
                timeout_s = _IDLE_S if self._work is None else _BUSY_S
                select.select([self._channel.fileno()], [], [], timeout_s)
                messages = [decode(frame) for frame in self._channel.drain_frames()]
                if Goodbye() in messages:
                    self._send(LeaveAck(health=self._watch.finish()))
                    return 0
                for message in messages:
                    self._obey(message)
                self._report()
                if self._told and self._work is None:
                    self._send(Finished(number=0, returncode=None, told=self._told))
                    return 1
                if self._channel.is_closed or None in messages:
                    self._end_alone()
                    return 1
        finally:
            if self._work is not None:
                self._work.__exit__()
            self._channel.close()

    def _obey(self, message: Message | None) -> None:
        """Do what task 0 asks for: begin a command, or pass a request to it."""
        match message:
            case Begin():
                self._work = TaskCommand(message, self._env)
            case Tell() if self._work is not None:
                self._work.tell(message.order)
            case _:
                pass

    def _report(self) -> None:
        """Send what is new of the command."""
        for message in [] if self._work is None else self._work.poll():
            if not isinstance(message, Finished):
                self._send(message)
            elif self._work is not None:
                self._send(replace(message, told=self._told))
                self._work.__exit__()
                self._work = None

    def _end_alone(self) -> None:
        """End the command without reporting its end."""
        if self._work is None:
            return
        self._work.tell("stop")
        give_up_at = time.monotonic() + _ALONE_S
        while self._work.finished is None and time.monotonic() < give_up_at:
            self._work.poll()
            time.sleep(_BUSY_S)
        self._work.tell("kill")

    def _send(self, message: Message) -> None:
        self._channel.send_frame(encode(message))

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal to this task, and stop its command."""
        self._told = signal.Signals(number).name
        if self._work is not None:
            self._work.tell("stop")


def describe_task(place: TaskPlace, env: Mapping[str, str]) -> Join:
    """Return the introduction of a task."""
    return Join(
        task=place.task,
        node=place.node,
        local=place.local,
        host=place.host,
        devices=env.get("CUDA_VISIBLE_DEVICES"),
        given={name: env[name] for name in PLACE_VARIABLES if env.get(name)},
    )
