"""The file of `--executor-config`: one mapping for each engine; errors have file and line.

`schemas/executor-config.schema.json` and the tables of `executor-config.md` are made from here.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from annotated_types import Gt

from pytest_megatron.base import schema
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.schema import (
    FINITE,
    About,
    Checked,
    Count,
    ExpectedError,
    FormatVersion,
    Positive,
    Text,
    closed,
    matches,
)
from pytest_megatron.base.text import one_of
from pytest_megatron.errors import ConfigError

if TYPE_CHECKING:
    from pytest_megatron.base.yaml import YamlDocument, YamlPath

GPUS_OF_RECIPE = "{gpus}"  # in `gres`
_LAST_PORT = 65_535

# Flags that the engine gives by itself, or by a key that others are joined with.
_OWN_FLAGS = frozenset(
    (
        *("array", "chdir", "container-image", "container-mounts", "container-workdir", "error"),
        *("exclude", "job-name", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "output"),
        *("parsable", "requeue", "test-only", "wait", "wrap"),
    )
)


def _check_flag(word: str) -> str:
    """Refuse a flag that would be given twice."""
    if word.removeprefix("--").partition("=")[0] in _OWN_FLAGS:
        raise ValueError(f"{word!r} is what the engine, or another key, sets; remove it")
    return word


def _check_ports(text: str) -> str:
    """Refuse a range of ports that is none."""
    first, _, last = text.partition("-")
    if not 0 < int(first) <= int(last) <= _LAST_PORT:
        raise ExpectedError(f"FIRST-LAST within 1-{_LAST_PORT}, the lower one first")
    return text


_MOUNT = "SOURCE:TARGET or SOURCE:TARGET:ro, both absolute"
Seconds: TypeAlias = Annotated[float, Gt(0), FINITE]
Flag: TypeAlias = Annotated[
    str,
    matches("^--[a-z][a-z0-9-]*(=.*)?$", "a long flag, --name or --name=value"),
    Checked(_check_flag),
]
Mount: TypeAlias = Annotated[str, matches("^/[^:]*:/[^:]*(:[^:]+)?$", _MOUNT)]
# pyxis cuts the list at commas, enroot an entry of it at blanks; options are joined by `+`.
PlainMount: TypeAlias = Annotated[
    str,
    matches(r"^/[^:,\s]*:/[^:,\s]*(:[^:,\s]+)?$", f"{_MOUNT}, without commas and blanks"),
]
Ports: TypeAlias = Annotated[
    str, matches(r"^\d+-\d+$", "FIRST-LAST, such as 20000-29999"), Checked(_check_ports)
]
Size: TypeAlias = Annotated[str, matches(r"^\d+[bkmgBKMG]?$", "a size, such as 16g")]
Variables: TypeAlias = dict[
    Annotated[str, matches(r"^[A-Za-z_]\w*$", "the name of a variable")], str
]
Venv: TypeAlias = Annotated[
    str, matches(r"^/[^/]+/.+$", "an absolute path, in a directory of its own")
]


class LaunchMode(Enum):
    """Who starts the ranks of a job."""

    TORCHRUN = "torchrun"  # one task a node, each starts torch.distributed.run
    SRUN_NATIVE = "srun-native"  # one task a rank, started by srun


_MOUNTS = About(
    "`SOURCE:TARGET[:ro]`, both absolute. The project and the run directory are mounted by "
    "themselves, at the paths that they have outside."
)


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerConfig:
    """The container of a Slurm job, as enroot and pyxis take it."""

    image: Annotated[Text, About("`--container-image`: a registry's name or a `.sqsh` file.")]
    mounts: Annotated[
        tuple[PlainMount, ...],
        _MOUNTS,
    ] = ()


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class UvSyncConfig:
    """An environment that `uv sync` makes on every node before the training, in two phases."""

    venv: Annotated[
        Venv,
        About(
            "Where the environment goes. `{digest}` stands for a digest of the project's path, its "
            "`uv.lock` and these settings, so that two states do not share one; `{user}` for the "
            "user's name."
        ),
    ]
    cache: Annotated[Text | None, About("`UV_CACHE_DIR`.")] = None
    args: Annotated[
        tuple[Text, ...], About("Words of both phases after `uv sync --frozen`: extras and groups.")
    ] = ()
    first: Annotated[
        tuple[Text, ...],
        About(
            "Words of the first phase alone. Packages that build against torch go here as "
            "`--no-install-package NAME`."
        ),
    ] = ("--no-install-project",)


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceConfig:
    """Where in the cluster jobs go and what they find; also for one platform alone.

    None, and empty, is what the file does not say.
    """

    account: Annotated[Text | None, About("`--account`.")] = None
    partition: Annotated[Text | None, About("`--partition`.")] = None
    exclude: Annotated[
        tuple[Text, ...],
        About("`--exclude`: hosts, such as `node[3-4]`; hosts that failed are added."),
    ] = ()
    cpus_per_task: Annotated[
        Positive | None, About("`--cpus-per-task`, for the job and for its step.")
    ] = None
    gpus_per_node: Annotated[
        Count | None,
        About(
            "`--gpus-per-node`. By default the recipe's `gpus`, and none on platform `cpu`; 0 asks "
            "for none, where nodes are given out whole."
        ),
    ] = None
    gres: Annotated[
        Text | None,
        About(
            "`--gres` in place of `--gpus-per-node`, on platforms with GPUs; `{gpus}` stands for "
            "the recipe's number, as in `gpu:h100:{gpus},tmpfs:1`."
        ),
    ] = None
    sbatch_flags: Annotated[
        tuple[Flag, ...],
        About("Further flags of sbatch, such as `--qos=high`; they win over those of other keys."),
    ] = ()
    srun_flags: Annotated[
        tuple[Flag, ...],
        About("Further flags of the srun that starts the tasks, such as `--mpi=pmix`."),
    ] = ()
    container: Annotated[ContainerConfig | None, About("See below.")] = None
    uv_sync: Annotated[UvSyncConfig | None, About("See below.")] = None
    python: Annotated[
        Text | None,
        About(
            "The interpreter in the job, which has pytest-megatron. By default that of `uv_sync`, "
            "else `python3` in a container, else the one that pytest runs on."
        ),
    ] = None
    setup: Annotated[
        tuple[str, ...],
        About(
            "Lines of bash that the batch script runs first, on the job's first node and outside "
            "of any container, such as `module load cuda`."
        ),
    ] = ()
    env: Annotated[
        Variables,
        About(
            "Variables of the training. They arrive as they are written: nothing in them is "
            "expanded."
        ),
    ] = field(default_factory=dict)
    job_env: Annotated[
        Variables,
        About(
            "Variables that the batch script exports, for what Slurm, enroot or NCCL's plugins "
            "read before the training starts; everybody can read them in the script."
        ),
    ] = field(default_factory=dict)


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig(PlaceConfig):
    """The section `slurm`."""

    mode: Annotated[
        LaunchMode,
        About(
            "`torchrun`: one task a node, which starts `torch.distributed.run`; `srun-native`: one "
            "task a rank, which Slurm starts."
        ),
    ] = LaunchMode.TORCHRUN
    ports: Annotated[
        Ports,
        About(
            "`FIRST-LAST`: where the ranks of a job meet; which port it is follows from the job's "
            "number."
        ),
    ] = "20000-29999"
    time_slack: Annotated[
        Count,
        About(
            "Minutes that a job may take longer than its training: for the container, `uv sync` "
            "and its end."
        ),
    ] = 10
    max_jobs: Annotated[
        Positive | None, About("Jobs of a run that are in the queue at a time; by default all.")
    ] = None
    interval: Annotated[Seconds, About("Seconds between two questions about the queue.")] = 10.0
    platforms: Annotated[
        dict[Text, PlaceConfig],
        About("Platform to the keys that are different there, see below."),
    ] = field(default_factory=dict)

    def at(self, platform: str) -> SlurmConfig:
        """Return the settings as they are for one platform; `platforms` is empty in them."""
        own, unsaid = self.platforms.get(platform, PlaceConfig()), PlaceConfig()
        changes: dict[str, object] = {
            key.name: value
            for key in fields(PlaceConfig)
            if (value := getattr(own, key.name)) != getattr(unsaid, key.name)
        }
        changes["env"] = {**self.env, **own.env}
        changes["job_env"] = {**self.job_env, **own.job_env}
        return replace(self, platforms={}, **changes)  # type: ignore[arg-type] # fields' own values


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class DockerConfig:
    """The section `docker`."""

    image: Annotated[Text, About("Name, or `sha256:...` of an image that is here.")]
    mounts: Annotated[
        tuple[Mount, ...],
        _MOUNTS,
    ] = ()
    shm_size: Annotated[Size, About("Size of `/dev/shm`.")] = "16g"
    ulimits: Annotated[
        dict[Text, int],
        About(
            "Name to soft and hard limit; -1 is none. By default none on `memlock`, and 64 MiB for "
            "`stack`."
        ),
    ] = field(default_factory=lambda: {"memlock": -1, "stack": 67108864})
    network: Annotated[Text, About("Name of a network; Docker's own by default.")] = "bridge"
    memory: Annotated[
        Size | None, About("Limit of the container's memory; by default all that there is.")
    ] = None
    user: Annotated[
        Text | None,
        About(
            "`UID[:GID]` in the container; by default who runs pytest. What root writes there is "
            "given to them at the end."
        ),
    ] = None
    python: Annotated[
        Text, About("The interpreter in the container, which has pytest-megatron.")
    ] = "python3"
    env: Annotated[
        Variables, About("Variables of the training, which arrive as they are written.")
    ] = field(default_factory=dict)


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Further keys are names of engines of other packages."""

    format_version: FormatVersion
    slurm: SlurmConfig | None = None
    docker: DockerConfig | None = None


