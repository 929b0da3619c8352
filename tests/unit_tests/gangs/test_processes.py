"""What the kernel tells of processes that end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_megatron.process.tree import lives_on

EXITING, RUNNING = 0x40000C, 0x400000


def test_a_process_lives_on_until_it_is_dead() -> None:
    assert lives_on(os.getpid())
    assert not lives_on(0)
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays, dead
        assert not lives_on(child.pid)


# A process cannot be kept in the midst of its end, so this is what the kernel was seen to say.
@pytest.mark.parametrize(
    ("threads", "expected"),
    [
        pytest.param(["D", EXITING], False, id="its-only-thread"),
        pytest.param(["Z", EXITING, "D", EXITING], False, id="a-thread-after-the-first"),
        pytest.param(["Z", EXITING, "Z", EXITING], False, id="none-is-left"),
        pytest.param(["Z", EXITING, "S", RUNNING], True, id="a-thread-lives-on"),
    ],
)
def test_a_thread_that_is_not_in_its_end_shows_that_a_process_lives(
    tmp_path: Path, threads: list[str | int], *, expected: bool
) -> None:
    for number, (state, flags) in enumerate(zip(threads[::2], threads[1::2], strict=True)):
        directory = tmp_path / "7" / "task" / str(7 + number)
        directory.mkdir(parents=True)
        (directory / "stat").write_text(f"{7 + number} (a) b) {state} 1 7 7 0 -1 {flags} 0 0 0")
    assert lives_on(7, tmp_path) is expected
