"""Finds run directories below a directory (effects: files, read only)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from pytest_megatron.launch.layout import RUN_FILE


def runs_below(root: Path, *, depth: int, skipped: Collection[str] = ()) -> Iterator[Path]:
    """Yield the run directories at or below `root`, in order of their paths.

    Follows no link, looks for no run within a run, and passes over what it may not read.

    Args:
        root: A directory.
        depth: How many directories below `root` are looked into.
        skipped: Names of directories that hold none.
    """
    for directory, names, _ in os.walk(root):
        here = Path(directory)
        if (here / RUN_FILE).is_file():
            names.clear()
            yield here
            continue
        is_deepest = len(here.relative_to(root).parts) >= depth
        names[:] = [] if is_deepest else sorted(name for name in names if name not in skipped)
