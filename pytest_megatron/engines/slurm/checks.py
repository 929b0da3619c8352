"""Checks of a workload on a cluster, before anything of it is submitted (effects).

Looks at this machine's mounts and asks Slurm twice in a run; where Slurm does not answer, what it
would refuse is left to the submission.
"""

from __future__ import annotations

import functools
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.engines.slurm.script import place_of
from pytest_megatron.engines.slurm.shape import gpu_flags, minutes_of_job
from pytest_megatron.workloads.engine.api import EngineContext, Resources
from pytest_megatron.workloads.engine.config import SlurmConfig
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.checks.check import findings_of
from pytest_megatron.workloads.training.checks.cluster import (
    MOUNTS,
    SINFO_FORMAT,
    Cluster,
    MountEntry,
    NamedPath,
    Wanted,
    check_partition,
    check_ports,
    check_shared,
    in_container,
    parse_cluster,
    parse_mounts,
)
from pytest_megatron.workloads.training.checks.rules import CheckFinding, RuleMatch
from pytest_megatron.workloads.training.plan.plan import Setting

_PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
_TIMEOUT_S = 60.0
_NEMO_HOME = "NEMO_HOME"
_HOMES = (_NEMO_HOME, "NEMORUN_HOME", "HF_HOME")
# Variables that would change what the commands print.
_MISLEADING = ("SINFO_", "SCONTROL_")
Ask = Callable[[], Cluster]


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """Facts about this machine.

    Attributes:
        hosts: Names of nodes.
        ephemeral: Ports that the kernel gives to connections, first and last.
    """

    hosts: frozenset[str]
    mounts: tuple[MountEntry, ...]
    ephemeral: tuple[int, int] | None


class SlurmChecks:
    """The checks of one run."""

    def __init__(
        self, config: SlurmConfig, context: EngineContext, around: Around, ask: Ask
    ) -> None:
        """Keep where the cluster is looked at; nothing is asked yet.

        Args:
            config: The settings.
            context: Context of the run.
            around: This machine.
            ask: Asks Slurm; called once, when the first workload is checked.
        """
        self._config = config
        self._context = context
        self._around = around
        self._ask = ask
        self._places: dict[str, SlurmConfig] = {}  # that of a platform may read uv.lock

    def findings(
        self, workload: Workload, setting: Setting, needed: Resources
    ) -> tuple[CheckFinding, ...]:
        """Return what is wrong with the jobs of a workload, errors first.

        Raises:
            LaunchError: The settings ask for what is not there.
        """
        platform = workload.platform
        if platform not in self._places:
            self._places[platform] = place_of(self._config, platform, self._context.root)
        place = self._places[platform]
        return findings_of(self._hits(workload, setting, needed, place))

    def _hits(
        self, workload: Workload, setting: Setting, needed: Resources, place: SlurmConfig
    ) -> Iterator[RuleMatch]:
        """Yield what of a job its partition or the paths of the cluster refuse."""
        where = f"{self._context.config_file or '--executor-config'}: slurm"
        cluster = self._cluster
        gpus = _gpus_per_node(needed, place)
        wanted = Wanted(
            partitions=tuple(place.partition.split(",")) if place.partition else (),
            minutes=minutes_of_job(needed, place),
            nodes=needed.num_nodes,
            gpus=gpus,
            account=place.account,
            queue=place.qos,
            where=where,
        )
        yield from check_partition(cluster, wanted)
        jobs = _jobs_on_a_node(cluster, gpus, place)
        yield from check_ports(place.port_range, self._around.ephemeral, jobs, where)
        if not (cluster.hosts and cluster.hosts <= self._around.hosts):
            paths = [*self._own_paths(place), *self._named_paths(workload, setting, place)]
            vouched = [_real(Path(path)) for path in place.shared_paths]
            yield from check_shared(paths, self._around.mounts, vouched)

    @functools.cached_property
    def _cluster(self) -> Cluster:
        return self._ask()

    def _own_paths(self, place: SlurmConfig) -> Iterator[NamedPath]:
        """Yield what every job needs."""
        root, run_dir = self._context.root, self._context.run_dir
        yield _named("the run directory", run_dir, "shared-run-dir", "--run-dir")
        yield _named("the project", root, "shared-project", str(root))
        if (
            place.container is None
            and place.uv_sync is None
            and Path(place.python or "").is_absolute()
        ):
            python = Path(place.python or "")
            where = f"{self._context.config_file or '--executor-config'}: python"
            for path in dict.fromkeys((_real(python.parent) / python.name, _real(python))):
                yield NamedPath(use="the interpreter", path=path, rule="shared-python", where=where)

    def _named_paths(
        self, workload: Workload, setting: Setting, place: SlurmConfig
    ) -> Iterator[NamedPath]:
        """Yield what a row and the environment name; of a container's, what is outside of it."""
        given = {
            "data_path": workload.data_path or setting.env.get("DATA_PATH"),
            "data_cache_path": workload.data_cache_path,
            "checkpoint_load_path": workload.checkpoint_load_path,
        }
        named = [(use, text, workload.where) for use, text in given.items()]
        named += [(name, setting.env.get(name), "the environment") for name in _HOMES]
        if "nemo" in (workload.training_script_path or "").lower() and not setting.env.get(
            _NEMO_HOME
        ):
            named.append((_NEMO_HOME, str(Path.home() / ".cache/nemo"), "its default"))
        for use, text, where in named:
            if not text or set(text) & set("{}$"):
                continue
            path: Path | None = self._context.root / text
            if place.container is not None and path is not None:
                path = in_container(path, _container_mounts(place, self._context))
            if path is not None:
                yield _named(use, path, "shared-data", where)


