"""Questions to the user's git (effects: processes). Knows nothing of what the answers are for."""

from __future__ import annotations

import subprocess
from pathlib import Path


def ask_git(root: Path, *arguments: str) -> str | None:
    """Return what git prints in the directory `root`, without white space around it.

    None where it fails, where there is no git, or outside of a checkout.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],  # noqa: S607 - the user's git
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
