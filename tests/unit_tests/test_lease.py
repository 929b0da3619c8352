"""Real locks between real processes, on devices that only have names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.host import Gpu, Lease, lease_gpus
from pytest_megatron.process.guarded import GuardedProcess

GUESTS = Path(__file__).parent / "guests"
GPUS = tuple(Gpu(index=i, name="GPU", uuid=f"GPU-{i}", memory_bytes=1) for i in range(4))


@pytest.fixture(autouse=True)
def lease_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_MEGATRON_LEASES", str(tmp_path / "leases"))
    return tmp_path / "leases"


def never(text: str) -> None:
    raise AssertionError(text)


class _WouldWaitError(Exception):
    pass


def refuse_to_wait(text: str) -> None:
    raise _WouldWaitError(text)


def names(lease: Lease) -> list[str]:
    return [gpu.uuid for gpu in lease.gpus]


def test_leases_are_disjoint_and_end_with_their_context() -> None:
    one, three = lease_gpus(GPUS, 1, never), lease_gpus(GPUS, 3, never)
    with closing(one) as first, closing(three) as second:
        assert (names(first), names(second)) == (["GPU-0"], ["GPU-1", "GPU-2", "GPU-3"])
    with closing(lease_gpus(GPUS, 4, never)) as all_again:
        assert len(all_again.gpus) == 4


def test_no_gpu_is_no_wait() -> None:
    with closing(lease_gpus((), 0, never)) as lease:
        assert (lease.gpus, lease.descriptors) == ((), ())


def test_a_run_that_waits_holds_nothing() -> None:
    with closing(lease_gpus(GPUS, 2, never)):
        with pytest.raises(_WouldWaitError, match="waiting for 3 of 4 GPUs"):
            lease_gpus(GPUS, 3, refuse_to_wait)
        with closing(lease_gpus(GPUS, 2, never)) as rest:
            assert names(rest) == ["GPU-2", "GPU-3"]


def test_a_killed_holder_holds_nothing() -> None:
    holder = subprocess.Popen(
        [sys.executable, str(GUESTS / "holds_gpus.py")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held GPU-0\n"
    with closing(lease_gpus(GPUS, 1, never)) as lease:
        assert names(lease) == ["GPU-1"]
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    with closing(lease_gpus(GPUS, 1, never)) as lease:
        assert names(lease) == ["GPU-0"]


def test_the_guard_holds_on_until_the_command_is_gone(tmp_path: Path) -> None:
    lease = lease_gpus(GPUS, 4, never)
    with GuardedProcess(
        [sys.executable, str(GUESTS / "says_goodbye.py")],
        env=os.environ,
        cwd=tmp_path,
        output=tmp_path / "log",
        grace_s=20.0,
        kept_open=lease.descriptors,
    ) as process:
        lease.close()  # what the death of the controller does
        with pytest.raises(_WouldWaitError):
            lease_gpus(GPUS, 1, refuse_to_wait)
        process.stop()
        process.wait()
    with closing(lease_gpus(GPUS, 4, never)) as again:
        assert len(again.gpus) == 4


def test_a_directory_that_cannot_be_made_is_one_clear_error(
    lease_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_directory.write_text("")
    monkeypatch.setenv("PYTEST_MEGATRON_LEASES", str(lease_directory / "below"))
    with pytest.raises(LaunchError, match="set PYTEST_MEGATRON_LEASES to a directory"):
        lease_gpus(GPUS, 1, never)


def test_a_lock_file_that_is_a_link_is_refused(lease_directory: Path, tmp_path: Path) -> None:
    lease_directory.mkdir()
    (lease_directory / "GPU-0.lock").symlink_to(tmp_path / "made")
    with pytest.raises(LaunchError, match=r"GPU-0\.lock: is a link, expected a lock file"):
        lease_gpus(GPUS, 1, never)
    assert not (tmp_path / "made").exists()


def test_a_shared_directory_that_is_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_MEGATRON_LEASES")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "victim").mkdir()
    (tmp_path / "pytest-megatron-leases").symlink_to(tmp_path / "victim")
    with pytest.raises(LaunchError, match="is a link, expected a directory"):
        lease_gpus(GPUS, 1, never)
    assert list((tmp_path / "victim").iterdir()) == []
