"""Step of a job with several tasks: task 0 carries out the spec, the others run their part.

Every task runs its own command, a launcher of ranks or a rank, which writes its own logs. Task 0
leaves what is to be run as a file in the run directory, and each task how its command ended. `srun`
ends the step if a task is killed or its node is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TypeVar

from typing_extensions import override

from pytest_megatron.base.files import read_bytes, write_bytes_atomically
from pytest_megatron.base.schema import SchemaError, adapter, parse
from pytest_megatron.base.text import counted
from pytest_megatron.engines.config import LaunchMode, SlurmConfig
from pytest_megatron.engines.multitask.topology import TaskPlace, find_endpoint, find_place
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.health import Health, HealthWatch
from pytest_megatron.gpu.host import Gpu
from pytest_megatron.process.guarded import CommandEnd, GuardedProcess, RunningCommand
from pytest_megatron.workloads.engine.records import JobSpec
from pytest_megatron.workloads.recipe.case import Launcher
from pytest_megatron.workloads.training.plan.plan import PhasePlan, Ranks, inherited
from pytest_megatron.workloads.training.run.node_agents import (
    GRACE_S,
    node_command,
    over_all_nodes,
)
from pytest_megatron.workloads.training.run.runner import STOP_GRACE_S, FollowedFile

MODE, PORTS = "mode", "ports"  # of `Spec.options`
# What torch.distributed.run gives ranks whose environment has none of it.
_RANK_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
_RANK_LOGS = Path("srun_native", "attempt_0")  # as torch.distributed.run has it, with its run id
_LOOK_S = 0.2  # between two looks at the files of other tasks
_RANK_GRACE_S = 3.0  # for other ranks to say why they fail, where no launcher ends them
_GONE_S = 30.0  # beyond the grace of a stop, for what a task cannot end, and for its GPUs
_LOST = -9
_OVER = "over"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What all tasks run of a phase.

    Attributes:
        mode: Who starts the ranks.
        phase: The phase; `env` has what differs from the environment of task 0.
        unset: Variables of the job that are not passed on.
        endpoint: Where the ranks meet.
    """

    mode: LaunchMode
    phase: PhasePlan
    unset: tuple[str, ...]
    cwd: Path
    endpoint: tuple[str, int]

    @property
    def ranks(self) -> Ranks:
        """The ranks of the phase."""
        assert self.phase.start is not None
        return self.phase.start.ranks

    @property
    def are_ranks(self) -> bool:
        """True if the commands are ranks and no launchers of them."""
        return self.mode is LaunchMode.SRUN_NATIVE

    @property
    def per_node(self) -> int:
        """Commands of a node."""
        return self.ranks.per_node if self.are_ranks else 1

    @property
    def num_commands(self) -> int:
        """Commands over all nodes, numbered from node to node: ranks, or nodes."""
        return self.per_node * self.ranks.num_nodes

    def logs(self, number: int) -> tuple[Path, ...]:
        """Return the files for what a command prints: one for stdout and stderr, or each."""
        if not self.are_ranks:
            return (self.phase.dirs.root / f"launcher.node{number}.log",)
        directory = self.phase.dirs.logs / _RANK_LOGS / str(number)
        return directory / "stdout.log", directory / "stderr.log"

    def command(
        self, place: TaskPlace, env: Mapping[str, str]
    ) -> tuple[Sequence[str], dict[str, str]]:
        """Return what a task runs, and its environment: the task's own under that of the phase.

        A task that sees one GPU of several uses that one: its LOCAL_RANK is 0, since programs
        choose their device by it.

        Source: torch.distributed.run's worker environment.
        """
        start, ranks, (host, port) = self.phase.start, self.ranks, self.endpoint
        assert start is not None
        kept = {name: value for name, value in inherited(env).items() if name not in self.unset}
        common = {**kept, **self.phase.env}
        if not self.are_ranks:
            words = start.launcher_words
            argv = node_command(words, place.node, ranks.per_node, ranks.copied, self.endpoint)
            return argv, common
        rank = place.node * ranks.per_node + place.local
        is_bound = len([d for d in common.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]) == 1
        return start.rank_words, {
            **_RANK_DEFAULTS,
            **common,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks.world_size),
            "LOCAL_RANK": "0" if is_bound else str(place.local),
            "LOCAL_WORLD_SIZE": str(ranks.per_node),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_ERROR_FILE": str(self.logs(rank)[0].with_name("error.json")),
        }

    def start(self, place: TaskPlace, env: Mapping[str, str]) -> GuardedProcess:
        """Start the command of a task.

        Raises:
            LaunchError: It cannot be started.
        """
        argv, own = self.command(place, env)
        logs = self.logs(place.node * self.per_node + place.local)
        logs[0].parent.mkdir(parents=True, exist_ok=True)
        output = (logs[0], logs[-1])
        return GuardedProcess(
            argv,
            env=own,
            cwd=self.cwd,
            output=output if self.are_ranks else logs[0],
            grace_s=STOP_GRACE_S,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A command is over.

    Attributes:
        returncode: `Popen.returncode`; None where it could not be started, or its guard died.
        at: When, in seconds since 1970.
        pid: The command's.
        problem: Why, in that case.
        health: How the GPUs are, where this task looks after them.
    """

    returncode: int | None
    at: float = field(default_factory=time.time)
    pid: int = 0
    num_left: int = 0
    problem: str = ""
    health: Health | None = None


def _finished(ended: CommandEnd) -> Finished:
    return Finished(returncode=ended.returncode, pid=ended.pid, num_left=ended.num_left)


class Meeting:
    """The directory in which tasks leave their files; only its owner can enter it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: frozenset[str] = frozenset()

    def open(self) -> None:
        """Make the directory.

        Raises:
            OSError: It cannot be made.
        """
        self._directory.mkdir(mode=0o700, parents=True)

    def leave(self, name: str, value: object = None) -> None:
        """Leave a file, whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        content = b"" if value is None else adapter(type(value)).dump_json(value)
        write_bytes_atomically(self._directory / name, content)

    def names(self) -> frozenset[str]:
        """Return the files that are there.

        A network file system looks again where a directory is listed. While it fails, nothing has
        changed.
        """
        with contextlib.suppress(OSError):
            self._names = frozenset(path.name for path in self._directory.iterdir())
        return self._names

    def read(self, name: str, kind: type[_T]) -> _T | None:
        """Return the content of a file, None where it is not there, or of another version."""
        try:
            return parse(kind, read_bytes(self._directory / name))
        except (OSError, SchemaError):
            return None

    def remove(self, name: str) -> None:
        """Remove a file."""
        with contextlib.suppress(OSError):
            (self._directory / name).unlink()

    def close(self) -> None:
        """Say that it is over: tasks that still run something end it."""
        with contextlib.suppress(OSError):
            self.leave(_OVER)
        for name in self.names() - {_OVER}:
            self.remove(name)


@dataclass(slots=True, kw_only=True)
class Step:
    """The tasks of this step, with the settings of the spec.

    Attributes:
        place: Place of this task.
        ports: Where ranks may meet, `FIRST-LAST`.
        meeting: Where the tasks leave one another files, in the run directory.
        healths: Of the GPUs of other tasks.
    """

    place: TaskPlace
    mode: LaunchMode
    ports: str
    meeting: Meeting
    healths: list[Health] = field(default_factory=list)
    _num_turns: int = 0

    @classmethod
    def of(cls, spec: JobSpec, env: Mapping[str, str]) -> Self | None:
        """Return the step that this process is in; None where it is all that there is.

        Raises:
            LaunchError: The nodes have different numbers of tasks.
        """
        place = find_place(env)
        mode = LaunchMode(spec.options.get(MODE, LaunchMode.TORCHRUN.value))
        if place is None or (place.num_tasks == 1 and mode is LaunchMode.TORCHRUN):
            return None
        return cls(
            place=place,
            mode=mode,
            ports=spec.options.get(PORTS, SlurmConfig().ports),
            meeting=Meeting(spec.outcome.parent / f"tasks-{place.name}"),
        )

    def serve(self, env: Mapping[str, str], gpus: Sequence[Gpu]) -> None:
        """Run what task 0 wants of another task, until that is over.

        Args:
            env: Environment of this task.
            gpus: To be watched meanwhile.

        Raises:
            OSError: How a command ended cannot be written.
        """
        for number in itertools.count(1):
            while (turn := self.meeting.read(f"turn-{number}", Turn)) is None:
                if _OVER in self.meeting.names():
                    return
                time.sleep(_LOOK_S)
            if self.place.local < turn.per_node:
                with HealthWatch(gpus) as watch:
                    finished = self._carry_out(turn, number, env)
                    finished = replace(finished, health=watch.finish())
                own = self.place.node * turn.per_node + self.place.local
                if _OVER not in self.meeting.names():  # else nobody wants to know
                    self.meeting.leave(f"end-{number}-{own}", finished)

    def _carry_out(self, turn: Turn, number: int, env: Mapping[str, str]) -> Finished:
        """Run a command to its end, or until task 0 wants it stopped, or is gone."""
        done: set[str] = set()
        try:
            with turn.start(self.place, env) as command:
                while (ended := command.poll(_LOOK_S)) is None:
                    names = self.meeting.names()
                    if f"stacks-{number}" in names and "stacks" not in done:
                        done.add("stacks")
                        command.dump_stacks(of_all=turn.are_ranks)
                    if f"turn-{number}" not in names and "stop" not in done:
                        done.add("stop")
                        command.stop()
                return _finished(ended)
        except (LaunchError, OSError) as error:
            return Finished(returncode=None, problem=str(error))

    def start(self, env: Mapping[str, str], phase: PhasePlan, cwd: Path) -> RunningCommand:
        """Start a phase on all tasks, from task 0.

        Args:
            env: Environment of task 0 itself: what differs from it goes to every task.
            phase: What to run, with the environment that task 0 would run it in.
            cwd: Where.

        Raises:
            LaunchError: The tasks are not those that the phase needs.
        """
        place, base = self.place, inherited(env)
        if phase.start is None or phase.start.ranks.starter is Launcher.NONE:
            what = "a recipe's script" if phase.start is None else "started alone"
            raise LaunchError(
                phase.name,
                f"is {what}, and the step has {place.num_tasks} tasks, expected one; "
                f"it starts its ranks itself, on one node",
            )
        changed = {name: value for name, value in phase.env.items() if base.get(name) != value}
        turn = Turn(
            mode=self.mode,
            phase=replace(phase, env=changed),
            unset=tuple(name for name in base if name not in phase.env),
            cwd=cwd,
            endpoint=find_endpoint(place, self.ports),
        )
        wanted, num_nodes = turn.per_node, turn.ranks.num_nodes
        fits = place.per_node >= wanted if turn.are_ranks else place.per_node == wanted
        if len(place.hosts) != num_nodes or not fits:
            raise LaunchError(
                "srun",
                f"started {counted(place.per_node, 'task')} on each of {', '.join(place.hosts)}, "
                f"expected {wanted} on each of {counted(num_nodes, 'node')} in mode "
                f"{self.mode.value}; give srun --nodes={num_nodes} --ntasks-per-node={wanted}",
            )
        self._num_turns += 1
        return _TeamProcess(self, turn, self._num_turns, env)


class _TeamProcess(RunningCommand):
    """The commands of one phase on all tasks; nothing of them outlives the context."""

    def __init__(self, step: Step, turn: Turn, number: int, env: Mapping[str, str]) -> None:
        """Start the commands; task 0 has the first.

        Raises:
            LaunchError: The log cannot be written, or the command of task 0 not be started.
        """
        self._step, self._turn, self._number = step, turn, number
        self._started = time.monotonic()
        self._ends: dict[int, Finished] = {}
        self._failed: dict[int, Finished] = {}  # that were not told to end
        self._is_told = False
        self._stop_at = self._lose_at = float("inf")
        self._ended: CommandEnd | None = None
        tee = turn.ranks.tee_ranks
        self._followed = {
            command: [FollowedFile(path) for path in turn.logs(command)]
            for command in range(turn.num_commands)
            if not turn.are_ranks or tee is None or command in tee
        }
        try:
            self._log = turn.phase.dirs.launcher_log.open("wb")
            self._own = turn.start(step.place, env)
            step.meeting.leave(f"turn-{number}", turn)
        except OSError as error:
            where = error.filename or turn.phase.dirs.root
            raise LaunchError(str(where), f"{error.strerror}; nothing was run") from error

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(self, *error: object) -> None:
        try:
            if self._ended is None:
                self.stop()
        finally:
            self._own.__exit__(*error)
            self._log.close()
        if not self._turn.are_ranks:
            for command in self._ends:  # all of it is in the phase's log
                self._turn.logs(command)[0].unlink(missing_ok=True)

    @override
    def poll(self, timeout_s: float) -> CommandEnd | None:
        """Return how all of it ended, or None if some of it runs for `timeout_s` more seconds.

        Raises:
            LaunchError: A command could not be started on its node.
        """
        if self._ended is not None:
            return self._ended
        if 0 in self._ends:
            time.sleep(min(timeout_s, _LOOK_S))
        elif (ended := self._own.poll(timeout_s)) is not None:
            self._note(0, _finished(ended))
        names = self._step.meeting.names()
        for command in self._running():
            name = f"end-{self._number}-{command}"
            found = self._step.meeting.read(name, Finished) if name in names else None
            if found is not None:
                self._note(command, found)
        for command in self._followed:
            self._copy(command)
        self._act(time.monotonic())
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
        self._step.meeting.remove(f"turn-{self._number}")
        self._own.stop()
        self._lose_at = min(self._lose_at, time.monotonic() + STOP_GRACE_S + _GONE_S)

    @override
    def dump_stacks(self) -> None:
        """Abort every rank of every node; with faulthandler on, each prints its stacks."""
        self._is_told = True
        with contextlib.suppress(OSError):  # a full disk; they are stopped next
            self._step.meeting.leave(f"stacks-{self._number}")
        self._own.dump_stacks(of_all=self._turn.are_ranks)

    def _running(self) -> list[int]:
        return [command for command in range(self._turn.num_commands) if command not in self._ends]

    def _note(self, command: int, finished: Finished) -> None:
        """Note how a command ended; the first that fails ends the others after a grace."""
        if finished.returncode is None:
            raise LaunchError(self._name(command), finished.problem)
        self._ends[command] = finished
        self._step.healths += [] if finished.health is None else [finished.health]
        self._copy(command, is_ended=True)
        self._followed.pop(command, None)
        if finished.returncode and not self._is_told:
            grace_s = _RANK_GRACE_S if self._turn.are_ranks else GRACE_S
            self._stop_at = min(self._stop_at, time.monotonic() + grace_s)
            self._failed[command] = finished

    def _act(self, now_s: float) -> None:
        """End the phase, stop commands whose time is over, or give up those that do not end."""
        running = self._running()
        if running and now_s >= self._lose_at:
            for command in running:
                self._say(f"{self._name(command)} did not end although it was told to")
                self._ends[command] = Finished(returncode=_LOST)
        elif running and now_s >= self._stop_at and not self._is_told:
            self._say(f"{', '.join(map(self._name, running))} did not end by itself and is stopped")
            self.stop()
        if not self._running():
            self._end()

    def _end(self) -> None:
        """End the phase: say which commands failed, the first in time first; note the exit code."""
        failed = sorted(self._failed.items(), key=lambda found: found[1].at)
        for number, (command, end) in enumerate(failed):
            how = f"ended with exit code {end.returncode}"
            if self._turn.are_ranks:  # in the words that torch's launcher has for it
                also = "also " if number else ""
                how = f"{also}failed (exitcode: {end.returncode}) local_rank: {command} "
                how += f"(pid: {end.pid})"
            self._say(f"{self._name(command)} {how}")
        ends = [end for _, end in failed] or [*self._ends.values()]
        code = next((end.returncode for end in ends if end.returncode), 0)
        is_launcher = code > 0 and not self._turn.are_ranks
        self._ended = CommandEnd(
            returncode=code if is_launcher else int(code != 0),
            num_left=sum(end.num_left for end in self._ends.values()),
            duration_s=time.monotonic() - self._started,
        )

    def _copy(self, command: int, *, is_ended: bool = False) -> None:
        """Copy new lines of a command to the log with ranks as they are over all nodes."""
        for file in self._followed.get(command, ()):
            lines = list(file.new_lines())
            while is_ended and (more := list(file.new_lines())):
                lines += more
            if is_ended and (last := file.last_line()):
                lines.append(last)
            for text in lines:
                line = f"{text}\n".encode()
                if self._turn.are_ranks:
                    self._log.write(b"[default%d]:" % command + line)
                else:
                    self._log.write(over_all_nodes(line, command, self._turn.ranks.per_node))
        self._log.flush()

    def _name(self, command: int) -> str:
        host = self._step.place.hosts[command // self._turn.per_node]
        return f"{'rank' if self._turn.are_ranks else 'node'} {command} ({host})"

    def _say(self, text: str) -> None:
        self._log.write(f"[nodes]: {text}\n".encode())
        self._log.flush()


def watches(place: TaskPlace, env: Mapping[str, str]) -> bool:
    """Return whether a task asks GPUs how they are: one a node, or each that has one of its own."""
    return place.local == 0 or len(env.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1
