"""Python code in forks of one process that has imported libraries, as in a new interpreter.

Imported for `start_forker` and `start`; itself the program that forks, which ends once its stdin is
closed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import BinaryIO, NoReturn, cast

from _pytest.assertion.rewrite import AssertionRewritingHook

from pytest_megatron.gangs.start import preload
from pytest_megatron.process.fork_safety import find_obstacle, reseed
from pytest_megatron.process.tree import die_with, fork_child, large_imports

_MOST_DESCRIPTORS = 8
_WARN_IMPORTED = "_warn_already_imported"  # a method of pytest's import hook


@dataclass(frozen=True, kw_only=True)
class Order:
    """What runs.

    Attributes:
        code: As behind `python -c`.
        argv: `sys.argv`, and `orig_argv` likewise.
        path: `sys.path`.
        env: All variables.
    """

    code: str
    argv: Sequence[str]
    orig_argv: Sequence[str]
    path: Sequence[str]
    env: Mapping[str, str]
    directory: str


@dataclass
class ForkedCode:
    """Code that runs, with the methods of a `subprocess.Popen` that are needed."""

    connection: socket.socket
    pid: int
    exit_code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._take(socket.MSG_DONTWAIT)

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        code = self._take(0)
        assert code is not None
        return code

    def kill(self) -> None:
        """Kill it, and do not wait."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _take(self, flags: int) -> int | None:
        if self.exit_code is None:
            try:
                data = self.connection.recv(16, flags)
            except BlockingIOError:
                return None
            self.exit_code = int(data or -signal.SIGKILL)  # the forker was killed
            self.connection.close()
        return self.exit_code


