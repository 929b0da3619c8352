"""All that makes the text of a job's script, from what a submission needs and the settings. Pure.

Orders of one shape have one script, and can be elements of one array: what they differ in stands
in their specs.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.engines.multitask.messages import PLACE_VARIABLES
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.workloads.engine.api import Resources
from pytest_megatron.workloads.engine.config import (
    GPUS_OF_RECIPE,
    EnvironmentNodes,
    LaunchMode,
    SlurmConfig,
    UvSyncConfig,
)

WORKER = "pytest_megatron.engines.worker"
SPEC_VARIABLE = "spec"
# What the shell that submits may have of an earlier launcher would lead every rank astray.
UNSET = f"unset {' '.join(PLACE_VARIABLES)}"
_ENDS_MOUNT = re.compile(r"[\s,:]")
# The harness looks after the tasks itself: the first one names who failed, and stops the others.
STEP_FLAGS = ("--wait=0", "--kill-on-bad-exit=0")


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
        container: Image, or None.
        mounts: Mounts of the container, `SOURCE:TARGET[:OPTIONS]`.
        container_env: Variables whose outer value beats the image's.
        workdir: Where the tasks start.
        step_flags: Flags of the srun that starts the tasks beside `STEP_FLAGS`, whole words.
        setup: Lines of bash before it.
        command: What each task runs, as bash reads it.
    """

    name: str
    flags: dict[str, str]
    container: str | None
    mounts: tuple[str, ...]
    container_env: tuple[str, ...]
    workdir: str
    step_flags: tuple[str, ...]
    setup: tuple[str, ...]
    command: str


def shape_of(needed: Resources, place: SlurmConfig, paths: ShapePaths) -> Shape:
    """Return the shape of jobs with these needs.

    Args:
        needed: By a submission.
        place: The settings for its platform, as `place_of` gives them.
        paths: Paths of the run.

    Raises:
        LaunchError: A directory cannot be mounted into a container.
    """
    assert place.python is not None
    container = place.container
    words = [place.python, "-m", WORKER]
    return Shape(
        name=paths.title or f"megatron-{needed.num_nodes}x{needed.ranks_per_node}",
        flags=dict(_flags(needed, place, paths)),
        container=None if container is None else container.image,
        mounts=() if container is None else mounts_of(place, paths),
        container_env=() if container is None else container.env,
        workdir=_workdir(place, paths),
        step_flags=(*_home_flags(place), *step_flags(place)),
        setup=tuple(_setup(needed, place, paths)),
        command=f'{shlex.join(words)} "${SPEC_VARIABLE}"',
    )


def minutes_of_job(needed: Resources, place: SlurmConfig) -> int:
    """Return the time limit of a job in minutes: Slurm's comes after our own."""
    return place.time_minutes or math.ceil(needed.time_limit_s / 60) + place.time_slack


def tasks_per_node(needed: Resources, mode: LaunchMode) -> int:
    """Return how many tasks srun starts on a node."""
    return needed.ranks_per_node if mode is LaunchMode.SRUN_NATIVE else 1


def gpu_flags(needed: Resources, place: SlurmConfig) -> dict[str, str]:
    """Return what asks Slurm for GPUs."""
    is_cpu = needed.platform == CPU_PLATFORM
    kinds = [] if place.gres is None else place.gres.split(",")
    asked = [kind for kind in kinds if not (is_cpu and GPUS_OF_RECIPE in kind)]
    if asked:
        return {"gres": ",".join(asked).replace(GPUS_OF_RECIPE, str(needed.gpus_per_node))}
    if is_cpu and place.gpus_per_node is None:
        return {}
    number = needed.gpus_per_node if place.gpus_per_node is None else place.gpus_per_node
    return {"gpus-per-node": str(number)} if number else {}


def place_flags(needed: Resources, place: SlurmConfig) -> dict[str, str]:
    """Return the flags for a job's place in the cluster and its resources."""
    hours, minutes = divmod(minutes_of_job(needed, place), 60)
    found = {
        "account": place.account,
        "constraint": place.constraint,
        "cpus-per-task": _number(place.cpus_per_task),
        "exclude": ",".join(place.exclude),
        "exclusive": "" if place.exclusive else None,
        "mem": place.mem,
        "nodelist": ",".join(place.nodelist),
        "nodes": str(needed.num_nodes),
        "ntasks-per-node": str(tasks_per_node(needed, place.mode)),
        "partition": place.partition,
        "qos": place.qos,
        "reservation": place.reservation,
        "segment": _number(place.segment or needed.segment),
        "time": f"{hours:02}:{minutes:02}:00",
        **gpu_flags(needed, place),
    }
    lists = ("exclude", "nodelist")
    return {
        name: value
        for name, value in found.items()
        if value is not None and not (name in lists and not value)
    }


def step_flags(place: SlurmConfig) -> list[str]:
    """Return the flags of a step of tasks that are not about its container."""
    mpi = [] if place.mpi is None else [f"--mpi={place.mpi}"]
    return [*_cpu_flags(place), *mpi, *place.srun_flags]


