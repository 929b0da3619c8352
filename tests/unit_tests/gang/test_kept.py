"""Records of kept processes, and the limits of the host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_megatron.errors import LaunchError
from pytest_megatron.gang.kept import (
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