def look_around(root: Path = Path("/")) -> Around:
    """Return what is known of this machine, or of what is below `root` in a test."""
    words = _read(root, _PORT_RANGE).split()
    is_range = len(words) == 2 and all(word.isdecimal() for word in words)  # noqa: PLR2004
    name = socket.gethostname()
    return Around(
        hosts=frozenset((name, name.partition(".")[0], socket.getfqdn(), "localhost")),
        mounts=parse_mounts(_read(root, MOUNTS)),
        ephemeral=(int(words[0]), int(words[1])) if is_range else None,
    )


def ask_slurm(env: Mapping[str, str]) -> Cluster:
    """Return the cluster as Slurm's client shows it; nothing where it does not answer."""
    kept = {k: v for k, v in env.items() if not k.startswith(_MISLEADING)}
    partitions = _said(["scontrol", "show", "partition", "--oneliner"], kept)
    nodes = _said(["sinfo", "--noheader", "--format", SINFO_FORMAT], kept)
    return parse_cluster(partitions, nodes)


def _said(words: list[str], env: Mapping[str, str]) -> str:
    """Return what a command of Slurm prints, "" if it fails."""
    try:
        done = subprocess.run(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            start_new_session=True,  # Ctrl-C at the terminal is the controller's
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(root: Path, path: str) -> str:
    """Return the text of a file of the system, "" if it cannot be read."""
    try:
        return (root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _gpus_per_node(needed: Resources, place: SlurmConfig) -> int:
    """Return the GPUs that a job asks Slurm for on each node."""
    flags = gpu_flags(needed, place)
    if "gres" in flags:
        return needed.gpus_per_node
    return int(flags.get("gpus-per-node", 0))


def _jobs_on_a_node(cluster: Cluster, gpus: int, place: SlurmConfig) -> int:
    """Return how many jobs of this size a node may have at a time."""
    if not gpus or place.exclusive:
        return 1
    named = place.partition.split(",") if place.partition else []
    chosen = [p for p in cluster.partitions if p.name in named or (not named and p.is_default)]
    most = max((each // gpus for p in chosen for _, each in p.gpus), default=1)
    return max(1, most if place.max_jobs is None else min(most, place.max_jobs))


def _container_mounts(place: SlurmConfig, context: EngineContext) -> dict[Path, Path]:
    """Return what a container sees: directory in it -> directory outside."""
    assert place.container is not None
    own = {path: path for path in (context.root, context.run_dir)}
    words = [mount.split(":") for mount in place.container.mounts]
    return {**own, **{Path(target): Path(source) for source, target, *_ in words}}


def _named(use: str, path: Path, rule: str, where: str) -> NamedPath:
    return NamedPath(use=use, path=_real(path), rule=rule, where=where)


@functools.cache
def _real(path: Path) -> Path:
    """Return a path without links; looked up once, since 10,000 workloads name the same."""
    return path.resolve()
