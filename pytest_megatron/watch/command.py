"""`pytest-megatron watch`: a process with torch loaded, which forks pytest after each edit.

It imports no module of the project. Where a library that it has loaded changes, or a package is
installed, it starts itself anew.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import click

from pytest_megatron.base.text import printable
from pytest_megatron.errors import HostError
from pytest_megatron.process.fork_safety import find_obstacle, reseed
from pytest_megatron.process.guard import kill_descendants
from pytest_megatron.process.tree import (
    become_subreaper,
    descendants,
    die_with,
    fork,
    fork_child,
    import_installed,
    large_imports,
)
from pytest_megatron.watch.changes import (
    Versions,
    is_of_project,
    library_versions,
    loaded_files,
    project_files,
)
from pytest_megatron.watch.plugin import run_session

_LOADED = ("numpy", "torch", "pytest_megatron.gangs.controller.plugin")
_POLL_S = 0.1
_LIBRARIES_S = 2.0  # between looks at libraries while nothing else changes
_MOST_BUSY = 0.1  # part of the time that looking for changes may take
_TICK_NS = 10_000_000  # by which times of files may be late
_ENDED_S = 30.0  # for a session that is told to end
_GONE_S = 5.0  # for what it leaves, which its guards end
_ENDS = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
_INTERRUPTED = (2, 128 + signal.SIGINT)  # exit codes of pytest
_FROM_TERMINAL = 0x80  # SI_KERNEL: the session gets the signal as well
_MOST_NAMED = 3
_MOST_TOLD = 1 << 16
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # with which a look for GPUs does not use CUDA


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
    try:
        import_installed(_LOADED)
    except Exception as error:  # noqa: BLE001 - sessions report it
        click.echo(printable(f"watch: torch cannot be loaded: {error}"))
    obstacle = find_obstacle("torch was loaded")
    if obstacle:
        raise HostError("watch", f"{obstacle}, so that sessions cannot be forked; run pytest")
    sys.exit(_Watch(arguments).run())


class _Watch:
    """The loop of sessions."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Take the arguments of pytest."""
        self._arguments = arguments
        self._root = Path.cwd()  # until a session has told it
        self._loaded = loaded_files()
        self._libraries = library_versions(self._loaded, self._root)
        self._files: Versions | None = None  # when the last session began
        self._tried: set[str] = set()
        self._session = 0
        self._ends: list[int] = []  # of the session, at most one

    def run(self) -> int:
        """Run sessions until a signal comes, and end; return the exit code of the last one."""
        become_subreaper()
        signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDS, signal.SIGCHLD})
        while True:
            began_ns = time.time_ns() - _TICK_NS
            pipe, write_end = os.pipe()
            watch, self._session = os.getpid(), fork()
            if self._session == 0:
                die_with(watch)
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                os.close(pipe)
                reseed(has_user_code=False)
                run_session(self._arguments, write_end)
            os.close(write_end)
            code, has_to_end = self._follow()
            if has_to_end:
                return self._end(code)
            self._hear(pipe)
            if self._files is None:
                files = project_files(self._root).items()
                self._files = {f: v for f, v in files if v[:1] < (began_ns,)}
            click.echo("watch: waiting for a change; Ctrl-C ends")
            if not self._wait():
                return self._end(code)

    def _follow(self) -> tuple[int, bool]:
        """Pass signals to the session until it ends; return its exit code, and whether to end.

        Ctrl-C that interrupts a debugger, and not the session, ends nothing.
        """
        deadline, came = float("inf"), set[int]()
        self._ends.clear()
        while not self._ends:
            info = self._take_signal(min(_ENDED_S, max(0.0, deadline - time.monotonic())))
            if info is not None:
                came.add(info.si_signo)
            if self._ends or info is None:
                if time.monotonic() > deadline:
                    os.kill(self._session, signal.SIGKILL)
                continue
            if info.si_signo != signal.SIGINT:
                deadline = time.monotonic() + _ENDED_S
            elif info.si_code == _FROM_TERMINAL:
                continue
            os.kill(self._session, info.si_signo)
        code = os.waitstatus_to_exitcode(self._ends[0])
        code = code if code >= 0 else 128 - code
        return code, bool(came - {signal.SIGINT}) or (bool(came) and code in _INTERRUPTED)

    def _take_signal(self, limit_s: float) -> signal.struct_siginfo | None:
        """Wait for a signal that ends this process, or for the end of a child, which is noted."""
        info = signal.sigtimedwait({*_ENDS, signal.SIGCHLD}, limit_s)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # others were left by sessions
                if ended[0] == self._session:
                    self._ends.append(ended[1])
        return info if info is not None and info.si_signo in _ENDS else None

    def _hear(self, pipe: int) -> None:
        """Take what the session has told, and load what the next one needs."""
        os.set_blocking(pipe, False)
        try:
            told = os.read(pipe, _MOST_TOLD)
        except BlockingIOError:  # something that it left holds the other end
            told = b""
        os.close(pipe)
        if not told:  # it was refused before
            return
        root, names = json.loads(told)
        if Path(root) != self._root:
            self._root, self._files = Path(root), None
        new = [name for name in names if name not in self._tried]
        self._tried.update(new)
        if not new:
            return
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)  # it cannot look for them meanwhile
        with _cuda_unused():
            for name in new:
                problem = self._why_not(name)
                if problem:
                    click.echo(printable(f"watch: each session loads {name} itself: {problem}"))
                else:
                    with large_imports():
                        importlib.import_module(name)
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
        self._loaded = loaded_files()
        known = library_versions(self._loaded, self._root)
        self._libraries = {**known, **self._libraries}

    def _why_not(self, name: str) -> str:
        """Return why a module must not be loaded here, as a fork shows that loads it."""
        spec = find_spec(name.partition(".")[0])
        if spec is None:
            return "it is not installed"
        if any(is_of_project(p, self._root) for p in _places(spec.origin, spec)):
            return "it is of this project"
        pipe, write_end = os.pipe()

        def load() -> None:
            """Load it, and tell what is wrong with that."""
            try:
                importlib.import_module(name)
                files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
                own = next((f for f in files if is_of_project(f, self._root)), None)
                problem = (
                    f"it loads {own} of this project" if own else find_obstacle("it is loaded")
                )
            except BaseException as error:  # noqa: BLE001 - sessions report it
                problem = f"{type(error).__name__}: {error}"
            os.write(write_end, problem.encode(errors="replace")[:_MOST_TOLD] or b"\n")

        pid = fork_child(load)
        os.close(write_end)
        with os.fdopen(pipe) as file:
            problem = file.read() or "it ends the process"
        os.waitpid(pid, 0)
        return problem.strip()

    def _wait(self) -> bool:
        """Wait for a change, and until no more follow; return False if a signal comes.

        After one of a library this process starts anew.
        """
        last: tuple[Versions, Versions] | None = None
        libraries, looked = self._libraries, 0.0
        while True:
            began = time.monotonic()
            files = project_files(self._root)
            changed = _differences(self._files or {}, files)
            if changed or last or began - looked > _LIBRARIES_S:
                libraries, looked = library_versions(self._loaded, self._root), began
                changed = [*_differences(self._libraries, libraries), *changed]
            if changed and (files, libraries) == last:
                break
            last = (files, libraries) if changed else None
            pause_s = 0.0 if changed else (time.monotonic() - began) / _MOST_BUSY
            deadline = time.monotonic() + max(_POLL_S, pause_s)
            while (left_s := deadline - time.monotonic()) > 0:
                if self._take_signal(left_s) is not None:
                    return False
        shown = ", ".join(os.path.relpath(file) for file in changed[:_MOST_NAMED])
        more = f" and {len(changed) - _MOST_NAMED} more" if changed[_MOST_NAMED:] else ""
        click.echo(printable(f"watch: changed: {shown}{more}"))
        if libraries != self._libraries:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
        self._files = files
        return True

    def _end(self, code: int) -> int:
        """Leave no process behind; return an exit code."""
        deadline = time.monotonic() + _GONE_S
        while any(descendants()) and time.monotonic() < deadline:
            self._take_signal(_POLL_S)
        kill_descendants()
        return code


def _places(origin: str | None, spec: object) -> Iterator[str]:
    """Yield the files and folders of a module."""
    yield origin or ""
    yield from getattr(spec, "submodule_search_locations", None) or ()


def _differences(before: Versions, now: Versions) -> list[str]:
    return sorted(f for f in before.keys() | now.keys() if before.get(f) != now.get(f))


@contextlib.contextmanager
def _cuda_unused() -> Iterator[None]:
    """Have libraries look for GPUs without CUDA."""
    is_set = _NVML in os.environ
    os.environ.setdefault(_NVML, "1")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[_NVML]