# Values that are a text however they look in YAML: `account: 0123`, `env: {X: 0x10}`.
_WRITTEN = frozenset(("account", "shm_size", "user"))
_VARIABLES = frozenset(("env", "job_env"))
# Keys of earlier versions, by section: what to do instead.
_REMOVED = {
    **{
        ("slurm", name): f"is no key any more; write --{name}=VALUE in sbatch_flags"
        for name in (
            *("constraint", "exclusive", "mem", "nodelist", "qos", "reservation", "segment"),
            "time",
        )
    },
    ("slurm", "mpi"): "is no key any more; write --mpi=VALUE in srun_flags",
    **{
        ("docker", name): "was removed; drop it, the Docker daemon has settings of its own"
        for name in ("ipc", "privileged", "runtime")
    },
    ("docker", "pull"): "was removed, as an image that is not here is fetched; drop it",
    ("slurm", "max_array"): "was removed, as jobs are no arrays any more; drop it",
    ("slurm", "remember_nodes"): "was removed; drop it, exclude has the nodes to keep away from",
    ("slurm", "retry_cancelled"): "was removed, as nobody knows who cancelled a job; drop it",
    ("slurm", "retry_timeout"): "was removed; drop it, a larger time_slack gives jobs more time",
    ("slurm", "shared_paths"): "was removed, as paths are not checked any more; drop it",
}


