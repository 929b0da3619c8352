"""Where runs are found: a run directory, anything in it, artifacts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from recorded_runs import ROW, TEST, a_row, a_test, write_run

from pytest_megatron.errors import RunError
from pytest_megatron.runs.find import find_runs
from pytest_megatron.runs.layout import item_dirs
from pytest_megatron.runs.record import read_run


def found(path: Path, scratch: Path) -> list[Path]:
    """The run directories at a path, as `repro` looks for them."""
    runs = find_runs([path], scratch, lambda name: name.name == "plan.json", looks_up=True)
    return [run.directory for run in runs]


def test_a_path_in_a_run_leads_to_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {ROW: a_row()})
    attempt = item_dirs(run, ROW).attempt(repeat=1, attempt=1)
    for path in (run, run / "run.json", attempt.root, attempt.plan):
        assert found(path, tmp_path / "scratch") == [run]
    assert not (tmp_path / "scratch").exists()


def test_a_path_beside_a_run_does_not_lead_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_run(tmp_path / "run", {ROW: a_row()}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"^\.\./empty: holds no run\.json"):
        found(Path("../empty"), tmp_path / "scratch")


@pytest.mark.parametrize("kind", ["zip", "gztar", "xztar"])
def test_an_artifact_is_unpacked_beside_the_project(tmp_path: Path, kind: str) -> None:
    run = write_run(tmp_path / "jobs/unit/run", {ROW: a_row()})
    (run / "big.bin").write_bytes(b"\0" * 1000)
    artifact = Path(shutil.make_archive(str(tmp_path / "artifact"), kind, tmp_path / "jobs"))
    (unpacked,) = found(artifact, tmp_path / "scratch")
    assert unpacked == tmp_path / "scratch/0/artifact/unit/run"
    assert not (unpacked / "big.bin").exists()
    assert item_dirs(unpacked, ROW).attempt(repeat=1, attempt=1).plan.is_file()


def test_a_folder_of_artifacts_holds_the_runs_of_all(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run = write_run(tmp_path / name, {TEST: a_test()})
        shutil.make_archive(str(tmp_path / "downloads" / name), "zip", run)
    runs = found(tmp_path / "downloads", tmp_path / "scratch")
    assert [list(read_run(run).items) for run in runs] == [[TEST], [TEST]]


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "is not there, expected a run"), ("empty", r"holds no run\.json, expected a run")],
)
def test_a_path_without_a_run_is_one_error(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=message):
        found(tmp_path / name, tmp_path / "scratch")
