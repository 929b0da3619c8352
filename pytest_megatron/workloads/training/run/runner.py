"""Runner of attempts on this machine: starts each phase, follows its logs, leaves no process."""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeAlias

from pytest_megatron.base.files import (
    JsonValue,
    read_end,
    write_json_atomically,
    write_text_atomically,
)
from pytest_megatron.errors import GoldenError, LaunchError, MetricsError
from pytest_megatron.process.guarded import (
    CommandEnd,
    GuardedProcess,
    RunningCommand,
)
from pytest_megatron.process.tree import Activity
from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.triage.logs.lines import is_noise
from pytest_megatron.triage.logs.lines import parse_progress as parse_steps
from pytest_megatron.triage.logs.traceback import HEADER, MOST_LINES_AFTER
from pytest_megatron.triage.rank_log import End
from pytest_megatron.workloads.golden.collect import (
    Collector,
    newest,
    progress_bar,
    read_logs,
    read_measured,
)
from pytest_megatron.workloads.golden.model import is_loss
from pytest_megatron.workloads.recipe.case import ExitPolicy
from pytest_megatron.workloads.recipe.metrics import READY, MetricFormat, MetricSource
from pytest_megatron.workloads.training.plan.phases import (
    find_no_checkpoint,
    find_not_saved,
    lay_out,
)
from pytest_megatron.workloads.training.plan.plan import FLIGHT_VARIABLE, AttemptPlan, PhasePlan

_TAIL_BYTES = 1 << 16
_TAIL_LINES = 10
_TRACE_LINES = 30
_TRACE_STARTS = ("Traceback (most recent call last)", "Fatal Python error:")
_OF_STACK = ("  ", "Current thread ", "Thread ")
_RANK_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]: ?")


