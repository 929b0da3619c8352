"""Records of kept processes, and the limits of the host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.start.kept import (
    KeptProcess,
    changed_variables,
    describe_environment,
    find_kept,
    is_memory_short,
    list_kept,
    lock_record,
    private_directory,
    record_path,
    started_at,
    write_record,
)


def made(**changes: object) -> KeptProcess:
    values: dict[str, object] = {
        "project": "/work/project",
        "pid": os.getpid(),
        "began": started_at(os.getpid()),
        "address": "unix:/run/ptm/wire",
        "key": "00",
        "environment": {"Python": "1", "OMP_NUM_THREADS": "2"},
        "minutes": 10.0,
        "started": 1.0,
    }
    return KeptProcess(**{**values, **changes})  # type: ignore[arg-type]


def test_a_record_lasts_as_long_as_its_process_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = record_path(tmp_path)
    assert path.parent == private_directory()
    lock = lock_record(path)
    assert lock is not None
    assert list_kept() == []  # it still loads
    write_record(lock, made())
    assert list_kept() == [(path, made())]
    assert lock_record(path) is None
    os.close(lock)
    assert find_kept(path) is None
    assert not path.exists()


def test_sessions_that_look_for_a_record_do_not_keep_one_from_being_made(tmp_path: Path) -> None:
    path = tmp_path / "record"
    code = f"""if True:
        import pathlib
        from pytest_megatron.gangs.start.kept import find_kept
        print(flush=True)
        while True:
            find_kept(pathlib.Path({str(path)!r}))
    """
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            reader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
            stack.callback(reader.wait)
            stack.callback(reader.kill)
            assert reader.stdout is not None
            stack.callback(reader.stdout.close)
            reader.stdout.readline()
        for _ in range(300):
            lock = lock_record(path)
            assert lock is not None
            assert path.stat().st_ino == os.fstat(lock).st_ino
            os.close(lock)


@pytest.mark.parametrize("way", ["open", "link", "file"])
def test_a_directory_that_others_could_enter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    own = private_directory()
    own.rmdir()
    if way == "open":
        own.mkdir(mode=0o755)
    elif way == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "elsewhere")
    else:
        own.write_text("")
    with pytest.raises(LaunchError, match="pytest-megatron-kept"):
        private_directory()


def test_a_link_in_the_place_of_a_record_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "record").symlink_to(tmp_path / "target")
    assert find_kept(tmp_path / "record") is None
    assert lock_record(tmp_path / "record") is None
    assert (tmp_path / "target").read_text() == "kept"


def test_a_process_of_the_same_number_is_not_stopped() -> None:
    made(began=1).stop()  # this process


def test_what_a_running_process_cannot_take_over_is_named() -> None:
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "a", "FOO": "1"}
    facts = describe_environment(env, ["/lib"])
    kept = made(environment=facts)
    assert kept.differences(facts) == []
    other = {"OMP_NUM_THREADS": "2", "FOO": "2", "LC_ALL": "C", "PYTHONPATH": "a"}
    names = ["LC_ALL", "OMP_NUM_THREADS", "sys.path"]
    assert kept.differences(describe_environment(other, ["/new"])) == names


def test_variables_that_torch_reads_when_it_is_loaded() -> None:
    now = {"TORCH_LOGS": "x", "TORCHINDUCTOR_CACHE_DIR": "/c", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert changed_variables({"MKL_DYNAMIC": "1"}, now) == ["MKL_DYNAMIC", "TORCH_LOGS"]


# Files of this kernel's /proc, with figures that say the opposite.
MEMINFO = "MemTotal:       24689764 kB\nMemFree:          371224 kB\nMemAvailable:   {} kB\n"
PRESSURE = "some avg10={} avg60=0.00 avg300=0.00 total=0\nfull avg10=99.00 avg60=0.00 total=0\n"


@pytest.mark.parametrize(
    ("available", "stalled", "is_short"),
    [(15_000_000, "0.00", False), (1_000_000, "0.00", True), (15_000_000, "31.20", True)],
)
def test_memory_is_short(tmp_path: Path, available: int, stalled: str, *, is_short: bool) -> None:
    (tmp_path / "pressure").mkdir()
    (tmp_path / "meminfo").write_text(MEMINFO.format(available))
    (tmp_path / "pressure/memory").write_text(PRESSURE.format(stalled))
    assert is_memory_short(tmp_path) is is_short
    assert not is_memory_short(tmp_path / "no such directory")


PLACES = """
import ctypes, os, pathlib, resource, sys
from pytest_megatron.gangs.start.kept import record_path

own, libc = pathlib.Path("/proc/self"), ctypes.CDLL(None)
changes = [
    lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
    lambda: (own / "coredump_filter").write_text("0x11"),
    lambda: (own / "timerslack_ns").write_text("70000"),
    lambda: libc.personality(0x0040000),  # addresses without chance
    lambda: libc.prctl(41, 1, 0, 0, 0),  # no huge pages
    lambda: libc.syscall({"x86_64": 251, "aarch64": 30}[os.uname().machine], 1, 0, 3 << 13),
    lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
]
found = [record_path(pathlib.Path("/"))]
for change in changes:
    change()
    found.append(record_path(pathlib.Path("/")))
print(len(set(found)), len(found))
"""


def test_processes_of_another_scheduling_share_none(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PLACES]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "8 8\n"
