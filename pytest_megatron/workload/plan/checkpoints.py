"""What phases start from: whether it is there, and how checkpoints are laid out.

Source: Megatron-LM's layout, `iter_0000050/` beside `latest_checkpointed_iteration.txt`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import assert_never

from pytest_megatron.base.files import write_text_atomically
from pytest_megatron.errors import LaunchError
from pytest_megatron.recipe.paths import is_missing_program
from pytest_megatron.workload.plan.phases import TRACKER, Frozen, Rewind
from pytest_megatron.workload.plan.plan import AttemptPlan


def require_inputs(plan: AttemptPlan) -> None:
    """Check that the program and every frozen checkpoint of a plan are there, before anything runs.

    Raises:
        LaunchError: One is not, or would not be loaded; the text says what to do.
    """
    for phase in plan.phases:
        if phase.start is not None and phase.before_script is None:
            _require_program(plan.cwd, phase.start.program[0])
        if isinstance(phase.origin, Frozen):
            _require_iteration(phase.origin)
        for path in phase.frozen_paths:
            _require_path(path, is_only_one=len(phase.frozen_paths) == 1)


def find_no_checkpoint(origin: Rewind | Frozen) -> str | None:
    """Return what is wrong if the checkpoint to resume from is not there, None if it is."""
    kept = origin.checkpoints / iteration_name(origin.back_to)
    if kept.is_dir():
        return None
    found = _iterations(origin.checkpoints)
    return (
        f"{origin.checkpoints} has no {kept.name} to resume from, found "
        f"{', '.join(found) or 'no checkpoint'}; set --save-interval to half of --train-iters"
    )


def find_not_saved(directory: Path, iteration: int) -> str | None:
    """Return what is wrong if a phase did not save an iteration, None if it did."""
    if saved_iteration(directory) == iteration:
        return None
    found = _iterations(directory)
    return (
        f"{directory} has no {iteration_name(iteration)} to compare, found "
        f"{', '.join(found) or 'no checkpoint'}; set --save to ${{CHECKPOINT_SAVE_PATH}} and "
        f"--save-interval so that the last iteration is saved"
    )


def saved_iteration(directory: Path) -> int | None:
    """Return the iteration that a directory's tracker names, None where there is none."""
    try:
        text = (directory / TRACKER).read_text().strip()
    except OSError:
        return None
    is_there = text.isdecimal() and (directory / iteration_name(int(text))).is_dir()
    return int(text) if is_there else None


def lay_out(origin: Rewind | Frozen) -> None:
    """Make the directory that a phase loads from show the iteration that it resumes.

    Raises:
        OSError: The directory cannot be written.
    """
    match origin:
        case Rewind():
            directory = origin.checkpoints
            shutil.rmtree(directory / iteration_name(origin.last), ignore_errors=True)
        case Frozen():
            directory, name = origin.view, iteration_name(origin.back_to)
            directory.mkdir()
            (directory / name).symlink_to((origin.checkpoints / name).resolve())
        case _:
            assert_never(origin)
    write_text_atomically(directory / TRACKER, str(origin.back_to))


def iteration_name(iteration: int) -> str:
    """Return the directory of an iteration's checkpoint."""
    return f"iter_{iteration:07d}"


def _require_program(cwd: Path, program: str) -> None:
    """Check a Python program of the project; commands and absolute paths may be elsewhere."""
    if is_missing_program(cwd, program):
        raise LaunchError(
            str(cwd / program),
            "there is no such program, nothing was run; write it, or change the recipe's "
            "training_script_path, which counts from the project's root",
        )


def _require_iteration(frozen: Frozen) -> None:
    name = iteration_name(frozen.back_to)
    if (frozen.checkpoints / name).is_dir():
        return
    found = ", ".join(_iterations(frozen.checkpoints)) or "no checkpoint"
    raise LaunchError(
        str(frozen.checkpoints),
        f"there is no frozen checkpoint {name}, found {found}; nothing was run; to make one, train "
        f"the case once as ckpt-resume and copy {name} from the attempt's checkpoints directory",
    )


def _require_path(path: Path, *, is_only_one: bool) -> None:
    """Check one path that a frozen-start reads.

    A directory without a tracker may hold anything (a tokenizer, weights of another format); only
    where nothing else is read it must be a checkpoint, since a program that finds none there
    starts from scratch and says so in a warning.
    """
    what = None
    if not path.exists():
        what = "there is no frozen checkpoint"
    elif path.is_dir():
        has_tracker = (path / TRACKER).exists()
        names = _iterations(path)
        if not any(path.iterdir()):
            what = "the directory of the frozen checkpoint is empty"
        elif not has_tracker and (names or is_only_one):
            what = f"the directory of the frozen checkpoint has no {TRACKER}, so nothing is loaded"
    if what is not None:
        raise LaunchError(
            str(path),
            f"{what}; nothing was run; copy the checkpoint there, or let the recipe's "
            f"checkpoint_load_path name the directory that has it",
        )


def _iterations(directory: Path) -> Iterable[str]:
    return sorted(path.name for path in directory.glob("iter_*"))
