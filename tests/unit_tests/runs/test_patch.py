"""What a working tree has beside its commit, as a patch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pytest_megatron.runs import environment as patch

IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.org")


def git(root: Path, *words: str) -> None:
    command = ["git", "-C", str(root), *IDENTITY, *words]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "there"
    (root / "golden_values").mkdir(parents=True)
    (root / "kept.txt").write_text("1\n")
    (root / "data.bin").write_bytes(bytes(range(256)))
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "all")
    git(root, "clone", "-q", str(root), str(tmp_path / "here"))
    return root


def test_a_patch_makes_a_clone_what_the_tree_was(checkout: Path, tmp_path: Path) -> None:
    (checkout / "kept.txt").write_text("2\n")
    (checkout / "data.bin").write_bytes(bytes(range(255, -1, -1)))
    (checkout / "new dir").mkdir()
    (checkout / "new dir/new.txt").write_text("new\n")
    (checkout / "golden_values/g.json").write_text("{}")
    git(checkout, "add", "new dir")
    made = patch.make_patch(checkout, ())
    assert made.problem is None
    (tmp_path / "p").write_text(made.text)
    git(tmp_path / "here", "apply", str(tmp_path / "p"))
    for name in ("kept.txt", "data.bin", "new dir/new.txt"):
        assert (tmp_path / "here" / name).read_bytes() == (checkout / name).read_bytes()
    assert not (tmp_path / "here/golden_values/g.json").exists()


def test_what_is_too_large_is_left_out_with_the_reason(checkout: Path) -> None:
    (checkout / "data.bin").write_text("".join(f"{n * n * n}\n" for n in range(1 << 17)))
    made = patch.make_patch(checkout, ())
    assert made.text == ""
    assert str(made.problem).endswith("bytes, at most 1048576 are kept; commit first")


def test_of_a_new_file_there_is_its_name_alone_unless_the_user_added_it(checkout: Path) -> None:
    (checkout / "kept.txt").write_text("2\n")
    (checkout / ".env").write_text("PASSWORD=hunter2\n")
    git(checkout, "add", "kept.txt")
    made = patch.make_patch(checkout, (".env",))
    assert ("hunter2" in made.text, "+2" in made.text) == (False, True)
    assert made.problem == "without the new .env, which `git add` would put into it"
    git(checkout, "add", "-N", ".env")
    assert "hunter2" in patch.make_patch(checkout, ()).text


def test_without_git_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert patch.make_patch(tmp_path, ()).problem == "git could not say what differs"
