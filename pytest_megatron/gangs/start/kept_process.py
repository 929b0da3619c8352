"""The kept process: has torch and pytest imported, and forks sessions of pytest.

It runs no session and imports no code of the user itself. A session is a fork, which gets all that
a new process would get from its parent: arguments, variables, directory, descriptors, limits.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import importlib.util
import io
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, TypeAlias, cast

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook
from _pytest.config import default_plugins

from pytest_megatron.gangs.ipc.channel import Channel, listen_locally
from pytest_megatron.gangs.ipc.messages import (
    Message,
    Ready,
    Register,
    SessionExited,
    SessionStarted,
    StartSession,
)
from pytest_megatron.gangs.start import kept as kept_processes
from pytest_megatron.gangs.start.keep import StartAnew
from pytest_megatron.gangs.start.kept import (
    LIMITS,
    UNSTARTED,
    ForkedSession,
    KeptProcess,
    find_kept,
    is_memory_short,
    lock_record,
    started_at,
    write_record,
)
from pytest_megatron.gangs.start.preload import main as preload
from pytest_megatron.gangs.supervisor.connections import Calls
from pytest_megatron.process.fork_safety import find_obstacle, reseed
from pytest_megatron.process.tree import close_descriptors, die_with, end_process, import_installed

_LOADED = ("numpy", "torch", "pytest_megatron.plugin", "pytest_megatron.gangs.controller.plugin")
_POLL_S = 5.0  # between checks of time and memory
_REMOVED = " (deleted)"  # as the kernel writes behind a name
_TICK_NS = 10_000_000  # by which times of files may be late
_WARN_IMPORTED = "_warn_already_imported"  # a method of pytest's import hook


@dataclass(slots=True)
class _Running:
    """A session in the kept process, with the connection to its client."""

    pid: int
    channel: Channel
    end: int
    control: int


_Request: TypeAlias = tuple[StartSession, list[int], int]


@dataclass(slots=True)
class _KeptServer:
    """Serves sessions until it has to end.

    Attributes:
        files: Versions of what it has loaded.
    """

    kept: KeptProcess
    record: Path
    lock: int
    files: dict[str, tuple[int, ...]]
    calls: Calls = field(init=False)
    running: dict[int, _Running] = field(default_factory=dict)
    wanted: list[tuple[Channel, StartSession, list[int]]] = field(default_factory=list)
    is_stopping: bool = False

    def serve(self, on_stop: Callable[[], None]) -> _Request | None:
        """Fork sessions; return in each fork, with its data, and in this process at its end.

        Args:
            on_stop: Called once no more session is taken.
        """
        used = time.monotonic()
        while True:
            left_s = used + self.kept.minutes * 60 - time.monotonic()
            self.calls.take(_POLL_S if self.running else min(_POLL_S, left_s))
            while self.wanted:
                request = self._fork(*self.wanted.pop())
                if request is not None:
                    return request
            if self.running:
                used = time.monotonic()
            elif left_s <= 0 or is_memory_short() or not self._can_be_found():
                self.is_stopping = True
            if self.is_stopping:
                on_stop()
                if not self.running:
                    return None

    def _has_changed(self, file: str) -> bool:
        """Return whether a file is another one than when it was loaded.

        A new hard link, as of another environment made by uv, changes its last times as well.
        """
        known, now = self.files[file], _version_of(file)
        if now == known:
            return False
        if now[:1] == known[:1] or now[2:] != known[2:]:
            return True
        self.files[file] = now
        return False

    def _can_be_found(self) -> bool:
        """Return false if the record or the socket was removed or overwritten."""
        socket = Path(self.kept.address.partition(":")[2])
        return find_kept(self.record) == self.kept and socket.exists()

    def stop(self) -> None:
        """Take no more sessions."""
        self.is_stopping = True

    def on_register(self, channel: Channel, register: Register, rest: Sequence[Message]) -> None:
        """Answer a session that asks to be started."""
        if register.role != "session" or rest or not channel.is_of_same_user:
            self.calls.drop(channel)
            return
        changed = next(filter(self._has_changed, self.files), "")
        if changed or self.is_stopping:
            self.is_stopping = True
            doubt = f"{changed} has changed" if changed else "the kept process ends"
            channel.send(SessionExited(exit_code=UNSTARTED, doubt=doubt))
            self.calls.drop(channel)
            return
        self.calls.read(channel, lambda: self._on_request(channel))
        channel.send(Ready())

    def _on_request(self, channel: Channel) -> None:
        """Take a request for a session."""
        message, descriptors = channel.receive_with_descriptors()
        if isinstance(message, StartSession):
            self.calls.read(channel, lambda: self._on_news(channel))
            self.wanted.append((channel, message, descriptors))
            return
        for descriptor in descriptors:
            os.close(descriptor)
        self.calls.drop(channel)

    def _on_news(self, channel: Channel) -> None:
        """Kill a session whose client is gone."""
        channel.drain()
        if channel.is_closed:
            self.calls.drop(channel)
            for one in self.running.values():
                if one.channel is channel:
                    os.kill(one.pid, signal.SIGKILL)

    def _fork(
        self, channel: Channel, request: StartSession, descriptors: list[int]
    ) -> _Request | None:
        """Fork the process of a session, and return it with its pipes."""
        control, control_write = os.pipe()
        kept = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.calls.forget()
            close_descriptors([*descriptors, control_write])
            os.setsid()
            die_with(kept)
            return request, descriptors, control_write
        for descriptor in (*descriptors, control_write):
            os.close(descriptor)
        one = self.running[pid] = _Running(pid, channel, os.pidfd_open(pid), control)
        self.calls.watch(one.end, lambda: self._on_end(one))
        channel.send(SessionStarted(pid=pid))
        return None

    def _on_end(self, one: _Running) -> None:
        """Report the end of a session to its client."""
        _, status = os.waitpid(one.pid, 0)
        os.set_blocking(one.control, False)  # a daemon of the session may have the other end
        doubt = b""
        with contextlib.suppress(BlockingIOError):
            doubt = os.read(one.control, 1 << 16)
        os.close(one.control)
        self.calls.unwatch(one.end)
        del self.running[one.pid]
        code = os.waitstatus_to_exitcode(status)
        one.channel.send(SessionExited(exit_code=code, doubt=doubt.decode(errors="replace")))
        self.calls.drop(one.channel)
        os.utime(self.lock)  # its last use
        self.is_stopping |= bool(doubt)


def main() -> None:
    """Load torch and pytest, and serve; then run pytest in each fork."""
    settings = json.loads(sys.stdin.buffer.read())
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    record = Path(settings.pop("record"))
    lock = lock_record(record)
    if lock is None:
        return
    leader = settings.pop("leader")
    kept = KeptProcess(
        pid=os.getpid(),
        began=started_at(os.getpid()) or 0,
        address="",
        key="",
        started=time.time(),
        **settings,
    )
    write_record(lock, kept)
    report = record.with_suffix(".problem")
    report.unlink(missing_ok=True)
    problem, files = _load()
    if not kept.is_in_place():
        problem = "the session changed what this process has from it, such as a hard limit"
    if problem:
        report.write_text(problem)
        record.unlink()
        return
    os.chdir("/")
    os.umask(0o077)
    listener = listen_locally()
    kept = replace(kept, address=listener.address, key=listener.key.hex())
    server = _KeptServer(kept, record, lock, files)
    modules = {name: kept_processes.find_module(name) for name in sys.modules if "." not in name}
    wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    server.calls = Calls(listener, server.on_register)
    server.calls.watch(wakeup, lambda: _drain(wakeup))
    if leader:
        try:
            end = os.pidfd_open(leader)
        except OSError:  # it is gone
            listener.close()
            return
        server.calls.watch(end, server.stop)
    write_record(lock, kept)
    gc.collect()
    gc.freeze()  # keep present objects shared with the sessions

    def stop_listening() -> None:
        """Remove the record, so that no session finds this process."""
        with contextlib.suppress(OSError):
            if record.stat().st_ino == os.fstat(lock).st_ino:
                record.unlink()

    request = server.serve(stop_listening)
    if request is None:
        server.calls.stop()
        return
    taken, descriptors, control = request
    session = ForkedSession(record, control, tuple(sys.path), modules)
    _run_session(taken, descriptors, session)


def _load() -> tuple[str, dict[str, tuple[int, ...]]]:
    """Import the modules that every session needs.

    Returns:
        The reason why no session can be forked from here, or "", and versions of loaded files.
    """
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed", {}
    began_ns = time.time_ns() - _TICK_NS
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import_installed([*_LOADED, *(f"_pytest.{name}" for name in default_plugins)])
        except Exception as error:  # noqa: BLE001 - sessions report it
            return f"{type(error).__name__}: {error}", {}
    if caught:  # which a session reports as warnings of the test that imports torch
        return f"a warning while torch is loaded: {caught[0].message}", {}
    # A file goes before its folder, as the one that is named.
    files = {f: _version_of(f) for f in sorted(_loaded_files(), key=len, reverse=True)}
    for file, version in files.items():
        # A file with several names may have got one of them just now, as from uv.
        is_named_anew = version[:1] > (1,) and version[2:3] <= (began_ns,)
        is_named_anew |= os.path.isdir(file)  # noqa: PTH112 - it got a `__pycache__`
        if _is_removed(file) or (version[1:2] > (began_ns,) and not is_named_anew):
            return f"{file} was changed while it was loaded", {}
    return find_obstacle("torch was loaded"), files


def _run_session(request: StartSession, descriptors: list[int], session: ForkedSession) -> NoReturn:
    """Run a program as if this process had just been started."""
    loaded = frozenset(sys.modules)
    session.control = _move([session.control], 1 << 8)[0]
    try:
        _take_streams(request, descriptors)
        _take_process_state(request, session.path)
    except Exception as error:  # noqa: BLE001 - the client starts it itself
        session.start_anew(f"{type(error).__name__}: {error}")
        os._exit(UNSTARTED)
    if request.program == "preload":
        preload("fork")
    kept_processes.session = session
    is_main = request.program == "pytest.main"
    try:
        exit_code = pytest.main(list(request.arguments)) if is_main else pytest.console_main()
    except StartAnew:
        exit_code = UNSTARTED
    end_process(exit_code, loaded)


def _take_streams(request: StartSession, descriptors: list[int]) -> None:
    """Put descriptors to their numbers, and open the standard streams."""
    above = max(*request.descriptors, 1 << 8) + 1
    for number, moved in zip(request.descriptors, _move(descriptors, above), strict=True):
        os.dup2(moved, number)
        os.close(moved)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        encoding, errors, *kinds = request.streams[number]
        buffering = 0 if "raw" in kinds and mode == "w" else -1
        stream = io.TextIOWrapper(
            cast("io.BufferedWriter", open(number, f"{mode}b", buffering, closefd=False)),  # noqa: SIM115 - of a stream
            encoding,
            errors,
            line_buffering="line" in kinds,
            write_through="raw" in kinds,
        )
        vars(stream)["mode"] = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _move(descriptors: Sequence[int], least: int) -> list[int]:
    """Move descriptors to numbers that no session uses."""
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, least) for number in descriptors]
    for number in descriptors:
        os.close(number)
    return moved


def _take_process_state(request: StartSession, path: Sequence[str]) -> None:
    """Take what a new process inherits, from the request."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {
        signal.SIGKILL,
        signal.SIGSTOP,
        signal.SIGPIPE,
        signal.SIGXFSZ,
    }:
        if number in request.ignored:
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    for limit, (soft, hard) in zip(LIMITS, request.limits, strict=True):
        resource.setrlimit(limit, (soft, hard))
    os.umask(request.umask)
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.env)
    time.tzset()
    sys.argv[:] = request.argv
    sys.orig_argv[:] = request.orig_argv
    sys.path[:] = request.path or path
    if not request.path and not sys.flags.safe_path:
        script = os.path.dirname(os.path.realpath(request.argv[0]))  # noqa: PTH120 - as Python does
        sys.path.insert(0, script if request.program == "pytest" else request.directory)
    importlib.invalidate_caches()
    reseed(has_user_code=False)
    _expect_loaded_modules()


