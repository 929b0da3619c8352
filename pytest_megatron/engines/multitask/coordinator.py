"""The program of a phase on all tasks of a job: task 0, and the participants that it orders.

To task 0 the program is one thing that runs and ends. Its own command runs beside it, those of the
other tasks where they are; what all of them print becomes
the phase's `launcher.log`. The first command that fails ends the others after a grace.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Self

from typing_extensions import override

from pytest_megatron.base.text import counted, grouped, name_ranks
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
from pytest_megatron.engines.multitask.topology import TaskPlace, is_loopback
from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.ipc.channel import Channel
from pytest_megatron.gpu.health import Health, HealthWatch
from pytest_megatron.process.guarded import CommandEnd, GuardedProcess, RunningCommand
from pytest_megatron.workloads.engine.api import EngineError, TroubleKind
from pytest_megatron.workloads.training.plan.plan import inherited
from pytest_megatron.workloads.training.run.node_agents import GRACE_S, over_all_nodes
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


_FAREWELL_S = 30.0  # for GPUs to say how they are; one that is lost may take 20 s


class Peers:
    """All tasks of a step, seen from task 0.

    Attributes:
        members: By task, task 0 among them.
        lost: Task to what is known of its end, in the order in which that was noticed.
        healths: Health of the nodes' GPUs when the attempt was over.
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
        """True if there is no other task."""
        return self.place.num_tasks == 1

    @property
    def address(self) -> str:
        """Address of node 0 for the others: as most reached it, and not loopback if one did not.

        What a host calls itself may be its loopback; what others reached it by is not.
        """
        seen = Counter(m.seen_at for m in self.members.values() if m.seen_at)
        far = Counter({host: count for host, count in seen.items() if not is_loopback(host)})
        found = (far or seen).most_common(1)
        return found[0][0] if found else "127.0.0.1"

    def add(self, channel: Channel, member: Join) -> None:
        """Add the connection of a task."""
        self.members[member.task] = replace(member, seen_at=channel.own_host)
        self._channels[member.task] = channel
        self._selector.register(channel.fileno(), selectors.EVENT_READ, member.task)

    def name(self, tasks: Iterable[int]) -> str:
        """Return `task 2 on node1` or `tasks 2-3 on node1`; of several nodes, all of them."""
        by_host = grouped((self.members[task].host, task) for task in sorted(tasks))
        found = [f"{name_ranks(tasks, 'task')} on {host}" for host, tasks in by_host.items()]
        return ", ".join(found)

    def send(self, task: int, message: Message) -> None:
        """Tell another task something; one that is lost hears nothing."""
        channel = self._channels.get(task)
        if channel is not None:
            channel.send_frame(encode(message))

    def receive(self, timeout_s: float) -> list[tuple[int, Message]]:
        """Return messages of other tasks, waiting for a first one; note tasks that are lost."""
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
        """Close the connection to a task."""
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
        """Have every other task end, and collect the health of their GPUs."""
        for task in self._channels:
            self.send(task, Goodbye())
        give_up_at = time.monotonic() + _FAREWELL_S
        while self._channels and time.monotonic() < give_up_at:
            for _, message in self.receive(give_up_at - time.monotonic()):
                if isinstance(message, LeaveAck):
                    self.healths += [] if message.health is None else [message.health]

    def close(self) -> None:
        """Close all connections: a task that got no goodbye ends its command."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._selector.close()


_WIDTH = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """End of one rank that failed.

    Attributes:
        returncode: Return code, in the form of `Popen.returncode`.
        time_s: When it was noticed, since the epoch.
    """

    rank: int
    local_rank: int
    host: str
    returncode: int
    pid: int
    time_s: float


def first_line(first: RankExit) -> str:
    """Return the message about the first rank that failed."""
    return (
        f"failed (exitcode: {first.returncode}) local_rank: {first.rank} (pid: {first.pid}) "
        f"of {first.host}"
    )


def format_table(program: str, exits: Sequence[RankExit]) -> list[str]:
    """Return the lines of the table; the first of the ranks is its root cause."""
    first, *others = exits
    rows = [line for number, e in enumerate(others, start=1) for line in _row(number, e)]
    return [
        "=" * _WIDTH,
        f"{program} FAILED",
        "-" * _WIDTH,
        "Failures:",
        *(rows or ["  <NO_OTHER_FAILURES>"]),
        "-" * _WIDTH,
        "Root Cause (first observed failure):",
        *_row(0, first),
        "=" * _WIDTH,
    ]


def _row(number: int, found: RankExit) -> list[str]:
    """Return the lines of one rank in the table of failures."""
    when = time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(found.time_s))
    return [
        f"[{number}]:",
        f"  time      : {when}",
        f"  host      : {found.host}",
        f"  rank      : {found.rank} (local_rank: {found.local_rank})",
        f"  exitcode  : {found.returncode} (pid: {found.pid})",
        "  error_file: <N/A>",
        f"  traceback : {_traceback(found)}",
    ]


def _traceback(found: RankExit) -> str:
    """Describe the end of a rank as torch's table of failures does."""
    if found.returncode >= 0:
        return "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    try:
        name = signal.Signals(-found.returncode).name
    except ValueError:
        name = "unknown"
    return f"Signal {-found.returncode} ({name}) received by PID {found.pid}"


