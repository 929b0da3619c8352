"""The preloaded process: has imported torch and pytest, for ranks that collect for themselves.

It is a fork server whose children are fork servers, one for each rank of each size of gang; see
`hooks.start.collector`. It imports no code of the user.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import BinaryIO, Literal, NoReturn

from pytest_megatron.gang import kept
from pytest_megatron.gang.forkserver.fork_safety import find_obstacle
from pytest_megatron.gang.forkserver.server import ForkServer, StartRank, fork_rank
from pytest_megatron.gang.forkserver.store import StoreKeeper
from pytest_megatron.gang.ipc.channel import connect, remove_socket
from pytest_megatron.gang.ipc.messages import RankConfig, Register
from pytest_megatron.gang.kept import ForkedProgram
from pytest_megatron.gang.rank.lockstep import RankPipes
from pytest_megatron.gang.rank.logs import close_stdin
from pytest_megatron.hooks.start.collector import SessionInfo, collect_and_serve
from pytest_megatron.process.tree import (
    die_with,
    end_process,
    large_imports,
    python_command,
    run_guarded,
)

PreloadMode = Literal["fork", "fresh"]
_PRELOADED = ("numpy", "torch")
_CODE = """
import sys
sys.path[:] = {path!r}
from pytest_megatron.hooks.start.preload import {name}
{name}({argument!r})
"""


@dataclass(slots=True)
class PreloadedProcess:
    """The preloaded process, seen from the controller.

    Attributes:
        stdin: Write end of its stdin.
        log: Descriptor of its output, a file in memory.
    """

    mode: PreloadMode
    process: subprocess.Popen[bytes] | ForkedProgram
    stdin: BinaryIO
    log: int

    def send(self, info: SessionInfo) -> None:
        """Send the data of the session; the process then connects to the controller."""
        with contextlib.suppress(OSError):  # it is gone, which `problem` reports
            self.stdin.write(json.dumps(asdict(info)).encode() + b"\n")
            self.stdin.flush()
            if not info.has_parent_pipe:
                self.stdin.close()

    def stop(self, *, has_ranks: bool = True) -> None:
        """Wait for its end, which follows the end of its connection to the controller.

        Args:
            has_ranks: False kills it: it still imports.
        """
        if not has_ranks:
            self.process.kill()
        with contextlib.suppress(OSError):
            self.stdin.close()
        self.process.wait()
        os.close(self.log)

    def problem(self) -> str:
        """Return the reason of its end, or "" while it runs."""
        exit_code = self.process.poll()
        if exit_code is None:
            return ""
        text = os.pread(self.log, 1 << 16, 0).decode(errors="replace").strip()
        return text or f"exited with code {exit_code}"


def start_preloaded(
    mode: PreloadMode, env: Mapping[str, str], path: Sequence[str], modules: Sequence[str] = ()
) -> PreloadedProcess:
    """Start the process, which preloads modules until it receives the session's data.

    Args:
        mode: Whether ranks are forked, or fresh interpreters.
        env: Start environment of the session.
        path: Its `sys.path`.
        modules: Modules of third-party packages to import beside torch, for ranks that are forked.
    """
    log = os.memfd_create("preload")
    read_end, write_end = os.pipe()
    process: subprocess.Popen[bytes] | ForkedProgram | None = None
    if mode == "fork":
        process = _fork_off_kept(env, path, (read_end, log, log))
    if process is None:
        process = subprocess.Popen(
            _command(path, "main", mode),
            env=dict(env),
            stdin=read_end,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.close(read_end)
    stdin = os.fdopen(write_end, "wb")
    names = json.dumps(list(modules)).encode()
    try:  # nothing that is written waits for imports
        fcntl.fcntl(stdin, fcntl.F_SETPIPE_SZ, len(names) + (1 << 16))
    except OSError:
        names = b"[]"
    with contextlib.suppress(OSError):  # it is gone, which `problem` reports
        stdin.write(names + b"\n")
        stdin.flush()
    return PreloadedProcess(mode, process, stdin, log)


def _fork_off_kept(
    env: Mapping[str, str], path: Sequence[str], streams: tuple[int, int, int]
) -> ForkedProgram | None:
    """Start the process in the kept process of this session; None if that is impossible."""
    found = None if kept.session is None else kept.find_kept(kept.session.record)
    if found is None or found.is_stopped:
        return None
    request = replace(kept.make_request("preload", path, env, ()), descriptors=(0, 1, 2))
    program = kept.start_program(found, request, streams)
    return None if isinstance(program, str) else program


def main(mode: PreloadMode) -> NoReturn:
    """Load torch and pytest, wait for the session's data, and serve."""
    run_guarded(lambda: _serve(mode))
    end_process(0, loaded=sys.modules)


