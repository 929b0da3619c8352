"""Carries an attempt's plan out on this machine, and leaves its logs and nothing else behind."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Protocol

from pytest_megatron.errors import LaunchError
from pytest_megatron.files import JsonValue, write_json_atomically, write_text_atomically
from pytest_megatron.launch.follow import LogWatch, Progress
from pytest_megatron.launch.layout import PhaseDirs
from pytest_megatron.launch.plan import FLIGHT_VARIABLE, AttemptPlan, PhasePlan, Rewind
from pytest_megatron.launch.process import Ended, GuardedProcess

_POLL_S = 0.1
_STOP_GRACE_S = 10.0  # for the agent to end its ranks
_STACKS_S = 3.0  # for aborted ranks to print their stacks
_WATCHDOG_GRACE_S = 5.0  # for the other ranks to say which collective they wait in
_DUMPS_S = 10.0  # for what every rank's flight recorder dumps, where it is on
_QUIET_S = 1.0  # a dump that did not grow for so long is whole


class Listener(Protocol):
    """Who wants to see an attempt while it runs."""

    def on_lines(self, lines: list[str]) -> None:
        """Take lines of tee'd ranks."""

    def on_progress(self, phase: int, progress: Progress) -> None:
        """Take how far the training of a phase is."""


class End(Enum):
    """Why a phase ended."""

    EXITED = "exited"  # by itself, well or not
    TIME_LIMIT = "time limit"  # stopped by us
    HUNG_COLLECTIVE = "hung collective"  # stopped by us once a rank's watchdog said so
    NO_CHECKPOINT = "no checkpoint"  # by itself, without what the next phase resumes from


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnd:
    """How one phase went.

    Attributes:
        returncode: The launcher's, negative for a signal.
        num_left: Processes that outlived the launcher and were killed.
        hung_rank: The rank whose watchdog reported, where `end` is HUNG_COLLECTIVE.
        progress: The last iteration that was printed, or None.
        problem: What is missing, where `end` is NO_CHECKPOINT.
    """

    plan: PhasePlan
    end: End
    returncode: int
    num_left: int
    duration_s: float
    hung_rank: int | None
    progress: Progress | None
    problem: str | None = None

    @property
    def is_clean(self) -> bool:
        """Whether it ran to its end and said so."""
        return self.end is End.EXITED and self.returncode == 0


def run_attempt(
    plan: AttemptPlan, description: JsonValue, listener: Listener, kept_open: Sequence[int] = ()
) -> tuple[PhaseEnd, ...]:
    """Run the phases of an attempt one after the other, up to the first that is not clean.

    Args:
        plan: What to run; its directories must not be there yet.
        description: Goes to `plan.json` before anything starts.
        listener: Told about lines and progress while it runs.
        kept_open: Descriptors, of GPU locks, that must not close before the last rank is gone.

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
    deadline = time.monotonic() + plan.time_limit_s
    for phase in plan.phases:
        if phase.rewind is not None and (problem := find_no_checkpoint(phase.rewind)):
            ends[-1] = replace(ends[-1], end=End.NO_CHECKPOINT, problem=problem)
            break
        _prepare(plan, phase)
        ends.append(_run_phase(plan, phase, listener, deadline, kept_open))
        settle_logs(phase.dirs)
        if not ends[-1].is_clean:
            break
    return tuple(ends)


def find_no_checkpoint(rewind: Rewind) -> str | None:
    """Return what is wrong if the checkpoint to resume from is not there, None if it is."""
    kept = rewind.checkpoints / f"iter_{rewind.back_to:07d}"
    if kept.is_dir():
        return None
    found = sorted(path.name for path in rewind.checkpoints.glob("iter_*"))
    return (
        f"{rewind.checkpoints} has no {kept.name} to resume from, found "
        f"{', '.join(found) or 'no checkpoint'}; set --save-interval to half of --train-iters"
    )


def rewind_checkpoints(rewind: Rewind) -> None:
    """Make a finished training look as if it had stopped at `back_to`.

    Raises:
        OSError: The checkpoints cannot be changed.
    """
    shutil.rmtree(rewind.checkpoints / f"iter_{rewind.last:07d}", ignore_errors=True)
    tracker = rewind.checkpoints / "latest_checkpointed_iteration.txt"
    write_text_atomically(tracker, str(rewind.back_to))


def settle_logs(dirs: PhaseDirs) -> None:
    """Move torch's `logs/<run id>/attempt_0/<rank>/` to `logs/<rank>/`."""
    for run in [path for path in dirs.logs.glob("*_*") if path.is_dir()]:
        for rank in run.glob("attempt_*/*"):
            target = dirs.logs / rank.name
            if rank.is_dir() and not target.exists():
                rank.rename(target)
        for attempt in run.glob("attempt_*"):
            if not any(attempt.iterdir()):
                attempt.rmdir()
        if not any(run.iterdir()):
            run.rmdir()


