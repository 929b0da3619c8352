"""Fork server: starts ranks, reports their deaths, and kills all their descendants.

It is a process without work of its own, in a session of its own, which forks ranks (or executes
fresh interpreters) and waits for them. If the controller exits, even by SIGKILL, its connection
closes, and the fork server kills all of its ranks.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, TypeAlias

from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.forkserver.store import StoreKeeper
from pytest_megatron.gangs.ipc.channel import Channel
from pytest_megatron.gangs.ipc.messages import (
    Adopt,
    AskStacks,
    Died,
    Fork,
    Interrupt,
    Kill,
    Killed,
    Message,
    OpenStore,
    RankConfig,
    Stacks,
    StoreOpened,
)
from pytest_megatron.gangs.rank.lockstep import NOTE_BYTES, Lockstep, RankPipes, read_note
from pytest_megatron.gangs.rank.logs import FLIGHT_FILE, STACKS_FILE, file_size
from pytest_megatron.process.guard import UNKILLABLE_S, kill_descendants, send_signal
from pytest_megatron.process.tree import (
    Descendant,
    become_subreaper,
    descendants,
    fork_child,
    wake_at_death_of_parent,
)

# Starts a rank, with the pipes that it shares with the fork server; returns its process. The first
# descriptors are those that it keeps open, the second those of the fork server that it must close.
StartRank: TypeAlias = Callable[[RankConfig, RankPipes, Sequence[int], Sequence[int]], int]
STACK_SIGNAL = signal.SIGRTMIN + 9
_POLL_S = 0.02
_STACKS_S = 1.0  # for a rank to write its stack


@dataclass(slots=True)
class _Child:
    config: RankConfig
    trigger: int
    notes: int
    is_alive: bool = True
    exit_code: int = 0

    @property
    def noted(self) -> tuple[int, str]:
        """The last execution that it began, and its current phase."""
        return read_note(os.pread(self.notes, NOTE_BYTES, 0))

    def close(self, exit_code: int) -> None:
        """Note how the rank ended, and close its descriptors."""
        self.is_alive, self.exit_code = False, exit_code
        os.close(self.trigger)
        os.close(self.notes)


@dataclass(slots=True)
class _StackRequest:
    """Request for stacks that ranks are writing."""

    gang: int
    files: dict[int, Path]
    flights: dict[int, Path]
    phases: dict[str, str]
    until: float
    sizes: dict[int, int] = field(default_factory=dict)


class ForkServer:
    """Serves one connection until it closes."""

    def __init__(
        self,
        channel: Channel,
        start_rank: StartRank,
        keeper: StoreKeeper,
        parent_pipe: int | None = None,
    ) -> None:
        """Create a fork server without ranks.

        Args:
            channel: To the controller.
            start_rank: Starts the process of a rank.
            keeper: Opens stores, in a process of its own.
            parent_pipe: Read end of a pipe; the fork server also ends when its write end is closed.
        """
        self._channel = channel
        self._parent_pipe = parent_pipe
        self._start_rank = start_rank
        self._keeper = keeper
        self._children: dict[int, _Child] = {}
        self._dying: dict[int, float] = {}
        self._stores: dict[int, int] = {}
        self._own: list[int] = []
        self._stack_requests: list[_StackRequest] = []

    def serve(self) -> None:
        """Handle messages until the controller or the parent is gone, then kill everything."""
        become_subreaper()
        wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        parent = [] if self._parent_pipe is None else [self._parent_pipe]
        self._own = [wakeup, wakeup_write, *parent]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        gc.freeze()  # keep present objects shared with the ranks
        guard = os.getppid()
        wake_at_death_of_parent()
        try:
            while not self._channel.is_closed and os.getppid() == guard:
                wait_s = _POLL_S if self._dying or self._stack_requests else None
                channel = self._channel.fileno()
                readable, _, _ = select.select([channel, wakeup, *parent], [], [], wait_s)
                if self._parent_pipe in readable:
                    return
                if wakeup in readable:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wakeup, 4096)
                self._collect()
                if channel in readable:
                    self._take()
                self._finish_dying()
                self._finish_stacks()
        finally:
            kill_descendants()

    def _take(self) -> None:
        """Take all messages of the controller that have arrived."""
        while True:
            message, descriptors = self._channel.receive_with_descriptors()
            if message is not None:
                self._handle(message, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            if message is None or not self._channel.has_message:
                return

    def _handle(self, message: Message, descriptors: Sequence[int]) -> None:
        """Do what a message of the controller asks for."""
        match message:
            case Fork(configs=configs):
                self._start_gang(configs, descriptors)
            case OpenStore(gang=gang, host=host):
                self._channel.send(self._open_store(gang, host))
            case Kill(gang=gang):
                self._dying.setdefault(gang, time.monotonic() + UNKILLABLE_S)
                send_signal(self._below(gang), signal.SIGKILL)
                self._collect()
            case Adopt():
                self._adopt(message)
            case Interrupt(gang=gang):
                send_signal(self._living(gang), signal.SIGINT)
            case AskStacks(gang=gang, ranks=ranks):
                self._ask_stacks(gang, ranks)
            case _:
                raise AssertionError(f"not for a fork server: {message!r}")

    def _start_gang(self, configs: Sequence[RankConfig], descriptors: Sequence[int]) -> None:
        """Start ranks of a gang."""
        is_whole = len(configs) == configs[0].world_size
        lockstep = Lockstep(len(configs)) if is_whole else None
        for config in configs:
            self._start(config, descriptors, lockstep)
        if lockstep is not None:
            lockstep.close()

    def _start(
        self, config: RankConfig, descriptors: Sequence[int], lockstep: Lockstep | None
    ) -> None:
        """Start a rank, and keep the descriptors that reach it."""
        trigger_read, trigger = os.pipe()
        notes = os.memfd_create("notes")
        os.ftruncate(notes, NOTE_BYTES)
        others = [c for c in self._children.values() if c.is_alive]
        unwanted = [fd for child in others for fd in (child.trigger, child.notes)]
        pid = self._start_rank(
            config,
            RankPipes(trigger_read, notes, lockstep),
            descriptors,
            [*unwanted, *self._own, trigger],
        )
        os.close(trigger_read)
        self._children[pid] = _Child(config, trigger, notes)

    def _adopt(self, adopt: Adopt) -> None:
        """Assign a collector that becomes a rank to its gang."""
        for child in self._children.values():
            if (child.config.gang, child.config.rank) == (adopt.collector, adopt.rank):
                child.config = replace(
                    child.config, gang=adopt.gang, device=adopt.device, log_dir=adopt.log_dir
                )
                if not child.is_alive:
                    died = Died(gang=adopt.gang, rank=adopt.rank, exit_code=child.exit_code)
                    self._channel.send(died)

    def _collect(self) -> None:
        """Wait for processes that ended, and report ranks among them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.get(pid)
            if child is None:
                self._keeper.replace_if_ended(pid)
            elif child.is_alive:
                run, phase = child.noted
                child.close(os.waitstatus_to_exitcode(status))
                self._channel.send(
                    Died(
                        gang=child.config.gang,
                        rank=child.config.rank,
                        exit_code=child.exit_code,
                        phase=phase,
                        run=run,
                    )
                )

    def _living(self, gang: int) -> list[int]:
        return [p for p, c in self._children.items() if c.is_alive and c.config.gang == gang]

    def _below(self, gang: int, *, is_exact: bool = False) -> list[int]:
        """Return the processes of a gang: its ranks, their descendants, and orphans of these."""
        ranks = {p for p, c in self._children.items() if c.config.gang == gang}
        found: set[int] = set()
        for process in descendants(is_exact=is_exact):
            if (
                process.pid in ranks
                or process.parent in found
                or process.session in ranks
                or self._is_stray(process)
            ):
                found.add(process.pid)
        return list(found)

    def _is_stray(self, process: Descendant) -> bool:
        """Return whether a process is an orphan that cannot be attributed to a rank."""
        return (
            process.parent == os.getpid()
            and process.pid not in self._children
            and process.session not in self._children
            and process.pid != self._keeper.pid
        )

    def _open_store(self, gang: int, host: str) -> StoreOpened:
        """Open the store of a gang; return its port, or why there is none."""
        try:
            self._stores[gang] = self._keeper.open_store(host)
        except LaunchError as error:
            return StoreOpened(gang=gang, port=0, problem=str(error))
        return StoreOpened(gang=gang, port=self._stores[gang])

    def _finish_dying(self) -> None:
        """Report gangs of which nothing is left, and kill again what is."""
        for gang, until in list(self._dying.items()):
            left = self._below(gang) or self._below(gang, is_exact=True)
            if left and time.monotonic() < until:
                send_signal(left, signal.SIGKILL)
                continue
            del self._dying[gang]
            self._children = {p: c for p, c in self._children.items() if c.config.gang != gang}
            if gang in self._stores:
                self._keeper.close_store(self._stores.pop(gang))
            self._channel.send(Killed(gang=gang))

    def _ask_stacks(self, gang: int, ranks: Sequence[int]) -> None:
        """Have ranks write their stacks."""
        files: dict[int, Path] = {}
        phases: dict[str, str] = {}
        flights: dict[int, Path] = {}
        for pid in self._living(gang):
            config = self._children[pid].config
            if config.device == "cuda":  # also idle ranks: they may have missed a collective
                flights[config.rank] = Path(config.log_dir)
                with contextlib.suppress(OSError):
                    os.write(self._children[pid].trigger, b"d")
            if config.rank in ranks:
                phases[str(config.rank)] = self._children[pid].noted[1]
                files[config.rank] = Path(config.log_dir)
                send_signal([pid], STACK_SIGNAL)
                send_signal([pid], signal.SIGCONT)  # a stopped process writes nothing
        self._stack_requests.append(
            _StackRequest(gang, files, flights, phases, time.monotonic() + _STACKS_S)
        )

    def _finish_stacks(self) -> None:
        """Send stacks that are complete, or late."""
        for asked in list(self._stack_requests):
            sizes = {r: file_size(d / STACKS_FILE) for r, d in asked.files.items()}
            has_flights = all((d / FLIGHT_FILE).exists() for d in asked.flights.values())
            is_settled = sizes == asked.sizes and all(sizes.values()) and has_flights
            asked.sizes = sizes
            if not is_settled and time.monotonic() < asked.until:
                continue
            self._stack_requests.remove(asked)
            self._channel.send(
                Stacks(
                    gang=asked.gang,
                    stacks=_texts(asked.files, STACKS_FILE),
                    flights=_texts(asked.flights, FLIGHT_FILE),
                    phases=asked.phases,
                )
            )


def fork_rank(
    channel: Channel, keeper: StoreKeeper, run_rank: Callable[[RankConfig, RankPipes], NoReturn]
) -> StartRank:
    """Return a function that starts ranks by forking this process, with all that it has loaded.

    Args:
        channel: Connection of the fork server, closed in ranks.
        keeper: Keeper of the fork server, closed in ranks.
        run_rank: Runs a rank in the child.
    """

    def start(
        config: RankConfig, pipes: RankPipes, inherited: Sequence[int], unwanted: Sequence[int]
    ) -> int:
        """Fork a rank; return its process id in the parent."""
        del inherited  # a fork has them all

        def run() -> None:
            for descriptor in unwanted:
                os.close(descriptor)
            channel.close()
            keeper.forget()
            run_rank(config, pipes)

        return fork_child(run, leads_session=True)

    return start


def _texts(directories: dict[int, Path], name: str) -> dict[str, str]:
    """Return the texts of a file of each rank that has any, by rank."""
    texts = {}
    for rank, directory in directories.items():
        try:
            texts[str(rank)] = (directory / name).read_text(errors="replace")
        except OSError:
            continue
    return {rank: text for rank, text in texts.items() if text}
