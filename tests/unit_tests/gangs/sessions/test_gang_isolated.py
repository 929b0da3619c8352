"""Isolated tests: fresh processes each, which are forked while the test before still runs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from gang_suite import Suite, wait_until

pytestmark = pytest.mark.nightly

SUITE = """
    import contextlib
    import os
    import time
    from pathlib import Path

    import psutil
    import pytest

    pytestmark = pytest.mark.isolated
    DEADLINE_S = 30

    def wait_until(is_true):
        until = time.monotonic() + DEADLINE_S
        while not is_true():
            assert time.monotonic() < until
            time.sleep(0.01)

    def logs(attempt, rank):
        mine = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
        return mine.parent.parent / f"attempt_{attempt}" / str(rank) / "stdout.log"

    def note(name, rank):
        with open(f"{name}.{rank}", "a") as file:
            file.write(f"{os.getpid()} {os.environ['MASTER_PORT']}\\n")

    def test_next_gang_is_there(rank):
        note("pids", rank)
        wait_until(lambda: all(logs(2, other).exists() for other in (0, 1)))

    def test_fails_on_one_rank(rank):
        note("pids", rank)
        assert rank == 0

    def test_dies(rank):
        note("pids", rank)
        if rank:
            os._exit(0)
        time.sleep(DEADLINE_S)

    def test_next_gang_is_killed(rank):
        note("pids", rank)
        if rank == 0:
            wait_until(lambda: all(logs(5, other).exists() for other in (0, 1)))
            mine = [int(Path("pids.0").read_text().split()[-2]), os.getpid()]
            wait_until(lambda: len(Path("pids.1").read_text().splitlines()) == 4)
            mine.append(int(Path("pids.1").read_text().split()[-2]))
            others = [
                process
                for process in psutil.Process(os.getppid()).children()
                if process.pid not in mine and os.getsid(process.pid) == process.pid
            ]
            for process in others:
                with contextlib.suppress(psutil.NoSuchProcess):  # stopped when the one before died
                    process.kill()
            wait_until(lambda: not any(process.is_running() for process in others))

    def test_last(rank):
        note("pids", rank)
    """


@pytest.mark.everyday
def test_every_test_has_processes_of_its_own_whatever_became_of_others(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_isolated=SUITE)
    run = suite.run("-v", "--ranks=2", "-omegatron_rank_grace=0.2")
    assert run.words == {
        "test_next_gang_is_there": "PASSED",
        "test_fails_on_one_rank": "FAILED",
        "test_dies": "FAILED",
        "test_next_gang_is_killed": "PASSED",
        "test_last": "PASSED",
    }, run.stdout
    rows = [row.split() for rank in (0, 1) for row in suite.read(f"pids.{rank}")]
    assert len({pid for pid, _ in rows}) == 2 * 5
    assert len({port for _, port in rows}) == 5  # a store of its own


STOPPED = """
    import os
    import time
    from pathlib import Path

    import pytest

    @pytest.mark.isolated
    @pytest.mark.parametrize("number", range(4))
    def test_it(number, rank):
        logs = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.parent.parent
        while not (logs / "attempt_2" / "1" / "stdout.log").exists():
            time.sleep(0.01)
        Path(f"began.{rank}").touch()
        while not Path("go").exists():
            time.sleep(0.01)
        assert number != 0
    """


def test_a_gang_that_is_not_needed_any_more_ends_with_the_session(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_stops=STOPPED)
    (tmp_path / "go").touch()
    run = suite.run("-v", "--ranks=2", "-x")
    assert (run.returncode, run.words) == (1, {"test_it[0]": "FAILED"}), run.stdout


@pytest.mark.parametrize("how", ["at a terminal", "in the background"])
def test_an_interrupt_leaves_nothing_of_the_gang_that_would_have_been_next(
    tmp_path: Path, how: str
) -> None:
    suite = Suite(tmp_path).write(test_stops=STOPPED)
    ignores = how == "in the background"  # as `pytest &` in a script
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignores else signal.default_int_handler)
    try:
        process = suite.start("-v", "--ranks=2")
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until(lambda: all((tmp_path / f"began.{rank}").exists() for rank in (0, 1)), "the test")
    process.send_signal(signal.SIGINT)
    if ignores:
        process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, stdout
    assert ("KeyboardInterrupt: SIGTERM" in stdout) is ignores, stdout
    wait_until(lambda: not suite.processes(), "no process is left")
