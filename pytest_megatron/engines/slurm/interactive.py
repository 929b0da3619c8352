"""The lines with which a person gets nodes of Slurm, and what to type there. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from pytest_megatron.engines.api import Resources
from pytest_megatron.engines.config import SlurmConfig
from pytest_megatron.engines.slurm.shape import (
    STEP_FLAGS,
    UNSET,
    WORKER,
    ShapePaths,
    container_words,
    place_flags,
    step_flags,
    sync_lines,
    sync_script,
)

_WIDTH = 100
_INDENT = "    "


def shell_lines(
    needed: Resources, place: SlurmConfig, paths: ShapePaths, inside: Sequence[str]
) -> Iterator[str]:
    """Yield how to get a shell on one node, and what to type in it.

    Args:
        needed: By a workload, one node of it.
        place: The settings of the cluster for its platform.
        paths: Of the project and the run.
        inside: What runs the workload there.
    """
    flags = place_flags(needed, place)
    del flags["ntasks-per-node"]
    flags = _named(flags, paths)
    yield "# a shell on a node with what it needs:"
    yield from _exports(place.job_env)
    if place.container is not None:
        yield from place.setup
    words = [*_words(flags), "--ntasks=1", *place.sbatch_flags, *_shell(place, paths)]
    yield wrapped(["srun", *words])
    yield "# in it:"
    yield from _exports(place.env)
    if place.container is None:
        yield from place.setup
    if place.uv_sync is not None:
        yield f"({sync_script(place.uv_sync, paths.root)})"
    yield f"cd {shlex.quote(str(paths.root))}"
    yield shlex.join(inside)


def allocation_lines(
    needed: Resources, place: SlurmConfig, paths: ShapePaths, notes: Sequence[str]
) -> Iterator[str]:
    """Yield how to get several nodes, and what to type on the first.

    Args:
        needed: As above.
        place: As above.
        paths: As above.
        notes: Comments on what the tasks do.
    """
    assert place.python is not None
    yield "# its nodes:"
    flags = _named(place_flags(needed, place), paths)
    yield wrapped(["salloc", *_words(flags), *place.sbatch_flags])
    yield "# in the shell that this opens:"
    yield UNSET
    yield from _exports(place.job_env)
    yield from place.setup
    yield from sync_lines(needed, place, paths)
    there = container_words(place, paths) or (f"--chdir={paths.root}",)
    yield from notes
    task = [place.python, "-m", WORKER, str(paths.spec)]
    yield wrapped(["srun", *there, *step_flags(place), *STEP_FLAGS, *task])
    yield "# or a shell on the first of them:"
    yield wrapped(["srun", "--nodes=1", "--ntasks=1", *_shell(place, paths)])


def _named(flags: Mapping[str, str], paths: ShapePaths) -> dict[str, str]:
    return {"job-name": paths.title, **flags} if paths.title else dict(flags)


def _shell(place: SlurmConfig, paths: ShapePaths) -> list[str]:
    return [*container_words(place, paths), *step_flags(place), "--pty", "bash", "-i"]


def _exports(variables: Mapping[str, str]) -> Iterator[str]:
    for name, value in variables.items():
        yield f"export {name}={shlex.quote(value)}"


def _words(flags: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" if value else f"--{name}" for name, value in flags.items()]


def wrapped(words: Sequence[str]) -> str:
    """Return a command, a long one over several lines."""
    lines = [""]
    for word in map(shlex.quote, words):
        if lines[-1].strip() and len(lines[-1]) + len(word) >= _WIDTH:
            lines.append(_INDENT)
        is_first = not lines[-1].strip()
        lines[-1] += word if is_first else f" {word}"
    return " \\\n".join(lines)
