"""The program of a phase on all tasks of a job: task 0, and the participants beside it.

To task 0 the program is one thing that runs and ends. Every task runs its own command, which writes
its own logs; they tell each other by files. What the commands print becomes the phase's
`launcher.log`. The first command that fails ends the others after a grace. A task that is killed
ends the others by `srun --kill-on-bad-exit`.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from typing_extensions import override

from pytest_megatron.base.text import counted, grouped, name_ranks
from pytest_megatron.engines.multitask.messages import LOOK_S, Begin, Finished, Join, Meeting, Turn
from pytest_megatron.engines.multitask.topology import (
    TaskPlace,
    find_address,
    gloo_network,
    own_address,
)
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.health import Health, HealthWatch
from pytest_megatron.process.guarded import CommandEnd, GuardedProcess, RunningCommand
from pytest_megatron.workloads.engine.api import EngineError, TroubleKind
from pytest_megatron.workloads.training.plan.plan import inherited
from pytest_megatron.workloads.training.run.node_agents import GRACE_S, over_all_nodes
from pytest_megatron.workloads.training.run.runner import STOP_GRACE_S, FollowedFile

_POLL_S = 0.05
_OVER = "over"


class TaskCommand:
    """The command of this task; as a context manager it never leaves a process behind."""

    def __init__(self, begin: Begin, env: Mapping[str, str]) -> None:
        """Start the command.

        Args:
            begin: What task 0 wants.
            env: The task's own environment, below.
        """
        self._begin = begin
        self._process: GuardedProcess | None = None
        self._finished: Finished | None = None
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
            self._finished = Finished(returncode=None, problem=str(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.__exit__(*error)
            self._process = None

    def poll(self, timeout_s: float) -> Finished | None:
        """Return how the command ended, or None if it runs for `timeout_s` more seconds."""
        if self._finished is None and self._process is not None:
            try:
                ended = self._process.poll(timeout_s)
            except LaunchError as error:
                self._finished = Finished(returncode=None, problem=str(error))
            else:
                if ended is not None:
                    self._finished = Finished(
                        returncode=ended.returncode,
                        at=time.time(),
                        pid=ended.pid,
                        num_left=ended.num_left,
                    )
        return self._finished

    def stop(self) -> None:
        """Ask the command to end; after its grace it is killed."""
        if self._process is not None:
            self._process.stop()

    def dump_stacks(self) -> None:
        """Abort the ranks; with faulthandler on, each prints its stacks."""
        if self._process is not None:
            self._process.dump_stacks(of_all=self._begin.is_rank)


def task_env(begin: Begin, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command: the task's own, with the variables of task 0."""
    kept = {name: value for name, value in inherited(env).items() if name not in begin.unset}
    own = {} if not begin.head else gloo_network(own_address(begin.head), env)
    return {**begin.defaults, **own, **kept, **begin.env}


class Participant:
    """Runs one command after the other for task 0."""

    def __init__(
        self, meeting: Meeting, task: int, env: Mapping[str, str], watch: HealthWatch
    ) -> None:
        self._meeting = meeting
        self._task = task
        self._env = env
        self._watch = watch
        self._told = False

    def run(self) -> int:
        """Serve until task 0 is done or gone; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        for turn in itertools.count(1):
            begins = self._wait_for(turn)
            if begins is None:
                break
            if self._task in begins:
                self._carry_out(turn, begins[self._task])
        with contextlib.suppress(OSError):  # nobody waits for it any more
            if (health := self._watch.finish()) is not None:
                self._meeting.leave(f"health-{self._task}", health)
        return int(self._told)

    def _wait_for(self, turn: int) -> dict[int, Begin] | None:
        """Return the commands of a phase; None where there is none any more."""
        while not self._told:
            names = self._meeting.names()
            if _OVER in names or not names:
                return None
            found = self._meeting.read(f"turn-{turn}", Turn) if f"turn-{turn}" in names else None
            if found is not None:
                return found.begins
            time.sleep(LOOK_S)
        return None

    def _carry_out(self, turn: int, begin: Begin) -> None:
        """Run a command to its end, or until task 0 wants it stopped, or is gone."""
        done: set[str] = set()
        with TaskCommand(begin, self._env) as command:
            while (finished := command.poll(LOOK_S)) is None:
                names = self._meeting.names()
                if f"stacks-{turn}" in names and "stacks" not in done:
                    done.add("stacks")
                    command.dump_stacks()
                is_unwanted = f"stop-{turn}" in names or _OVER in names or not names or self._told
                if is_unwanted and "stop" not in done:
                    done.add("stop")
                    command.stop()
        with contextlib.suppress(OSError):
            self._meeting.leave(f"end-{turn}-{self._task}", finished)

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal to this task, for task 0 as well: others may have been lost."""
        self._told = True
        with contextlib.suppress(OSError):
            self._meeting.leave(f"told-{self._task}", signal.Signals(number).name)


