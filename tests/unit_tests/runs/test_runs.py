from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from pytest_megatron.cli import group
from pytest_megatron.runs.find import kept_runs, remove_old_runs, runs_below
from pytest_megatron.runs.layout import OWN_DIR, make_own_dir


def make_runs(root: Path, *places: str) -> None:
    for place in places:
        (root / place).mkdir(parents=True, exist_ok=True)
        (root / place / "run.json").write_text("{}")


def test_runs_are_found_at_every_depth_but_not_within_a_run(tmp_path: Path) -> None:
    make_runs(tmp_path, "b", "a/one", "a/one/inner", "a/b/c")
    found = [run.relative_to(tmp_path).as_posix() for run in runs_below(tmp_path, depth=3)]
    assert found == ["a/b/c", "a/one", "b"]
    assert list(runs_below(tmp_path / "b", depth=0)) == [tmp_path / "b"]


def test_neither_what_is_too_deep_nor_what_is_skipped_nor_a_link_is_looked_into(
    tmp_path: Path,
) -> None:
    make_runs(tmp_path, "a/b", "a/b/c", "checkpoints/one")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    assert list(runs_below(tmp_path, depth=1, skipped=("checkpoints",))) == []
    assert list(runs_below(tmp_path, depth=2, skipped=("checkpoints",))) == [tmp_path / "a" / "b"]


def test_our_directory_may_be_a_link_to_scratch_that_was_emptied(tmp_path: Path) -> None:
    (tmp_path / OWN_DIR).symlink_to(tmp_path / "scratch" / "mine")
    for _ in range(2):
        make_own_dir(tmp_path)
    assert (tmp_path / "scratch" / "mine" / ".gitignore").read_text() == "*\n"


RUNS = Path(".pytest_megatron/runs")
OLD, DEAD, MIDDLE, NEW = (f"20261121-04000{second}-4c39" for second in range(4))


def ended_runs(root: Path) -> None:
    """Four runs, of which the second was killed, and what is no run of ours."""
    for name in (OLD, MIDDLE, NEW, "mine"):
        make_runs(root / RUNS, name)
        (root / RUNS / name / "run.json").write_text(
            '{"exit_code": 1, "items": {"a": {"verdict": "passed"}}}'
        )
    make_runs(root / RUNS, DEAD)
    (root / RUNS / DEAD / "run.json").write_text('{"exit_code": null, "items": {}}')
    (root / RUNS / "20261121-040000-beef").mkdir()
    (root / RUNS / "latest").symlink_to(NEW)


def names(root: Path) -> set[str]:
    return {path.name for path in (root / RUNS).iterdir()}


def test_only_old_runs_that_have_ended_are_removed(tmp_path: Path) -> None:
    ended_runs(tmp_path)
    before = names(tmp_path)
    assert [run.directory.name for run in kept_runs(tmp_path)] == [NEW, MIDDLE, DEAD, OLD]
    assert remove_old_runs(tmp_path, 4) == ()
    assert [path.name for path in remove_old_runs(tmp_path, 1)] == [MIDDLE, OLD]
    assert names(tmp_path) == before - {MIDDLE, OLD}


def test_a_run_file_that_cannot_be_read_is_of_a_run_that_stays(tmp_path: Path) -> None:
    ended_runs(tmp_path)
    for text in ("{", json.dumps([1]), '{"exit_code": "1"}'):
        (tmp_path / RUNS / OLD / "run.json").write_text(text)
        assert OLD not in {path.name for path in remove_old_runs(tmp_path, 3)}


def test_the_command_lists_and_removes(tmp_path: Path) -> None:
    ended_runs(tmp_path)
    root = ["--root", str(tmp_path)]
    listed = CliRunner().invoke(group, ["runs", "list", *root]).output.splitlines()
    assert listed[0] == f"{NEW}  exit code 1, 1 item"
    assert listed[2] == f"{DEAD}  not ended, 0 items"
    removed = CliRunner().invoke(group, ["runs", "prune", "--keep", "3", *root])
    assert removed.output == f"removed: {tmp_path / RUNS / OLD}\n"
    again = CliRunner().invoke(group, ["runs", "prune", "--keep", "3", *root])
    assert again.output == "nothing to remove\n"
    assert CliRunner().invoke(group, ["runs", "prune", "--keep", "0", *root]).exit_code == 2
