"""Artifacts that mean harm: each is refused with one error, and nothing outside is touched."""

from __future__ import annotations

import io
import json
import stat
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from recorded_runs import TEST, a_test

from pytest_megatron.errors import RunError
from pytest_megatron.runs.find import find_runs
from pytest_megatron.runs.record import read_run

RUN = json.dumps({"schema": 1, "items": {TEST: a_test()}})


def zipped(path: Path, names: Mapping[str, str], *, mode: int = 0) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("run.json", RUN)
        for name, text in names.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, text)
    return path


def tarred(path: Path, *members: tuple[str, bytes, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("run.json")
        info.size = len(RUN)
        archive.addfile(info, io.BytesIO(RUN.encode()))
        for name, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
    return path


def twice(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("run.json", RUN)
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("run.json", RUN)
    return path


def bomb(path: Path) -> Path:
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive,
        archive.open("run.json", "w", force_zip64=True) as file,
    ):
        for _ in range(65):
            file.write(b" " * (1 << 20))
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda p: zipped(p, {"../x": ""}), "leads out of the archive", id="escape"),
        pytest.param(lambda p: zipped(p, {"/etc/x": ""}), "leads out of the", id="absolute"),
        pytest.param(lambda p: zipped(p, {"a\\..\\x": ""}), "leads out of the", id="backslash"),
        pytest.param(
            lambda p: zipped(p, {"plan.json": "/etc/passwd"}, mode=stat.S_IFLNK | 0o777),
            "is a link or a device",
            id="symlink",
        ),
        pytest.param(lambda p: zipped(p, {"a\x1b[2J": ""}), "control characters", id="escapes"),
        pytest.param(twice, "is there twice", id="duplicate"),
        pytest.param(bomb, "which no log does; not unpacked", id="bomb"),
    ],
)
def test_a_zip_that_means_harm_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    artifact = make(tmp_path / "artifact.zip")
    with pytest.raises(RunError, match=message) as raised:
        find_runs([artifact], tmp_path / "scratch", lambda _: True)
    assert "\x1b" not in str(raised.value)
    assert [p for p in (tmp_path / "scratch").rglob("*") if p.is_file()] == []


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        pytest.param(tarfile.SYMTYPE, "/etc/passwd", id="symlink"),
        pytest.param(tarfile.LNKTYPE, "../../secret", id="hard link"),
        pytest.param(tarfile.CHRTYPE, "", id="device"),
        pytest.param(tarfile.FIFOTYPE, "", id="pipe"),
    ],
)
def test_a_tar_with_anything_but_files_is_refused(tmp_path: Path, kind: bytes, target: str) -> None:
    artifact = tarred(tmp_path / "artifact.tar.gz", ("plan.json", kind, target))
    with pytest.raises(RunError, match="is a link or a device"):
        find_runs([artifact], tmp_path / "scratch", lambda _: True)


def test_a_record_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_text(RUN)
    (tmp_path / "run.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(RunError, match="no plain file"):
        read_run(tmp_path)
