from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["pytester", "labs"]
for number in (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
):  # of `pytest &`, and of sessions below
    if signal.getsignal(number) is signal.SIG_IGN:
        is_ctrl_c = number is signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
for name in ("CI", "GITHUB_ACTIONS", "GITLAB_CI"):  # sessions of tests write for a terminal
    os.environ.pop(name, None)

# Files that take a minute and more, from the longest on. They begin first, so that no worker of
# pytest-xdist is left with one at the end; those that wait stand between those that compute.
LONG = (
    *("test_doc_commands", "test_docker", "test_gang_faults", "test_slurm_limits"),
    *("test_gang_hosts", "test_gang_collection", "test_failing_workloads", "test_slurm_lab"),
    *("test_gang_xdist", "test_golden_writing"),
)

gc.disable()  # collecting 5,000 tests makes no garbage to speak of


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # nor do the tests search all of it, and torch, again and again


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(LONG)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    yield disk
    umount = ["umount", "--lazy", str(disk)]  # a test that failed may have files open
    subprocess.run(umount, check=True)
