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
import socket
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

from pytest_megatron.base.files import json_objects
from pytest_megatron.gang import kept
from pytest_megatron.gang.forkserver.fork_safety import find_obstacle, reseed
from pytest_megatron.gang.ipc.channel import Channel, listen_locally
from pytest_megatron.gang.ipc.messages import (
    Broken,
    Message,
    Ready,
    Register,
    SessionExited,
    SessionStarted,
    StartSession,
)
from pytest_megatron.gang.kept import (
    LIMITS,
    UNSTARTED,
    ForkedSession,
    KeptContexts,
    KeptProcess,
    find_kept,
    is_memory_short,
    lock_record,
    started_at,
    write_record,
)
from pytest_megatron.gang.supervisor.connections import Calls
from pytest_megatron.hooks.start.contexts import SpareRanks, wait_for_session
from pytest_megatron.hooks.start.preload import main as preload
from pytest_megatron.hooks.start.preload import serve
from pytest_megatron.process.tree import close_descriptors, die_with, end_process, large_imports

_LOADED = ("numpy", "torch", "pytest_megatron.plugin", "pytest_megatron.hooks.gangs.plugin")
_POLL_S = 5.0  # between checks of time and memory
_WARN_IMPORTED = "_warn_already_imported"  # a method of pytest's import hook


@dataclass(slots=True)
class _Running:
    """A session in the kept process, or the idle process for one that is to have CUDA contexts.

    Attributes:
        channel: To the client of a session; to an idle process itself.
    """

    pid: int
    channel: Channel
    end: int
    control: int


_Request: TypeAlias = tuple[StartSession, list[int], int, SpareRanks | None]


@dataclass(slots=True)
class _KeptServer:
    """Serves sessions until it has to end.

    Attributes:
        devices: UUIDs of the GPUs on which the next session is to have CUDA contexts.
        problem: Reason why it will have none, or "".
    """

    kept: KeptProcess
    record: Path
    lock: int
    devices: tuple[str, ...]
    calls: Calls = field(init=False)
    idle: _Running | None = None
    problem: str = "no session on GPUs has ended"
    running: dict[int, _Running] = field(default_factory=dict)
    wanted: list[tuple[Channel, StartSession, list[int]]] = field(default_factory=list)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    is_stopping: bool = False

    def serve(self, on_stop: Callable[[], None]) -> _Request | None:
        """Fork sessions; return in each fork, with its data, and in this process at its end.

        Args:
            on_stop: Called once no more session is taken.
        """
        used = time.monotonic()
        is_due = True
        while True:
            is_due |= bool(self.running)
            if is_due and not self.running and self.devices and self.idle is None:
                is_due = False
                request = self._fork_idle()
                if request is not None:
                    return request
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
                self._drop_idle("")
                if not self.running:
                    return None

    def _can_be_found(self) -> bool:
        """Return false if the record or the socket was removed or overwritten."""
        socket = Path(self.kept.address.partition(":")[2])
        return find_kept(self.record) == self.kept and socket.exists()

    def stop(self) -> None:
        """Take no more sessions."""
        self.is_stopping = True

    def on_register(
        self, channel: Channel, registration: Register, rest: Sequence[Message]
    ) -> None:
        """Answer a session that asks to be started."""
        if registration.role != "session" or rest or not channel.is_of_same_user:
            self.calls.drop(channel)
            return
        changed = next((f for f, known in self.files.items() if _version_of(f) != known), "")
        if changed or self.is_stopping:
            self.is_stopping = True
            doubt = f"{changed} has changed" if changed else "the kept process ends"
            channel.send(SessionExited(exit_code=UNSTARTED, doubt=doubt))
            self.calls.drop(channel)
            return
        self.calls.read(channel, lambda: self._on_request(channel))
        channel.send(Ready())

    def _on_request(self, channel: Channel) -> None:
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
        if request.program == "contexts" and self.idle is not None and not self.problem:
            one = self.idle
            one.channel.send(request, descriptors)
            self._drop_idle("another session has them")
            one.channel = channel
        else:
            idle = [] if self.idle is None else [self.idle.end]
            child = self._fork_child(channel, [*descriptors, *idle])
            if isinstance(child, int):
                return request, descriptors, child, None
            one = child
        for descriptor in descriptors:
            os.close(descriptor)
        self.running[one.pid] = one
        channel.send(SessionStarted(pid=one.pid))
        return None

    def _fork_idle(self) -> _Request | None:
        """Fork the process that makes CUDA contexts; return in it, with the session's data."""
        own, other = socket.socketpair()
        channel = Channel(own)
        child = self._fork_child(channel, [other.fileno()])
        if isinstance(child, int):
            own.detach()  # its number may be another's
            found = wait_for_session(other, self.devices, lambda r: _take_process_state(r, ()))
            request, descriptors, spares = found
            return request, descriptors, child, spares
        other.close()
        self.idle, self.problem = child, "they are not made yet"
        self.calls.watch(channel.fileno(), self._on_idle)
        self._write_record(0)
        return None

    def _on_idle(self) -> None:
        """Handle a message of the idle process, or its end."""
        assert self.idle is not None
        reply = self.idle.channel.receive()
        if isinstance(reply, Ready):
            self.problem = ""
            self._write_record(len(self.devices))
        else:
            reason = reply.problem if isinstance(reply, Broken) else ""
            self._drop_idle(reason or "a process that had one was killed")

    def _drop_idle(self, problem: str) -> None:
        """Close the connection to the idle process, which then ends if it has no session."""
        if self.idle is not None:
            self.calls.drop(self.idle.channel)
            self.idle, self.problem = None, problem
            self._write_record(None)

    def _write_record(self, num_contexts: int | None) -> None:
        self.kept = replace(self.kept, num_contexts=num_contexts)
        write_record(self.lock, self.kept)

    def _fork_child(self, channel: Channel, kept_open: Sequence[int]) -> _Running | int:
        """Fork; in the child return the write end of the pipe that it reports by."""
        control, control_write = os.pipe()
        kept = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.calls.forget()
            close_descriptors([*kept_open, control_write])
            os.setsid()
            die_with(kept)
            return control_write
        os.close(control_write)
        one = _Running(pid, channel, os.pidfd_open(pid), control)
        self.calls.watch(one.end, lambda: self._on_end(one))
        return one

    def _on_end(self, one: _Running) -> None:
        _, status = os.waitpid(one.pid, 0)
        os.set_blocking(one.control, False)  # a daemon of the session may have the other end
        report = b""
        with contextlib.suppress(BlockingIOError):
            report = os.read(one.control, 1 << 16)
        os.close(one.control)
        self.calls.unwatch(one.end)
        if self.running.pop(one.pid, None) is None:
            return  # it was idle
        found = {name: value for row in json_objects(report) for name, value in row.items()}
        doubt = str(found.get("doubt", ""))
        devices = tuple(cast("list[str]", found.get("devices", self.devices)))
        if devices != self.devices:
            self._drop_idle("the last session had other GPUs")
            self.devices = devices
        code = os.waitstatus_to_exitcode(status)
        one.channel.send(SessionExited(exit_code=code, doubt=doubt))
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
    leader, devices = settings.pop("leader"), tuple(settings.pop("devices"))
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
    problem = _load()
    if problem:
        report.write_text(problem)
        record.unlink()
        return
    os.chdir("/")
    os.umask(0o077)
    listener = listen_locally()
    kept = replace(kept, address=listener.address, key=listener.key.hex())
    server = _KeptServer(kept, record, lock, devices)
    server.files = {
        file: _version_of(file)
        for module in list(sys.modules.values())
        if isinstance(file := getattr(module, "__file__", None), str)
    }
    modules = frozenset(name for name in sys.modules if "." not in name)
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
        with contextlib.suppress(OSError):
            if record.stat().st_ino == os.fstat(lock).st_ino:
                record.unlink()

    request = server.serve(stop_listening)
    if request is None:
        server.calls.stop()
        return
    idle = None if server.idle is None else server.idle.end
    contexts = KeptContexts(server.devices, server.problem, idle)
    taken, descriptors, control, spares = request
    session = ForkedSession(record, control, tuple(sys.path), modules, contexts)
    _run_session(taken, descriptors, spares, session)


