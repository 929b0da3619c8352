"""Checkout of a project: its commit, and what differs from it (effects: git, files).

Settings that make git look away from changes are overruled here, and so are the marks of an index.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pytest_megatron.base.project import SHORT_COMMIT, ask_git, run_git

# Goldens come of the run; Python writes its own files where nobody told git to ignore them.
_NO_CHANGES = (":(exclude)golden_values", ":(top,exclude,glob)**/__pycache__/**")
_STATUS = (
    *("status", "--porcelain", "-z", "--no-renames", "--untracked-files=normal"),
    *("--ignore-submodules=dirty", "--", ":/", *_NO_CHANGES),
)
_SUBMODULE = "160000"
_UNKNOWN = "(git cannot say which files)"
is_recipe = re.compile(r"(.*/)?recipes/.*\.ya?ml").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """State of a checkout; names of files are relative to the project.

    Attributes:
        commit: None outside of git.
        edited: Files that differ from the commit, and new Python files that an import may find.
        new: Files and directories that git neither has nor ignores, below the project.
        written: When each file was written that git has, and each new recipe: it tells of changes
            that were taken back.
    """

    commit: str | None = None
    edited: frozenset[str] = frozenset()
    new: frozenset[str] = frozenset()
    written: Mapping[str, int | None] = field(default_factory=dict)

    def since(self, start: Tree) -> tuple[str, ...]:
        """Return what is not as it was at `start`: the commit, then files by name."""
        names = self.edited - start.edited
        names |= {name for name, at in start.written.items() if self.written.get(name) != at}
        if self.commit == start.commit:
            return tuple(sorted(names))
        before, after = ((c or "none")[:SHORT_COMMIT] for c in (start.commit, self.commit))
        return (f"HEAD, which was {before} and is {after}", *sorted(names))


class _Entry(NamedTuple):
    """A file of an index: its mark, mode and name from the top of the checkout."""

    mark: str
    mode: str
    name: str


def read_tree(root: Path) -> Tree:
    """Return the state of the checkout that a project is in."""
    root = root.resolve()
    top, _, commit = (ask_git(root, "rev-parse", "--show-toplevel", "HEAD") or "").rpartition("\n")
    if not commit:
        return Tree()
    listed = _git(root, "ls-files", "-z", "-v", "-s", "--full-name", "--", ":/", *_NO_CHANGES)
    entries = [_Entry(e[0], e[2:].split(" ")[0], e.partition("\t")[2]) for e in listed or ()]
    with tempfile.TemporaryDirectory() as scratch:
        status = _git(root, *_STATUS, env=_seeing_env(Path(top), entries, Path(scratch)))
    if listed is None or status is None:
        return Tree(commit=commit, edited=frozenset({_UNKNOWN}))

    def shown(name: str) -> str:
        return os.path.relpath(Path(top, name), root) + "/" * name.endswith("/")

    edited = {shown(line[3:]) for line in status if not line.startswith("??")}
    found = {name for line in status if line.startswith("??") for name in [shown(line[3:])]}
    new = set(_new_files(root, found))
    importable = {name for name in new if _is_importable(root / name)}
    files = {shown(entry.name) for entry in entries if entry.mode != _SUBMODULE}
    files |= set(filter(is_recipe, new))
    for name in (shown(entry.name) for entry in entries if entry.mode == _SUBMODULE):
        if (root / name / ".git").exists():
            inside = read_tree(root / name)
            edited |= {f"{name}/{file}" for file in inside.edited}
            files |= {f"{name}/{file}" for file in inside.written}
    return Tree(
        commit=commit,
        edited=frozenset(edited | importable),
        new=frozenset(new),
        written={name: _written_at(root / name) for name in files},
    )


def _git(root: Path, *arguments: str, env: Mapping[str, str] | None = None) -> list[str] | None:
    """Return the entries that git prints, each ended by a zero; None if it fails.

    Git must not lock the index meanwhile, which is the user's.
    """
    done = run_git(root, "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments, env=env)
    return None if done.returncode else os.fsdecode(done.stdout).split("\0")[:-1]


def _seeing_env(top: Path, entries: Sequence[_Entry], scratch: Path) -> dict[str, str] | None:
    """Return an environment with a copy of the index that looks at all files; None if it does.

    Entries marked as assume-unchanged (a small letter) or skip-worktree (S) hide changes. A file
    that is skipped and not there is one of a sparse checkout.
    """
    unseen = [
        entry.name
        for entry in entries
        if entry.mark == "h" or (entry.mark in "sS" and os.path.lexists(top / entry.name))
    ]
    if not unseen:
        return None
    index = ask_git(top, "rev-parse", "--git-path", "index")
    shutil.copyfile(top / str(index), scratch / "index")
    env = {**os.environ, "GIT_INDEX_FILE": str(scratch / "index")}
    names = b"".join(os.fsencode(name) + b"\0" for name in unseen)
    for flag in ("--no-assume-unchanged", "--no-skip-worktree"):
        run_git(top, "update-index", flag, "-z", "--stdin", given=names, env=env)
    return env


def _new_files(root: Path, names: set[str]) -> Iterator[str]:
    """Yield what is new in the project; of a directory with recipes, each file."""
    for name in names:
        if name.startswith("../") and root.is_relative_to(root / name):
            yield name
        elif name.startswith("../"):
            continue
        elif "recipes" in Path(name).parts and name.endswith("/"):
            yield from _git(root, "ls-files", "-z", "-o", "--exclude-standard", "--", name) or ()
        else:
            yield name


def _is_importable(path: Path) -> bool:
    return path.suffix in importlib.machinery.SOURCE_SUFFIXES or (path / "__init__.py").is_file()


def _written_at(path: Path) -> int | None:
    """Return when a file was written; None of one that is gone."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return None