def _expect_loaded_modules() -> None:
    """Have pytest not warn about modules that this process had imported."""
    warn: Callable[[object, str], None] = getattr(AssertionRewritingHook, _WARN_IMPORTED)
    loaded = frozenset(sys.modules)

    def warn_of_others(hook: AssertionRewritingHook, name: str) -> None:
        if name not in loaded:
            warn(hook, name)

    setattr(AssertionRewritingHook, _WARN_IMPORTED, warn_of_others)


def _loaded_files() -> set[str]:
    """Return what this process was made of: modules and their archives, libraries, their places."""
    found: set[object] = {"/etc/ld.so.cache", "/etc/ld.so.preload"}
    found.update(os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        archive = getattr(getattr(spec, "loader", None), "archive", None)
        found |= {getattr(module, "__file__", None), archive}
    maps = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    mapped = {name for line in maps for name in line.split(None, 5)[5:]}
    found |= mapped
    # A library that is new in such a folder may go before one that was found elsewhere.
    found.update(os.path.dirname(name) for name in mapped if ".so" in name)  # noqa: PTH120 - a name
    names = {name for name in found if isinstance(name, str) and name.startswith("/")}
    return {name for name in names if not name.endswith(_REMOVED) or _is_removed(name)}


def _is_removed(file: str) -> bool:
    """Return whether this is the name of a mapped library that was removed or replaced."""
    return file.endswith(_REMOVED) and ".so" in file and not file.startswith("/memfd:")


def _version_of(file: str) -> tuple[int, ...]:
    """Return time, size and number of a file, empty if it is gone."""
    try:
        found = os.stat(file)  # noqa: PTH116 - of 2,000 files at each start of a session
    except OSError:
        return ()
    times = found.st_ctime_ns, found.st_mtime_ns
    return found.st_nlink, *times, found.st_size, found.st_ino, found.st_dev


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, 4096)
