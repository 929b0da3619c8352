"""The life of a task of a job step that is not the first: it does what task 0 says."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType

from pytest_megatron.engines.task_messages import (
    PLACE_VARIABLES,
    Begin,
    Finished,
    Goodbye,
    Join,
    LeaveAck,
    Message,
    Tell,
    decode,
    encode,
)
from pytest_megatron.engines.task_places import TaskPlace
from pytest_megatron.engines.task_work import TaskCommand
from pytest_megatron.gang.channel import Channel
from pytest_megatron.launch.health import HealthWatch

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
        """Serve until task 0 says goodbye or is gone; return the exit code."""
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
                self._work.__exit__(None, None, None)
            self._channel.close()

    def _obey(self, message: Message | None) -> None:
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
                self._work.__exit__(None, None, None)
                self._work = None

    def _end_alone(self) -> None:
        """End the command although nobody wants to know how it ends."""
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
        self._told = signal.Signals(number).name
        if self._work is not None:
            self._work.tell("stop")


def describe_task(place: TaskPlace, env: Mapping[str, str]) -> Join:
    """Return what a task says of itself."""
    return Join(
        task=place.task,
        node=place.node,
        local=place.local,
        host=place.host,
        devices=env.get("CUDA_VISIBLE_DEVICES"),
        given={name: env[name] for name in PLACE_VARIABLES if env.get(name)},
    )