def _prepare(plan: AttemptPlan, phase: PhasePlan) -> None:
    """Make what a phase expects to find."""
    try:
        if phase.rewind is not None:
            rewind_checkpoints(phase.rewind)
        phase.dirs.logs.mkdir(parents=True)
        phase.dirs.tensorboard.mkdir()
        if str(phase.dirs.flight) in phase.own_env.get(FLIGHT_VARIABLE, ""):
            phase.dirs.flight.mkdir()
        if plan.script is not None:
            plan.dirs.assets.mkdir()
            plan.dirs.artifacts.mkdir()
            write_text_atomically(Path(phase.argv[-1]), plan.script)
    except OSError as error:
        raise _cannot_write(error, phase.dirs.root) from error


def _run_phase(
    plan: AttemptPlan,
    phase: PhasePlan,
    listener: Listener,
    deadline: float,
    kept_open: Sequence[int],
) -> PhaseEnd:
    """Start a phase and watch it to its end."""
    watch = LogWatch(phase.dirs, scripts=plan.dirs.assets if phase.is_script else None)
    end = End.EXITED
    hung_at = 0.0
    with GuardedProcess(
        phase.argv,
        env=phase.env,
        cwd=plan.cwd,
        output=phase.dirs.launcher_log,
        grace_s=_STOP_GRACE_S,
        kept_open=kept_open,
    ) as process:
        while (ended := process.poll(_POLL_S)) is None:
            _tell(listener, phase, watch)
            hung_at = hung_at or (0.0 if watch.hung_rank is None else time.monotonic())
            if hung_at and _has_said_all(phase, plan.world_size, time.monotonic() - hung_at):
                deadline = 0.0
            if time.monotonic() >= deadline:
                end = End.TIME_LIMIT if watch.hung_rank is None else End.HUNG_COLLECTIVE
                ended = _stop(process)
                break
    _tell(listener, phase, watch, is_ended=True)
    return PhaseEnd(
        plan=phase,
        end=end,
        returncode=ended.returncode,
        num_left=ended.num_left,
        duration_s=ended.duration_s,
        hung_rank=watch.hung_rank,
        progress=watch.progress,
    )


def _tell(listener: Listener, phase: PhasePlan, watch: LogWatch, *, is_ended: bool = False) -> None:
    before = watch.progress
    if lines := (watch.drain() if is_ended else watch.poll()):
        listener.on_lines(lines)
    if watch.progress is not None and watch.progress != before:
        listener.on_progress(phase.number, watch.progress)


def _has_said_all(phase: PhasePlan, world_size: int, waited_s: float) -> bool:
    """Whether the ranks had their time to say where they are, once a watchdog spoke."""
    dumps = phase.dirs.flight_dumps()
    if not phase.dirs.flight.is_dir():
        return waited_s >= _WATCHDOG_GRACE_S
    now = time.time()
    is_whole = len(dumps) >= world_size and all(
        now - path.stat().st_mtime >= _QUIET_S for path in dumps
    )
    return is_whole or waited_s >= _DUMPS_S


def _stop(process: GuardedProcess) -> Ended:
    """Get every rank's stack into its log, then end it all."""
    process.dump_stacks()
    ended = process.poll(_STACKS_S)
    if ended is None:
        process.stop()
        ended = process.wait()
    return ended


def _cannot_write(error: OSError, directory: Path) -> LaunchError:
    where = str(error.filename or directory)
    return LaunchError(
        where, f"{error.strerror}; give another --run-dir, or make room; nothing was run"
    )
