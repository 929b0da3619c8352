"""The preloaded process: has imported torch and pytest, for ranks that collect for themselves.

It is an agent whose children are agents, one for each rank of each size of gang; see
`gangs.start.collector`. It imports no code of the user.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import BinaryIO, NoReturn

from pytest_megatron.gangs.forkserver.server import Agent, fork_rank
from pytest_megatron.gangs.forkserver.store import StoreKeeper
from pytest_megatron.gangs.ipc.channel import BufferedChannel, Channel
from pytest_megatron.gangs.ipc.messages import BecomeRank
from pytest_megatron.gangs.rank.logs import close_stdin
from pytest_megatron.gangs.start.collector import SessionInfo, collect_and_serve
from pytest_megatron.process.fork_safety import find_obstacle, reseed
from pytest_megatron.process.tree import (
    close_descriptors,
    die_with,
    end_process,
    fork,
    fork_child,
    import_installed,
    large_imports,
    python_command,
    run_guarded,
)

_PRELOADED = ("numpy", "torch")
_PIPE_BYTES = 1 << 20  # more than the data of a session
_CODE = """
import sys
sys.path[:] = {path!r}
from pytest_megatron.gangs.start.preload import main
main({connection})
"""


@dataclass(slots=True)
class Spare:
    """A process that waits to become the preloaded one, with the methods of `Popen` that it needs.

    It is a fork of a process that has loaded torch, and nothing of the user.
    """

    pid: int
    channel: Channel
    exit_code: int | None = None

    def start(self, env: Mapping[str, str], path: Sequence[str], streams: Sequence[int]) -> None:
        """Have it become the preloaded process.

        Args:
            env: All variables.
            path: `sys.path`.
            streams: Its stdin, stdout and stderr, and its connection.
        """
        content = json.dumps({"env": dict(env), "path": list(path)})
        self.channel.send(BecomeRank(content=content), streams)
        self.channel.close()

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


spares: list[Spare] = []  # in a session that is itself such a fork; at most one


def fork_spare() -> Spare:
    """Fork a process that waits to become the preloaded one, and dies with this process."""
    own, other = socket.socketpair()

    def run() -> None:
        close_descriptors([other.fileno()])
        message, descriptors = Channel(other).receive_with_descriptors()
        if not isinstance(message, BecomeRank):  # it is not needed
            return
        content = json.loads(message.content)
        *streams, connection = descriptors
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(content["env"])
        sys.path[:] = content["path"]
        reseed(has_user_code=False)
        main(connection)

    pid = fork_child(run, leads_session=True)
    other.close()
    return Spare(pid, Channel(own))


@dataclass(slots=True)
class PreloadedProcess:
    """The preloaded process, seen from the controller.

    Attributes:
        stdin: Write end of its stdin.
        connection: The other end of its connection.
        log: Descriptor of its output, a file in memory.
    """

    process: subprocess.Popen[bytes] | Spare
    stdin: BinaryIO
    connection: socket.socket
    log: int

    def send(self, info: SessionInfo) -> None:
        """Send the data of the session; the process then serves its connection."""
        self.write(json.dumps(asdict(info)).encode())
        self._close_stdin()

    def write(self, line: bytes) -> None:
        """Write a line to the process's stdin; `problem` reports if it is gone."""
        with contextlib.suppress(OSError):
            self.stdin.write(line + b"\n")
            self.stdin.flush()

    def _close_stdin(self) -> None:
        with contextlib.suppress(OSError):
            self.stdin.close()

    def stop(self, *, has_ranks: bool = True) -> None:
        """Wait for the process's end, which follows that of its connection.

        Args:
            has_ranks: False kills it: it still imports.
        """
        if not has_ranks:
            self.process.kill()
        self._close_stdin()
        self.connection.close()
        self.process.wait()
        os.close(self.log)

    def problem(self) -> str:
        """Return why the process ended, or "" while it runs."""
        exit_code = self.process.poll()
        if exit_code is None:
            return ""
        text = os.pread(self.log, 1 << 16, 0).decode(errors="replace").strip()
        return text or f"exited with code {exit_code}"


def start_preloaded(
    env: Mapping[str, str], path: Sequence[str], modules: Sequence[str] = ()
) -> PreloadedProcess:
    """Start the process, which preloads modules until it receives the session's data.

    Args:
        env: Start environment of the session.
        path: `sys.path` of the session.
        modules: Modules of third-party packages to import beside torch.
    """
    log = os.memfd_create("preload")
    read_end, write_end = os.pipe()
    ours, theirs = socket.socketpair()
    process: subprocess.Popen[bytes] | Spare
    if spares:
        process = spares.pop()
        process.start(env, path, (read_end, log, log, theirs.fileno()))
    else:
        process = subprocess.Popen(
            python_command(_CODE.format(path=list(path), connection=theirs.fileno())),
            env=dict(env),
            stdin=read_end,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    os.close(read_end)
    theirs.close()
    stdin = os.fdopen(write_end, "wb")
    with contextlib.suppress(OSError):  # else writing may wait for imports
        fcntl.fcntl(stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    preloaded = PreloadedProcess(process, stdin, ours, log)
    preloaded.write(json.dumps(list(modules)).encode())
    return preloaded


def main(descriptor: int) -> NoReturn:
    """Load torch and pytest, wait for the session's data, and serve.

    Args:
        descriptor: Of the connection to the session.
    """
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    run_guarded(partial(_serve, connection), connection)
    end_process(0, loaded=sys.modules)


def _import_in_child(modules: Sequence[str]) -> None:
    """Import modules in a fork, which goes on instead of this process.

    This one goes on if a module cannot be imported or keeps the fork from being forked: ranks
    import them where the user's code does.
    """
    parent = os.getpid()
    read_end, write_end = os.pipe()
    pid = fork()
    if pid == 0:
        die_with(parent)
        os.close(read_end)
        try:
            with large_imports():
                for name in modules:
                    importlib.import_module(name)
            obstacle = find_obstacle()
        except BaseException as error:  # noqa: BLE001 - ranks report it
            obstacle = repr(error)
        if obstacle:
            os._exit(0)
        os.write(write_end, b"1")
        os.close(write_end)
        return
    os.close(write_end)
    has_imported = bool(os.read(read_end, 1))
    os.close(read_end)
    os.waitpid(pid, 0)
    if has_imported:
        os._exit(0)


def _load(modules: Sequence[str]) -> None:
    """Import torch, and then modules in a fork that goes on instead of this process."""
    import_installed(_PRELOADED)
    if modules:
        _import_in_child(modules)


def _serve(connection: socket.socket) -> None:
    """Load torch, wait for the session's data, and start ranks until the session ends."""
    env, path = dict(os.environ), list(sys.path)
    modules: list[str] = json.loads(sys.stdin.buffer.readline() or b"[]")
    _load(modules)
    changed = {name: value for name, value in os.environ.items() if env.get(name) != value}
    added = [entry for entry in sys.path if entry not in path]
    keeper = StoreKeeper()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return
    info = SessionInfo(**json.loads(line))
    # With what importing packages has changed:
    info = replace(info, env={**info.env, **changed}, path=[*info.path, *added])
    close_stdin()
    session_end = None
    if info.node_rank:  # the controller is elsewhere
        _, (descriptor,), _, _ = socket.recv_fds(connection, 1, 1)
        session_end, connection = connection.detach(), socket.socket(fileno=descriptor)
    channel = BufferedChannel(connection)
    start_rank = fork_rank(channel, keeper, partial(collect_and_serve, info))
    Agent(channel, start_rank, keeper, session_end).serve()
