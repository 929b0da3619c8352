"""Commands of the user's git (effects: processes), for any purpose."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection
from pathlib import Path

# Source: git setup.c, die_upon_dubious_ownership, from 2.35.2 on; a command is not translated.
_REFUSAL = re.compile(r"^\s*(git config --global --add safe\.directory .+)$", re.MULTILINE)


def mend_of_owner(message: str) -> str | None:
    """Return the command that lets git read a checkout that it refuses by its owner.

    None for any other message of git.
    """
    match = _REFUSAL.search(message)
    return match[1] if match else None


def ask_git_for_owner(root: Path) -> str | None:
    """Return the command that lets git read a checkout, None where it reads it or there is none."""
    try:
        done = run_git(root, "rev-parse", "--git-dir")
    except OSError:
        return None
    return mend_of_owner(os.fsdecode(done.stderr))


def ask_git(root: Path, *arguments: str) -> str | None:
    """Return the output of git in the directory `root`, without white space around it.

    None where it fails, where there is no git, or outside of a checkout.
    """
    output = read_git(root, *arguments)
    return None if output is None else os.fsdecode(output).strip()


def read_git(root: Path, *arguments: str, fine: Collection[int] = (0,)) -> bytes | None:
    """Return the output of git in the directory `root`, byte for byte.

    None where it ends with an exit code that is not `fine`, or where there is no git.
    """
    try:
        done = run_git(root, *arguments)
    except OSError:
        return None
    return done.stdout if done.returncode in fine else None


def run_git(root: Path, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run git in the directory `root` to its end, with `given` as its input.

    Raises:
        OSError: It cannot be started.
    """
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, input=given, capture_output=True, check=False)
