"""`pytest-megatron watch`: a process with torch loaded, which forks pytest after each edit.

Where a file changes that it has loaded itself, or a package is installed, it starts itself anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import site
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import click

from pytest_megatron.base.text import listed, printable
from pytest_megatron.errors import HostError
from pytest_megatron.process.fork_safety import find_obstacle, reseed
from pytest_megatron.process.tree import die_with, fork, import_installed
from pytest_megatron.runs.layout import RUN_FILE
from pytest_megatron.watch.plugin import run_session

_LOADED = ("numpy", "torch", "pytest_megatron.gangs.controller.plugin")
_WATCHED = (".py", ".toml", ".ini", ".cfg", ".yaml", ".yml")
_POLL_S = 0.1
_LESS_BUSY = 9  # looking for changes takes a tenth of the time at most
_ENDS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_INTERRUPTED = (2, 128 + signal.SIGINT)  # exit codes of pytest
_MOST_NAMED = 3
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # with which a look for GPUs does not use CUDA
_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
_Versions: TypeAlias = dict[str, tuple[int, int]]  # file -> time and size


@click.command(
    "watch",
    context_settings={
        "help_option_names": ["--help"],
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
)
@click.argument("arguments", metavar="[PYTEST_ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run pytest, and again after each edit of a file of the project, until Ctrl-C.

    torch is loaded once. All arguments are pytest's; the exit code is that of the last session.
    """
    sys.exit(_Watch(arguments).run())


class _Watch:
    """The loop of sessions."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Take the arguments of pytest."""
        self._arguments = arguments
        self._root = Path.cwd()  # until a session has told it
        self._loaded: set[str] = set()  # files of modules, and folders of packages
        self._tried: set[str] = set()  # modules
        self._load(_LOADED)
        self._session = 0  # 0 while none runs
        self._came = set[int]()  # signals during the session

    def run(self) -> int:
        """Run sessions until a signal comes; return the exit code of the last one.

        Ctrl-C that interrupts a debugger, and not the session, ends nothing.
        """
        code = _INTERRUPTED[1]
        handlers: dict[int, _Handler] = {n: signal.signal(n, self._on_signal) for n in _ENDS}
        before: _Versions = {}
        try:
            while True:
                told = self._start(handlers)
                before = before or self._look()
                ended = os.waitid(os.P_PID, self._session, os.WEXITED | os.WNOWAIT)
                assert ended is not None
                code = ended.si_status + (0 if ended.si_code == os.CLD_EXITED else 128)
                session, self._session = self._session, 0  # from now on a signal ends all
                if self._came - {signal.SIGINT} or (self._came and code in _INTERRUPTED):
                    return code
                before |= self._load(told)
                click.echo("watch: waiting for a change; Ctrl-C ends")
                os.waitpid(session, 0)
                now = self._wait(before)
                names = sorted(f for f in before | now if before.get(f) != now.get(f))
                shown = listed([os.path.relpath(name) for name in names], _MOST_NAMED)
                click.echo(printable(f"watch: changed: {shown}"))
                if not self._loaded.isdisjoint(names):
                    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
                before = now
        except KeyboardInterrupt:
            return code

    def _load(self, names: Sequence[str]) -> _Versions:
        """Import modules that are installed; return the versions of what is loaded since.

        Raises:
            HostError: This process cannot be forked any more.
        """
        new_names = [name for name in names if name not in self._tried]
        if not new_names:
            return {}
        self._tried.update(new_names)
        before, os.environ[_NVML] = os.environ.get(_NVML), "1"
        for name in new_names:
            try:
                import_installed([name])
            except Exception as error:  # noqa: BLE001 - sessions report it
                click.echo(printable(f"watch: {name} cannot be loaded: {error}"))
        os.environ.pop(_NVML)
        os.environ.update({} if before is None else {_NVML: before})
        if obstacle := find_obstacle(f"{', '.join(new_names)} was loaded"):
            raise HostError("watch", f"{obstacle}, so that sessions cannot be forked; run pytest")
        modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        files = {file for file in modules if isinstance(file, str)} | {*site.getsitepackages()}
        new, self._loaded = files - self._loaded, files
        return _versions(new)

    def _start(self, handlers: Mapping[int, _Handler]) -> list[str]:
        """Start a session, with other handlers of signals; return what the next one loads."""
        pipe, write_end = os.pipe()
        self._came, watch = set(), os.getpid()
        self._session = fork()
        if self._session == 0:
            die_with(watch)
            os.close(pipe)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            reseed(has_user_code=False)
            run_session(self._arguments, write_end)
        os.close(write_end)
        with os.fdopen(pipe) as file:
            told = file.read()
        root, names = json.loads(told) if told else (self._root, [])  # it was refused before
        self._root = Path(root)
        return list(names)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on to the session, which has Ctrl-C from the terminal; without one, end."""
        if not self._session:
            raise KeyboardInterrupt
        self._came.add(number)
        if number != signal.SIGINT:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._session, number)

    def _wait(self, before: _Versions) -> _Versions:
        """Wait for a change, and until no more follow; return the versions of all files then."""
        last: _Versions = {}
        while True:
            began = time.monotonic()
            now = self._look()
            if now not in (before, last):
                last = now
            elif now != before:
                return now
            time.sleep(max(_POLL_S, (time.monotonic() - began) * _LESS_BUSY))

    def _look(self) -> _Versions:
        """Return the versions of what is loaded, and of the files that a session may read."""
        return _versions([*self._loaded, *_files(self._root)])


def _versions(files: Iterable[str]) -> _Versions:
    found: _Versions = {}
    for file in files:
        try:
            status = os.stat(file)  # noqa: PTH116 - of thousands of files
        except OSError:  # it was removed meanwhile
            continue
        found[file] = status.st_mtime_ns, status.st_size
    return found


def _files(root: Path) -> Iterator[str]:
    """Yield the files of a project without hidden folders, caches, environments and runs."""
    for directory, below, names in os.walk(root):
        if "pyvenv.cfg" in names or RUN_FILE in names:
            below.clear()
            continue
        below[:] = [name for name in below if not name.startswith((".", "__py"))]
        yield from (f"{directory}/{name}" for name in names if name.endswith(_WATCHED))