def _load() -> str:
    """Load modules; return the reason why no session can be forked from here, or ""."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    with warnings.catch_warnings(record=True) as caught, large_imports():
        warnings.simplefilter("always")
        try:
            for name in (*_LOADED, *(f"_pytest.{name}" for name in default_plugins)):
                if importlib.util.find_spec(name) is not None:
                    importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - sessions report it
            return f"{type(error).__name__}: {error}"
    if caught:  # which a session reports as warnings of the test that imports torch
        return f"a warning while torch is loaded: {caught[0].message}"
    return find_obstacle("torch was loaded")


def _run_session(
    request: StartSession,
    descriptors: list[int],
    spares: SpareRanks | None,
    session: ForkedSession,
) -> NoReturn:
    """Run a program as if this process had just been started."""
    loaded, offered = frozenset(sys.modules), session.offered
    session.control = _move([session.control], 1 << 8)[0]
    if offered.end is not None:
        offered.end = _move([offered.end], 1 << 8)[0]
    try:
        _take_streams(request, descriptors)
        _take_process_state(request, session.path)
    except Exception as error:  # noqa: BLE001 - the client starts it itself
        session.start_anew(f"{type(error).__name__}: {error}")
    if spares is not None:
        serve("fork", spares.start_first)
        end_process(0, loaded)
    if request.program in ("preload", "contexts"):
        preload("fork")
    kept.session = session
    is_main = request.program == "pytest.main"
    exit_code = pytest.main(list(request.arguments)) if is_main else pytest.console_main()
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
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, least) for number in descriptors]
    for number in descriptors:
        os.close(number)
    return moved


def _take_process_state(request: StartSession, path: Sequence[str]) -> None:
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


def _version_of(file: str) -> tuple[int, int]:
    try:
        found = os.stat(file)  # noqa: PTH116 - of 2,000 files at each start of a session
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, 4096)
