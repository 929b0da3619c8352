"""An agent between its ranks and a controller, without torch and pytest."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from pytest_megatron.gangs.forkserver.server import Agent, fork_rank
from pytest_megatron.gangs.forkserver.store import StoreKeeper
from pytest_megatron.gangs.ipc.channel import OWN, BufferedChannel, Channel, Place
from pytest_megatron.gangs.ipc.messages import (
    Broken,
    Close,
    Closed,
    Died,
    Hello,
    Kill,
    Killed,
    Message,
    RankConfig,
    Ready,
    Start,
    decode,
)
from pytest_megatron.gangs.rank.lockstep import RankPipes
from pytest_megatron.process.tree import fork_child

DEADLINE_S = 60.0


class World:
    """An agent whose two ranks do one thing."""

    def __init__(self, path: Path, do: Callable[[int, Channel], None]) -> None:
        def run_rank(config: RankConfig, pipes: RankPipes) -> NoReturn:
            do(config.rank, Channel(socket.socket(fileno=pipes.connection)))
            os._exit(3)

        def serve() -> None:
            ours.close()
            channel, keeper = BufferedChannel(theirs), StoreKeeper()
            Agent(channel, fork_rank(channel, keeper, run_rank), keeper).serve()

        ours, theirs = socket.socketpair()
        self.controller = Channel(ours)
        self._pid = fork_child(serve)
        theirs.close()
        config = RankConfig(
            gang=1,
            rank=0,
            world_size=2,
            node_rank=0,
            device="cpu",
            env={},
            log_dir=str(path),
            base_temp=str(path),
        )
        self.controller.send(Start(gang=1, configs=(config, replace(config, rank=1))))

    def read_until(self, last: Message) -> list[tuple[Place, Message]]:
        """Return what the agent sends, up to a message."""
        found: list[tuple[Place, Message]] = []
        deadline = time.monotonic() + DEADLINE_S
        while last not in [message for _, message in found]:
            assert time.monotonic() < deadline, found
            frames = self.controller.drain_frames()
            found += [(frame.place, decode(frame.content)) for frame in frames]
            time.sleep(0 if frames else 0.01)
        return found

    def close(self) -> None:
        self.controller.close()
        os.waitpid(self._pid, 0)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.001)


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended, collected or not."""
    deadline = time.monotonic() + DEADLINE_S
    with suppress(FileNotFoundError, ProcessLookupError):  # gone when opened, or when read
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, pid
            time.sleep(0.001)


def test_a_death_comes_after_the_ranks_last_words_and_before_what_others_say_later(
    tmp_path: Path,
) -> None:
    def do(rank: int, channel: Channel) -> None:
        if rank == 0:
            channel.send(Ready())
            for _ in range(20):
                channel.send(Broken(problem="x" * 10_000))
            (tmp_path / "part").write_text(str(os.getpid()))
            (tmp_path / "part").rename(tmp_path / "said")
        else:
            wait_for(tmp_path / "said")
            wait_for_end(int((tmp_path / "said").read_text()))
            channel.send(Closed(problem=""))
            channel.receive()

    with closing(World(tmp_path, do)) as world:
        (place, hello), *told = world.read_until(Closed(problem=""))
    assert (place, type(hello)) == (OWN, Hello)
    died = Died(gang=1, rank=0, exit_code=3)
    words: list[tuple[Place, Message]] = [((1, 0), Ready())]
    words += [((1, 0), Broken(problem="x" * 10_000))] * 20
    assert told == [*words, (OWN, died), ((1, 1), Closed(problem=""))]


def test_an_agent_obeys_while_nobody_reads_what_its_ranks_say(tmp_path: Path) -> None:
    def do(rank: int, channel: Channel) -> None:
        if rank == 0:
            for _ in range(3):  # more than sockets hold
                channel.send(Broken(problem="x" * 1_000_000))
            (tmp_path / "part").write_text(str(os.getpid()))
            (tmp_path / "part").rename(tmp_path / "begun")
            while True:
                channel.send(Broken(problem="x" * 1_000_000))
        (tmp_path / "heard").write_text(str(channel.receive()))
        channel.receive()

    with closing(World(tmp_path, do)) as world:
        wait_for(tmp_path / "begun")
        world.controller.send(Close(), place=(1, 1))
        wait_for(tmp_path / "heard")
        world.controller.send(Kill(gang=1))
        wait_for_end(int((tmp_path / "begun").read_text()))
        told = world.read_until(Killed(gang=1))
    assert {m.rank: m.exit_code for _, m in told if isinstance(m, Died)} == {0: -9, 1: -9}


def test_a_rank_that_closes_its_connection_and_lives_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_megatron.gangs.forkserver.server._LOST_S", 0.01)

    def do(rank: int, channel: Channel) -> None:
        if rank:
            channel.send(Closed(problem=""))
            channel.close()
        time.sleep(DEADLINE_S)

    with closing(World(tmp_path, do)) as world:
        told = world.read_until(Broken(problem="closed its connection to the controller"))
    assert [place for place, _ in told] == [OWN, (1, 1), (1, 1)]
