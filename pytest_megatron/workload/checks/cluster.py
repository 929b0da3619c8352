"""Checks of paths and ports of a workload's jobs on other machines than this one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pytest_megatron.base.text import counted
from pytest_megatron.workload.checks.rules import RuleMatch

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
        """Machines that see it, as far as the type shows."""
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
        mounts: Of this machine.
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
        ports: Of which each job takes one by its number.
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
        path: As the program in the container has it.
        mounts: Directory in the container -> directory outside.
    """
    for target in sorted(mounts, key=lambda point: len(point.parts), reverse=True):
        if path.is_relative_to(target):
            return mounts[target] / path.relative_to(target)
    return None
