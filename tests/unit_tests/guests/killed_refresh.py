"""Replaces goldens of a project and is killed before its n-th file operation, for every n.

Run as a program with a directory: prints one line of JSON for each way to die: at which operation,
what the files then are, and what they are after the same refresh was repeated. Every death is a
real SIGKILL of a forked process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from pytest_megatron.base.files import write_texts_together
from pytest_megatron.workloads.refresh.write import locked

_OPERATIONS = frozenset({"open", "os.rename", "os.remove", "os.mkdir"})
TARGETS = tuple(Path(f"golden_values/m/{name}.json") for name in ("a", "b", "new/c"))


def run(action: Callable[[], None], die_at: int) -> bool:
    """Do something in a forked process; return whether it ended before its n-th operation."""
    process = os.fork()
    if process == 0:
        left = die_at

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            del arguments
            if event in _OPERATIONS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        action()
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert status in (0, signal.SIGKILL), status
    return status == 0


def refresh(root: Path) -> None:
    with locked(root):
        write_texts_together({root / target: f"new {target.name}" for target in TARGETS})


def prepare(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    (root / "golden_values" / "m").mkdir(parents=True)
    for name in ("a", "b"):
        (root / "golden_values" / "m" / f"{name}.json").write_text(f"old {name}.json")


def state(root: Path) -> dict[str, str]:
    """The files of the project's goldens; those that only wait to be renamed left out."""
    base = root / "golden_values" / "m"
    files = (p for p in base.rglob("*") if p.is_file() and p.suffix != ".tmp")
    return {p.relative_to(base).as_posix(): p.read_text() for p in files}


def main(root: Path) -> None:
    for die_at in range(1000):
        prepare(root)
        is_done = run(lambda: refresh(root), die_at)
        found = state(root)
        refresh(root)
        print(json.dumps({"at": die_at, "files": found, "again": state(root)}))
        if is_done:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