_TOLD_S = 1.0  # for tasks to say that they were told to end; Slurm kills them soon
_FAREWELL_S = 30.0  # for GPUs to say how they are; one that is lost may take 20 s


class MissingTasksError(Exception):
    """Tasks did not come."""

    def __init__(self, trouble: EngineError) -> None:
        super().__init__(trouble)
        self.trouble = trouble


class Team:
    """All tasks of a step, seen from task 0; as a context manager it ends the others.

    Attributes:
        members: By task, task 0 among them.
        lost: Task to what is known of its end, in the order in which that was noticed.
        healths: Health of the nodes' GPUs when the attempt was over.
    """

    def __init__(self, place: TaskPlace, own: Join, meeting: Meeting) -> None:
        self.place = place
        self.members = {own.task: own}
        self.lost: dict[int, EngineError] = {}
        self.healths: list[Health] = []
        self.meeting = meeting
        self.num_turns = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.meeting.close()

    def gather(self, limit_s: float) -> None:
        """Wait for all other tasks.

        Args:
            limit_s: How long after this one the last may start.

        Raises:
            MissingTasksError: Tasks did not come in time.
        """
        give_up_at = time.monotonic() + limit_s
        while len(self.members) < self.place.num_tasks and time.monotonic() < give_up_at:
            for name in self.meeting.names():
                if name.startswith("here-") and (found := self.meeting.read(name, Join)):
                    self.members[found.task] = found
            if len(self.members) < self.place.num_tasks:
                time.sleep(LOOK_S)
        missing = self._missing()
        if missing:
            text = (
                f"{', '.join(missing.values())} did not come to task 0 within {limit_s:g} s; see "
                f"the log of the job for how the container or the interpreter starts there"
            )
            raise MissingTasksError(
                EngineError(kind=TroubleKind.BOOT_FAIL, text=text, hosts=tuple(missing))
            )

    def address(self) -> str:
        """Return the address of node 0 for the others."""
        if len(self.place.hosts) == 1:
            return "127.0.0.1"
        far_first = sorted(self.members.values(), key=lambda member: member.node == 0)
        return find_address(self.place.hosts[0], [member.launched_from for member in far_first])

    def name(self, tasks: Iterable[int]) -> str:
        """Return `task 2 on node1` or `tasks 2-3 on node1`; of several nodes, all of them."""
        by_host = grouped((self.members[task].host, task) for task in sorted(tasks))
        found = [f"{name_ranks(tasks, 'task')} on {host}" for host, tasks in by_host.items()]
        return ", ".join(found)

    def lose(self, task: int, why: str, kind: TroubleKind = TroubleKind.LOST) -> None:
        """Note that a task ends, or has ended, by itself."""
        hosts = (self.members[task].host,)
        trouble = EngineError(kind=kind, text=f"{self.name([task])} {why}", hosts=hosts)
        self.lost.setdefault(task, trouble)

    def note_told(self, names: Iterable[str]) -> None:
        """Note the tasks that were told to end."""
        told = {name for name in names if name.startswith("told-")}
        for task in self.members:
            if f"told-{task}" in told and task not in self.lost:
                word = self.meeting.read(f"told-{task}", str) or "a signal"
                self.lose(task, f"was told to end by {word}", TroubleKind.CANCELLED)

    def find_lost(self) -> EngineError | None:
        """Return which task was lost, as task 0 was told to end.

        Where all are told, the job ends; where srun ends a step since one of its tasks is gone,
        that one says nothing.
        """
        give_up_at = time.monotonic() + _TOLD_S
        others = self.members.keys() - {self.place.task}
        while True:
            names = self.meeting.names()
            silent = sorted(task for task in others if f"told-{task}" not in names)
            if not silent or time.monotonic() >= give_up_at:
                break
            time.sleep(_POLL_S)
        for task in silent:
            self.lose(task, "was lost: it was killed, or its node is gone")
        return self.trouble()

    def trouble(self) -> EngineError | None:
        """Return what happened to the first task that was lost, or None."""
        return next(iter(self.lost.values()), None)

    def say_goodbye(self) -> None:
        """Have every other task end, and collect the health of their GPUs."""
        self.meeting.leave(_OVER)
        awaited = {
            task
            for task, member in self.members.items()
            if member.has_gpus and task not in (self.place.task, *self.lost)
        }
        give_up_at = time.monotonic() + _FAREWELL_S
        while awaited and time.monotonic() < give_up_at:
            for task in [t for t in awaited if f"health-{t}" in self.meeting.names()]:
                awaited.discard(task)
                found = self.meeting.read(f"health-{task}", Health)
                self.healths += [] if found is None else [found]
            time.sleep(LOOK_S if awaited else 0.0)

    def _missing(self) -> dict[str, str]:
        """Return how many tasks have not come, by host."""
        place, there = self.place, Counter(member.node for member in self.members.values())
        return {
            host: f"{wanted - there[node]} of {counted(wanted, 'task')} on {host}"
            for node, (host, wanted) in enumerate(zip(place.hosts, place.on_nodes, strict=True))
            if there[node] < wanted
        }


