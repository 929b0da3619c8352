"""Debugging a rank from the controller's terminal: who stops, what is said, what stands still."""

from __future__ import annotations

import os
import pty
import select
import signal
import time
from pathlib import Path

import psutil
import pytest
from gang_suite import RecordedSuite, Run
from labs import DEADLINE_S, wait_until

pytestmark = pytest.mark.nightly

FAILING = """
    def test_fails(rank):
        number = rank + 40
        assert False

    def test_passes(rank):
        pass
"""
BREAKPOINTS = """
    import pytest

    def test_builtin(rank):
        number = rank + 40
        breakpoint()
        number += 10
        number += 100

    def test_with_capture(rank, capsys):
        print("captured")
        pytest.set_trace()
        print("as well")
        assert capsys.readouterr().out == "captured\\nas well\\n"
"""


def stopped(run: Run) -> list[str]:
    """The ranks that had the terminal, in order."""
    return [line.strip("> ") for line in run.printed if line.startswith(">>") and "rank " in line]


@pytest.mark.everyday
def test_the_first_rank_that_fails_stops_and_the_session_goes_on(tmp_path: Path) -> None:
    suite = RecordedSuite(root=tmp_path).write(test_it=FAILING)
    run = suite.run("--ranks", "2", "--pdb", stdin="p number * 10\nc\n")
    (rank,) = stopped(run)
    assert rank in ("rank 0 of 2", "rank 1 of 2")
    assert f"(Pdb) {400 + 10 * int(rank[5])}" in run.printed
    assert ">       assert False" in run.printed[: run.printed.index("(Pdb) ")]
    assert (run.returncode, run.outcomes) == (
        1,
        {"test_fails": "FAILED", "test_passes": "PASSED"},
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_breakpoints_stop_one_rank_without_any_option(tmp_path: Path, rank: int) -> None:
    suite = RecordedSuite(root=tmp_path).write(test_it=BREAKPOINTS)
    chosen = ["--pdb-rank", "1"] if rank else []
    typed = ["p number", "b 8", "c", "p number", "!print('to', 'me')", "c", "p 'last'", "c"]
    run = suite.run("--ranks", "2", *chosen, stdin="\n".join(typed) + "\n")
    assert set(stopped(run)) == {f"rank {rank} of 2"}
    said = [x.removeprefix("(Pdb) ") for x in run.printed if x.startswith("(Pdb) ")]
    assert (said[0], said[3:5], said[6]) == (f"{rank + 40}", [f"{rank + 50}", "to me"], "'last'")
    assert (run.returncode, run.summary) == (0, "2 passed")


def test_trace_stops_at_the_start_of_every_test(tmp_path: Path) -> None:
    suite = RecordedSuite(root=tmp_path).write(test_it=FAILING)
    run = suite.run("--ranks", "2", "--trace", stdin="n\np number\nc\nc\n")
    assert stopped(run) == ["rank 0 of 2"] * 2
    assert "(Pdb) 40" in run.printed
    assert run.summary == "1 failed, 1 passed"


@pytest.mark.parametrize("typed", ["q\n", ""], ids=["quit", "end-of-input"])
def test_quitting_ends_the_session_as_in_plain_pytest(tmp_path: Path, typed: str) -> None:
    suite = RecordedSuite(root=tmp_path).write(test_it=FAILING)
    run = suite.run("--ranks", "2", "--pdb", stdin=typed)
    plain = suite.run("--pdb", stdin=typed, env={"RANK": "0"})
    for one in (run, plain):
        assert any("Exit: Quitting debugger" in line for line in one.printed)
        assert (one.returncode, one.summary) == (pytest.ExitCode.INTERRUPTED, "1 failed")


def test_clocks_stand_still_while_a_rank_is_debugged(tmp_path: Path) -> None:
    text = """
        import time
        import pytest

        @pytest.fixture
        def meeting(shared_tmp_path, rank):
            yield shared_tmp_path / "met"
            if rank == 1:
                (shared_tmp_path / "met").touch()

        def test_waits(meeting, rank):
            assert rank == 0
            while not meeting.exists():
                time.sleep(0.01)
    """
    suite = RecordedSuite(root=tmp_path).write(test_it=text)
    limits = ("--rank-timeout", "2", "-o", "megatron_rank_grace=2")
    run = suite.run("--ranks", "2", "--pdb", *limits, stdin="!time.sleep(5)\nc\n")
    assert stopped(run) == ["rank 1 of 2"]
    assert "rank 0: passed" in run.printed


def test_a_rank_that_dies_in_its_debugger_gives_the_terminal_back(tmp_path: Path) -> None:
    suite = RecordedSuite(root=tmp_path).write(test_it=FAILING)
    typed = "!import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    run = suite.run(
        "--ranks", "2", "--pdb", "--pdb-rank", "1", "-o", "megatron_rank_grace=5", stdin=typed
    )
    assert any(x.startswith("rank 1: ") and x.endswith("killed by SIGKILL") for x in run.printed)
    assert run.summary == "1 failed, 1 passed"


def test_on_a_terminal_ctrl_c_interrupts_the_prompt_and_nothing_else(tmp_path: Path) -> None:
    suite = RecordedSuite(root=tmp_path).write(test_it=FAILING)
    command = suite.command("--ranks", "2", "--pdb", "--pdb-rank", "1")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(command[0], command, suite.env(TERM="dumb"))  # noqa: S606 - a shell does the same
    try:
        for awaited, typed in [
            ("(Pdb) ", "p numb"),
            ("p numb", "\x03"),
            ("KeyboardInterrupt--\r\n(Pdb) ", "p number"),
            ("p number", "\r"),
            ("41\r\n(Pdb) ", "c\r"),
        ]:
            read_until(terminal, awaited)
            if typed == "\x03":  # before a rank waits for keys, it is seen at the next key only
                wait_until(lambda: are_asleep(pid), "it waits for keys")
            os.write(terminal, typed.encode())
        talk = read_until(terminal, "1 failed")
        read_until(terminal, None)
    except BaseException:
        os.kill(pid, signal.SIGKILL)  # the tests that follow count processes
        raise
    finally:
        os.close(terminal)
        status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 1
    assert "PDB continue" in talk
    wait_until(lambda: suite.processes() == [], "no process is left")


def are_asleep(pid: int) -> bool:
    """Return whether no process below one is at work."""
    found = psutil.Process(pid).children(recursive=True)
    return {str(process.status()) for process in found} == {psutil.STATUS_SLEEPING}


def read_until(terminal: int, awaited: str | None) -> str:
    """Read a terminal until it says something, or with None until it is closed."""
    text = ""
    deadline = time.monotonic() + DEADLINE_S
    while awaited is None or awaited not in text:
        readable, _, _ = select.select([terminal], [], [], deadline - time.monotonic())
        assert readable, f"{awaited!r} did not come after {text!r}"
        try:
            text += os.read(terminal, 1 << 16).decode()
        except OSError:  # the other side is closed
            assert awaited is None, text
            return text
    return text
