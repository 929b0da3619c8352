"""Copies a project for a script that may write into it (effects: files, git)."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_megatron.git import read_git
from pytest_megatron.launch.script_row import ScriptFiles, ScriptMachine

_NEVER = frozenset((".git", ".pytest_megatron", "__pycache__"))
_YQ = "/usr/local/bin/yq"


def look_at_machine(env: Mapping[str, str]) -> ScriptMachine:
    """Return which of the expectations of Megatron-LM's scripts this machine meets.

    A `uv` counts only with an environment that it is told to use, as in the container: it would
    make one in the copy of the project otherwise.
    """
    path = env.get("PATH")
    missing = set()
    if shutil.which("envsubst", path=path) is None:
        missing.add("envsubst")
    if not _is_yq(shutil.which("yq", path=path)):
        missing.add("yq")
    if shutil.which("uv", path=path) is None or "UV_PROJECT_ENVIRONMENT" not in env:
        missing.add("uv")
    paths = {"/opt/venv": sys.prefix} if not Path("/opt/venv").exists() else {}
    if "DATA_PATH" in env and not Path("/mnt/artifacts").exists():
        paths["/mnt/artifacts"] = env["DATA_PATH"]
    return ScriptMachine(
        missing=frozenset(missing),
        has_yq_place=_is_yq(_YQ),
        paths=paths,
    )


@functools.cache
def _is_yq(program: str | None) -> bool:
    """Whether a program is the yq that drivers mean: another one of that name takes other flags."""
    if program is None:
        return False
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return "mikefarah" in done.stdout


def lay_out_script(files: ScriptFiles) -> None:
    """Make what a script needs beside itself.

    Tracked and new files are copied. What git ignores (built extensions, data, environments) is
    linked, so that it is found and costs nothing; a project without git is copied whole.

    Raises:
        OSError: Something cannot be read or written.
    """
    files.home.mkdir(parents=True)
    for path, text in files.texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    files.copy.mkdir(parents=True)
    listed = _listed(files.project, "--cached", "--others", "--exclude-standard")
    if listed is None:
        shutil.copytree(
            files.project,
            files.copy,
            symlinks=True,
            dirs_exist_ok=True,
            ignore=lambda where, names: {n for n in names if _is_left_out(files, Path(where, n))},
        )
        return
    for name in listed:
        if not _is_left_out(files, files.project / name):
            _copy(files.project / name, files.copy / name)
    ignored = _listed(files.project, "--others", "--ignored", "--exclude-standard", "--directory")
    for name in ignored or ():
        target = files.copy / name
        if not _is_left_out(files, files.project / name) and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(files.project / name)


def _is_left_out(files: ScriptFiles, path: Path) -> bool:
    """Whether a file of the project is none of the script's: git's, a cache, a result of ours."""
    is_result = path == files.results or files.results in path.parents
    return is_result or bool(_NEVER.intersection(path.relative_to(files.project).parts))


def _copy(source: Path, target: Path) -> None:
    if not source.exists() and not source.is_symlink():
        return  # tracked, and deleted
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():  # a submodule
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _listed(project: Path, *flags: str) -> Iterator[str] | None:
    """Return what git lists, relative to the project; None without git."""
    listed = read_git(project, "ls-files", "-z", *flags)
    if listed is None:
        return None
    return (name.rstrip("/") for name in os.fsdecode(listed).split("\0") if name)