_WIDTH = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """End of one rank that failed.

    Attributes:
        returncode: Return code, in the form of `Popen.returncode`.
        time_s: When it ended, since the epoch.
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


_RANK_GRACE_S = 3.0  # for other ranks to say why they fail, where no launcher ends them
_GONE_S = 15.0  # beyond the grace of a stop, for what a task cannot end


class TeamProcess(RunningCommand):
    """The commands of one phase on all tasks; nothing of them outlives the context."""

    def __init__(
        self,
        team: Team,
        begins: Mapping[int, Begin],
        log: Path,
        env: Mapping[str, str],
        *,
        per_node: int,
    ) -> None:
        """Start the commands of one phase on all tasks.

        Args:
            team: The tasks.
            begins: What each of them runs.
            log: The phase's launcher.log.
            env: Environment of task 0 itself.
            per_node: Ranks of a node.

        Raises:
            LaunchError: The log cannot be written.
        """
        self._team = team
        self._per_node = per_node
        self._begins = begins
        self._started = time.monotonic()
        self._finished: dict[int, Finished] = {}
        self._noted: set[int] = set()  # of tasks that were lost
        self._exits: list[RankExit] = []
        self._first_code: int | None = None
        self._is_told = self._has_failed_untold = False
        self._stop_at = self._lose_at = self._say_at = float("inf")
        self._look_at = 0.0
        self._ended: CommandEnd | None = None
        team.num_turns += 1
        self._turn = team.num_turns
        self._followed = {
            task: [FollowedFile(path) for path in (begin.output, begin.errors) if path is not None]
            for task, begin in begins.items()
            if begin.is_copied
        }
        try:
            self._log = log.open("wb")
            team.meeting.leave(f"turn-{self._turn}", Turn(begins=dict(begins)))
        except OSError as error:
            where = error.filename or log
            raise LaunchError(str(where), f"{error.strerror}; nothing was run") from error
        own = begins.get(team.place.task)
        self._work = None if own is None else TaskCommand(own, env)

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(self, *error: object) -> None:
        try:
            if self._ended is None:
                self.stop()
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
        self._leave("stop")
        if self._work is not None:
            self._work.stop()
        self._lose_at = min(self._lose_at, time.monotonic() + STOP_GRACE_S + _GONE_S)

    @override
    def dump_stacks(self) -> None:
        """Abort every rank of every node; with faulthandler on, each prints its stacks."""
        self._is_told = True
        self._leave("stacks")
        if self._work is not None:
            self._work.dump_stacks()

    def _leave(self, order: str) -> None:
        with contextlib.suppress(OSError):  # a full disk; the directory goes at the end at least
            self._team.meeting.leave(f"{order}-{self._turn}")

    def _running(self) -> list[int]:
        lost = self._team.lost
        return [task for task in self._begins if task not in self._finished and task not in lost]

    def _take_in(self, timeout_s: float) -> None:
        """Note what is new of all tasks, this one included."""
        own = self._team.place.task
        if self._work is None or own in self._finished:
            time.sleep(timeout_s)
        elif (finished := self._work.poll(timeout_s)) is not None:
            self._note_end(own, finished)
        if time.monotonic() >= self._look_at:
            names = self._team.meeting.names()
            for task in self._running():
                name = f"end-{self._turn}-{task}"
                found = self._team.meeting.read(name, Finished) if name in names else None
                if found is not None:
                    self._note_end(task, found)
            self._team.note_told(names)
            self._look_at = time.monotonic() + LOOK_S
        for task in self._followed:
            self._copy(task)

    def _copy(self, task: int, *, is_ended: bool = False) -> None:
        """Copy new lines of a task to the log with ranks as they are over all nodes."""
        begin, node = self._begins[task], self._team.members[task].node
        for file in self._followed.get(task, ()):
            lines = list(file.new_lines())
            while is_ended and (more := list(file.new_lines())):
                lines += more
            if is_ended and (last := file.last_line()):
                lines.append(last)
            for text in lines:
                if begin.is_rank:
                    self._log.write(f"[default{begin.env['RANK']}]:{text}\n".encode())
                else:
                    self._log.write(over_all_nodes(text.encode() + b"\n", node, self._per_node))
        self._log.flush()

    def _note_end(self, task: int, finished: Finished) -> None:
        """Note how a command ended; the first that fails ends the others after a grace."""
        self._finished[task] = finished
        begin, member = self._begins[task], self._team.members[task]
        self._copy(task, is_ended=True)
        self._followed.pop(task, None)
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
            time_s=finished.at,
        )
        if not self._exits and not self._is_told:
            self._say_at = time.monotonic() + 2 * LOOK_S  # others may have failed before
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
        if now_s >= self._say_at or (not running and self._say_at < float("inf")):
            self._say(first_line(min(self._exits, key=lambda found: found.time_s)))
            self._say_at = float("inf")
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
            exits = sorted(self._exits, key=lambda found: found.time_s)
            for line in format_table(_shown(program), exits):
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
