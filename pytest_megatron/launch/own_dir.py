"""Directories of ours in a project: runs, history, reproductions (effects: files)."""

from __future__ import annotations

from pathlib import Path

from pytest_megatron.files import write_text_atomically

OWN_DIR = Path(".pytest_megatron")
RUNS_DIR = OWN_DIR / "runs"


def make_own_dir(root: Path) -> None:
    """Make our directory in a project, ignored by git: a run must not make the tree dirty.

    Raises:
        OSError: It cannot be made.
    """
    directory = (root / OWN_DIR).resolve()  # maybe a link to scratch, where it is not there yet
    directory.mkdir(parents=True, exist_ok=True)
    _ignore(directory)


def make_results_dir(directory: Path) -> None:
    """Make a directory for results that the user named; in a git tree, git ignores a new one.

    Raises:
        OSError: It cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    is_in_tree = any((parent / ".git").exists() for parent in directory.absolute().parents)
    if is_in_tree and not any(directory.iterdir()):
        _ignore(directory)


def _ignore(directory: Path) -> None:
    if not (directory / ".gitignore").exists():
        write_text_atomically(directory / ".gitignore", "*\n")
