"""Edits a test while `pytest-megatron watch` runs here: after its first session, once.

After the second one it presses Ctrl-C, as a page cannot.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

LIMIT_S = 300
TEST = Path("tests/test_sum.py")


def wait_until(is_true: Callable[[], object]) -> None:
    """Wait, as long as a page may take."""
    deadline = time.monotonic() + LIMIT_S
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.02)


def find() -> list[psutil.Process]:
    """Return the process of `watch` in this directory."""
    here = str(Path.cwd())
    found = []
    for process in psutil.process_iter():
        try:
            if "watch" in process.cmdline()[:3] and process.cwd() == here:
                found.append(process)
        except psutil.Error:
            continue
    return found[:1]


def main() -> None:
    """Do it."""
    wait_until(find)
    (watch,) = find()
    for is_first in (True, False):
        wait_until(watch.children)
        wait_until(lambda: not watch.children())
        if is_first:
            TEST.write_text(TEST.read_text().replace("== dist", "< dist"))
    watch.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
