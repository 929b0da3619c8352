"""A session whose processes are stopped (Ctrl-Z) or killed, or that has no standard input."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from gang_suite import READS_RANK, Suite
from labs import wait_until

pytestmark = pytest.mark.nightly

LIMIT_S = 3
ENDS = """
    import time
    from pathlib import Path

    def test_ends(rank):
        Path(f"running.{rank}").touch()
        while not Path("stopped").exists():
            time.sleep(0.01)
        print("x" * 1_000_000)  # more than a socket takes while nobody reads
        Path(f"ended.{rank}").touch()

    def test_next(rank):
        pass
"""


def test_time_in_which_the_controller_is_stopped_does_not_count(tmp_path: Path) -> None:
    """Ranks go on meanwhile; what they said is heard before anybody looks at the clock."""
    suite = Suite(tmp_path).write(test_ends=ENDS)
    process = suite.start("--ranks=2", "-rP", f"--rank-timeout={LIMIT_S}")

    def has(name: str) -> bool:
        return all((tmp_path / f"{name}.{rank}").exists() for rank in (0, 1))

    wait_until(lambda: has("running"), "the test runs")
    process.send_signal(signal.SIGSTOP)
    status = psutil.Process(process.pid).status
    wait_until(lambda: status() == psutil.STATUS_STOPPED, "the controller is stopped")
    (tmp_path / "stopped").touch()
    wait_until(lambda: has("ended"), "the ranks have ended the test")
    over_at = time.monotonic() + LIMIT_S + 0.5
    wait_until(lambda: time.monotonic() > over_at, "the limit is over")
    process.send_signal(signal.SIGCONT)
    stdout, _ = process.communicate(timeout=60)
    assert "2 passed" in stdout, stdout[-3000:]
    wait_until(lambda: not suite.processes(), "no process is left")


@pytest.mark.parametrize("how", ["forked", "not captured", "collects"])
def test_a_session_without_standard_input(tmp_path: Path, how: str) -> None:
    """As `pytest <&-`, of cron jobs and services: its number is not taken by what ranks need."""
    suite = Suite(tmp_path, has_torch=False).write(
        test_input="""
            import os
            import pytest

            def test_stdin_is_empty():
                assert os.read(0, 1) == b""

            def test_fails():
                raise ValueError("told")
            """
    )
    if how == "collects":
        suite.write(conftest=READS_RANK)
    command = [*suite.command(), "-v", "--ranks=2", *(["-s"] if how == "not captured" else [])]
    run = suite.run(command=["sh", "-c", 'exec "$@" <&-', "sh", *command])
    assert run.words == {"test_stdin_is_empty": "PASSED", "test_fails": "FAILED"}, run.stdout
    assert "ValueError: told" in run.stdout


@pytest.mark.parametrize("how", ["forked", "collects"])
def test_a_stopped_agent_ends_with_a_killed_controller(tmp_path: Path, how: str) -> None:
    suite = Suite(tmp_path, has_torch=False).write(
        test_waits="""
            import os
            import signal
            from pathlib import Path

            def test_waits(rank):
                Path(f"parent.{rank}").write_text(str(os.getppid()))
                signal.pause()
            """
    )
    if how == "collects":
        suite.write(conftest=READS_RANK)
    with suite.start("--ranks=2") as process:
        try:
            files = [tmp_path / f"parent.{rank}" for rank in (0, 1)]
            wait_until(lambda: all(f.exists() and f.read_text() for f in files), "the test runs")
            for server in {int(file.read_text()) for file in files}:
                os.kill(server, signal.SIGSTOP)
        finally:
            process.kill()
    wait_until(lambda: not suite.processes(), "no process is left")


@pytest.mark.everyday
@pytest.mark.parametrize("how", ["forked", "collects"])
def test_a_killed_guard_fails_the_test_and_leaves_nothing(tmp_path: Path, how: str) -> None:
    suite = Suite(tmp_path, has_torch=False).write(
        test_waits="""
            import os
            import signal
            from pathlib import Path

            def test_waits(rank):
                if os.fork() == 0:
                    os.setsid()  # it does not die with its rank
                    Path(f"begun.{rank}").touch()
                signal.pause()

            def test_after(rank):
                pass
            """
    )
    if how == "collects":
        suite.write(conftest=READS_RANK)
    begun = [tmp_path / f"begun.{rank}" for rank in (0, 1)]
    with suite.start("--ranks=2") as process:
        try:
            wait_until(lambda: all(file.exists() for file in begun), "the test runs")
            for guard in psutil.Process(process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):  # the end of another ended it
                    guard.kill()
            stdout, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert "1 failed, 1 passed" in stdout, stdout
    wait_until(lambda: not suite.processes(), "no process is left")


@pytest.mark.parametrize("how", ["forked", "collects"])
def test_a_controller_that_is_killed_while_torch_is_loaded_leaves_nothing(
    tmp_path: Path, how: str
) -> None:
    suite = Suite(tmp_path).write(
        test_passes="def test_passes(rank): import torch",
        torch="""
            import time
            from pathlib import Path

            Path("loads").touch()
            while not Path("killed").exists():
                time.sleep(0.01)
            """,
    )
    if how == "collects":
        suite.write(conftest=READS_RANK)
    with suite.start("--ranks=2", PYTHONPATH=str(tmp_path)) as process:
        try:
            wait_until((tmp_path / "loads").exists, "torch is loaded")
        finally:
            process.kill()
    (tmp_path / "killed").touch()
    wait_until(lambda: not suite.processes(), "no process is left")


@pytest.mark.everyday
def test_a_test_that_kills_the_agent_fails_and_no_other(tmp_path: Path) -> None:
    suite = Suite(tmp_path, has_torch=False).write(
        test_kills="""
            import os
            import signal

            def test_kills():
                os.kill(os.getppid(), signal.SIGKILL)

            def test_next():
                pass
            """
    )
    run = suite.run("-v", "--ranks=2")
    assert run.words == {"test_kills": "FAILED", "test_next": "PASSED"}, run.stdout