def read_executor_config(path: Path) -> ExecutorConfig:
    """Read a file of `--executor-config`.

    Raises:
        ConfigError: With file and line: it is not there or not YAML, has a key twice or one that
            nobody reads, or a value is not what its key takes.
    """
    # Jobs import the types alone.
    from pytest_megatron.base.yaml import read_yaml  # noqa: PLC0415
    from pytest_megatron.workloads.engine.api import GROUP  # noqa: PLC0415

    document = read_yaml(path, error=ConfigError)
    schema.refuse_duplicates(document, ConfigError)
    for (section, key), text in _REMOVED.items():
        found = document.value.get(section)
        if isinstance(found, dict) and key in found:
            raise ConfigError(f"{document.where((section, key))}: {section}.{key}", text)
    engines = {entry.name for entry in importlib.metadata.entry_points(group=GROUP)}
    foreign = engines - {"docker", "local", "slurm"}
    value = {
        key: _as_written(document, (key,), one)
        for key, one in document.value.items()
        if key not in foreign
    }
    return schema.read(ExecutorConfig, document, ConfigError, value)


def read_slurm_config(path: Path | None, platforms: Collection[str] = ()) -> SlurmConfig:
    """Return the section `slurm` of a file; what is not said, and all without a file, is default.

    Args:
        path: What `--executor-config` names, or None.
        platforms: The words that the section may have settings for; empty to take any.

    Raises:
        ConfigError: The file is refused, see `read_executor_config`; or a platform is none.
    """
    found = None if path is None else read_executor_config(path).slurm
    for name in (found or SlurmConfig()).platforms if platforms else ():
        if name not in platforms:
            raise ConfigError(
                f"{path}: slurm.platforms",
                f"unknown platform {name!r}, expected {one_of(name, platforms)}",
            )
    return found or SlurmConfig()


def read_docker_config(path: Path | None) -> DockerConfig:
    """Return the section `docker` of a file.

    Raises:
        ConfigError: The file is refused, see `read_executor_config`; or there is no file, or no
            such section: without an image there is no container.
    """
    if path is None:
        raise ConfigError(
            "--executor-config",
            "is not given, expected a file with `docker: {image: ...}` in it; "
            "docker needs to know which image",
        )
    found = read_executor_config(path).docker
    if found is None:
        raise ConfigError(str(path), "has no section docker, expected docker: {image: ...}; add it")
    return found


def json_schema() -> dict[str, JsonValue]:
    """Return the JSON schema of the file."""
    found = schema.json_schema(ExecutorConfig, "pytest-megatron executor configuration")
    del found["additionalProperties"]
    return found


def _as_written(document: YamlDocument, path: YamlPath, value: JsonValue) -> JsonValue:
    """Return a value with what must be a text as its characters in the file."""
    if isinstance(value, dict):
        return {key: _as_written(document, (*path, key), one) for key, one in value.items()}
    if isinstance(value, list):
        return [_as_written(document, (*path, i), one) for i, one in enumerate(value)]
    is_text = path[-1] in _WRITTEN or (len(path) > 1 and path[-2] in _VARIABLES)
    if is_text and isinstance(value, bool | int | float):
        return document.text_of(path)
    return value
