"""Task 0's connections to the other tasks of its job step, from the first to the last phase."""

from __future__ import annotations

import selectors
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from pytest_megatron.engines.base import EngineError, TroubleKind
from pytest_megatron.engines.interfaces import is_loopback
from pytest_megatron.engines.task_messages import (
    Goodbye,
    Join,
    LeaveAck,
    Message,
    decode,
    encode,
)
from pytest_megatron.engines.task_places import TaskPlace
from pytest_megatron.gang.channel import Channel
from pytest_megatron.health import Health
from pytest_megatron.wording import counted, name_ranks

_FAREWELL_S = 30.0  # for GPUs to say how they are; one that is lost may take 20 s


class Peers:
    """All tasks of a step, seen from task 0.

    Attributes:
        members: By task, task 0 among them.
        lost: Task to what is known of its end, in the order in which that was noticed.
        healths: What nodes said of their GPUs when the attempt was over.
    """

    def __init__(self, place: TaskPlace, own: Join) -> None:
        self.place = place
        self.members = {own.task: own}
        self.lost: dict[int, EngineError] = {}
        self.healths: list[Health] = []
        self._channels: dict[int, Channel] = {}
        self._selector = selectors.DefaultSelector()

    @property
    def is_alone(self) -> bool:
        """Whether there is no other task."""
        return self.place.num_tasks == 1

    @property
    def address(self) -> str:
        """Where the others reach node 0: as most of them did, and not by loopback if one did not.

        What a host calls itself may be its loopback; what others reached it by is not.
        """
        seen = Counter(m.seen_at for m in self.members.values() if m.seen_at)
        far = Counter({host: count for host, count in seen.items() if not is_loopback(host)})
        found = (far or seen).most_common(1)
        return found[0][0] if found else "127.0.0.1"

    def add(self, channel: Channel, member: Join) -> None:
        """Take a task in."""
        self.members[member.task] = replace(member, seen_at=channel.own_host)
        self._channels[member.task] = channel
        self._selector.register(channel.fileno(), selectors.EVENT_READ, member.task)

    def name(self, tasks: Iterable[int]) -> str:
        """Return `task 2 on node1` or `tasks 2-3 on node1`; of several nodes, all of them."""
        by_host: dict[str, list[int]] = {}
        for task in sorted(tasks):
            by_host.setdefault(self.members[task].host, []).append(task)
        found = [f"{name_ranks(tasks, 'task')} on {host}" for host, tasks in by_host.items()]
        return ", ".join(found)

    def send(self, task: int, message: Message) -> None:
        """Tell another task something; one that is lost hears nothing."""
        channel = self._channels.get(task)
        if channel is not None:
            channel.send_frame(encode(message))

    def receive(self, timeout_s: float) -> list[tuple[int, Message]]:
        """Return what other tasks said, waiting for a first one; notes who is lost."""
        if not self._channels:
            time.sleep(timeout_s)
            return []
        found: list[tuple[int, Message]] = []
        for key, _ in self._selector.select(timeout_s):
            task: int = key.data
            channel = self._channels[task]
            messages = [decode(frame) for frame in channel.drain_frames()]
            found += [(task, message) for message in messages if message is not None]
            if None in messages:
                self.lose(task, "sent what is no message of this version")
            elif any(isinstance(message, LeaveAck) for message in messages):
                self._forget(task)
            elif channel.is_closed:
                self.lose(task, "was lost: it ended, or its host does not answer")
        return found

    def lose(self, task: int, why: str, kind: TroubleKind = TroubleKind.LOST) -> None:
        """Have nothing more to do with a task."""
        self._forget(task)
        hosts = (self.members[task].host,)
        trouble = EngineError(kind=kind, text=f"{self.name([task])} {why}", hosts=hosts)
        self.lost.setdefault(task, trouble)

    def _forget(self, task: int) -> None:
        channel = self._channels.pop(task, None)
        if channel is not None:
            self._selector.unregister(channel.fileno())
            channel.close()

    def trouble(self) -> EngineError | None:
        """Return what happened to the first task that was lost, or None."""
        return next(iter(self.lost.values()), None)

    def missing(self) -> dict[str, str]:
        """Return how many tasks have not come, by host."""
        place = self.place
        found: dict[str, str] = {}
        for node, (host, wanted) in enumerate(zip(place.hosts, place.on_nodes, strict=True)):
            num_there = sum(member.node == node for member in self.members.values())
            if num_there < wanted:
                found[host] = f"{wanted - num_there} of {counted(wanted, 'task')} on {host}"
        return found

    def say_goodbye(self) -> None:
        """Let every other task end well, and take what their GPUs say."""
        for task in self._channels:
            self.send(task, Goodbye())
        give_up_at = time.monotonic() + _FAREWELL_S
        while self._channels and time.monotonic() < give_up_at:
            for _, message in self.receive(give_up_at - time.monotonic()):
                if isinstance(message, LeaveAck):
                    self.healths += [] if message.health is None else [message.health]

    def close(self) -> None:
        """Hang up: whoever was not told goodbye ends what it runs."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._selector.close()