def tail(path: Path, is_noise: Callable[[str], bool] | None = None) -> tuple[str, ...]:
    """Return the last meaningful lines of a log; none where it cannot be read.

    Of a log that ends in a traceback, only that, without torch's `[rank0]:` in front.

    Args:
        path: The log.
        is_noise: Returns if a line is meaningless; empty ones always are.
    """
    try:
        text = read_end(path, _TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ()
    said = _plain(text.splitlines())
    lines = [line for line in said if is_noise is None or not is_noise(line)]
    starts = [index for index, line in enumerate(lines) if line.startswith(_TRACE_STARTS)]
    return _cut(lines[starts[-1] :]) if starts else tuple(lines[-_TAIL_LINES:])


def traceback_at(path: Path, number: int) -> tuple[str, ...]:
    """Return the traceback that ends, or the stack that begins, in a line; none where none does.

    Args:
        path: The log.
        number: Number of the line, from 1.
    """
    try:
        with path.open(errors="replace") as file:
            lines = [line for _, line in zip(range(number + _TRACE_LINES), file, strict=False)]
    except OSError:
        return ()
    said, below = _plain(lines[:number]), _plain(lines[number:])
    if said and said[-1].startswith(_TRACE_STARTS):
        stack = itertools.takewhile(lambda line: line.startswith(_OF_STACK), below)
        return _cut([said[-1], *stack])
    starts = [at for at, line in enumerate(said) if line.startswith(_TRACE_STARTS[0])]
    trace = said[starts[-1] :] if starts else []
    is_whole = all(line.startswith("  ") for line in trace[1:-1])
    return _cut(trace) if is_whole else ()


def _plain(lines: Sequence[str]) -> list[str]:
    return [_RANK_PREFIX.sub("", line).rstrip() for line in lines if line.strip()]


def _cut(lines: Sequence[str]) -> tuple[str, ...]:
    """Return a traceback without its middle, if it is long."""
    if len(lines) > _TRACE_LINES:
        lines = [*lines[:2], "  ...", *lines[3 - _TRACE_LINES :]]
    return tuple(line for line in lines if not line.startswith("Extension modules:"))


_CHUNK_BYTES = 1 << 20  # of one file in one poll: a rank that floods its log cannot starve the rest
_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)\s*\|")
_TIME_MS = re.compile(r"elapsed time per iteration \(ms\):\s*([\d.]+)")
_LOSS = re.compile(r"\blm loss:\s*([^\s|]+)")
# Megatron-LM prints it before it exits, at whatever iteration (training.py, d98e8a64dd).
_EXITING = "exiting program at iteration"
# How torch.distributed.run marks a line that it copies from a rank.
_TEED = re.compile(r"\[default(\d+)\]:(?:\[rank\d+\]: ?)?(.*)")
# torch prints it when a collective did not finish; what follows only takes minutes. The name of
# the work behind it tells it from a program that speaks of watchdogs.
_WATCHDOG = "Watchdog caught collective operation timeout"
_WATCHDOG_LINE = re.compile(r"Watchdog caught collective operation timeout: Work\w*\(")
_SAYS_RANK = re.compile(r"\bRank (\d+)\]")
_LONGEST_LINE = 1 << 16  # of what has no end yet; the rest of a longer one is dropped
_LOOK_EVERY_S = 0.5  # for new files
_OTHER_STREAM = {"stdout.log": "stderr.log", "stderr.log": "stdout.log"}
_SCRIPT_GRACE_S = 5.0
# Megatron-LM evaluates the text in a shell with these settings.
_SCRIPT_HEAD = "set -euo pipefail\n"
_ENV_FILE = "PYTEST_MEGATRON_ENV_FILE"
_SCRIPT_TAIL = f'\nenv -0 > "${_ENV_FILE}"\n'
_NOT_PASSED_ON = frozenset((_ENV_FILE, "BASHOPTS", "SHELLOPTS", "SHLVL", "_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a training is: its `iteration N/M | ...` line, or the last step that it measured.

    Attributes:
        iteration: The one that just ended.
        last: The one that the training is to reach; None where nobody says.
        loss: Loss that was printed or measured, or None without one.
        iteration_ms: Time of this iteration, or None.
        loss_name: Name of the loss.
        has_step: Whether `iteration` is a step; else it counts the values that were logged.
    """

    iteration: int
    last: int | None
    loss: str | None = None
    iteration_ms: float | None = None
    loss_name: str = "lm loss"
    has_step: bool = True

    @property
    def text(self) -> str:
        """The iteration, and the last one where that is known."""
        last = "" if self.last is None else f" of {self.last}"
        return f"{'iteration' if self.has_step else 'logged value'} {self.iteration}{last}"

    @property
    def time_left_s(self) -> float | None:
        """Estimate from the latest iteration; None where its time is not known."""
        if self.iteration_ms is None or self.last is None:
            return None
        return (self.last - self.iteration) * self.iteration_ms / 1000


def parse_progress(line: str) -> Progress | None:
    """Read Megatron-LM's training line; None for every other line.

    Source: Megatron-LM megatron/training/training.py, training_log(), d98e8a64dd.
    """
    match = _ITERATION.search(line)
    if match is None:
        return None
    time = _TIME_MS.search(line)
    loss = _LOSS.search(line)
    return Progress(
        iteration=int(match[1]),
        last=int(match[2]),
        loss=None if loss is None else loss[1],
        iteration_ms=None if time is None else float(time[1]),
    )


@dataclass(slots=True)
class FollowedFile:
    """A log that grows."""

    path: Path
    _position: int = 0
    _rest: bytes = b""

    @property
    def num_bytes_read(self) -> int:
        """Number of bytes that were read."""
        return self._position

    def new_lines(self) -> Iterator[str]:
        """Yield the lines completed since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                chunk = file.read(_CHUNK_BYTES)
        except OSError:  # not there yet
            return
        self._position += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[:_LONGEST_LINE]
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")

    def last_line(self) -> str:
        """Return what stands behind the last end of a line."""
        return self._rest.decode(errors="replace").rstrip("\r")


@dataclass(slots=True)
class LogWatch:
    """Follows every log of one phase, each line once.

    Attributes:
        ranks_per_node: Logs of several nodes lie in `node<i>/`, by local rank.
        scripts: Where a script of the recipe may have its own ranks log, or None.
        reads_lines: Whether Megatron-LM's lines say how far the training is.
        printed: The latest that any rank printed, or None.
        measured: The latest that was measured, or None; where lines say nothing, it counts.
        hung_rank: The rank whose watchdog reported a collective that did not finish, or None.
        is_exiting: Whether a program said last that it exits.
        changed_at: When anything was logged or measured last, on the monotonic clock.
        num_behind: Log with a traceback, `3/stderr.log` -> lines that the same rank wrote elsewhere
            since the last one was seen; a step that it did counts as many.
    """

    dirs: PhaseDirs
    ranks_per_node: int = 1
    scripts: Path | None = None
    reads_lines: bool = True
    printed: Progress | None = None
    measured: Progress | None = None
    hung_rank: int | None = None
    is_exiting: bool = False
    changed_at: float = field(default_factory=time.monotonic)
    num_behind: dict[str, int] = field(default_factory=dict)
    _num_bytes: int = 0
    _launcher: FollowedFile = field(init=False)
    _ranks: dict[Path, FollowedFile] = field(default_factory=dict)
    _look_again_at: float = 0.0

    def __post_init__(self) -> None:
        self._launcher = FollowedFile(self.dirs.launcher_log)

    @property
    def progress(self) -> Progress | None:
        """How far the training is, or None."""
        return self.printed or self.measured

    def poll(self) -> list[str]:
        """Take in what is new; return the new lines of tee'd ranks, as `[rank0]: ...`."""
        if time.monotonic() >= self._look_again_at:
            self._look()
        raised: list[str] = []
        for path, followed in self._ranks.items():
            rank = int(path.parent.name)
            if self.dirs.logs in path.parents:
                rank += self.dirs.first_rank_below(path, self.ranks_per_node)
            for line in followed.new_lines():
                self._note_line(line, rank=rank)
                self._note_behind(line, f"{rank}/{_OTHER_STREAM[path.name]}")
                raised += [f"{rank}/{path.name}"] * (HEADER in line)
        self.num_behind |= dict.fromkeys(raised, 0)  # what came before in this poll is not known
        shown = []
        for line in self._launcher.new_lines():
            tee = _TEED.match(line)
            self._note_watchdog(line, None if tee is None else int(tee[1]))
            if tee is not None:
                shown.append(f"[rank{tee[1]}]: {tee[2]}")
            elif self.scripts is not None:  # which may start a program without a launcher
                self._note_line(line, rank=0)
        if (num_bytes := self._num_bytes_read()) != self._num_bytes:
            self._num_bytes, self.changed_at = num_bytes, time.monotonic()
        return shown

    @property
    def outlived(self) -> tuple[str, ...]:
        """Logs behind whose last traceback their rank went on, as `3/stderr.log`."""
        return tuple(log for log, num in self.num_behind.items() if num > MOST_LINES_AFTER)

    def drain(self) -> list[str]:
        """Take in everything that is there: for the end, when nothing more is written."""
        lines: list[str] = []
        self._look()
        while True:
            before = self._num_bytes_read()
            lines += self.poll()
            if self._num_bytes_read() == before:
                return lines

    def _num_bytes_read(self) -> int:
        return sum(f.num_bytes_read for f in (self._launcher, *self._ranks.values()))

    def _look(self) -> None:
        """Find the logs of ranks that have started since."""
        self._look_again_at = time.monotonic() + _LOOK_EVERY_S
        found = [*self.dirs.logs.glob("**/attempt_*/*/std*.log")]
        if self.scripts is not None:
            found += self.scripts.glob("**/attempt_*/*/std*.log")
        for path in found:
            if path.parent.name.isdigit():
                self._ranks.setdefault(path, FollowedFile(path))

    def _note_line(self, line: str, *, rank: int) -> None:
        """Note what a line says of its rank: progress, exit, or a report of NCCL's watchdog."""
        self._note_watchdog(line, rank)
        if not self.reads_lines:
            return
        progress = parse_progress(line) if "iteration" in line else None
        if progress is not None or _EXITING in line:
            self.is_exiting = progress is None
        self.printed = progress or self.printed

    def _note_behind(self, line: str, other: str) -> None:
        """Count a line, or a step, that a rank did behind a traceback in its other log."""
        if other in self.num_behind:
            is_step = parse_steps(line) is not None
            self.num_behind[other] += MOST_LINES_AFTER + 1 if is_step else not is_noise(line)

    def _note_watchdog(self, line: str, rank: int | None) -> None:
        """Remember the rank of a watchdog's report, which may stand in a log of no rank."""
        if self.hung_rank is not None or _WATCHDOG not in line:
            return
        if _WATCHDOG_LINE.search(line):
            said = _SAYS_RANK.search(line)
            self.hung_rank = int(said[1]) if rank is None and said is not None else rank or 0


_POLL_S = 0.1
_READ_EVERY_S = 2.0
_READ_SHARE = 0.02  # of the time, at most, to read what was measured so far
STOP_GRACE_S = 10.0  # for the agent to end its ranks
_STACKS_S = 3.0  # for aborted ranks to print their stacks
_WATCHDOG_GRACE_S = 5.0  # for all ranks to say which collective they wait in, and to dump
_EXIT_LOOK_S = 3.0
_EXIT_GRACE_S = 30.0  # without any work, for a program that has nothing left to do but exit
_IDLE_SHARE = 0.02  # of a core for each process: threads of torch and NCCL poll
_IDLE_BYTES = 1 << 16  # between two looks


# Starts the program of a phase in a directory.
StartPhase: TypeAlias = Callable[[PhasePlan, Path], RunningCommand]


class AttemptListener(Protocol):
    """Observer of an attempt while it runs."""

    def on_lines(self, lines: list[str]) -> None:
        """Take lines of tee'd ranks."""

    def on_progress(self, phase: str, progress: Progress) -> None:
        """Take how far the training of a phase is."""


def _ignore(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardingListener:
    """Listener made of functions."""

    on_lines: Callable[[list[str]], None] = _ignore
    on_progress: Callable[[str, Progress], None] = _ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEnd:
    """Result of a script.

    Attributes:
        key: `BEFORE_SCRIPT` or `AFTER_SCRIPT`.
        returncode: None where the time limit ended it.
        log: What it printed.
        env: The environment that it leaves to the training.
    """

    key: str
    returncode: int | None
    log: Path
    env: Mapping[str, str]

    @property
    def is_clean(self) -> bool:
        """True if it ended with exit code 0."""
        return self.returncode == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnd:
    """The end of a phase.

    Attributes:
        returncode: The launcher's, negative for a signal.
        num_left: Processes that outlived the launcher and were killed.
        hung_rank: The rank whose watchdog reported, where `end` is HUNG_COLLECTIVE.
        progress: The last iteration that was printed, or None.
        problem: The missing checkpoint, where `end` is NO_CHECKPOINT; the loss that is not
            finite, where it is STOPPED.
        script: The script that failed, where `end` is SCRIPT.
        waiting: The ranks that had not exited, where `end` is NOT_EXITED.
        quiet_s: Seconds in which nothing was logged before it was stopped.
        outlived: Logs behind whose last traceback their rank went on until it was stopped.
    """

    plan: PhasePlan
    end: End
    returncode: int
    num_left: int = 0
    duration_s: float = 0.0
    hung_rank: int | None = None
    progress: Progress | None = None
    problem: str | None = None
    script: ScriptEnd | None = None
    waiting: tuple[int, ...] = ()
    quiet_s: float = 0.0
    outlived: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """True if the phase exited with 0 and nothing was wrong, or its case lets it not exit."""
        if self.end is End.NOT_EXITED:
            return self.plan.exit_policy is ExitPolicy.PASS
        return self.end is End.EXITED and self.returncode == 0


# Returns the loss of a phase that is not finite, None without one. Takes its end; one that runs as
# if it were stopped now.
FindNotFinite: TypeAlias = Callable[[PhaseEnd], str | None]


def run_attempt(
    plan: AttemptPlan,
    description: JsonValue,
    listener: AttemptListener,
    start: StartPhase | None = None,
    losses: FindNotFinite | None = None,
) -> tuple[PhaseEnd, ...]:
    """Run the phases of an attempt one after the other, up to the first that is not clean.

    Args:
        plan: What to run; its directories must not be there yet.
        description: Goes to `plan.json` before anything starts.
        listener: Told about lines and progress while it runs.
        start: Starts the program of a phase in another way, maybe elsewhere.
        losses: Asked now and then while a phase runs, and before another one.

    Raises:
        LaunchError: Directories cannot be made, or the launcher cannot be started.
        KeyboardInterrupt: Ctrl-C; every process of the attempt is gone by then.
    """
    try:
        for directory in (plan.dirs.root, plan.dirs.checkpoints, plan.dirs.no_checkpoint):
            directory.mkdir(parents=True)
        write_json_atomically(plan.dirs.plan, description)
    except OSError as error:
        raise _cannot_write(error, plan.dirs.root) from error
    ends: list[PhaseEnd] = []
    start = start or start_here
    deadline = time.monotonic() + plan.time_limit_s
    for phase in plan.phases:
        if phase.origin is not None and (problem := find_no_checkpoint(phase.origin)):
            if not ends:  # of an earlier run, that this one is to go on from
                raise LaunchError(phase.name, problem)
            ends[-1] = replace(ends[-1], end=End.NO_CHECKPOINT, problem=problem)
            break
        _prepare(plan, phase)
        end = _run_phase(plan, phase, listener, deadline, start, _LossWatch(losses))
        ends.append(_look_at_checkpoint(end))
        settle_logs(phase.dirs, phase.world_size // phase.num_nodes)
        if not ends[-1].is_clean:
            break
        is_last = phase is plan.phases[-1]
        if losses is not None and not is_last and (problem := losses(ends[-1])) is not None:
            ends[-1] = replace(ends[-1], end=End.STOPPED, problem=problem)
            break
    return tuple(ends)


def _look_at_checkpoint(end: PhaseEnd) -> PhaseEnd:
    """Return how a phase ended once it is known whether it saved what is compared."""
    saves, last = end.plan.saves, end.plan.last_iteration
    if not end.is_clean or saves is None or last is None:
        return end
    problem = find_not_saved(saves, last)
    return end if problem is None else replace(end, end=End.NO_CHECKPOINT, problem=problem)


def settle_logs(dirs: PhaseDirs, ranks_per_node: int = 1) -> None:
    """Move torch's `logs/<run id>/attempt_0/<local rank>/` to `logs/<rank>/`.

    Those of several nodes, `logs/node1/<run id>/attempt_0/<local rank>/`, become the same.
    """
    runs = [*dirs.logs.glob("*_*"), *dirs.logs.glob("node*/*_*")]
    for run in [path for path in runs if path.is_dir()]:
        first = dirs.first_rank_below(run, ranks_per_node)
        for rank in run.glob("attempt_*/*"):
            target = dirs.logs / str(first + int(rank.name)) if rank.name.isdigit() else rank
            if rank.is_dir() and not target.exists():
                rank.rename(target)
        for attempt in run.glob("attempt_*"):
            if not any(attempt.iterdir()):
                attempt.rmdir()
        if not any(run.iterdir()):
            run.rmdir()
    for node in dirs.logs.glob("node*"):
        if node.is_dir() and not any(node.iterdir()):
            node.rmdir()


def _prepare(plan: AttemptPlan, phase: PhasePlan) -> None:
    """Make what a phase expects to find."""
    try:
        if phase.origin is not None:
            lay_out(phase.origin)
        phase.dirs.logs.mkdir(parents=True)
        phase.dirs.tensorboard.mkdir()
        if str(phase.dirs.flight) in phase.own_env.get(FLIGHT_VARIABLE, ""):
            phase.dirs.flight.mkdir()
        if plan.script is not None:
            for directory in (plan.dirs.assets, plan.dirs.artifacts, plan.dirs.home):
                directory.mkdir()
            write_text_atomically(Path(phase.argv[-1]), plan.script)
    except OSError as error:
        raise _cannot_write(error, phase.dirs.root) from error


@dataclass(slots=True)
class LookPace:
    """When what a training measured is to be read: now and then, and for little of the time."""

    _next_at: float = field(default_factory=lambda: time.monotonic() + _READ_EVERY_S)

    @property
    def is_due(self) -> bool:
        """True if it may be read now."""
        return time.monotonic() >= self._next_at

    def pause(self, took_s: float) -> None:
        """Wait after reading took so long."""
        self._next_at = time.monotonic() + max(_READ_EVERY_S, took_s / _READ_SHARE)


@dataclass(slots=True)
class _LossWatch:
    """Asks now and then whether a loss of the phase that runs is not finite."""

    find: FindNotFinite | None
    _began: float = field(default_factory=time.monotonic)
    _pace: LookPace = field(default_factory=LookPace)

    def problem(self, phase: PhasePlan, progress: Progress | None) -> str | None:
        """Return the loss that is not finite; None without one, or if it is too soon to ask."""
        if self.find is None or not self._pace.is_due:
            return None
        now = time.monotonic()
        so_far = PhaseEnd(  # as if it were stopped now
            plan=phase,
            end=End.STOPPED,
            returncode=-signal.SIGTERM,
            duration_s=now - self._began,
            progress=progress,
        )
        problem = self.find(so_far)
        self._pace.pause(time.monotonic() - now)
        return problem


def _run_phase(
    plan: AttemptPlan,
    phase: PhasePlan,
    listener: AttemptListener,
    deadline: float,
    start: StartPhase,
    losses: _LossWatch,
) -> PhaseEnd:
    """Run the scripts around a phase and the phase itself."""
    env, before = phase.env, None
    if phase.before_script is not None:
        path = phase.dirs.script("before")
        before = _run_script(
            "BEFORE_SCRIPT", phase.before_script, path, env, plan.cwd, deadline=deadline
        )
        env = before.env
    if before is not None and not before.is_clean:
        return PhaseEnd(
            plan=phase,
            end=End.SCRIPT,
            returncode=before.returncode or 0,
            script=before,
        )
    end = _train(plan, replace(phase, env=env), listener, deadline, start, losses)
    if phase.after_script is None or end.end is not End.EXITED:
        return end
    path = phase.dirs.script("after")
    env = {**env, "EXIT_CODE": str(end.returncode)}
    after = _run_script("AFTER_SCRIPT", phase.after_script, path, env, plan.cwd, deadline=deadline)
    is_cause = end.is_clean and not after.is_clean  # a failed training is the cause of what follows
    return replace(end, end=End.SCRIPT, script=after) if is_cause else end


def _train(
    plan: AttemptPlan,
    phase: PhasePlan,
    listener: AttemptListener,
    deadline: float,
    start: StartPhase,
    losses: _LossWatch,
) -> PhaseEnd:
    """Start the program of a phase and watch it to its end."""
    watch = _watch_of(plan, phase)
    exit_watch = _ExitWatch(phase, watch)
    measured = _Measured.of(phase, plan.cwd)
    end, problem = End.EXITED, None
    hung_at = quiet_s = 0.0
    outlived: tuple[str, ...] = ()
    with start(phase, plan.cwd) as process:
        while (ended := process.poll(_POLL_S)) is None:
            _tell(listener, phase, watch, measured)
            outlived = watch.outlived
            hung_at = hung_at or (0.0 if watch.hung_rank is None else time.monotonic())
            if hung_at and time.monotonic() - hung_at >= _WATCHDOG_GRACE_S:
                deadline = 0.0
            if time.monotonic() >= deadline:
                end = End.TIME_LIMIT if watch.hung_rank is None else End.HUNG_COLLECTIVE
                quiet_s = time.monotonic() - watch.changed_at  # until their stacks are logged
                ended = _stop(process)
                break
            if exit_watch.is_overdue(process):
                end, ended = End.NOT_EXITED, _stop(process)
                break
            if hung_at or (found := losses.problem(phase, watch.progress)) is None:
                continue
            if (ended := process.poll(0.0)) is None:  # else it came to its end meanwhile
                end, problem = End.STOPPED, found
                process.stop()
                ended = process.wait()
            break
    _tell(listener, phase, watch, measured, is_ended=True)
    return PhaseEnd(
        plan=phase,
        end=end,
        returncode=ended.returncode,
        num_left=ended.num_left,
        duration_s=ended.duration_s,
        hung_rank=watch.hung_rank,
        progress=watch.progress,
        problem=problem,
        waiting=exit_watch.waiting,
        quiet_s=quiet_s,
        outlived=() if end is End.EXITED else outlived,
    )


@dataclass(slots=True)
class _ExitWatch:
    """Finds a program that has done its work, does nothing more, and does not exit.

    Attributes:
        waiting: The ranks that it waits for, once it is overdue.
    """

    phase: PhasePlan
    log: LogWatch
    waiting: tuple[int, ...] = ()
    _seen: Activity | None = None
    _idle_since: float = 0.0
    _looked_at: float = field(default_factory=time.monotonic)

    def is_overdue(self, process: RunningCommand) -> bool:
        """Return true if nothing but its exit is missing, and nothing has happened for a while."""
        now = time.monotonic()
        took_s = now - self._looked_at
        is_watched = not self.phase.is_script and self.phase.exit_policy is not ExitPolicy.WAIT
        if took_s < _EXIT_LOOK_S or not is_watched:
            return False
        self._looked_at = now
        before, self._seen = self._seen, process.activity()
        if before is None or self._seen is None or not _is_idle(before, self._seen, took_s):
            self._idle_since = now
        is_over = now - self._idle_since >= _EXIT_GRACE_S and self._has_done_its_work()
        if self._seen is None or not is_over:
            return False
        self.waiting = self._seen.ranks
        return bool(self.waiting)

    def _has_done_its_work(self) -> bool:
        """Return true if the program has logged its last iteration, or written its requests."""
        if self.log.is_exiting:
            return True
        if (progress := self.log.progress) is not None:
            last = self.phase.last_iteration or progress.last
            return last is not None and progress.iteration >= last
        return self.phase.dirs.generated.exists()


def _is_idle(before: Activity, now: Activity, took_s: float) -> bool:
    """Return true if processes did next to nothing: threads that poll, as those of NCCL do."""
    is_quiet = now.written_bytes - before.written_bytes < _IDLE_BYTES and not now.is_busy
    cpu_s = now.cpu_s - before.cpu_s
    return now.pids == before.pids and is_quiet and cpu_s < _IDLE_SHARE * took_s * len(now.pids)


def _watch_of(plan: AttemptPlan, phase: PhasePlan) -> LogWatch:
    """Return the watch of a phase's logs."""
    scripts = plan.dirs.assets if phase.is_script else None
    return LogWatch(
        phase.dirs,
        phase.world_size // phase.num_nodes,
        scripts=scripts,
        reads_lines=phase.source is None or phase.source.form is None,
    )


@dataclass(slots=True)
class _Measured:
    """What a phase measures, read now and then: progress that the judgement will read too.

    Attributes:
        collector: Reads it from the place that the row names; None leaves that to others.
    """

    phase: PhasePlan
    collector: Collector | None = None
    _pace: LookPace = field(default_factory=LookPace)

    @classmethod
    def of(cls, phase: PhasePlan, cwd: Path) -> _Measured:
        """Return the one of a phase that is about to start here."""
        source = phase.source
        if source is None or source.form is None:
            return cls(phase)
        return cls(phase, Collector(source, phase.dirs, cwd))

    def look(self, watch: LogWatch, *, is_ended: bool) -> None:
        """Read what is new, and let it be the progress unless lines of the program say it."""
        if self.phase.source is None or not (is_ended or self._pace.is_due):
            return
        began = time.monotonic()
        if self.collector is not None:
            self.collector.refresh(is_ended=is_ended)
        if (progress := self._progress()) not in (None, watch.measured):
            watch.measured, watch.changed_at = progress, time.monotonic()
        self._pace.pause(time.monotonic() - began)

    def _progress(self) -> Progress | None:
        source, dirs, last = self.phase.source, self.phase.dirs, self.phase.last_iteration
        assert source is not None
        try:
            found = newest(read_measured(dirs).metrics, source.names)
        except (GoldenError, MetricsError, OSError):  # nothing yet, or half a line
            found = None
        if found is None and source.form is not None and last is not None:
            return self._printed(source, last)
        if found is None:
            return None
        step, name, value = found
        loss = f"{value:.6g}" if is_loss(name) and isinstance(value, float) else None
        return Progress(iteration=step, last=last, loss=loss, loss_name=name)

    def _printed(self, source: MetricSource, last: int) -> Progress | None:
        """Return what a program that has not written its metrics yet shows on the terminal."""
        found = None
        if source.form is MetricFormat.TRAINER_STATE:
            said = read_logs(self.phase.dirs, READY["hf_trainer"]).metrics
            found = newest(said, source.names)
        if (step := progress_bar(self.phase.dirs, last)) is not None:
            known = Progress(iteration=step, last=last)
        elif found is not None:  # Trainer with `--disable_tqdm` prints no steps
            known = Progress(iteration=found[0], last=None, has_step=False)
        else:
            return None
        if found is None or not is_loss(found[1]):
            return known
        _, name, value = found
        return replace(known, loss=f"{value:.6g}", loss_name=name)


class LiveLog:
    """Follows the logs of an attempt that runs elsewhere, phase by phase.

    Attributes:
        plan: Plan of the attempt.
    """

    def __init__(self, plan: AttemptPlan, listener: AttemptListener) -> None:
        self.plan = plan
        self._listener = listener
        self._left = list(plan.phases)
        self._phase = self._left.pop(0)
        self._watch = _watch_of(plan, self._phase)
        self._measured = _Measured(self._phase)

    def poll(self, *, is_ended: bool = False) -> None:
        """Pass new lines and progress on to the listener.

        Args:
            is_ended: Whether nothing more is going to be written.
        """
        while self._left and self._left[0].dirs.root.is_dir():
            _tell(self._listener, self._phase, self._watch, self._measured, is_ended=True)
            self._phase = self._left.pop(0)
            self._watch = _watch_of(self.plan, self._phase)
            self._measured = _Measured(self._phase)
        _tell(self._listener, self._phase, self._watch, self._measured, is_ended=is_ended)


def _tell(
    listener: AttemptListener,
    phase: PhasePlan,
    watch: LogWatch,
    measured: _Measured,
    *,
    is_ended: bool = False,
) -> None:
    """Tell the listener new lines and progress."""
    before = watch.progress
    if lines := (watch.drain() if is_ended else watch.poll()):
        listener.on_lines(lines)
    measured.look(watch, is_ended=is_ended)
    if watch.progress is not None and watch.progress != before:
        listener.on_progress(phase.name, watch.progress)


def start_here(phase: PhasePlan, cwd: Path, kept_open: Sequence[int] = ()) -> GuardedProcess:
    """Start the launcher of a phase on this machine.

    Args:
        phase: The phase.
        cwd: Working directory of the phase.
        kept_open: Descriptors that its guard holds until all is over.
    """
    return GuardedProcess(
        phase.argv,
        env=phase.env,
        cwd=cwd,
        output=phase.dirs.launcher_log,
        grace_s=STOP_GRACE_S,
        kept_open=kept_open,
    )


def _stop(process: RunningCommand) -> CommandEnd:
    """Get every rank's stack into its log, then end it all."""
    process.dump_stacks()
    ended = process.poll(_STACKS_S)
    if ended is None:
        process.stop()
        ended = process.wait()
    return ended


def _cannot_write(error: OSError, directory: Path) -> LaunchError:
    """Return the error that the run directory cannot be written."""
    where = str(error.filename or directory)
    return LaunchError(
        where, f"{error.strerror}; give another --run-dir, or make room; nothing was run"
    )


def _run_script(
    key: str, text: str, path: Path, env: Mapping[str, str], cwd: Path, *, deadline: float
) -> ScriptEnd:
    """Run a case's BEFORE_SCRIPT or AFTER_SCRIPT under bash, in processes of its own.

    No value that a script assigns reaches the verdict; the exports of BEFORE_SCRIPT reach the
    training.

    Args:
        key: The key of the case, for `ScriptEnd.key`.
        text: What the case holds.
        path: The file to put it in; its output and its environment go beside it.
        env: All of its environment.
        cwd: The project's root.
        deadline: On the monotonic clock.

    Raises:
        OSError: The file cannot be written.
        LaunchError: bash cannot be started.
    """
    log, left = path.with_suffix(".log"), path.with_suffix(".env")
    write_text_atomically(path, _SCRIPT_HEAD + text + _SCRIPT_TAIL)
    returncode = None
    with GuardedProcess(
        ["bash", str(path)],
        env={**env, _ENV_FILE: str(left)},
        cwd=cwd,
        output=log,
        grace_s=_SCRIPT_GRACE_S,
    ) as process:
        ended = process.poll(max(0.0, deadline - time.monotonic()))
        if ended is not None:
            returncode = ended.returncode
    return ScriptEnd(key=key, returncode=returncode, log=log, env=_left_env(left, env))


def _left_env(file: Path, env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment that a script left; remove the file, since it may hold secrets."""
    if not file.exists():  # it called `exit 0` itself, or failed
        return env
    pairs = [line.partition("=") for line in file.read_text().split("\0") if line]
    file.unlink()
    return {name: value for name, _, value in pairs if name not in _NOT_PASSED_ON}
