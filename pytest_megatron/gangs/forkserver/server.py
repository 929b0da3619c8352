"""Agent: starts ranks, relays their messages, reports their deaths, kills all their descendants.

It is a process without work of its own, in a session of its own, which forks ranks and waits for
them. They have no connection but that to their agent, so that the controller learns of a death
after the last message of the rank, and before what others sent later. If the controller exits, even
by SIGKILL, its connection closes, and the agent kills all of its ranks.

An agent never waits until others read, and reads from ranks only what it can pass on.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, TypeAlias

from pytest_megatron.gangs.forkserver.store import StoreKeeper
from pytest_megatron.gangs.ipc.channel import OWN, BufferedChannel, Frame, Place
from pytest_megatron.gangs.ipc.messages import (
    AskStacks,
    Broken,
    Died,
    Hello,
    Interrupt,
    Kill,
    Killed,
    Message,
    RankConfig,
    Stacks,
    Start,
    decode,
)
from pytest_megatron.gangs.rank.lockstep import NOTE_BYTES, Lockstep, RankPipes, read_note
from pytest_megatron.gangs.rank.logs import FLIGHT_FILE, STACKS_FILE, file_size
from pytest_megatron.process.guard import UNKILLABLE_S, kill_descendants, send_signal
from pytest_megatron.process.tree import (
    Descendant,
    become_subreaper,
    descendants,
    fork_child,
    lives_on,
    wake_at_death_of_parent,
)

# Starts a rank, with the pipes that it shares with the agent; returns its process. The first
# descriptors are those that it keeps open, the second those of the agent that it must close.
StartRank: TypeAlias = Callable[[RankConfig, RankPipes, Sequence[int], Sequence[int]], int]
STACK_SIGNAL = signal.SIGRTMIN + 9
_POLL_S = 0.02
_STACKS_S = 1.0  # for a rank to write its stack
_CLOSED = "closed its connection to the controller"
_LOST_S = 2.0  # between looks at a rank that has closed its connection
_MOST_UNSENT = 1 << 22  # bytes for the controller; then ranks have to wait
# Frames of each rank without a word of the controller, after which ranks go on by themselves: they
# are read every so many seconds then, as waking up for each would take a core from them.
_MANY_FRAMES = 4
_PAUSE_S = 0.03


@dataclass(slots=True)
class _Child:
    config: RankConfig
    channel: BufferedChannel
    trigger: int
    notes: int
    is_alive: bool = True
    exit_code: int = 0
    frames: list[Frame] = field(default_factory=list)  # read, and not passed on yet
    look_at: float | None = None  # when to look what became of it, as it closed its connection

    @property
    def place(self) -> Place:
        """The place of its frames."""
        return self.config.gang, self.config.rank

    @property
    def noted(self) -> tuple[int, str]:
        """The last execution that it began, and its current phase."""
        return read_note(os.pread(self.notes, NOTE_BYTES, 0))

    def descriptors(self) -> list[int]:
        """Return the descriptors by which the agent reaches it."""
        return [self.channel.fileno(), self.trigger, self.notes]

    def read(self) -> None:
        """Read the frames that have arrived."""
        self.frames += self.channel.drain_frames()
        if self.channel.is_closed and self.look_at is None:
            self.look_at = time.monotonic() + _LOST_S

    def close(self, exit_code: int) -> None:
        """Note how the rank ended, and close its descriptors."""
        self.is_alive, self.exit_code = False, exit_code
        self.channel.close()
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


class Agent:
    """Serves one connection until it closes."""

    def __init__(
        self,
        channel: BufferedChannel,
        start_rank: StartRank,
        keeper: StoreKeeper,
        session_end: int | None = None,
    ) -> None:
        """Create an agent without ranks.

        Args:
            channel: To the controller.
            start_rank: Starts the process of a rank.
            keeper: Opens stores, in a process of its own.
            session_end: Descriptor; the agent also ends when it is readable.
        """
        self._channel = channel
        self._session_end = session_end
        self._start_rank = start_rank
        self._keeper = keeper
        self._children: dict[int, _Child] = {}
        self._routes: dict[Place, _Child] = {}  # to ranks of agents below this one
        self._num_relayed = 0  # frames of ranks since the last one of the controller
        self._dying: dict[int, float] = {}
        self._own: list[int] = []
        self._stack_requests: list[_StackRequest] = []

    def serve(self) -> None:
        """Handle messages until the controller or the parent is gone, then kill everything."""
        become_subreaper()
        wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        parent = [] if self._session_end is None else [self._session_end]
        self._own = [wakeup, wakeup_write, *parent]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        gc.freeze()  # keep present objects shared with the ranks
        guard = os.getppid()
        wake_at_death_of_parent()
        self._channel.send(Hello(pid=os.getpid()))
        try:
            while not self._channel.is_closed and os.getppid() == guard:
                self._channel.flush()
                ready = self._wait([wakeup, *parent])
                if self._session_end in ready:
                    return
                if wakeup in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wakeup, 4096)
                self._relay(ready)
                if self._channel.fileno() in ready:
                    self._take()
                self._finish_dying()
                self._finish_stacks()
                self._find_lost()
        finally:
            kill_descendants()

    def _wait(self, own: Sequence[int]) -> set[int]:
        """Wait for something to do; return the descriptors that are ready."""
        poll = select.poll()
        for descriptor in own:
            poll.register(descriptor, select.POLLIN)
        channel = self._channel
        poll.register(channel, select.POLLIN | select.POLLOUT * bool(channel.num_unsent))
        open_ones = [c for c in self._children.values() if c.is_alive and c.look_at is None]
        is_calm = self._num_relayed > _MANY_FRAMES * len(open_ones)
        is_read = not is_calm and channel.num_unsent < _MOST_UNSENT
        for child in open_ones:
            child.channel.flush()
            events = select.POLLIN * is_read | select.POLLOUT * bool(child.channel.num_unsent)
            if events:
                poll.register(child.channel, events)
        found = poll.poll(self._wait_ms(is_calm=is_calm))
        ready = {descriptor for descriptor, _ in found}
        if is_calm and channel.num_unsent < _MOST_UNSENT:
            ready |= {child.channel.fileno() for child in open_ones}
        return ready

    def _wait_ms(self, *, is_calm: bool) -> float | None:
        """Return how long to wait at most."""
        if self._dying or self._stack_requests:
            return _POLL_S * 1000
        if is_calm:
            return _PAUSE_S * 1000
        are_lost = any(c.is_alive and c.look_at is not None for c in self._children.values())
        return _LOST_S * 1000 if are_lost else None

    def _relay(self, ready: set[int]) -> None:
        """Pass on what ranks have sent, in an order in which it may have happened.

        A rank that had died before another one sent something is reported before that.
        """
        senders = [c for c in self._children.values() if c.is_alive and c.channel.fileno() in ready]
        for child in senders:
            child.read()
        if not any(child.frames for child in senders):
            self._num_relayed = 0
        self._collect()
        for child in senders:
            self._pass_on(child)

    def _pass_on(self, child: _Child) -> None:
        """Pass the frames of a rank on to the controller."""
        frames, child.frames = child.frames, []
        self._num_relayed += len(frames)
        self._routes |= dict.fromkeys((f.place for f in frames if f.place != OWN), child)
        self._channel.send_frames(
            frame.at(child.place) if frame.place == OWN else frame for frame in frames
        )

    def _find_lost(self) -> None:
        """Report ranks that have closed their connection, and have not died of it."""
        now = time.monotonic()
        for pid, child in self._children.items():
            if child.is_alive and child.look_at is not None and now >= child.look_at:
                child.look_at = now + _LOST_S
                if lives_on(pid):
                    self._channel.send(Broken(problem=_CLOSED), place=child.place)
                    child.look_at = float("inf")

    def _take(self) -> None:
        """Take all frames of the controller that have arrived."""
        self._num_relayed = 0
        for frame in self._channel.drain_frames(takes_descriptors=True):
            children = [c for c in self._children.values() if c.is_alive and c.place == frame.place]
            descriptors = list(frame.descriptors)
            if frame.place == OWN:
                self._handle(decode(frame.content), descriptors)
            elif children:
                children[0].channel.send_frames([frame.at(OWN)])
            elif (child := self._routes.get(frame.place)) is not None:
                child.channel.send_frames([frame])
            for descriptor in descriptors:
                os.close(descriptor)

    def _handle(self, message: Message, descriptors: list[int]) -> None:
        """Do what a message of the controller asks for; those it keeps leave the descriptors."""
        match message:
            case Start(adopted=number) if number:
                self._adopt(message, descriptors)
            case Start(gang=gang, configs=configs, has_store=has_store):
                if has_store:  # kept, and not for ranks: these would hold the port as well
                    listening = socket.socket(fileno=descriptors.pop(0))
                    self._keeper.open_store(gang, listening)
                self._start_gang(configs, descriptors)
            case Kill(gang=gang):
                self._dying.setdefault(gang, time.monotonic() + UNKILLABLE_S)
                send_signal(self._below(gang), signal.SIGKILL)
                self._collect()
            case Interrupt(gang=gang):
                send_signal(self._living(gang), signal.SIGINT)
            case AskStacks(gang=gang, ranks=ranks):
                self._ask_stacks(gang, ranks)
            case _:
                raise AssertionError(f"not for an agent: {message!r}")

    def _start_gang(self, configs: Sequence[RankConfig], descriptors: Sequence[int]) -> None:
        """Start ranks of a gang."""
        is_whole = len(configs) == (configs[0].world_size if configs else None)
        lockstep = Lockstep(len(configs)) if is_whole else None
        for config in configs:
            self._start(config, descriptors, lockstep)
        if lockstep is not None:
            lockstep.close()

    def _start(
        self, config: RankConfig, descriptors: Sequence[int], lockstep: Lockstep | None
    ) -> None:
        """Start a rank, and keep the descriptors that reach it."""
        ours, theirs = socket.socketpair()
        connection = theirs.detach()
        trigger_read, trigger = os.pipe()
        notes = os.memfd_create("notes")
        os.ftruncate(notes, NOTE_BYTES)
        child = _Child(config, BufferedChannel(ours), trigger, notes)
        others = [c for c in self._children.values() if c.is_alive]
        unwanted = [fd for other in others for fd in other.descriptors()]
        pid = self._start_rank(
            config,
            RankPipes(connection, trigger_read, notes, lockstep),
            descriptors,
            [*unwanted, *self._own, ours.fileno(), trigger],
        )
        os.close(connection)
        os.close(trigger_read)
        self._children[pid] = child

    def _adopt(self, start: Start, descriptors: Sequence[int]) -> None:
        """Make ranks of a gang of processes that have collected outside any gang."""
        for config in start.configs:
            for child in self._children.values():
                if child.place == (start.adopted, config.rank):
                    child.config = config
                    if child.is_alive:
                        child.channel.send(replace(start, configs=(config,)), descriptors)
                    else:
                        self._report_death(child, "", 0)

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
                self._keeper.note_end(pid)
            elif child.is_alive:
                run, phase = child.noted
                child.read()
                self._pass_on(child)
                child.close(os.waitstatus_to_exitcode(status))
                self._report_death(child, phase, run)

    def _report_death(self, child: _Child, phase: str, run: int) -> None:
        gang, rank = child.place
        died = Died(gang=gang, rank=rank, exit_code=child.exit_code, phase=phase, run=run)
        self._channel.send(died)

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

    def _finish_dying(self) -> None:
        """Report gangs of which nothing is left, and kill again what is."""
        for gang, until in list(self._dying.items()):
            left = self._below(gang) or self._below(gang, is_exact=True)
            if left and time.monotonic() < until:
                send_signal(left, signal.SIGKILL)
                continue
            self._collect()  # those that died since: no death is told after this
            del self._dying[gang]
            self._children = {p: c for p, c in self._children.items() if c.config.gang != gang}
            self._keeper.close_store(gang)
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
    channel: BufferedChannel,
    keeper: StoreKeeper,
    run_rank: Callable[[RankConfig, RankPipes], NoReturn],
) -> StartRank:
    """Return a function that starts ranks by forking this process, with all that it has loaded.

    Args:
        channel: Connection of the agent, closed in ranks.
        keeper: Keeper of the agent, closed in ranks.
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