def start(address: str, order: Order, descriptors: Sequence[int]) -> ForkedCode:
    """Have code run.

    Args:
        address: Socket of the forker.
        order: The code.
        descriptors: Its stdin, stdout and stderr, and others that it keeps open.

    Raises:
        OSError: The forker is gone.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address.replace("@", "\0"))
    content = os.memfd_create("order")
    with os.fdopen(os.dup(content), "wb") as file:
        file.write(json.dumps(asdict(order)).encode())
    socket.send_fds(connection, [b"o"], [content, *descriptors])
    os.close(content)
    pid = connection.recv(16)
    if not pid:
        raise BrokenPipeError(address)
    return ForkedCode(connection, int(pid))


def start_forker(
    address: str, modules: Sequence[str], env: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], list[str]]:
    """Start the program; return it and its `sys.path`, without the folder of this file.

    Args:
        address: Where it listens: `@` and a name that no file has, as a path may be too long.
        modules: What it imports.
        env: All variables.
    """
    process = subprocess.Popen(
        [sys.executable, __file__, address, *modules],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        path: list[str] = json.loads(process.stdout.readline())
    return process, path


def main(address: str, modules: Sequence[str]) -> None:
    """Import modules, fork for each order, and be it in the fork."""
    del sys.path[0]
    with large_imports():
        for name in modules:
            importlib.import_module(name)
    assert not find_obstacle("modules were imported"), find_obstacle()
    gc.collect()
    gc.freeze()  # keep present objects shared with the forks
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address.replace("@", "\0"))
    listener.listen(64)
    os.write(1, json.dumps(sys.path).encode() + b"\n")
    taken = _Forker(listener).serve()
    if taken is not None:
        _become(*taken)


@dataclass
class _Forker:
    """Forks for each order, until stdin is closed.

    Attributes:
        running: Descriptor of a process -> the process, and who asked for it.
    """

    listener: socket.socket
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    running: dict[int, tuple[int, socket.socket]] = field(default_factory=dict)

    def serve(self) -> tuple[Order, list[int]] | None:
        """Return the order in each fork, with its descriptors, and None at the end."""
        for source in (sys.stdin.fileno(), self.listener):
            self.selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if key.fd == sys.stdin.fileno():
                    return None
                if key.fileobj is self.listener:
                    self.selector.register(self.listener.accept()[0], selectors.EVENT_READ)
                    continue
                self.selector.unregister(key.fileobj)
                if key.fd in self.running:
                    self._end(key.fd)
                elif taken := self._fork(cast("socket.socket", key.fileobj)):
                    return taken

    def _end(self, descriptor: int) -> None:
        """Tell of the end of a process, unless who asked for it is gone."""
        pid, asked = self.running.pop(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(descriptor)
        with asked, contextlib.suppress(OSError):
            asked.send(str(code).encode())

    def _fork(self, connection: socket.socket) -> tuple[Order, list[int]] | None:
        """Take an order and fork for it; return it in the fork."""
        data, received, _, _ = socket.recv_fds(connection, 1, _MOST_DESCRIPTORS)
        if not data:
            connection.close()
            return None
        with os.fdopen(received[0], "rb") as file:
            file.seek(0)
            order = Order(**json.load(file))
        forker, pid = os.getpid(), os.fork()
        if pid == 0:
            self._forget()
            connection.close()
            os.setsid()
            die_with(forker)
            return order, received[1:]
        for descriptor in received[1:]:
            os.close(descriptor)
        end = os.pidfd_open(pid)
        self.running[end] = pid, connection
        self.selector.register(end, selectors.EVENT_READ)
        connection.send(str(pid).encode())
        return None

    def _forget(self) -> None:
        for descriptor, (_, asked) in self.running.items():
            os.close(descriptor)
            asked.close()
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.selector.close()


def _become(order: Order, descriptors: Sequence[int]) -> NoReturn:
    """Run code as if this process had just been started."""
    loaded = frozenset(sys.modules)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for descriptor in descriptors[3:]:
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - its name
    os.chdir(order.directory)
    os.environ.clear()
    os.environ.update(order.env)
    _open_streams()
    time.tzset()
    sys.argv[:], sys.orig_argv[:], sys.path[:] = order.argv, order.orig_argv, order.path
    importlib.invalidate_caches()
    reseed(has_user_code=False)
    _expect_modules(loaded)
    gc.unfreeze = lambda: None  # or it is searched for garbage at the end
    vars(preload)["Popen"] = Spare.started
    Spare.fork()
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exit_code: object = 0
    try:
        exec(order.code, vars(module))  # noqa: S102 - of a test
    except SystemExit as end:
        exit_code = end.code
    end_process(int(cast("int", exit_code or 0)), loaded)


_spares: list[Spare] = []  # at most one


@dataclass
class Spare:
    """A fork that waits to become the preloaded process, with the methods of its `Popen`.

    It has torch, and nothing of the user.
    """

    pid: int
    connection: socket.socket
    exit_code: int | None = None

    @classmethod
    def fork(cls) -> None:
        """Fork one, which dies with this process."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def run() -> None:
            own.close()
            data, descriptors, _, _ = socket.recv_fds(other, 1, _MOST_DESCRIPTORS)
            if not data:  # it is not needed
                return
            other.detach()
            content, *streams, connection = descriptors
            with os.fdopen(content, "rb") as file:
                file.seek(0)
                order = json.load(file)
            for number, descriptor in enumerate(streams):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(order["env"])
            os.dup2(connection, order["connection"])
            reseed(has_user_code=False)
            exec(order["code"], {})  # noqa: S102 - of the preloaded process

        pid = fork_child(run, leads_session=True)
        other.close()
        _spares.append(cls(pid, own))

    @staticmethod
    def started(  # noqa: PLR0913 - of Popen
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> Spare | subprocess.Popen[bytes]:
        """Return the spare as if it had been started by that command, or start a process."""
        if not _spares:
            return subprocess.Popen(
                command,
                env=env,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                start_new_session=start_new_session,
            )
        spare = _spares.pop()
        content = os.memfd_create("order")
        with os.fdopen(os.dup(content), "wb") as file:
            order = {"env": dict(env), "code": command[-1], "connection": pass_fds[0]}
            file.write(json.dumps(order).encode())
        socket.send_fds(spare.connection, [b"o"], [content, stdin, stdout, stderr, *pass_fds])
        os.close(content)
        spare.connection.close()
        return spare

    def poll(self, options: int = os.WNOHANG) -> int | None:
        """Return its exit code, or None while it runs."""
        if self.exit_code is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # other code has waited for it
                pid, status = self.pid, 0
            self.exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self.exit_code

    def wait(self) -> None:
        """Wait for its end."""
        self.poll(0)

    def kill(self) -> None:
        """Kill it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def end_process(exit_code: int, loaded: Collection[str]) -> NoReturn:
    """End this process as Python does, but without taking apart what was loaded before a fork.

    That takes half a second where torch was: its objects are freed one by one, and its libraries
    end.

    Args:
        exit_code: Exit code of this process.
        loaded: Modules that are left as they are.
    """
    with contextlib.suppress(Exception):
        vars(threading)["_shutdown"]()  # waits for threads
    files = _own_files()  # an exit function may freeze what there is
    atexit._run_exitfuncs()
    for name in [name for name in sys.modules if name not in loaded]:
        del sys.modules[name]
    sys.meta_path.clear()  # the import hook of pytest has the session
    gc.collect()
    for file in (*files, *_own_files(), sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    os._exit(exit_code & 0xFF)


def _own_files() -> list[io.IOBase]:
    return [found for found in gc.get_objects() if isinstance(found, io.IOBase)]


def _open_streams() -> None:
    """Open the standard streams as a new interpreter does."""
    is_raw = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "wb" if number else "rb"
        binary = open(number, mode, 0 if is_raw and number else -1, closefd=False)  # noqa: SIM115 - of a stream
        stream = io.TextIOWrapper(
            cast("BinaryIO", binary),
            "utf-8",
            "backslashreplace" if name == "stderr" else "strict",
            line_buffering=name == "stderr",
            write_through=is_raw and number > 0,
        )
        vars(stream)["mode"] = mode[0]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _expect_modules(loaded: frozenset[str]) -> None:
    """Have pytest not warn of modules that the forker has imported."""
    warn: Callable[[object, str], None] = getattr(AssertionRewritingHook, _WARN_IMPORTED)

    def warn_of_others(hook: AssertionRewritingHook, name: str) -> None:
        if name not in loaded:
            warn(hook, name)

    setattr(AssertionRewritingHook, _WARN_IMPORTED, warn_of_others)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
