"""What the kernel tells of processes that end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_megatron.gang.processes import is_being_dismantled

EXITING, RUNNING = 0x40000C, 0x400000


def test_a_process_that_lives_is_dead_or_was_never_there_is_not_being_dismantled() -> None:
    assert not is_being_dismantled(os.getpid())
    assert not is_being_dismantled(0)
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays, dead
        assert not is_being_dismantled(child.pid)


# A process cannot be kept in the midst of its end, so this is what the kernel was seen to say.
@pytest.mark.parametrize(
    ("threads", "expected"),
    [
        pytest.param(["D", EXITING], True, id="its-only-thread"),
        pytest.param(["Z", EXITING, "D", EXITING], True, id="a-thread-after-the-first"),
        pytest.param(["Z", EXITING, "Z", EXITING], False, id="none-is-left"),
        pytest.param(["Z", EXITING, "S", RUNNING], False, id="a-thread-lives-on"),
    ],
)
def test_threads_in_their_end_show_that_a_process_is(
    tmp_path: Path, threads: list[str | int], *, expected: bool
) -> None:
    for number, (state, flags) in enumerate(zip(threads[::2], threads[1::2], strict=True)):
        directory = tmp_path / "7" / "task" / str(7 + number)
        directory.mkdir(parents=True)
        (directory / "stat").write_text(f"{7 + number} (a) b) {state} 1 7 7 0 -1 {flags} 0 0 0")
    assert is_being_dismantled(7, tmp_path) is expected
