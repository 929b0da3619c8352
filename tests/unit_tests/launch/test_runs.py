from __future__ import annotations

from pathlib import Path

from pytest_megatron.launch.own_dir import OWN_DIR, make_own_dir
from pytest_megatron.launch.runs import runs_below


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
