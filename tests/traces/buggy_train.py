"""Trains like train_gpt.py, after planting a bug of the exam: `--exam-bug NAME`, or `none`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "functional_tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
FLAG = "--exam-bug"


def main() -> None:
    """Plant the bug and train."""
    if FLAG in sys.argv:
        at = sys.argv.index(FLAG)
        plant(sys.argv[at + 1])
        del sys.argv[at : at + 2]
    import train_gpt

    train_gpt.main()


def plant(name: str) -> None:
    """Put the bug of that name into this process; `none` is no bug."""
    if name == "none":
        return
    import bugs

    (bug,) = (one for one in bugs.BUGS if one.name == name)
    bug.plant()


if __name__ == "__main__":
    main()
