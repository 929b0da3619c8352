"""Sessions of pytest that run in forks of one process.

The process has pytest, plugins and torch loaded, which is most of what a short session costs. It
ends with this one. A session is `python -m pytest` in its own directory and environment, until it
ends; its ranks are forked from what is loaded as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import pytest
from _pytest.config import default_plugins
from forked_code import ForkedCode, Order, start, start_forker

from pytest_megatron.process.fork_safety import HARMLESS_ENV

LIMIT_S = 300
GONE_S = 60
LOADED = (
    *("coverage", "numpy", "torch"),  # the first by pytest-testmon, in every session
    *("pytest_megatron.plugin", "pytest_megatron.gangs.controller.plugin"),
    *("pytest_megatron.workloads.items.training", "pytest_megatron.pages.write"),
    *(f"_pytest.{name}" for name in default_plugins),
)
_KEEPS_PATH = ("rerunfailures", "xdist", "xdist.looponfail")  # the sys.path of its import
# Read while numpy and torch are loaded, or by Python and libraries when they start.
_READ_ON_LOAD = re.compile(
    r"(?:TORCH(?!INDUCTOR_CACHE_DIR)|PYTORCH|OMP_|GOMP_|KMP_|MKL|OPENBLAS|GOTO_|BLAS|NPY_|NUMPY"
    r"|NVPL_|DNNL|ONEDNN|KINETO|FX_|COMPILE_|ACC_|GFORTRAN|INTEL_|I_MPI|MALLOC_|GLIBC_"
    r"|PYTHON(?!UNBUFFERED)|LD_|LC_|LANG|TZ$|HOME$|VIRTUAL_ENV|COVERAGE|COV_CORE|CUDA|NVIDIA|NCCL"
    r"|GLOO|HIP_|ROCR_|XPU|SYCL|TRITON|OPENSSL)"
)
_STARTING = threading.Lock()
PYTEST = str(Path(pytest.__file__).with_name("__main__.py"))
_CODE = "import pytest, sys; sys.exit(pytest.main())"


@dataclass(frozen=True)
class _Forker:
    """The process.

    Attributes:
        env: What torch was loaded with.
        path: `sys.path` of a new process there.
        process: Holds its stdin, at whose end it ends.
    """

    address: str
    env: Mapping[str, str]
    path: Sequence[str]
    process: subprocess.Popen[bytes]


@functools.cache
def _start() -> _Forker:
    """Start the process."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("COV_")}
    plugins = importlib.metadata.entry_points(group="pytest11")
    modules = [*LOADED, *(p.module for p in plugins if p.name not in _KEEPS_PATH)]
    address = f"@forked-sessions-{uuid.uuid4()}"
    process, path = start_forker(address, modules, {**HARMLESS_ENV, **env})
    process.returncode = 0  # it ends with this process
    return _Forker(address, env, path, process)


def _forker() -> _Forker:
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

    A session whose variables differ from those that Python and torch were loaded with runs in a new
    process.

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

    Folders of PYTHONPATH hide no module that is loaded.
    """
    with (
        tempfile.TemporaryFile() as typed,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        typed.write(stdin.encode())
        typed.seek(0)
        session = _fork(arguments, cwd, env, (typed.fileno(), stdout.fileno(), stderr.fileno()))
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
    program: ForkedCode
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
            select.select([self.program.connection], [], [], left_s)
        if self.ended >= 0:
            gone = select.select([self.ended], [], [], GONE_S)[0]
            assert gone, f"forks are left of {self.arguments}"
            os.close(self.ended)
            self.ended = -1
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
    """Start pytest, without input.

    Args:
        arguments: Of pytest.
        cwd: Its directory.
        env: All of its variables.
        output: Gets its output and errors.
        is_fresh: Whether it starts in a new process in any case.
    """
    with Path(os.devnull).open("rb") as none:
        if not is_fresh:
            return _fork(arguments, cwd, env, (none.fileno(), output.fileno(), output.fileno()))
        command = [sys.executable, "-m", "pytest", *arguments]
        return subprocess.Popen(
            command, cwd=cwd, env=env, stdin=none, stdout=output, stderr=subprocess.STDOUT
        )


def _fork(
    arguments: Sequence[str], cwd: Path, env: Mapping[str, str], streams: Sequence[int]
) -> ForkedSession:
    """Start pytest in a fork of the process, or of another one if that was killed."""
    ended, held = os.pipe()
    with contextlib.closing(os.fdopen(held, "wb")):
        try:
            program = start(_forker().address, _order(arguments, cwd, env), [*streams, held])
        except OSError:
            _start.cache_clear()
            program = start(_forker().address, _order(arguments, cwd, env), [*streams, held])
    return ForkedSession(arguments, program, ended)


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
    """Return the variables with which Python or torch would load otherwise."""
    like = _forker().env
    names = filter(_READ_ON_LOAD.match, like.keys() | env.keys())
    return [name for name in names if like.get(name) != env.get(name)]


def _order(arguments: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Order:
    added = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    return Order(
        code=_CODE,
        argv=(PYTEST, *arguments),
        orig_argv=(sys.executable, "-m", "pytest", *arguments),
        path=(str(cwd), *added, *_forker().path),
        env=env,
        directory=str(cwd),
    )
