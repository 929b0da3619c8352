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
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.gangs.ipc.channel import Channel, connect
from pytest_megatron.gangs.ipc.messages import (
    Message,
    Ready,
    Register,
    SessionExited,
    SessionStarted,
    StartSession,
)
from pytest_megatron.gangs.start.kept import KeptProcess, describe_environment, find_kept
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
    request = _request(arguments, cwd, env)
    channel = _call()
    if channel is None:
        return run_command([sys.executable, "-m", "pytest", *arguments], cwd, env, stdin=stdin)
    ended, held = os.pipe()  # all forks of the session have the second one
    with (
        tempfile.TemporaryFile() as typed,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        typed.write(stdin.encode())
        typed.seek(0)
        descriptors = [typed.fileno(), stdout.fileno(), stderr.fileno(), held]
        channel.send(replace(request, descriptors=(0, 1, 2, held)), descriptors)
        os.close(held)
        started, reply = _next(channel, arguments), _next(channel, arguments)
        assert isinstance(started, SessionStarted)
        assert isinstance(reply, SessionExited)
        assert not reply.doubt
        channel.close()
        assert select.select([ended], [], [], GONE_S)[0], f"forks are left of {arguments}"
        os.close(ended)
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(arguments, reply.exit_code, *texts)


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
    kept, like = _start()
    return kept.differences(describe_environment(env, like.path))


def _request(arguments: Sequence[str], cwd: Path, env: Mapping[str, str]) -> StartSession:
    like = _start()[1]
    added = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    return replace(
        like,
        argv=(PYTEST, *arguments),
        orig_argv=(sys.executable, "-m", "pytest", *arguments),
        path=(str(cwd), *added, *like.path),
        env=env,
        directory=str(cwd),
    )


def _call() -> Channel | None:
    """Connect to the kept process, or to another one if it has ended; None if that has as well."""
    registration = Register(role="session", gang=0, rank=-1, node_rank=0, pid=os.getpid())
    for _ in range(2):
        kept = _start()[0]
        with contextlib.suppress(OSError):
            channel = connect(kept.address, bytes.fromhex(kept.key), registration)
            if isinstance(_next(channel, ()), Ready):
                return channel
            channel.close()  # refused, as a file has changed or memory is short
        _start.cache_clear()
    return None


def _next(channel: Channel, arguments: Sequence[str]) -> Message | None:
    is_there = channel.has_message or select.select([channel], [], [], LIMIT_S)[0]
    assert is_there, f"the session did not end: {arguments}"
    return channel.receive()
