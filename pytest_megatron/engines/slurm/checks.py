"""Checks of a workload on a cluster, before anything of it is submitted: paths, ports, partitions.

Only `look_around` and `ask_slurm` have effects, each once in a run. Where Slurm does not answer,
what it would refuse is left to the submission.

Source: scontrol(1), show partition --oneliner; sinfo(1).
"""

from __future__ import annotations

import functools
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pytest_megatron.base.text import counted, nearest
from pytest_megatron.engines.slurm.script import place_of
from pytest_megatron.engines.slurm.shape import gpu_flags, minutes_of_job
from pytest_megatron.engines.slurm.submit import RealSlurm
from pytest_megatron.workloads.engine.api import EngineContext, Resources
from pytest_megatron.workloads.engine.config import SlurmConfig
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.checks.check import findings_of
from pytest_megatron.workloads.training.checks.rules import CheckFinding, RuleMatch
from pytest_megatron.workloads.training.plan.plan import Setting

SINFO_FORMAT = "%R|%D|%G|%n"
_FIELD = re.compile(r"(\w+)=(\S*)")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)")
_NO_LIMIT = ("UNLIMITED", "NONE", "INFINITE", "(null)", "N/A", "")
_MINUTES_OF_DAY = 24 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One partition; a limit that there is not is None.

    Attributes:
        gpus: For each kind of node, how many nodes there are with how many GPUs.
        accounts: That may use it; None for all, `queues` (QOS) alike.
        denied_accounts: That may not; `denied_queues` alike.
        state: `UP`, or why it takes or starts nothing.
    """

    name: str
    is_default: bool
    max_minutes: int | None
    min_nodes: int
    max_nodes: int | None
    num_nodes: int
    gpus: tuple[tuple[int, int], ...]
    accounts: frozenset[str] | None
    queues: frozenset[str] | None
    denied_accounts: frozenset[str]
    denied_queues: frozenset[str]
    state: str

    def nodes_with(self, gpus: int) -> int:
        """Return how many nodes have at least so many GPUs."""
        if not gpus:
            return self.num_nodes
        return sum(number for number, each in self.gpus if each >= gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster.

    Attributes:
        hosts: Names of the machines that its nodes are.
    """

    partitions: tuple[Partition, ...]
    hosts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Request of a job.

    Attributes:
        partitions: By name, any of them; none takes the default.
        minutes: Time limit of the job.
        gpus: On each node.
        where: The settings that request it.
    """

    partitions: tuple[str, ...]
    minutes: int
    nodes: int
    gpus: int
    account: str | None
    queue: str | None
    where: str


def parse_cluster(partitions: str, nodes: str) -> Cluster:
    """Parse what `scontrol` and `sinfo` print of partitions.

    Args:
        partitions: What `scontrol show partition --oneliner` prints.
        nodes: What `sinfo --noheader --format SINFO_FORMAT` prints.
    """
    gpus: dict[str, list[tuple[int, int]]] = {}
    hosts: set[str] = set()
    for line in nodes.splitlines():
        name, _, rest = line.partition("|")
        number, _, rest = rest.partition("|")
        resources, _, host = rest.rpartition("|")
        if number.isdecimal():
            each = sum(int(match[1]) for match in _GPUS.finditer(resources))
            gpus.setdefault(name, []).append((int(number), each))
            hosts.add(host.strip())
    found = []
    for line in partitions.splitlines():
        fields = dict(_FIELD.findall(line))
        if "PartitionName" in fields:
            found.append(_partition(fields, tuple(gpus.get(fields["PartitionName"], ()))))
    return Cluster(partitions=tuple(found), hosts=frozenset(hosts))


def check_partition(cluster: Cluster, wanted: Wanted) -> Iterator[RuleMatch]:
    """Yield why none of the partitions that a job may go to takes it."""
    known = {partition.name: partition for partition in cluster.partitions}
    if not known:
        return
    for name in wanted.partitions:
        if name not in known:
            there = ", ".join(sorted(known)) + nearest(name, sorted(known))
            yield RuleMatch("partition-unknown", wanted.where, name=repr(name), there=there)
    chosen = [known[name] for name in wanted.partitions if name in known]
    if not wanted.partitions:
        chosen = [partition for partition in cluster.partitions if partition.is_default]
    refusals = [[*_refusals(partition, wanted)] for partition in chosen]
    if refusals and all(refusals):
        yield from refusals[0]


def _refusals(partition: Partition, wanted: Wanted) -> Iterator[RuleMatch]:
    """Yield limits of a partition that a job exceeds."""
    name, where = partition.name, wanted.where
    if partition.state != "UP":
        yield RuleMatch("partition-down", where, partition=name, state=partition.state)
    if partition.max_minutes is not None and wanted.minutes > partition.max_minutes:
        asked, most = time_text(wanted.minutes), time_text(partition.max_minutes)
        yield RuleMatch("partition-time", where, partition=name, asked=asked, most=most)
    if partition.max_nodes is not None and wanted.nodes > partition.max_nodes:
        limit = f"at most {partition.max_nodes}"
        yield RuleMatch("partition-nodes", where, partition=name, nodes=wanted.nodes, limit=limit)
    elif wanted.nodes < partition.min_nodes:
        limit = f"at least {partition.min_nodes}"
        yield RuleMatch("partition-nodes", where, partition=name, nodes=wanted.nodes, limit=limit)
    elif wanted.nodes > partition.num_nodes:
        limit = f"has {partition.num_nodes}"
        yield RuleMatch("partition-nodes", where, partition=name, nodes=wanted.nodes, limit=limit)
    elif partition.gpus and wanted.nodes > partition.nodes_with(wanted.gpus):
        have = ", ".join(f"{number} with {each}" for number, each in _merged(partition.gpus))
        values = {"nodes": wanted.nodes, "gpus": wanted.gpus, "have": have}
        yield RuleMatch("partition-gpus", where, partition=name, **values)
    yield from _members(partition, wanted)


def _members(partition: Partition, wanted: Wanted) -> Iterator[RuleMatch]:
    """Yield accounts and QOS that may not use a partition."""
    for what, value, allowed, denied in (
        ("account", wanted.account, partition.accounts, partition.denied_accounts),
        ("QOS", wanted.queue, partition.queues, partition.denied_queues),
    ):
        if value is None or (value not in denied and (allowed is None or value in allowed)):
            continue
        rest = "all but " + ", ".join(sorted(denied)) if allowed is None else None
        takes = rest or ", ".join(sorted(allowed or ()))
        values = {"what": what, "value": value, "takes": takes}
        yield RuleMatch("partition-member", wanted.where, partition=partition.name, **values)


def time_text(minutes: int) -> str:
    """Return minutes as Slurm writes them: `1-02:30:00`."""
    days, rest = divmod(minutes, _MINUTES_OF_DAY)
    hours, minutes = divmod(rest, 60)
    return f"{f'{days}-' if days else ''}{hours:02}:{minutes:02}:00"


def _merged(gpus: Iterable[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Return nodes by their number of GPUs, the fullest first."""
    found: dict[int, int] = {}
    for number, each in gpus:
        found[each] = found.get(each, 0) + number
    return [(found[each], each) for each in sorted(found, reverse=True)]


