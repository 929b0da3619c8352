"""What a working tree has beside its commit, as a patch that `git apply` takes (effects: git).

Goldens are left out, as they are when a tree is called dirty: they come of runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.git import read_git

MOST_BYTES = 1 << 20
MOST_NEW_FILES = 100
NAME = "dirty.patch"
_SCOPE = ("--", ".", ":(exclude)golden_values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """What differs from the commit.

    Attributes:
        text: Of the patch; empty where it was left out.
        problem: Why something was left out, or None.
    """

    text: str = ""
    problem: str | None = None


def make_patch(root: Path) -> Patch:
    """Return what differs from the commit in `root` and below, new files among it.

    Of more than `MOST_BYTES`, or more than `MOST_NEW_FILES` new files, nothing is returned but the
    reason.
    """
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z", *_SCOPE)
    if listed is None:
        return Patch(problem="git could not say what differs")
    new = [root / name.decode("utf-8", "surrogateescape") for name in listed.split(b"\0") if name]
    new = [path for path in new if path.is_file() and not path.is_symlink()]
    num_bytes = sum(path.stat().st_size for path in new)
    if len(new) > MOST_NEW_FILES or num_bytes > MOST_BYTES:
        return Patch(
            problem=f"{len(new)} new files of {num_bytes} bytes, at most {MOST_NEW_FILES} of "
            f"{MOST_BYTES} are kept; commit or ignore them"
        )
    pieces = [_git(root, "diff", "--binary", "--relative", "HEAD", *_SCOPE) or b""]
    pieces += [_git(root, *_NEW_FILE, str(path.relative_to(root))) or b"" for path in new]
    data = b"".join(pieces)
    if len(data) > MOST_BYTES:
        return Patch(problem=f"of {len(data)} bytes, at most {MOST_BYTES} are kept; commit first")
    return Patch(text=data.decode("utf-8", "replace"))


_NEW_FILE = ("diff", "--no-index", "--binary", "--", "/dev/null")


def _git(root: Path, *arguments: str) -> bytes | None:
    """Return git's answer; None without git, outside of a checkout or on an error."""
    fine = (0, 1) if "--no-index" in arguments else (0,)  # 1: there is a difference
    return read_git(root, "-c", "core.quotepath=off", *arguments, fine=fine)
