"""All that makes the text of a job's script, from what a submission needs and the settings. Pure.

Submissions of one shape have one script: what they differ in stands in their specs.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.engines.config import (
    GPUS_OF_RECIPE,
    LaunchMode,
    SlurmConfig,
    UvSyncConfig,
)
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.workloads.engine.api import Resources

WORKER = "pytest_megatron.engines.worker"
SPEC_VARIABLE = "spec"
# What the shell that submits may have of an earlier launcher would lead every rank astray.
UNSET = "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
_ENDS_MOUNT = re.compile(r"[\s,:]")
# A task whose command fails stays until task 0 has noted it and stopped the others; these end a
# step of which a task was killed, and tasks that stay behind.
STEP_FLAGS = ("--wait=60", "--kill-on-bad-exit=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapePaths:
    """Paths that are common to the scripts of one run.

    Attributes:
        root: The project.
        run_dir: Directory of the run; a container sees both at the same paths.
        logs: Where the output of jobs goes.
        spec: What a script carries out that is submitted without an argument, or None.
        title: Name of its jobs, where they are of one workload; "" is the shape's.
    """

    root: Path
    run_dir: Path
    logs: Path
    spec: Path | None = None
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One kind of job.

    Attributes:
        flags: sbatch's flags by name, with `-` and without the dashes in front; "" is a bare flag.
        step: The srun that starts the tasks, in words; its output goes where the job's goes.
        setup: Lines of bash before it.
        command: What each task runs, as bash reads it.
    """

    name: str
    flags: dict[str, str]
    step: tuple[str, ...]
    setup: tuple[str, ...]
    command: str


def shape_of(resources: Resources, slurm: SlurmConfig, paths: ShapePaths) -> Shape:
    """Return the shape of jobs with these needs.

    Args:
        resources: By a submission.
        slurm: The settings for its platform, as `place_of` gives them.
        paths: Paths of the run.

    Raises:
        LaunchError: A directory cannot be mounted into a container.
    """
    assert slurm.python is not None
    where = container_words(slurm, paths) or (f"--chdir={paths.root}",)
    words = [slurm.python, "-m", WORKER]
    return Shape(
        name=paths.title or f"megatron-{resources.num_nodes}x{resources.ranks_per_node}",
        flags=dict(_flags(resources, slurm, paths)),
        step=("srun", "--output=all", *where, *_cpu_flags(slurm), *STEP_FLAGS, *slurm.srun_flags),
        setup=tuple(_setup(resources, slurm, paths)),
        command=f'{shlex.join(words)} "${SPEC_VARIABLE}"',
    )


def minutes_of_job(resources: Resources, slurm: SlurmConfig) -> int:
    """Return the time limit of a job in minutes: Slurm's comes after our own."""
    return math.ceil(resources.time_limit_s / 60) + slurm.time_slack


def tasks_per_node(resources: Resources, mode: LaunchMode) -> int:
    """Return how many tasks srun starts on a node."""
    return resources.ranks_per_node if mode is LaunchMode.SRUN_NATIVE else 1


def gpu_flags(resources: Resources, slurm: SlurmConfig) -> dict[str, str]:
    """Return what asks Slurm for GPUs."""
    if resources.platform == CPU_PLATFORM:
        return {}
    if slurm.gres is not None:
        return {"gres": slurm.gres.replace(GPUS_OF_RECIPE, str(resources.gpus_per_node))}
    number = resources.gpus_per_node if slurm.gpus_per_node is None else slurm.gpus_per_node
    return {"gpus-per-node": str(number)} if number else {}


def place_flags(resources: Resources, slurm: SlurmConfig) -> dict[str, str]:
    """Return the flags for a job's place in the cluster and its resources."""
    hours, minutes = divmod(minutes_of_job(resources, slurm), 60)
    found = {
        "account": slurm.account,
        "cpus-per-task": _number(slurm.cpus_per_task),
        "exclude": ",".join(slurm.exclude) or None,
        "nodes": str(resources.num_nodes),
        "ntasks-per-node": str(tasks_per_node(resources, slurm.mode)),
        "partition": slurm.partition,
        "segment": _number(resources.segment),
        "time": f"{hours:02}:{minutes:02}:00",
        **gpu_flags(resources, slurm),
    }
    return {name: value for name, value in found.items() if value is not None}


def flag_words(flags: Mapping[str, str]) -> list[str]:
    """Return flags as words of a command."""
    return [f"--{name}={value}" if value else f"--{name}" for name, value in flags.items()]


