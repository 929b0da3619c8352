"""The preloaded process: has imported torch and pytest, for ranks that collect for themselves.

It is an agent whose children are agents, one for each rank of each size of gang; see
`gangs.start.collector`. It imports no code of the user.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from subprocess import Popen
from typing import BinaryIO, NoReturn

from pytest_megatron.gangs.forkserver.server import Agent, fork_rank
from pytest_megatron.gangs.forkserver.store import StoreKeeper
from pytest_megatron.gangs.ipc.channel import BufferedChannel
from pytest_megatron.gangs.rank.logs import close_stdin
from pytest_megatron.gangs.start.collector import SessionInfo, collect_and_serve
from pytest_megatron.process.fork_safety import find_obstacle
from pytest_megatron.process.tree import (
    import_installed,
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
class PreloadedProcess:
    """The preloaded process, seen from the controller.

    Attributes:
        stdin: Write end of its stdin.
        connection: The other end of its connection.
        log: Descriptor of its output, a file in memory.
    """

    process: Popen[bytes]
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
    process = Popen(
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
    os._exit(0)


def _serve(connection: socket.socket) -> None:
    """Load torch, wait for the session's data, and start ranks until the session ends."""
    env, path = dict(os.environ), list(sys.path)
    modules: list[str] = json.loads(sys.stdin.buffer.readline() or b"[]")
    import_installed((*_PRELOADED, *modules))
    if modules and (obstacle := find_obstacle(f"{', '.join(modules)} was imported")):
        sys.exit(f"megatron_preload: {obstacle}")
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