def _import_in_child(modules: Sequence[str]) -> None:
    """Import modules in a fork, which goes on instead of this process.

    This one goes on if a module cannot be imported or keeps the fork from being forked: ranks
    import them where the user's code does.
    """
    parent = os.getpid()
    read_end, write_end = os.pipe()
    pid = os.fork()
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


def _serve(mode: PreloadMode) -> None:
    env, path = dict(os.environ), list(sys.path)
    modules: list[str] = json.loads(sys.stdin.buffer.readline() or b"[]")
    if mode == "fork":
        with large_imports():
            for name in _PRELOADED:
                if importlib.util.find_spec(name) is not None:
                    importlib.import_module(name)
        if modules:
            _import_in_child(modules)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return
    info = SessionInfo(**json.loads(line))
    if mode == "fork":  # what importing packages has changed
        changed = {name: value for name, value in os.environ.items() if env.get(name) != value}
        added = [entry for entry in sys.path if entry not in path]
        info = replace(info, env={**info.env, **changed}, path=[*info.path, *added])
    parent_pipe = os.dup(0) if info.has_parent_pipe else None
    close_stdin()
    registration = Register(
        role="fork_server", gang=0, rank=-1, node_rank=info.node_rank, pid=os.getpid()
    )
    channel = connect(info.address, bytes.fromhex(info.key), registration)
    keeper = StoreKeeper()
    start_rank: StartRank = partial(_execute_rank, info)
    if mode == "fork":
        start_rank = fork_rank(channel, keeper, partial(collect_and_serve, info))
    ForkServer(channel, start_rank, keeper, parent_pipe).serve()
    remove_socket(info.address)  # a controller that was killed leaves it


def _execute_rank(
    info: SessionInfo,
    rank_config: RankConfig,
    pipes: RankPipes,
    inherited: Sequence[int],
    unwanted: Sequence[int],
) -> int:
    """Start a rank as a fresh interpreter; return its process."""
    del unwanted  # it gets the descriptors that are passed
    content = {
        "info": asdict(info),
        "config": {**asdict(replace(rank_config, coverage={})), "coverage": rank_config.coverage},
        "pipes": {"trigger": pipes.trigger, "notes": pipes.notes},
    }
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(content).encode())
        file.seek(0)
        process = subprocess.Popen(
            _command(info.path, "fresh_main", os.getpid()),
            env={**info.env, **rank_config.env},
            stdin=file,
            pass_fds=[pipes.trigger, pipes.notes, *inherited],
            start_new_session=True,
        )
    process.returncode = 0  # the fork server waits for it
    return process.pid


def fresh_main(fork_server: int) -> None:
    """Run a rank that was executed, with the data of its stdin."""
    die_with(fork_server)
    content = json.loads(sys.stdin.buffer.read())
    close_stdin()
    info = SessionInfo(**content["info"])
    rank_config = RankConfig(**content["config"])
    collect_and_serve(info, rank_config, RankPipes(**content["pipes"]))


def _command(path: Sequence[str], function: str, argument: object) -> list[str]:
    """Return the command that calls a function of this module in a fresh interpreter."""
    return python_command(_CODE.format(path=list(path), name=function, argument=argument))