def container_words(place: SlurmConfig, paths: ShapePaths) -> tuple[str, ...]:
    """Return the words of an srun of ours whose task is to be in the container, if there is one."""
    container = place.container
    if container is None:
        return ()
    found = [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(mounts_of(place, paths))}",
        f"--container-workdir={_workdir(place, paths)}",
    ]
    if container.env:
        found.append(f"--container-env={','.join(container.env)}")
    return (*found, *_home_flags(place))


def mounts_of(place: SlurmConfig, paths: ShapePaths) -> tuple[str, ...]:
    """Return what a container sees: what is configured, and what the worker needs to see.

    Raises:
        LaunchError: pyxis or enroot would take one path for several.
    """
    assert place.container is not None
    needed = [paths.root, paths.run_dir, *(_uv_dirs(place.uv_sync))]
    for path in map(str, needed):
        if _ENDS_MOUNT.search(path):
            raise LaunchError(
                path,
                "cannot be mounted into a container: pyxis and enroot read a blank, a comma and "
                "a colon as the end of a path; use a directory without them",
            )
    own = [f"{path}:{path}" for path in needed if not {*path.parents} & {*needed}]
    return tuple(dict.fromkeys([*place.container.mounts, *own]))


def _flags(needed: Resources, place: SlurmConfig, paths: ShapePaths) -> Iterator[tuple[str, str]]:
    """Yield the flags of sbatch with their values."""
    yield from place_flags(needed, place).items()
    yield "no-requeue", ""
    yield "output", str(paths.logs / "%x-%j.out")
    for word in place.sbatch_flags:
        name, _, value = word.removeprefix("--").partition("=")
        yield name, value


def _cpu_flags(place: SlurmConfig) -> list[str]:
    """Return what a step does not inherit from its job since Slurm 22.05."""
    return [] if place.cpus_per_task is None else [f"--cpus-per-task={place.cpus_per_task}"]


def _home_flags(place: SlurmConfig) -> list[str]:
    is_hidden = place.container is not None and not place.container.mounts_home
    return ["--no-container-mount-home"] if is_hidden else []


def _workdir(place: SlurmConfig, paths: ShapePaths) -> str:
    own = None if place.container is None else place.container.workdir
    return own or str(paths.root)


def _setup(needed: Resources, place: SlurmConfig, paths: ShapePaths) -> Iterator[str]:
    """Yield the lines before the tasks start; the first that fails ends the job."""
    default = "" if paths.spec is None else f":-{shlex.quote(str(paths.spec))}"
    yield f"{SPEC_VARIABLE}=${{1{default or ':?no spec is given'}}}"
    yield UNSET
    if not (place.job_env or place.setup or place.uv_sync):
        return
    yield "set -e"
    for name, value in place.job_env.items():
        yield f"export {name}={shlex.quote(value)}"
    yield from place.setup
    yield from sync_lines(needed, place, paths)
    yield "set +e"


def sync_lines(needed: Resources, place: SlurmConfig, paths: ShapePaths) -> Iterator[str]:
    """Yield the steps that make the environment, on every node or on the first."""
    sync = place.uv_sync
    if sync is None:
        return
    number = needed.num_nodes if sync.where is EnvironmentNodes.NODE else 1
    step = ["srun", f"--nodes={number}", f"--ntasks={number}", "--ntasks-per-node=1"]
    if place.container is not None:  # a mount has to be there before the container is
        yield shlex.join([*step, "mkdir", "-p", *map(str, _uv_dirs(sync))])
    inside = [*_cpu_flags(place), *container_words(place, paths)]
    yield shlex.join([*step, *inside, "bash", "-euxc", sync_script(sync, paths.root)])


def sync_script(sync: UvSyncConfig, root: Path) -> str:
    """Return the two phases of `uv sync` as bash reads them.

    In the first everything is installed that others are built against, torch above all; in the
    second what is built against it, and the project itself. The first takes nothing away, or it
    would take that from a job that shares the environment.
    """
    base = [sync.uv, "sync", "--frozen"]
    project = sync.project or str(root)
    cache = [] if sync.cache is None else [f"export UV_CACHE_DIR={shlex.quote(sync.cache)}"]
    return "; ".join(
        [
            f"export UV_PROJECT_ENVIRONMENT={shlex.quote(sync.venv)}",
            *cache,
            f"cd {shlex.quote(project)}",
            shlex.join([*base, "--inexact", *sync.args, *sync.first]),
            shlex.join([*base, *sync.args, *sync.second]),
        ]
    )


def _uv_dirs(sync: UvSyncConfig | None) -> list[Path]:
    """Return the directories that a container must share with its node for an environment."""
    if sync is None:
        return []
    return [Path(sync.venv).parent, *([] if sync.cache is None else [Path(sync.cache)])]


def _number(value: int | None) -> str | None:
    return None if value is None else str(value)
