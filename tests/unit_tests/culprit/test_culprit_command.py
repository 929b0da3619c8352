"""`pytest-megatron culprit` in real repositories; pytest runs in worktrees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_megatron.culprit import command as culprit
from pytest_megatron.culprit.command import Worktrees, command
from pytest_megatron.culprit.search import CulpritRun, CulpritState
from pytest_megatron.errors import CulpritError

TEST = "import library\n\ndef test_x():\n    assert library.NUMBER < 6\n"


def git(root: Path, *words: str) -> str:
    own = ("-c", "user.name=n", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    argv = ["git", "-C", str(root), *own, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a repository of nine commits, which is bad from the sixth on."""
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "-q")
    (root / "test_a.py").write_text(TEST)
    for number in range(1, 10):
        (root / "library.py").write_text(f"NUMBER = {number}\n")
        git(root, "add", "-A")
        git(root, "commit", "-qm", f"Change {number}")
    return root


def only_search(root: Path) -> Path:
    (found,) = (root / ".pytest_megatron" / "culprit").iterdir()
    return found


def run(root: Path, *words: str) -> tuple[int, str]:
    argv = [*words, "--project", str(root)]
    done = CliRunner().invoke(command, argv, catch_exceptions=False)
    return done.exit_code, done.output


def test_the_first_bad_commit_is_found_and_the_checkout_is_as_it_was(project: Path) -> None:
    (project / "library.py").write_text("NUMBER = 0  # not committed\n")
    before = git(project, "status", "--porcelain")
    words = ("test_a.py::test_x", "--good", "HEAD~8", "--flake-rate", "0")
    code, output = run(project, *words)
    assert code == 0, output
    assert "Change 6\n  at it: failed in 1 of 1 runs; before it: failed in 0 of 1 runs\n" in output
    report = json.loads((only_search(project) / "culprit.json").read_text())
    assert (report["subject"], report["num_runs"]) == ("Change 6", 5)
    assert report["commit"] == git(project, "rev-parse", "HEAD~3")
    assert git(project, "status", "--porcelain") == before
    assert len(git(project, "worktree", "list").splitlines()) == 1


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Return a function after which Ctrl-C comes in the given run."""
    original, number = culprit.run_at, 0

    def after(wanted: int) -> None:
        def run_at(trees: Worktrees, state: CulpritState, position: int) -> CulpritRun:
            nonlocal number
            number += 1
            if number == wanted:
                os.kill(os.getpid(), signal.SIGINT)
            return original(trees, state, position)

        monkeypatch.setattr(culprit, "run_at", run_at)

    yield after
    monkeypatch.undo()


def test_a_search_goes_on_after_ctrl_c(project: Path, interrupt: Callable[[int], None]) -> None:
    interrupt(2)
    words = ("test_a.py::test_x", "--good", "HEAD~4", "--bad", "HEAD~3", "--flake-rate", "0")
    code, output = run(project, *words)
    assert code == 130, output
    place = only_search(project)
    assert f"go on with: pytest-megatron culprit --resume {place}\n" in output
    assert len(json.loads((place / "state.json").read_text())["runs"]) == 1
    assert len(git(project, "worktree", "list").splitlines()) == 1
    code, output = run(project, "--resume", str(place))
    assert code == 0, output
    assert output.startswith("  run 2, --bad ")
    assert "Change 6\n" in output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("test_a.py::test_x",), "ITEM, --good: are needed to begin a search, expected both"),
        (("test_x", "--good", "HEAD~8"), "ITEM: 'test_x' is no node id"),
        (("test_a.py::test_x", "--good", "nowhere"), "--good: 'nowhere' is no commit of"),
        (("test_a.py::test_x", "--good", "HEAD"), "--good: 'HEAD' is no earlier commit than"),
        (
            ("test_a.py::test_x", "--good", "HEAD~8", "--setup", "exit 3"),
            "cannot run there: the set-up exited with code 3",
        ),
        (("test_a.py::test_y", "--good", "HEAD~8"), r"no such test here.*; see .*run_1\.log; give"),
    ],
)
def test_bad_input_is_one_clear_error(project: Path, words: tuple[str, ...], text: str) -> None:
    with pytest.raises(Exception, match=text):
        run(project, *words)


def test_the_line_of_a_project_sets_up_each_worktree(project: Path) -> None:
    (project / "pyproject.toml").write_text(
        "[tool.pytest-megatron.culprit]\nsetup = 'echo NUMBER = 9 > library.py'\n"
    )
    with pytest.raises(CulpritError, match="runs there, expected passes"):
        run(project, "test_a.py::test_x", "--good", "HEAD~8", "--flake-rate", "0")
    assert list(only_search(project).glob("setup_*.log"))
    assert (project / "library.py").read_text() == "NUMBER = 9\n"
    assert git(project, "status", "--porcelain") == "?? pyproject.toml"


def test_a_set_up_without_a_venv_runs_the_code_of_each_commit(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "src").mkdir()
    (project / "test_a.py").write_text(TEST.replace("library", "installed"))
    for number in (5, 6):
        (project / "src" / "installed.py").write_text(f"NUMBER = {number}\n")
        git(project, "add", "-A")
        git(project, "commit", "-qm", f"Install {number}")
    monkeypatch.setenv("PYTHONPATH", str(project / "src"))  # as an editable installation
    words = ("test_a.py::test_x", "--good", "HEAD~1", "--flake-rate", "0", "--setup", "touch data")
    code, output = run(project, *words)
    assert (code, "Install 6\n  at it: failed in 1 of 1 runs" in output) == (0, True), output
