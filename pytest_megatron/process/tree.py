"""Descendants of processes, signals at a parent's death, large imports, on Linux (effects)."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import posix
import re
import select
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from os import getpid  # a test may put another function in its place
from pathlib import Path
from typing import cast

from pytest_megatron.errors import LaunchError
from pytest_megatron.process.guard import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    kill_descendants,
    prctl,
    reset_signals,
    watch,
)

_BROKEN = 70  # exit code, as of an error in software
_OUTLIVES_S = 5.0  # a controller that is gone, to save what was measured
# After the process called `setsid`, its own number is its session's.
_FIELDS_AFTER_NAME = 4
_DEAD = (b"Z", b"X")
# After the name: state parent group session terminal its-group flags; see include/linux/sched.h.
_FLAGS, _EXITING = 6, 0x4
_USER_TICKS = 11  # the system's follow
_MOST_BYTES = 1 << 16
_HAS_CHILDREN = Path("/proc/thread-self/children").exists()  # the kernel was built with them


@dataclass(frozen=True, slots=True)
class Descendant:
    """A living process below this one.

    Attributes:
        session: Session id; a rank leads a session of its own.
    """

    pid: int
    parent: int
    session: int


def check_proc(proc: Path = Path("/proc")) -> None:
    """Make sure that /proc lists this process: what ranks leave is found in no other way.

    Args:
        proc: Where it is mounted.

    Raises:
        LaunchError: It does not, or it is of another PID namespace.
    """
    try:
        found = str((proc / "self").readlink())
    except OSError:
        found = ""
    if found != str(os.getpid()):
        what = "is of another PID namespace" if found else "is not mounted"
        raise LaunchError(
            str(proc),
            f"{what}, and processes of ranks are found by it; mount it: mount -t proc proc {proc}",
        )


def become_subreaper() -> None:
    """Make orphans below this process its children, so that none gets away."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process once its parent is gone."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the kernel knew
        os._exit(1)


def wake_at_death_of_parent() -> None:
    """Have the kernel send SIGTERM, not SIGKILL, so that this process can kill what is below it."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def fork() -> int:
    """Fork this process; for the threads that it may have see `fork_safety`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def fork_child(run: Callable[[], None], *, leads_session: bool = False) -> int:
    """Fork a child that does one thing and dies with this process; return the child.

    Its signals are reset, and it never comes back: on an error it ends with code 70.

    Args:
        run: What it does.
        leads_session: Whether it has a session of its own, and Ctrl-C.
    """
    parent, pid = os.getpid(), fork()
    if pid:
        return pid
    exit_code = _BROKEN
    try:
        signal.set_wakeup_fd(-1)
        reset_signals()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        die_with(parent)
        if leads_session:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
        run()
        exit_code = 0
    except BaseException:  # noqa: BLE001 - it must never go on as its parent
        traceback.print_exc()
    finally:
        os._exit(exit_code)


def run_guarded(serve: Callable[[], None], connection: socket.socket) -> None:
    """Run something in a child process, and kill what it leaves should it be killed.

    It has to end once the parent of this process is gone; it is continued then, and killed if it
    does not.

    Args:
        serve: What the child does.
        connection: The child's alone, so that its other end sees that the child has ended.
    """
    parent = os.getppid()
    reset_signals()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    become_subreaper()
    guard = os.getpid()
    pid = fork()
    if pid == 0:
        die_with(guard)
        serve()
        return
    connection.close()
    try:
        end = os.pidfd_open(parent)
    except OSError:  # an older kernel, or it is gone
        end = -1
    status = watch(pid, end, select.POLLIN, _OUTLIVES_S)
    kill_descendants()
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


@contextlib.contextmanager
def large_imports(without: Collection[str] = ()) -> Iterator[None]:
    """Import libraries without a search for garbage, neither now nor, in them, at the end.

    These searches are a third of the CPU time of a process that imports torch, and find nothing.

    Args:
        without: Optional dependencies that are not to be found.
    """
    cast("dict[str, object]", sys.modules).update(dict.fromkeys(without))
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def import_installed(names: Iterable[str]) -> None:
    """Import those of some modules that are installed."""
    with large_imports():
        for name in names:
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)


def python_command(code: str) -> list[str]:
    """Return the command that runs code in a fresh interpreter like this one."""
    flags: list[str] = vars(subprocess)["_args_from_interpreter_flags"]()  # as multiprocessing does
    return [sys.executable, *flags, "-c", code]


