"""Real processes: each guest says that it is up by a line in its output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pytest_megatron.errors import LaunchError
from pytest_megatron.process.guarded import CommandEnd, GuardedProcess

GUESTS = Path(__file__).parents[1] / "guests"
DEADLINE_S = 30.0
MARK = "PYTEST_MEGATRON_GUEST_OF"


def start(tmp_path: Path, *command: str, grace_s: float = 20.0) -> GuardedProcess:
    env = os.environ | {MARK: str(tmp_path)}
    return GuardedProcess(command, env=env, cwd=tmp_path, output=tmp_path / "log", grace_s=grace_s)


def wait_for_line(log: Path, text: str, count: int = 1) -> list[str]:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        written = log.read_text() if log.exists() else ""
        lines = written[: written.rfind("\n") + 1].splitlines()  # `print` may write word by word
        if sum(text in line for line in lines) >= count:
            return lines
        time.sleep(0.01)
    raise AssertionError(f"no {text!r} in {log}")


def alive(mark: Path) -> list[int]:
    """Processes that a test started, and all below them; a pid alone may be another's by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(mark) and process.pid != os.getpid():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_until_gone(mark: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if not alive(mark):
            return
        time.sleep(0.01)
    raise AssertionError(f"still there: {alive(mark)}")


def outcome(ended: CommandEnd) -> tuple[int, int]:
    return ended.returncode, ended.num_left


def test_the_exit_code_and_the_output_of_a_command_come_back(tmp_path: Path) -> None:
    with start(tmp_path, sys.executable, "-c", "print('out'); raise SystemExit(3)") as process:
        assert outcome(process.wait()) == (3, 0)
    assert (tmp_path / "log").read_text() == "out\n"


def test_a_signal_comes_back_as_a_negative_exit_code(tmp_path: Path) -> None:
    with start(tmp_path, "sh", "-c", "kill -SEGV $$") as process:
        assert outcome(process.wait()) == (-signal.SIGSEGV, 0)


def test_a_program_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with start(tmp_path, "no-such-program") as process, pytest.raises(LaunchError) as caught:
        process.wait()
    assert "no-such-program: No such file or directory: cannot be started" in str(caught.value)


def test_an_output_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="Is a directory; nothing was run"):
        GuardedProcess(["true"], env={}, cwd=tmp_path, output=tmp_path, grace_s=1.0)


def test_grandchildren_in_sessions_of_their_own_are_killed_with_the_command(tmp_path: Path) -> None:
    with start(tmp_path, sys.executable, str(GUESTS / "leaves_grandchildren.py")) as process:
        ended = process.wait()
    num_up = sum("up" in line for line in wait_for_line(tmp_path / "log", "up"))
    assert (outcome(ended), num_up, alive(tmp_path)) == ((0, 2), 2, [])


def test_leaving_the_context_stops_what_still_runs(tmp_path: Path) -> None:
    with start(tmp_path, sys.executable, str(GUESTS / "ignores_term.py"), grace_s=0.2):
        wait_for_line(tmp_path / "log", "up")
        assert len(alive(tmp_path)) == 3  # the two of the guard, and the command
    assert alive(tmp_path) == []


def test_stop_is_polite_first(tmp_path: Path) -> None:
    with start(tmp_path, sys.executable, str(GUESTS / "says_goodbye.py")) as process:
        wait_for_line(tmp_path / "log", "up")
        process.stop()
        assert outcome(process.wait()) == (5, 0)
    assert "goodbye" in (tmp_path / "log").read_text()


def test_stacks_of_a_hanging_rank_land_in_its_output(tmp_path: Path) -> None:
    with start(tmp_path, sys.executable, str(GUESTS / "hangs_in_a_child.py")) as process:
        wait_for_line(tmp_path / "log", "up")
        process.dump_stacks()
        assert outcome(process.wait()) == (0, 0)
    assert "in wait_forever" in (tmp_path / "log").read_text()


def test_a_helper_of_a_rank_does_not_write_into_its_stack(tmp_path: Path) -> None:
    with start(tmp_path, sys.executable, str(GUESTS / "hangs_beside_its_helper.py")) as process:
        wait_for_line(tmp_path / "log", "up")
        process.dump_stacks()
        assert outcome(process.wait()) == (0, 1)
    log = (tmp_path / "log").read_text()
    assert log.count("Fatal Python error") == 1
    assert "in rank_waits" in log
    assert "in helper_waits" not in log


def test_a_process_whose_main_thread_has_ended_does_not_hide_others(tmp_path: Path) -> None:
    with start(tmp_path, sys.executable, str(GUESTS / "ends_its_main_thread.py")) as process:
        wait_for_line(tmp_path / "log", "up")
        process.kill()
        process.wait()
    assert alive(tmp_path) == []


def test_a_killed_controller_leaves_nothing_behind(tmp_path: Path) -> None:
    controller = subprocess.Popen(
        [sys.executable, str(GUESTS / "controller_of.py"), str(GUESTS / "leaves_grandchildren.py")],
        cwd=tmp_path,
        env=os.environ | {MARK: str(tmp_path)},
    )
    wait_for_line(tmp_path / "log", "up", count=2)
    assert len(alive(tmp_path)) == 6  # controller, guard's two, command and its two
    controller.kill()
    controller.wait()
    wait_until_gone(tmp_path)


def guard_of(command: int) -> tuple[psutil.Process, psutil.Process]:
    """Return the process of the guard that runs a command, and the one that watches it."""
    runs = psutil.Process(command).parent()
    assert runs is not None
    watches = runs.parent()
    assert watches is not None
    return runs, watches


@pytest.mark.parametrize("which", [0, 1], ids=["runs", "watches"])
def test_a_killed_guard_is_one_clear_error_and_leaves_nothing_behind(
    tmp_path: Path, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAIT", "1")
    with start(tmp_path, sys.executable, str(GUESTS / "leaves_grandchildren.py")) as it:
        line, *_ = wait_for_line(tmp_path / "log", "up", count=2)
        command = psutil.Process(int(line.split()[1])).ppid()
        guard_of(command)[which].kill()
        with pytest.raises(LaunchError, match="the guard of a training was killed"):
            it.wait()
        wait_until_gone(tmp_path)


@pytest.mark.parametrize("which", [0, 1], ids=["runs", "watches"])
def test_a_stopped_guard_leaves_nothing_behind_once_its_controller_is_gone(
    tmp_path: Path, which: int
) -> None:
    controller = subprocess.Popen(
        [sys.executable, str(GUESTS / "controller_of.py"), str(GUESTS / "says_goodbye.py")],
        cwd=tmp_path,
        env=os.environ | {MARK: str(tmp_path)},
    )
    (line,) = wait_for_line(tmp_path / "log", "up")
    guard_of(int(line.split()[1]))[which].suspend()
    controller.kill()
    controller.wait()
    wait_until_gone(tmp_path)


def test_an_end_is_seen_before_the_time_is_over_though_a_signal_took_all_of_it(
    tmp_path: Path,
) -> None:
    """So it is after Ctrl-Z and `fg`: the wait is over, and its result is there."""
    go = tmp_path / "go"
    over_at = time.monotonic() + 1.0

    def let_it_end(*_: object) -> None:
        go.touch()
        wait_until_gone(tmp_path)
        while time.monotonic() < over_at:
            time.sleep(0.01)

    before = signal.signal(signal.SIGALRM, let_it_end)
    try:
        with start(tmp_path, "sh", "-c", f"until [ -e '{go}' ]; do sleep 0.01; done; exit 3") as it:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            ended = it.poll(0.5)
            assert ended is not None
            assert outcome(ended) == (3, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
