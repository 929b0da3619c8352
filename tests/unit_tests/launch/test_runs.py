from __future__ import annotations

from pathlib import Path

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
