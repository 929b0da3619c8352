"""Sessions that span nodes: node 0 collects, decides and reports as on one node.

`follower.py` is the session of another node, which only starts ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.ipc.channel import Channel, Frame, Listener, listen_on
from pytest_megatron.gangs.ipc.messages import (
    Joined,
    Register,
    SessionEnded,
    Welcome,
)
from pytest_megatron.gangs.markers import device_of
from pytest_megatron.gangs.supervisor.supervisor import Supervisor
from pytest_megatron.gangs.topology import KEY_VARIABLE, GangSpec, Nodes, find_key
from pytest_megatron.gpu.host import this_host
from pytest_megatron.session.options import Options
from pytest_megatron.session.state import write_line

MEETING_S = 300.0  # for every node to start and collect
RETRY_S = 0.2
DEVICES = "CUDA_VISIBLE_DEVICES"
BROKEN = 3  # exit code: not a test's fault
KEY_ADVICE = f"set {KEY_VARIABLE} to the same text on every node, or share ~/.pytest_megatron/key"


def nodes_of(options: Options) -> Nodes:
    """Return the nodes of this session and their numbers of ranks."""
    room = options.num_ranks or 0
    if options.num_gpus is not None:
        room = options.num_gpus or room_on_gpus(options)
    return Nodes(num_nodes=options.num_nodes, ranks_per_node=room)


def room_on_gpus(options: Options) -> int:
    """Return the number of ranks of one gang that fit on the GPUs of this host."""
    return len(this_host().gpus) * options.ranks_per_gpu


def first_gang(options: Options) -> GangSpec:
    """Return the gang of tests without a mark; its size is 0 where they run on none."""
    size, room = (
        nodes_of(options).num_ranks,
        0 if options.device == "cpu" else room_on_gpus(options),
    )
    return GangSpec(world_size=size, device=device_of(options, size, room))


def address_of(endpoint: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


class Leader:
    """Node 0's side: accepts the other nodes, and tells them how the session ended."""

    def __init__(
        self, config: pytest.Config, supervisor: Supervisor, *, welcome: Welcome, options: Options
    ) -> None:
        """Start listening for the sessions of other nodes.

        Raises:
            pytest.UsageError: There is no key, or the port is taken.
        """
        self._config = config
        self._supervisor = supervisor
        self._welcome = welcome
        self._stop = ""
        self._joined: set[int] = set()
        self._refused: list[str] = []
        self._has_wrong_key = False
        self._channels: dict[int, Channel] = {}  # to the sessions of other nodes
        listener = _listen(options)
        self._endpoint = listener.address
        supervisor.calls.listen(listener, self._on_register, self._on_wrong_key)

    def wait(self) -> None:
        """Wait until every node has joined.

        Raises:
            pytest.exit.Exception: A node did not connect, or cannot join.
        """
        deadline, said = time.monotonic() + MEETING_S, ""
        while missing := [n for n in range(1, self._welcome.num_nodes) if not self._is_there(n)]:
            names = ", ".join(map(str, missing))
            if names != said:
                write_line(self._config, f"node 0 waits at {self._endpoint} for node {names}")
                said = names
            if self._refused:
                raise pytest.exit.Exception("; ".join(self._refused), BROKEN)
            if time.monotonic() > deadline:
                raise pytest.exit.Exception(
                    f"node {names} did not come to {self._endpoint} in {MEETING_S:g} s; is its "
                    f"pytest running, with the same --nnodes and --rdzv-endpoint?",
                    BROKEN,
                )
            self._supervisor.pump(RETRY_S)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Record the reason of the session's end."""
        self._stop = getattr(excinfo.value, "msg", None) or str(excinfo.value) or "Ctrl-C"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Send the end of the session to the other nodes."""
        text = str(self._stop or session.shouldfail or session.shouldstop or "")
        for channel in self._channels.values():
            channel.send(SessionEnded(exit_code=int(exitstatus), text=text))
            channel.leave()  # they wait for the end of this process

    def _on_wrong_key(self) -> None:
        """Say once that a node does not know the key."""
        if not self._has_wrong_key:
            write_line(self._config, f"a node with another key was refused; {KEY_ADVICE}")
        self._has_wrong_key = True

    def _on_register(self, channel: Channel, register: Register, frames: Sequence[Frame]) -> None:
        """Accept or refuse the session of another node, or accept its agent."""
        node_rank = register.node_rank
        if register.role == "agent":
            self._supervisor.connect(channel, node_rank, frames)
            return
        known = self._channels.get(node_rank)
        is_taken = node_rank == 0 or (known is not None and not known.is_closed)
        if is_taken or node_rank >= self._welcome.num_nodes:
            text = f"--node-rank: {node_rank} is taken or too large; give each node one of its own"
            channel.send(SessionEnded(exit_code=pytest.ExitCode.USAGE_ERROR, text=text))
            self._supervisor.calls.drop(channel)
            return
        self._channels[node_rank] = channel
        self._supervisor.calls.read(channel, lambda: self._read(node_rank, channel))
        channel.send(self._welcome)

    def _read(self, node_rank: int, channel: Channel) -> None:
        """Read the messages of another node's session."""
        for message in channel.drain():
            if isinstance(message, Joined) and not message.problem:
                self._joined.add(node_rank)
            elif isinstance(message, Joined):
                self._refused.append(f"node {node_rank}: {message.problem}")
        if channel.is_closed:
            del self._channels[node_rank]
            self._joined.discard(node_rank)
            self._supervisor.calls.drop(channel)

    def _is_there(self, node_rank: int) -> bool:
        return node_rank in self._joined and self._supervisor.agents.has(node_rank)


def _listen(options: Options) -> Listener:
    """Listen for the other nodes.

    Raises:
        pytest.UsageError: There is no key, or the port is taken.
    """
    host, port = address_of(options.rdzv_endpoint)
    try:
        return listen_on(host, port, find_key(os.environ, Path.home(), options.rdzv_step))
    except LaunchError as error:
        raise pytest.UsageError(str(error)) from None
    except OSError as error:
        raise pytest.UsageError(
            f"--rdzv-endpoint: {options.rdzv_endpoint} cannot be listened on ({error.strerror}); "
            f"give another port"
        ) from None
