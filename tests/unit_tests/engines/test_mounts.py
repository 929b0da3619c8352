from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.engines.slurm.checks import (
    MountEntry,
    Reach,
    mount_of,
    parse_mounts,
)

TABLE = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:5 / /proc rw - proc proc rw
30 22 0:40 / /home rw,relatime shared:2 master:3 - nfs4 server:/home rw,vers=4.2
31 30 0:41 / /home/user/scratch rw - tmpfs tmpfs rw
32 22 0:42 / /mnt/two\040words rw - lustre 10.0.0.1@o2ib:/fs rw
33 22 0:43 / /data rw - ext4 /dev/sdb1 rw
34 22 0:44 / /data rw - wekafs backend/fs rw
not a line of the table
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/homework/x", "ext4"),
        ("/home", "nfs4"),
        ("/home/user/runs", "nfs4"),
        ("/home/user/scratch/runs", "tmpfs"),
        ("/mnt/two words/x", "lustre"),
        ("/data/x", "wekafs"),
    ],
)
def test_a_path_is_on_the_innermost_mount_and_of_two_on_the_later(path: str, kind: str) -> None:
    mount = mount_of(Path(path), parse_mounts(TABLE))
    assert mount is not None
    assert mount.kind == kind


def test_without_a_table_nothing_is_known() -> None:
    assert mount_of(Path("/x"), parse_mounts("")) is None


@pytest.mark.parametrize(
    ("kinds", "reach"),
    [
        ("nfs nfs4 lustre gpfs wekafs beegfs ceph fuse fuse.sshfs fuse.ceph-fuse", Reach.SHARED),
        ("ext4 xfs btrfs tmpfs overlay fuse.fuse-overlayfs fuseblk fuse.squashfuse", Reach.LOCAL),
        ("9p virtiofs somefs", Reach.UNKNOWN),
    ],
)
def test_the_kind_of_a_file_system_says_who_sees_it(kinds: str, reach: Reach) -> None:
    for kind in kinds.split():
        assert MountEntry(point=Path("/x"), kind=kind, source="s").reach is reach, kind
