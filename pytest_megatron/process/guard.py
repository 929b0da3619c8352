"""Runs one command and leaves nothing of it behind, whatever happens to the controller.

Started as a file, in a session of its own: `guard.py CONTROL RESULT GRACE COMMAND...`.
CONTROL is the read end of a pipe that the controller holds: its end of file (the controller is
gone, even by SIGKILL) or a byte `t` stops the command, a byte `k` kills it at once, a byte `a` asks
every process below it but helpers of ranks for its Python stack first (SIGABRT with faulthandler),
a byte `A` also the command. RESULT is the descriptor that gets one line of JSON when nothing is
left. Ranks that start sessions of their own are found as well: the guard is their subreaper. It is
two processes, so that one of them is left to do that if the other one is killed or stopped.
Standard library only, so that it starts in milliseconds; `tree` has the same guard for a function.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
SLOW_S = 5.0  # beyond the grace, for killing what did not end in it
STACKS_S = 2.0  # for all stacks; most take a few milliseconds
UNKILLABLE_S = 30.0  # a process stuck in the kernel (a dead file system) cannot be killed
# What whoever started this process has it ignore; two are ignored by Python itself.
_IGNORED = [
    number
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}
    if signal.getsignal(number) is signal.SIG_IGN
]


def reset_signals() -> None:
    """Take all signals again that whoever started this process has it ignore, or blocked.

    A shell has its background jobs ignore SIGINT and SIGQUIT, and `nohup` has SIGHUP ignored, which
    is meant for the process that they start, not for what runs below it.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in _IGNORED:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _execute(command: Sequence[str]) -> int:
    """Start the command; return its process."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=True)
    process.returncode = 0  # collected by `_collect`, not by Popen
    return process.pid


def main() -> None:
    """Run the command of the command line under guard."""
    control, result, grace_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    reset_signals()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The controller decides, through the pipe. A handler, unlike SIG_IGN, is not inherited.
        signal.signal(number, lambda *_: None)
    outer = os.getpid()
    inner = os.fork()
    if inner:
        # Only the end of the controller's side of the pipe counts, not its orders.
        if watch(inner, control, 0, grace_s + SLOW_S):
            kill_descendants()
        return
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGUSR1, _give_up)
    prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() == outer:
        _run(control, result, grace_s)


def watch(child: int, end: int, events: int, limit_s: float) -> int:
    """Wait for the end of a child process; return its status.

    Args:
        child: The process.
        end: Descriptor that tells that nobody needs it any more; -1 for none.
        events: Those of `poll` that tell so, beside that the other side is closed.
        limit_s: Time that it then has to end by itself; if it was stopped, it is continued.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # should this process be stopped
    poll = select.poll()
    try:
        own_end = os.pidfd_open(child)
    except OSError:  # an older kernel: see only its end
        end = -1
    if end >= 0:
        poll.register(own_end, select.POLLIN)
        poll.register(end, events)
        if own_end not in [descriptor for descriptor, _ in poll.poll()]:
            poll.unregister(end)
            send_signal([child], signal.SIGCONT)
            if not poll.poll(limit_s * 1000):
                send_signal([child], signal.SIGKILL)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def _give_up(*_: object) -> None:
    """Leave nothing behind; the other process of the guard was killed, and nothing is answered."""
    kill_descendants()
    os._exit(1)


def _run(control: int, result: int, grace_s: float) -> None:
    """Start the command, wait for its end, and report it with what was left."""
    try:
        child = _execute(sys.argv[4:])
    except OSError as error:
        _answer(result, {"error": f"{sys.argv[4]}: {error.strerror}"})
        return
    returncode = _wait(child, control, grace_s)
    num_left = kill_descendants()
    _answer(result, {"returncode": returncode, "num_left": num_left, "pid": child})


def _wait(child: int, control: int, grace_s: float) -> int:
    """Wait for the command's end and carry out orders; return its exit code, as Popen has it."""
    kill_at = float("inf")
    is_open = True
    while True:
        returncode = _collect(child)
        if returncode is not None:
            return returncode
        if time.monotonic() >= kill_at:
            send_signal(_descendants(), signal.SIGKILL)
        readable, _, _ = select.select([control] if is_open else [], [], [], POLL_S)
        order = os.read(control, 1) if readable else None
        match order:
            case None:
                continue
            case b"a" | b"A":
                _ask_for_stacks({} if order == b"A" else {child})
            case _:  # t, k, or the controller is gone
                is_open = order != b""
                kill_at = min(kill_at, time.monotonic() + (0.0 if order == b"k" else grace_s))
                send_signal([child], signal.SIGTERM)


def _ask_for_stacks(left_out: Container[int]) -> None:
    """Abort processes: those that share a stderr in turn, as they would tear each other's stacks.

    Helpers of a rank, such as workers of its data loader, are not asked: the last stack in its log
    is its own.
    """
    found = _descendants()
    ranks = {pid for pid in found if b"\0LOCAL_RANK=" in b"\0" + _environment(pid)}
    queues: dict[str, list[int]] = {}
    for pid, parent in found.items():
        stderr = _stderr(pid)
        is_helper = pid in ranks and parent in ranks and stderr == _stderr(parent)
        if not is_helper and pid not in left_out:
            queues.setdefault(stderr, []).append(pid)
    until = time.monotonic() + STACKS_S
    for turn in itertools.zip_longest(*queues.values()):
        asked = {pid for pid in turn if pid is not None}
        send_signal(asked, signal.SIGABRT)
        while asked.intersection(_descendants()) and time.monotonic() < until:
            time.sleep(0.005)


def _environment(pid: int) -> bytes:
    """Return the environment that a process began with; nothing of one that has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _stderr(pid: int) -> str:
    """Return the file that a process has as its stderr; "" without one."""
    try:
        return str(Path(f"/proc/{pid}/fd/2").readlink())
    except OSError:
        return ""


def _collect(child: int) -> int | None:
    """Collect every ended process that is ours; return the command's exit code once it ended."""
    returncode = None
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return returncode
            if pid == child:
                returncode = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        return returncode


def kill_descendants() -> int:
    """Kill and collect what descends from this process, a subreaper; return how many there were.

    A process whose main thread has ended already is no longer found, and hides its children, while
    its other threads are still at it: with CUDA that takes a second. The kernel knows of it.
    """
    seen: set[int] = set()
    give_up_at = time.monotonic() + UNKILLABLE_S
    while time.monotonic() < give_up_at:
        pids = _descendants()
        seen.update(pids)
        send_signal(pids, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            break
        time.sleep(0.005)
    return len(seen)


def _descendants() -> dict[int, int]:
    """Return every living process below the guard, and its parent; parents come first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:  # "pid (name) state parent ...", and a name may hold anything
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it ended while we looked
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found: dict[int, int] = {}
    todo = [os.getpid()]
    while todo:
        above = todo.pop()
        below = children.get(above, [])
        found |= dict.fromkeys(below, above)
        todo += below
    return found


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process, as `man prctl` lists them."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def send_signal(pids: Iterable[int], number: int) -> None:
    """Signal processes; one that is gone is no error."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _answer(result: int, value: dict[str, object]) -> None:
    """Send a message to the controller, which may be gone."""
    try:
        os.write(result, json.dumps(value).encode() + b"\n")
    except OSError:
        return


if __name__ == "__main__":
    main()