def end_if_forked(owner: int, error: BaseException | None = None) -> None:
    """End this process if a test forked it off the process `owner`: its parent runs the test.

    It ends as a program does that raised `error`, with a line on stderr, and runs no exit handlers.

    Args:
        owner: The process that may go on.
        error: With what the child came back, if it did not return.
    """
    if getpid() == owner:
        return
    code = 0 if error is None else 1
    with contextlib.suppress(Exception):
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = error.code or 0
        elif error is not None:
            traceback.print_exception(error)
        sys.stderr.write(
            f"pytest-megatron: process {getpid()}, which a test forked off process {owner}, came "
            f"back through pytest and ends here; end it in the test, with os._exit()\n"
        )
        sys.stdout.flush()
        sys.stderr.flush()
    posix._exit(code & 0xFF)  # a test may have replaced `os._exit`


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Use of the machine by the processes below one, since each of them began.

    Attributes:
        pids: Processes, in the order of their numbers.
        cpu_s: CPU time of all of them.
        written_bytes: Passed to `write`, to files, pipes and sockets alike.
        is_busy: Whether one of them waits for a disk or for a core.
        ranks: Values of RANK in their environments, in order.
    """

    pids: tuple[int, ...]
    cpu_s: float
    written_bytes: int
    is_busy: bool
    ranks: tuple[int, ...]


def activity_below(pid: int) -> Activity:
    """Return what the living processes below one have used; files that cannot be read count as 0.

    Args:
        pid: Process whose descendants are looked at, not itself.
    """
    pids = sorted(process.pid for process in descendants(pid, is_exact=False))
    ticks, written, is_busy = 0, 0, False
    ranks = set()
    for number in pids:
        fields = _content(f"/proc/{number}/stat").rpartition(b")")[2].split()
        if fields:
            ticks += sum(map(int, fields[_USER_TICKS : _USER_TICKS + 2]))
            is_busy = is_busy or fields[0] in (b"D", b"R")
        found = re.search(rb"^wchar: (\d+)$", _content(f"/proc/{number}/io"), re.MULTILINE)
        written += int(found[1]) if found else 0
        rank = re.search(
            rb"(?:^|\0)(?:PYTEST_MEGATRON_)?RANK=(\d+)(?:\0|$)", _content(f"/proc/{number}/environ")
        )
        ranks |= {int(rank[1])} if rank else set()
    return Activity(
        pids=tuple(pids),
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        written_bytes=written,
        is_busy=is_busy,
        ranks=tuple(sorted(ranks)),
    )


def descendants(root: int | None = None, *, is_exact: bool = True) -> Iterator[Descendant]:
    """Yield living processes below one, parents first.

    Args:
        root: The one; None for this process.
        is_exact: Whether to look at every process of the host. Else the kernel's lists of children
            are followed, which costs little on a host with thousands of processes; one whose
            sibling ends at that moment may be missing.
    """
    children = _children_by_parent() if is_exact or not _HAS_CHILDREN else None
    todo = [os.getpid() if root is None else root]
    while todo:
        parent = todo.pop()
        found = _children_of(parent) if children is None else children.get(parent, [])
        for child in found:
            yield child
            todo.append(child.pid)


def lives_on(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return true if a process of this host has a thread that neither is dead nor about to be.

    Between the two the kernel dismantles it: its files are closed, and its parent knows nothing.

    Args:
        pid: May be of no process.
        proc: Where it is mounted.
    """
    for stat in proc.glob(f"{pid}/task/*/stat"):
        fields = _content(str(stat)).rpartition(b")")[2].split()
        if fields and fields[0] not in _DEAD and not int(fields[_FLAGS]) & _EXITING:
            return True
    return False


def _children_by_parent() -> dict[int, list[Descendant]]:
    """Return all processes by their parent."""
    children: dict[int, list[Descendant]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - every microsecond counts here
        if name.isdigit() and (found := _read(name)) is not None:
            children.setdefault(found.parent, []).append(found)
    return children


def _children_of(parent: int) -> Iterator[Descendant]:
    """Yield the children of a process."""
    try:
        threads = os.listdir(f"/proc/{parent}/task")  # noqa: PTH208
    except OSError:
        return
    for thread in threads:
        for name in _content(f"/proc/{parent}/task/{thread}/children").split():
            if (found := _read(name.decode())) is not None:
                yield found


def close_descriptors(kept: Iterable[int]) -> None:
    """Close what this process inherited, but the standard streams and `kept`."""
    wanted = {0, 1, 2, *kept}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - its own descriptor is among them
        if int(name) not in wanted:
            try:
                os.close(int(name))
            except OSError:
                continue


def _read(name: str) -> Descendant | None:
    """Return a process; None if it has ended, collected or not."""
    # "pid (name) state parent group session ...", and a name may hold anything.
    fields = _content(f"/proc/{name}/stat").rpartition(b")")[2].split(None, _FIELDS_AFTER_NAME)
    if not fields or fields[0] in _DEAD:
        return None
    return Descendant(pid=int(name), parent=int(fields[1]), session=int(fields[3]))


def _content(path: str) -> bytes:
    """Return a file of `/proc`; nothing if its process ended meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, _MOST_BYTES)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