_POLL_S = 0.05
_RANK_GRACE_S = 3.0  # for other ranks to say why they fail, where no launcher ends them
_GONE_S = 15.0  # beyond the grace of a stop, for what a task cannot end


class TeamProcess(RunningCommand):
    """The commands of one phase on all tasks; nothing of them outlives the context."""

    def __init__(
        self,
        peers: Peers,
        begins: Mapping[int, Begin],
        log: Path,
        env: Mapping[str, str],
        *,
        per_node: int,
    ) -> None:
        """Start the commands of one phase on all tasks.

        Args:
            peers: The tasks.
            begins: What each of them runs.
            log: The phase's launcher.log.
            env: Environment of task 0 itself.
            per_node: Ranks of a node.

        Raises:
            LaunchError: The log cannot be written.
        """
        self._team = peers
        self._per_node = per_node
        self._begins = begins
        self._started = time.monotonic()
        self._finished: dict[int, Finished] = {}
        self._noted: set[int] = set()  # of tasks that were lost
        self._exits: list[RankExit] = []
        self._first_code: int | None = None
        self._is_told = self._has_failed_untold = False
        self._stop_at = self._lose_at = float("inf")
        self._ended: CommandEnd | None = None
        try:
            self._log = log.open("wb")
        except OSError as error:
            raise LaunchError(str(log), f"{error.strerror}; nothing was run") from error
        for task, begin in begins.items():
            peers.send(task, begin)
        own = begins.get(peers.place.task)
        self._work = None if own is None else TaskCommand(own, env)

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(self, *error: object) -> None:
        try:
            if self._ended is None:
                self.stop()
                with contextlib.suppress(LaunchError):
                    self.wait()
        finally:
            if self._work is not None:
                self._work.__exit__(*error)
            self._log.close()
        for task, begin in self._begins.items():
            if task in self._finished and not begin.is_rank:  # all of it is in the log
                begin.output.unlink(missing_ok=True)

    @override
    def poll(self, timeout_s: float) -> CommandEnd | None:
        """Return how all of it ended, or None if some of it runs for `timeout_s` more seconds.

        Raises:
            LaunchError: A command could not be started on its node.
        """
        give_up_at = time.monotonic() + timeout_s
        while self._ended is None:
            left_s = give_up_at - time.monotonic()
            self._take_in(min(_POLL_S, max(0.0, left_s)))
            self._act(time.monotonic())
            if left_s <= 0:
                break
        return self._ended

    @override
    def wait(self) -> CommandEnd:
        """Wait for the end; tasks that do not answer any more do not delay it for ever."""
        while (ended := self.poll(1.0)) is None:
            pass
        return ended

    @override
    def stop(self) -> None:
        """Tell every command to end; after its grace it is killed."""
        self._is_told = True
        self._tell_all("stop")
        self._lose_at = min(self._lose_at, time.monotonic() + STOP_GRACE_S + _GONE_S)

    @override
    def dump_stacks(self) -> None:
        """Abort every rank of every node; with faulthandler on, each prints its stacks."""
        self._is_told = True
        self._tell_all("stacks")

    def _tell_all(self, order: OrderWord) -> None:
        """Pass a request to all tasks that run a command."""
        for task in self._running():
            self._team.send(task, Tell(order=order))
            if task == self._team.place.task and self._work is not None:
                self._work.tell(order)

    def _running(self) -> list[int]:
        lost = self._team.lost
        return [task for task in self._begins if task not in self._finished and task not in lost]

    def _take_in(self, timeout_s: float) -> None:
        """Handle messages of tasks, this one included."""
        for task, message in self._team.receive(timeout_s):
            self._hear(task, message)
        for message in [] if self._work is None else self._work.poll():
            self._hear(self._team.place.task, message)

    def _hear(self, task: int, message: Message) -> None:
        """Take a message of a task: its output, or the end of its command."""
        begin = self._begins.get(task)
        match message:
            case Lines() if begin is not None and message.number == begin.number:
                self._write(task, begin, message.text)
            case Finished() if message.told:
                self._team.lose(task, f"was told to end by {message.told}", TroubleKind.CANCELLED)
            case Finished() if begin is not None and message.number == begin.number:
                self._finished[task] = message
                self._note_end(task, begin, message)
            case _:  # of a phase that is over
                pass

    def _write(self, task: int, begin: Begin, lines: Iterable[str]) -> None:
        """Copy lines to the log with ranks as they are over all nodes."""
        node, per_node = self._team.members[task].node, self._per_node
        for text in lines:
            if begin.is_rank:
                self._log.write(f"[default{begin.env['RANK']}]:{text}\n".encode())
            else:
                self._log.write(over_all_nodes(text.encode() + b"\n", node, per_node))
        self._log.flush()

    def _note_end(self, task: int, begin: Begin, finished: Finished) -> None:
        """Note how a command ended; the first that fails ends the others after a grace."""
        member = self._team.members[task]
        if finished.returncode is None:
            raise LaunchError(self._team.name([task]), finished.problem)
        if finished.returncode == 0:
            return
        if not begin.is_rank:
            self._fail(finished.returncode)
            self._say(
                f"node {member.node} ({member.host}) ended with exit code {finished.returncode}"
            )
            return
        found = RankExit(
            rank=int(begin.env["RANK"]),
            local_rank=member.local,
            host=member.host,
            returncode=finished.returncode,
            pid=finished.pid,
            time_s=time.time(),
        )
        if not self._exits and not self._is_told:
            self._say(first_line(found))
        self._exits.append(found)
        self._fail(1)

    def _fail(self, code: int) -> None:
        """Note the first exit code that is none of success; others may end by themselves."""
        if self._first_code is None:
            self._first_code = code
            self._has_failed_untold = not self._is_told
            are_ranks = any(begin.is_rank for begin in self._begins.values())
            grace_s = _RANK_GRACE_S if are_ranks else GRACE_S
            self._stop_at = time.monotonic() + grace_s

    def _act(self, now_s: float) -> None:
        """End the phase, note lost tasks, or stop commands whose time is over."""
        for task in self._team.lost.keys() & self._begins.keys() - self._noted:
            self._noted.add(task)
            self._say(self._team.lost[task].text)
            if task not in self._finished:  # what it lost, nobody needs to explain
                self._fail(1)
                self._stop_at = min(self._stop_at, now_s)
        running = self._running()
        if not running:
            self._end()
        elif now_s >= self._stop_at and not self._is_told:
            self._say(f"{self._team.name(running)} did not end by itself and is stopped")
            self.stop()
        elif now_s >= self._lose_at:
            for task in running:
                self._team.lose(task, "did not end although it was told to")

    def _end(self) -> None:
        """End the phase: print the table of failures, and note the exit code."""
        if self._exits and self._has_failed_untold:
            program = next(iter(self._begins.values())).argv
            for line in format_table(_shown(program), self._exits):
                self._say(line)
        code = self._first_code or 0
        self._ended = CommandEnd(
            returncode=max(code, 0) or int(code != 0),  # a launcher that was killed has a negative
            num_left=sum(end.num_left for end in self._finished.values()),
            duration_s=time.monotonic() - self._started,
        )

    def _say(self, text: str) -> None:
        self._log.write(f"[nodes]: {text}\n".encode())
        self._log.flush()


def _shown(argv: Sequence[str]) -> str:
    """Return the program of a rank's command."""
    return next((word for word in argv[1:] if not word.startswith("-")), argv[0])
