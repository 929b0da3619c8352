"""Replaces goldens of a project and is killed before its n-th file operation, for every n.

Run as a program with a directory and `once`, `recovery` or `undo`: prints one line of JSON for each
way to die: at which operation the refresh and (`recovery`) at which its recovery was killed, and
what the files then are. With `undo` the last target is a directory, so that the refresh fails and
takes everything back. Every death is a real SIGKILL of a forked process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from pytest_megatron.workloads.refresh.transaction import locked, recover, replace_together

_OPERATIONS = frozenset(
    {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "shutil.copymode"}
)
MODE = sys.argv[2]
LAST = "c" if MODE == "undo" else "new/c"
TARGETS = tuple(PurePosixPath(f"golden_values/m/{name}.json") for name in ("a", "b", LAST))


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
    with contextlib.suppress(IsADirectoryError), locked(root):
        replace_together(root, {target: f"new {target.name}" for target in TARGETS})


def prepare(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    (root / "golden_values" / "m").mkdir(parents=True)
    for name in ("a", "b"):
        (root / "golden_values" / "m" / f"{name}.json").write_text(f"old {name}.json")
    (root / ".pytest_megatron").mkdir()
    if MODE == "undo":
        (root / TARGETS[-1]).mkdir()


def state(root: Path) -> dict[str, str]:
    """What lies in the project, our own directory left out."""
    files = (root / "golden_values").rglob("*")
    return {
        p.relative_to(root / "golden_values" / "m").as_posix(): p.read_text() if p.is_file() else ""
        for p in files
        if p != root / "golden_values" / "m"
    }


def main(root: Path) -> None:
    every_recovery = MODE == "recovery"
    for die_at in range(1000):
        prepare(root)
        is_done = run(lambda: refresh(root), die_at)
        torn = root.with_name("torn")
        shutil.rmtree(torn, ignore_errors=True)
        shutil.copytree(root, torn)
        for recovery_dies_at in range(1000 if every_recovery else 1):
            shutil.rmtree(root)
            shutil.copytree(torn, root)
            is_recovered = run(lambda: recover(root), recovery_dies_at) if every_recovery else False
            recover(root)
            found = {"at": die_at, "recovery": recovery_dies_at, "files": state(root)}
            left = [p.name for p in (root / ".pytest_megatron").glob("goldens.*.json")]
            print(json.dumps({**found, "left": left, "done": is_done}))
            if is_recovered:
                break
        if is_done:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