def _partition(fields: Mapping[str, str], gpus: tuple[tuple[int, int], ...]) -> Partition:
    """Return a partition from what `scontrol` prints."""
    return Partition(
        name=fields["PartitionName"],
        is_default=fields.get("Default") == "YES",
        max_minutes=_minutes(fields.get("MaxTime", "")),
        min_nodes=_number(fields.get("MinNodes", "")) or 0,
        max_nodes=_number(fields.get("MaxNodes", "")),
        num_nodes=_number(fields.get("TotalNodes", "")) or 0,
        gpus=gpus,
        accounts=_names(fields.get("AllowAccounts", "ALL")),
        queues=_names(fields.get("AllowQos", "ALL")),
        denied_accounts=_names(fields.get("DenyAccounts", "")) or frozenset(),
        denied_queues=_names(fields.get("DenyQos", "")) or frozenset(),
        state=fields.get("State", "UP"),
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _names(text: str) -> frozenset[str] | None:
    return None if text in ("ALL", *_NO_LIMIT) else frozenset(text.split(","))


def _minutes(text: str) -> int | None:
    """Return `[DAYS-]HH:MM:SS` in minutes, rounded down; None for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes = (int(number or 0) for number in match.groups()[:3])
    return days * _MINUTES_OF_DAY + hours * 60 + minutes


MOUNTS = "/proc/self/mountinfo"
_SHARED = frozenset(
    (
        *("nfs", "nfs4", "vastnfs", "lustre", "gpfs", "mmfs", "wekafs", "beegfs", "beegfs_nodev"),
        *("ceph", "cifs", "smb3", "panfs", "pvfs2", "orangefs", "afs", "glusterfs", "daos"),
        *("quobyte", "moosefs", "ocfs2", "gfs2", "cvmfs2", "dvs", "bwfs", "yrfs", "cpfs"),
    )
)
_LOCAL = frozenset(
    (
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs"),
        *("tmpfs", "ramfs", "rootfs", "devtmpfs", "overlay", "overlayfs", "aufs", "squashfs"),
        *("erofs", "iso9660", "vfat", "exfat", "ntfs", "ntfs3", "hugetlbfs", "proc", "sysfs"),
    )
)
# Programs of FUSE that show something of this machine; all others speak to a server.
_LOCAL_FUSE = re.compile(r"fuseblk|fuse\.(?:.*overlayfs|squashfuse.*|lxcfs|portal|gvfsd-fuse|ntfs)")
_OCTAL = re.compile(r"\\([0-7]{3})")
_LEAST_FIELDS = 5  # before the optional ones
_LEAST_REST = 2  # after the dash: type and source


class Reach(Enum):
    """Machines that see a file system."""

    SHARED = "shared"
    LOCAL = "local"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class MountEntry:
    """One line of the table of mounts.

    Attributes:
        kind: Type of the file system, such as `nfs4` or `fuse.sshfs`.
        source: What is mounted.
    """

    point: Path
    kind: str
    source: str

    @property
    def reach(self) -> Reach:
        """Machines that see the file system, as far as its type shows."""
        if self.kind in _SHARED:
            return Reach.SHARED
        if self.kind in _LOCAL or _LOCAL_FUSE.fullmatch(self.kind):
            return Reach.LOCAL
        return Reach.SHARED if self.kind.startswith("fuse") else Reach.UNKNOWN


def parse_mounts(text: str) -> tuple[MountEntry, ...]:
    """Return the mounts of a `mountinfo`, in its order; lines that are none are left out."""
    found = []
    for line in text.splitlines():
        head, dash, rest = line.partition(" - ")
        fields, ends = head.split(), rest.split()
        if dash and len(fields) >= _LEAST_FIELDS and len(ends) >= _LEAST_REST:
            point = Path(_unescaped(fields[4]))
            found.append(MountEntry(point=point, kind=ends[0], source=_unescaped(ends[1])))
    return tuple(found)


def mount_of(path: Path, mounts: Sequence[MountEntry]) -> MountEntry | None:
    """Return the mount that an absolute path without links is on; of two in one place the later."""
    best: MountEntry | None = None
    for mount in mounts:
        is_in = path == mount.point or mount.point in path.parents
        if is_in and (best is None or len(mount.point.parts) >= len(best.point.parts)):
            best = mount
    return best


def _unescaped(text: str) -> str:
    """Return a field with its blanks, which the kernel writes as octal numbers."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


_LEAST_PORT, _MOST_PORT = 1024, 65535
_PORTS_OF_JOB = 2  # one for its tasks, one for its ranks
# Where the system's own programs are, on every node its own.
_SYSTEM = tuple(Path(name) for name in ("/usr", "/bin", "/opt", "/sbin"))


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPath:
    """A path that a job uses, without links.

    Attributes:
        use: What it is for, as a user calls it.
        rule: That it goes against where other machines do not see it.
        where: The setting that names it.
    """

    use: str
    path: Path
    rule: str
    where: str


def check_shared(
    paths: Sequence[NamedPath], mounts: Sequence[MountEntry], vouched: Sequence[Path]
) -> Iterator[RuleMatch]:
    """Yield paths that other machines do not see.

    Args:
        paths: What jobs use.
        mounts: Mounts of this machine.
        vouched: Directories that all machines see according to the user.
    """
    for named in paths:
        usual = _SYSTEM if named.rule == "shared-python" else ()
        if any(named.path.is_relative_to(directory) for directory in (*vouched, *usual)):
            continue
        mount = mount_of(named.path, mounts)
        if mount is None or mount.reach is Reach.SHARED:
            continue
        rule = named.rule if mount.reach is Reach.LOCAL else "shared-unknown"
        yield RuleMatch(
            rule, named.where, use=named.use, path=named.path, kind=mount.kind, point=mount.point
        )


def check_ports(
    ports: range, ephemeral: tuple[int, int] | None, num_jobs: int, where: str
) -> Iterator[RuleMatch]:
    """Yield what is wrong with the ports at which jobs meet.

    Args:
        ports: Ports of which each job takes one by its number.
        ephemeral: What the kernel gives to connections, first and last; None where unknown.
        num_jobs: That a node may have at a time.
        where: The setting that names it.
    """
    if not ports or ports[0] < _LEAST_PORT or ports[-1] > _MOST_PORT:
        yield RuleMatch("ports-range", where, ports=f"{ports.start}-{ports.stop - 1}")
        return
    if ephemeral is not None and ports[0] <= ephemeral[1] and ports[-1] >= ephemeral[0]:
        taken = f"{ephemeral[0]}-{ephemeral[1]}"
        yield RuleMatch("ports-ephemeral", where, ports=f"{ports[0]}-{ports[-1]}", taken=taken)
    if len(ports) < _PORTS_OF_JOB * num_jobs:
        yield RuleMatch("ports-few", where, count=len(ports), jobs=counted(num_jobs, "job"))


def in_container(path: Path, mounts: Mapping[Path, Path]) -> Path | None:
    """Return where a path of a container is outside of it; None for what is in its image.

    Args:
        path: Path that the program in the container has.
        mounts: Directory in the container -> directory outside.
    """
    for target in sorted(mounts, key=lambda point: len(point.parts), reverse=True):
        if path.is_relative_to(target):
            return mounts[target] / path.relative_to(target)
    return None


_PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
_NEMO_HOME = "NEMO_HOME"
_HOMES = (_NEMO_HOME, "NEMORUN_HOME", "HF_HOME")
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
        self, workload: Workload, setting: Setting, resources: Resources
    ) -> tuple[CheckFinding, ...]:
        """Return what is wrong with the jobs of a workload, errors first.

        Raises:
            LaunchError: The settings ask for what is not there.
        """
        platform = workload.platform
        if platform not in self._places:
            self._places[platform] = place_of(self._config, platform, self._context.root)
        place = self._places[platform]
        return findings_of(self._hits(workload, setting, resources, place))

    def _hits(
        self, workload: Workload, setting: Setting, resources: Resources, slurm: SlurmConfig
    ) -> Iterator[RuleMatch]:
        """Yield what of a job its partition or the paths of the cluster refuse."""
        where = f"{self._context.config_file or '--executor-config'}: slurm"
        cluster = self._cluster
        gpus = _gpus_per_node(resources, slurm)
        wanted = Wanted(
            partitions=tuple(slurm.partition.split(",")) if slurm.partition else (),
            minutes=minutes_of_job(resources, slurm),
            nodes=resources.num_nodes,
            gpus=gpus,
            account=slurm.account,
            queue=slurm.qos,
            where=where,
        )
        yield from check_partition(cluster, wanted)
        jobs = _jobs_on_a_node(cluster, gpus, slurm)
        yield from check_ports(slurm.port_range, self._around.ephemeral, jobs, where)
        if not (cluster.hosts and cluster.hosts <= self._around.hosts):
            paths = [*self._own_paths(slurm), *self._named_paths(workload, setting, slurm)]
            vouched = [_real(Path(path)) for path in slurm.shared_paths]
            yield from check_shared(paths, self._around.mounts, vouched)

    @functools.cached_property
    def _cluster(self) -> Cluster:
        return self._ask()

    def _own_paths(self, slurm: SlurmConfig) -> Iterator[NamedPath]:
        """Yield what every job needs."""
        root, run_dir = self._context.root, self._context.run_dir
        yield _named("the run directory", run_dir, "shared-run-dir", "--run-dir")
        yield _named("the project", root, "shared-project", str(root))
        if (
            slurm.container is None
            and slurm.uv_sync is None
            and Path(slurm.python or "").is_absolute()
        ):
            python = Path(slurm.python or "")
            where = f"{self._context.config_file or '--executor-config'}: python"
            for path in dict.fromkeys((_real(python.parent) / python.name, _real(python))):
                yield NamedPath(use="the interpreter", path=path, rule="shared-python", where=where)

    def _named_paths(
        self, workload: Workload, setting: Setting, slurm: SlurmConfig
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
            if slurm.container is not None and path is not None:
                path = in_container(path, _container_mounts(slurm, self._context))
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
    slurm = RealSlurm(env, Path.cwd())
    return parse_cluster(
        slurm.said(["scontrol", "show", "partition", "--oneliner"]),
        slurm.said(["sinfo", "--noheader", "--format", SINFO_FORMAT]),
    )


def _read(root: Path, path: str) -> str:
    """Return the text of a file of the system, "" if it cannot be read."""
    try:
        return (root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _gpus_per_node(resources: Resources, slurm: SlurmConfig) -> int:
    """Return the GPUs that a job asks Slurm for on each node."""
    flags = gpu_flags(resources, slurm)
    if "gres" in flags:
        return resources.gpus_per_node
    return int(flags.get("gpus-per-node", 0))


def _jobs_on_a_node(cluster: Cluster, gpus: int, slurm: SlurmConfig) -> int:
    """Return how many jobs of this size a node may have at a time."""
    if not gpus or slurm.exclusive:
        return 1
    named = slurm.partition.split(",") if slurm.partition else []
    chosen = [p for p in cluster.partitions if p.name in named or (not named and p.is_default)]
    most = max((each // gpus for p in chosen for _, each in p.gpus), default=1)
    return max(1, most if slurm.max_jobs is None else min(most, slurm.max_jobs))


def _container_mounts(slurm: SlurmConfig, context: EngineContext) -> dict[Path, Path]:
    """Return what a container sees: directory in it -> directory outside."""
    assert slurm.container is not None
    own = {path: path for path in (context.root, context.run_dir)}
    words = [mount.split(":") for mount in slurm.container.mounts]
    return {**own, **{Path(target): Path(source) for source, target, *_ in words}}


def _named(use: str, path: Path, rule: str, where: str) -> NamedPath:
    return NamedPath(use=use, path=_real(path), rule=rule, where=where)


@functools.cache
def _real(path: Path) -> Path:
    """Return a path without links; looked up once, since 10,000 workloads name the same."""
    return path.resolve()
