"""Sessions of pytest that run in forks of one kept process, as those of `--keep-gangs` do.

The process has pytest, plugins and torch loaded, which is most of what a short session costs. It
ends with this one. A session is `python -m pytest` in its own directory and environment, until it
ends; its ranks are forked from what is loaded as well.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeAlias

import pytest

from pytest_megatron.gangs.ipc.messages import StartSession
from pytest_megatron.gangs.start.kept import (
    ForkedProgram,
    KeptProcess,
    describe_environment,
    find_kept,
    start_program,
)
from pytest_megatron.process.fork_safety import HARMLESS_ENV

LIMIT_S = 300
LOADED_S = 120
GONE_S = 60
PROGRAM = """
import dataclasses, importlib.metadata, json, sys
del sys.path[0]
from pytest_megatron.gangs.start.kept import make_request
request = make_request("python -m pytest", sys.path, {}, ())
print(json.dumps(dataclasses.asdict(request)), flush=True)
import pytest_megatron.workloads.items.training, pytest_megatron.pages.write
for plugin in importlib.metadata.entry_points(group="pytest11"):
    if plugin.name not in ("rerunfailures", "xdist", "xdist.looponfail"):
        plugin.load()  # xdist keeps the sys.path of its import for workers
from pytest_megatron.gangs.start.kept_process import main
main()
"""
_STARTING = threading.Lock()
_UNBUFFERED = "PYTHONUNBUFFERED"
PYTEST = str(Path(pytest.__file__).with_name("__main__.py"))


@functools.cache
def _start() -> tuple[KeptProcess, StartSession]:
    """Start the kept process; return it and the request for a session like it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("COV_")}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**HARMLESS_ENV, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        request = StartSession(**json.loads(process.stdout.readline()))
    place = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    record = Path(place, "kept.json")
    settings = {
        "record": str(record),
        "project": place,
        "environment": describe_environment(env, request.path),
        "minutes": 60,
        "leader": os.getpid(),
    }
    with process.stdin:
        process.stdin.write(json.dumps(settings).encode())
    deadline = time.monotonic() + LOADED_S
    while (kept := find_kept(record)) is None or not kept.address:
        if process.poll() is not None:
            problem = record.with_suffix(".problem").read_text()
            assert problem.endswith("was changed while it was loaded"), problem
            return _start()  # such as by a new hard link of another environment
        assert time.monotonic() < deadline, "the kept process has not loaded everything"
        time.sleep(0.01)
    process.returncode = 0  # it ends with this process
    return kept, request


def _kept() -> tuple[KeptProcess, StartSession]:
    with _STARTING:
        return _start()


def run_session(
    arguments: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    *,
    is_fresh: bool = False,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run pytest with exactly this environment to its end.

    A session that would not run in a kept process of the user either, as its variables differ from
    those that Python and torch were loaded with, runs in a new process.

    Args:
        arguments: Of pytest.
        cwd: Its directory.
        env: All of its variables.
        is_fresh: Whether it runs in a new process in any case.
        stdin: Text that it reads.
    """
    if is_fresh or _differences(env):
        return run_command([sys.executable, "-m", "pytest", *arguments], cwd, env, stdin=stdin)
    return fork_session(arguments, cwd, env, stdin=stdin)


def fork_session(
    arguments: Sequence[str], cwd: Path, env: Mapping[str, str], *, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run pytest in a fork, whatever its variables are; no fork of the session may be left.

    Folders of PYTHONPATH hide no module that is loaded. A host without memory to spare keeps no
    process: the session runs in a new one.
    """
    with (
        tempfile.TemporaryFile() as typed,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        typed.write(stdin.encode())
        typed.seek(0)
        session = _fork(arguments, cwd, env, (typed.fileno(), stdout.fileno(), stderr.fileno()))
        if session is None:
            command = [sys.executable, "-m", "pytest", *arguments]
            return run_command(command, cwd, env, stdin=stdin)
        exit_code = session.wait()
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(arguments, exit_code, *texts)


@dataclass
class ForkedSession:
    """A session in a fork, with the methods of a `subprocess.Popen`.

    Attributes:
        ended: End of a pipe of which all its forks have the other one.
    """

    arguments: Sequence[str]
    program: ForkedProgram
    ended: int
    returncode: int | None = None

    @property
    def pid(self) -> int:
        return self.program.pid

    def poll(self) -> int | None:
        self.returncode = self.program.poll()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = LIMIT_S) -> int:
        """Wait for its end and that of all its forks."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired([*self.arguments], timeout)
            select.select([self.program.channel], [], [], left_s)
        if self.ended >= 0:
            gone = select.select([self.ended], [], [], GONE_S)[0]
            assert gone, f"forks are left of {self.arguments}"
            os.close(self.ended)
            self.ended = -1
            self.program.channel.close()
        return code


Session: TypeAlias = ForkedSession | subprocess.Popen[bytes]


def start_session(
    arguments: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    output: BinaryIO,
    *,
    is_fresh: bool = False,
) -> Session:
    """Start pytest, without input; on a host without memory to spare, in a new process.

    Args:
        arguments: Of pytest.
        cwd: Its directory.
        env: All of its variables.
        output: Gets its output and errors.
        is_fresh: Whether it starts in a new process in any case.
    """
    with Path(os.devnull).open("rb") as none:
        if not is_fresh:
            forked = _fork(arguments, cwd, env, (none.fileno(), output.fileno(), output.fileno()))
            if forked is not None:
                return forked
        command = [sys.executable, "-m", "pytest", *arguments]
        return subprocess.Popen(
            command, cwd=cwd, env=env, stdin=none, stdout=output, stderr=subprocess.STDOUT
        )


def _fork(
    arguments: Sequence[str], cwd: Path, env: Mapping[str, str], streams: Sequence[int]
) -> ForkedSession | None:
    """Start pytest in a fork of the kept process, or of another one if that has ended."""
    ended, held = os.pipe()
    with contextlib.closing(os.fdopen(held, "wb")):
        for _ in range(2):
            request = replace(_request(arguments, cwd, env), descriptors=(0, 1, 2, held))
            program = start_program(_kept()[0], request, [*streams, held])
            if isinstance(program, ForkedProgram):
                return ForkedSession(arguments, program, ended)
            _start.cache_clear()  # refused, as a file has changed or memory is short
    os.close(ended)
    return None


def run_command(
    command: Sequence[str], cwd: Path, env: Mapping[str, str], *, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run any command to its end."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def _differences(env: Mapping[str, str]) -> list[str]:
    kept, like = _kept()
    own = {name: value for name, value in env.items() if name != _UNBUFFERED}
    return kept.differences(describe_environment(own, like.path))


def _request(arguments: Sequence[str], cwd: Path, env: Mapping[str, str]) -> StartSession:
    like = _kept()[1]
    added = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    raw = ["raw"] if env.get(_UNBUFFERED) else []
    return replace(
        like,
        streams=tuple([*stream, *raw] for stream in like.streams),
        argv=(PYTEST, *arguments),
        orig_argv=(sys.executable, "-m", "pytest", *arguments),
        path=(str(cwd), *added, *like.path),
        env=env,
        directory=str(cwd),
    )