def container_words(slurm: SlurmConfig, paths: ShapePaths) -> tuple[str, ...]:
    """Return the words of an srun whose tasks are to be in the container, if there is one."""
    if slurm.container is None:
        return ()
    return (
        f"--container-image={slurm.container.image}",
        f"--container-mounts={','.join(mounts_of(slurm, paths))}",
        f"--container-workdir={paths.root}",
        "--no-container-mount-home",
    )


def mounts_of(slurm: SlurmConfig, paths: ShapePaths) -> tuple[str, ...]:
    """Return what a container sees: what is configured, and what the worker needs to see.

    Raises:
        LaunchError: pyxis or enroot would take one path for several.
    """
    assert slurm.container is not None
    needed = [paths.root, paths.run_dir, *(_uv_dirs(slurm.uv_sync))]
    for path in map(str, needed):
        if _ENDS_MOUNT.search(path):
            raise LaunchError(
                path,
                "cannot be mounted into a container: pyxis and enroot read a blank, a comma and "
                "a colon as the end of a path; use a directory without them",
            )
    own = [f"{path}:{path}" for path in needed if not {*path.parents} & {*needed}]
    return tuple(dict.fromkeys([*slurm.container.mounts, *own]))


def _flags(
    resources: Resources, slurm: SlurmConfig, paths: ShapePaths
) -> Iterator[tuple[str, str]]:
    """Yield the flags of sbatch with their values."""
    yield from place_flags(resources, slurm).items()
    yield "no-requeue", ""
    yield "output", str(paths.logs / "%x-%j.out")
    for word in slurm.sbatch_flags:
        name, _, value = word.removeprefix("--").partition("=")
        yield name, value


def _cpu_flags(slurm: SlurmConfig) -> list[str]:
    """Return what a step does not inherit from its job since Slurm 22.05."""
    return [] if slurm.cpus_per_task is None else [f"--cpus-per-task={slurm.cpus_per_task}"]


def _setup(resources: Resources, slurm: SlurmConfig, paths: ShapePaths) -> Iterator[str]:
    """Yield the lines before the tasks start; the first that fails ends the job."""
    default = "" if paths.spec is None else f":-{shlex.quote(str(paths.spec))}"
    yield f"{SPEC_VARIABLE}=${{1{default or ':?no spec is given'}}}"
    yield UNSET
    if not (slurm.job_env or slurm.setup or slurm.uv_sync):
        return
    yield "set -e"
    for name, value in slurm.job_env.items():
        yield f"export {name}={shlex.quote(value)}"
    yield from slurm.setup
    yield from sync_lines(resources, slurm, paths)
    yield "set +e"


def sync_lines(resources: Resources, slurm: SlurmConfig, paths: ShapePaths) -> Iterator[str]:
    """Yield the steps that make the environment, on every node."""
    sync = slurm.uv_sync
    if sync is None:
        return
    number = resources.num_nodes
    step = ["srun", f"--nodes={number}", f"--ntasks={number}", "--ntasks-per-node=1"]
    if slurm.container is not None:  # a mount has to be there before the container is
        yield shlex.join([*step, "mkdir", "-p", *map(str, _uv_dirs(sync))])
    inside = [*_cpu_flags(slurm), *container_words(slurm, paths)]
    yield shlex.join([*step, *inside, "bash", "-euxc", sync_script(sync, paths.root)])


def sync_script(sync: UvSyncConfig, root: Path) -> str:
    """Return the two phases of `uv sync` as bash reads them.

    In the first everything is installed that others are built against, torch above all; in the
    second what is built against it, and the project itself. The first takes nothing away, or it
    would take that from a job that shares the environment.
    """
    base = ["uv", "sync", "--frozen"]
    cache = [] if sync.cache is None else [f"export UV_CACHE_DIR={shlex.quote(sync.cache)}"]
    return "; ".join(
        [
            f"export UV_PROJECT_ENVIRONMENT={shlex.quote(sync.venv)}",
            *cache,
            f"cd {shlex.quote(str(root))}",
            shlex.join([*base, "--inexact", *sync.args, *sync.first]),
            shlex.join([*base, *sync.args]),
        ]
    )


def _uv_dirs(sync: UvSyncConfig | None) -> list[Path]:
    """Return the directories that a container must share with its node for an environment."""
    if sync is None:
        return []
    return [Path(sync.venv).parent, *([] if sync.cache is None else [Path(sync.cache)])]


def _number(value: int | None) -> str | None:
    return None if value is None else str(value)
