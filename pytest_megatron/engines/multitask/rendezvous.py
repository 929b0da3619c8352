"""Rendezvous of the tasks of a job step: task 0 listens, the others connect.

A caller tries every address and every port that may be meant; who has the key of the job is right.
So a host that calls itself 127.0.1.1, a port that another job has and an unknown name do
no harm.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from pytest_megatron.engines.multitask.coordinator import Peers
from pytest_megatron.engines.multitask.messages import Join, decode
from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.ipc.channel import Channel, Listener, WrongKeyError, connect, listen_on
from pytest_megatron.session.slurm_step import slurm_address
from pytest_megatron.workloads.engine.api import EngineError, TroubleKind

_PAUSE_S = 0.2  # between two rounds of calls
_NUM_EASY_ROUNDS = 10  # before names are looked up, which takes long where nobody knows them


class MissingTasksError(Exception):
    """Tasks did not come."""

    def __init__(self, trouble: EngineError) -> None:
        super().__init__(trouble)
        self.trouble = trouble


@dataclass(slots=True)
class Door:
    """Listener of task 0 for the others.

    Attributes:
        num_strangers: Callers that had another key.
    """

    listener: Listener
    num_strangers: int = 0
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _knocking: dict[int, socket.socket] = field(default_factory=dict)
    _unnamed: dict[int, Channel] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._selector.register(self.listener.fileno(), selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._unnamed.values():
            channel.close()
        self._selector.close()
        self.listener.close()

    def take_in(self, timeout_s: float) -> list[tuple[Channel, Join]]:
        """Return the tasks that connected, proved their key and introduced themselves."""
        found = []
        for ready, _ in self._selector.select(timeout_s):
            number = ready.fd
            if number == self.listener.fileno():
                caller = self.listener.accept()
                self._knocking[caller.fileno()] = caller
                self._selector.register(caller.fileno(), selectors.EVENT_READ)
            elif number in self._knocking:
                self._prove(number)
            elif (named := self._hear(number)) is not None:
                found.append(named)
        return found

    def _prove(self, number: int) -> None:
        """Go on with proving that a new connection knows the job's key."""
        try:
            channel = self.listener.prove(self._knocking[number])
        except PermissionError as error:
            self.num_strangers += isinstance(error, WrongKeyError)
            self._selector.unregister(number)
            del self._knocking[number]
            return
        if channel is not None:
            del self._knocking[number]
            self._unnamed[number] = channel

    def _hear(self, number: int) -> tuple[Channel, Join] | None:
        """Return a caller that introduced itself."""
        channel = self._unnamed[number]
        frames = channel.drain_frames()
        if not frames and not channel.is_closed:
            return None
        self._selector.unregister(number)
        del self._unnamed[number]
        hello = decode(frames[0]) if frames else None
        if isinstance(hello, Join):
            return channel, hello
        channel.close()
        return None


def gather(peers: Peers, key: bytes, ports: Sequence[int], *, limit_s: float) -> None:
    """Wait for all other tasks.

    Args:
        peers: Has task 0 alone.
        key: Who does not know it is sent away.
        ports: The first that is free is listened on.
        limit_s: How long after this one the last may start.

    Raises:
        LaunchError: No port is free.
        MissingTasksError: Tasks did not come in time.
    """
    give_up_at = time.monotonic() + limit_s
    with Door(_listen(ports, key)) as door:
        while len(peers.members) < peers.place.num_tasks and time.monotonic() < give_up_at:
            for channel, member in door.take_in(give_up_at - time.monotonic()):
                peers.add(channel, member)
    missing = peers.missing()
    if missing:
        text = f"{', '.join(missing.values())} did not come to task 0 within {limit_s:g} s"
        if door.num_strangers:
            text += f"; {door.num_strangers} calls had the key of another job"
        text += "; see the log of the job for how the container or the interpreter starts there"
        raise MissingTasksError(
            EngineError(kind=TroubleKind.BOOT_FAIL, text=text, hosts=tuple(missing))
        )


def call(
    host: str, env: Mapping[str, str], key: bytes, ports: Sequence[int], *, limit_s: float
) -> Channel:
    """Call task 0 until it answers.

    Args:
        host: Slurm's name of its node.
        env: Environment of this task; srun sets in it its own host, mostly node 0.
        key: Key of the job.
        ports: Where task 0 may listen.
        limit_s: How long to try.

    Raises:
        LaunchError: It never answered.
    """
    give_up_at = time.monotonic() + limit_s
    problem = "nobody listens"
    started_at = env.get("SLURM_LAUNCH_NODE_IPADDR")
    addresses = [] if started_at is None else [started_at]
    for num_rounds in itertools.count():
        if num_rounds == (_NUM_EASY_ROUNDS if addresses else 0):
            addresses = list(dict.fromkeys((*addresses, *find_addresses(host))))
        for address, port in ((a, p) for p in ports for a in addresses):
            try:
                return connect(f"tcp:{address}:{port}", key, None)
            except WrongKeyError:
                problem = "another job listens, or this one has another key"
            except ConnectionRefusedError:
                continue
            except OSError as error:
                problem = f"{address}:{port}: {error.strerror or error}"
        if time.monotonic() > give_up_at:
            known = ", ".join(addresses) or "no address known"
            raise LaunchError(
                f"task 0 on {host}",
                f"does not answer within {limit_s:g} s at ports {ports[0]}-{ports[-1]} of "
                f"{known}: {problem}; nodes of a job must reach one another there",
            )
        time.sleep(_PAUSE_S)
    raise AssertionError("counting never ends")


def find_addresses(host: str) -> Iterator[str]:
    """Yield what may be the address of a host, the likeliest first."""
    for name in (host, slurm_address(host)):
        with contextlib.suppress(OSError):  # of no such host; another one may do
            yield from (str(found[4][0]) for found in socket.getaddrinfo(name, None))


def free_port(ports: Sequence[int]) -> int:
    """Return a port that no program listens on.

    Raises:
        LaunchError: There is none.
    """
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise _all_taken(ports)


def _listen(ports: Sequence[int], key: bytes) -> Listener:
    """Listen on the first port that is free, on every interface."""
    for port in ports:
        with contextlib.suppress(OSError):
            return listen_on("", port, key)
    raise _all_taken(ports)


def _all_taken(ports: Sequence[int]) -> LaunchError:
    """Return the error that no port is free."""
    return LaunchError(
        f"{socket.gethostname()}, ports {ports[0]}-{ports[-1]}",
        "all are taken; give other `ports` in the executor's configuration",
    )
