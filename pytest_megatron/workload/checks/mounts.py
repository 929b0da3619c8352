"""Mounts of this machine: the file system of a path, and if other machines see it.

Source: proc_pid_mountinfo(5).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

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
