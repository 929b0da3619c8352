"""`pytest-megatron gangs` and `watch`: kept processes, and tests that run again after an edit."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import click

from pytest_megatron.base.command import HintingGroup
from pytest_megatron.base.text import columns, counted, printable, rough_time
from pytest_megatron.gangs.start.kept import KeptProcess, list_kept, memory_bytes

_POLL_S = 0.5
_TEST_FILES = ("test_*.py", "*_test.py")  # pytest's default
_HEAD = ("project", "process", "since", "memory", "ends")


@click.group("gangs", cls=HintingGroup, context_settings={"help_option_names": ["-h", "--help"]})
def gangs() -> None:
    """List, stop and use the processes that --keep-gangs keeps."""


@gangs.command("list")
def list_gangs() -> None:
    """Print the kept processes of this user, of all projects."""
    rows = [_cells(path, kept) for path, kept in list_kept()]
    click.echo(printable("\n".join(columns([_HEAD, *rows]))) if rows else "no gangs are kept")


@gangs.command("stop")
@click.option("--all", "is_all", is_flag=True, help="Of all projects, not of this directory's.")
def stop(*, is_all: bool) -> None:
    """End the kept processes of this project; a session that runs in one ends first by itself."""
    here = Path.cwd()
    found = [kept for _, kept in list_kept() if is_all or here.is_relative_to(kept.project)]
    for kept in found:
        kept.stop()
        click.echo(printable(f"stopped: process {kept.pid} of {kept.project}"))
    if not found:
        click.echo("no gangs are kept")


def _cells(path: Path, kept: KeptProcess) -> tuple[str, ...]:
    """Return the line of a kept process; the time of its record is that of its last use."""
    now, num_sessions = time.time(), kept.num_sessions()
    if num_sessions:
        ends = f"after {counted(num_sessions, 'session')}"
    else:
        ends = f"in {rough_time(max(0.0, path.stat().st_mtime + kept.minutes * 60 - now))}"
    memory = f"{memory_bytes(kept.pid) / (1 << 20):.0f} MiB" if kept.address else "loads torch"
    return kept.project, str(kept.pid), f"{rough_time(now - kept.started)} ago", memory, ends


@gangs.command(
    "watch",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
)
@click.argument("args", metavar="[PATHS]... [PYTEST_ARGS]...", nargs=-1, type=click.UNPROCESSED)
def watch(args: tuple[str, ...]) -> None:
    """Run pytest with --keep-gangs, and again whenever a Python file of the project changes.

    PATHS are files, folders and node ids, before all options; the rest is passed to pytest. A test
    file that changed runs alone; after a change of any other file all of PATHS runs. Ctrl-C ends
    it, with the exit code of the last run.
    """
    paths = list(takewhile(lambda arg: not arg.startswith("-"), args))
    code, chosen = 0, paths
    try:
        while True:
            before = _versions(paths)
            code = _run(["-p", "megatron", *chosen, "--megatron-keep-gangs", *args[len(paths) :]])
            click.echo("watch: waiting for a change; Ctrl-C ends")
            while (now := _versions(paths)) == before:
                time.sleep(_POLL_S)
            changed = sorted(p for p in now.keys() | before.keys() if now.get(p) != before.get(p))
            click.echo(printable(f"watch: changed: {', '.join(map(os.path.relpath, changed))}"))
            chosen = choose(changed, paths)
    except KeyboardInterrupt:
        sys.exit(code)


def choose(changed: Sequence[Path], paths: Sequence[str]) -> list[str]:
    """Return the arguments of pytest after files have changed.

    Args:
        changed: Absolute paths.
        paths: Files, folders and node ids that are watched.
    """
    chosen: list[str] = []
    for file in changed:
        named = [path for path in paths if Path(path.partition("::")[0]).absolute() == file]
        is_within = not paths or any(file.is_relative_to(Path(path).absolute()) for path in paths)
        is_test = any(fnmatch.fnmatch(file.name, pattern) for pattern in _TEST_FILES)
        if not file.exists() or not (named or (is_within and is_test)):
            return list(paths)
        chosen += named or [os.path.relpath(file)]
    return chosen


def _run(args: Sequence[str]) -> int:
    """Run pytest; Ctrl-C reaches it as well, and it ends by itself.

    Raises:
        SystemExit: It did, after Ctrl-C.
    """
    script = Path(sys.executable).with_name("pytest")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "pytest"]
    process = subprocess.Popen([*command, *args])
    try:
        return process.wait()
    except KeyboardInterrupt:
        sys.exit(process.wait())


def _versions(paths: Sequence[str]) -> Mapping[Path, tuple[int, int]]:
    """Return time and size of every Python file below the current directory and below paths."""
    roots = {Path.cwd(), *(Path(path.partition("::")[0]).absolute() for path in paths)}
    found = {}
    for file in _files(roots):
        with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
            found[Path(file.path)] = file.stat().st_mtime_ns, file.stat().st_size
    return found


def _files(roots: set[Path]) -> Iterator[os.DirEntry[str]]:
    """Yield Python files; not those of hidden folders and of virtual environments."""
    todo = [str(root) for root in roots if root.is_dir() and roots.isdisjoint(root.parents)]
    while todo:
        try:
            entries = list(os.scandir(todo.pop()))
        except OSError:  # it was removed
            continue
        if any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(
                (".", "__pycache__")
            ):
                todo.append(entry.path)
            elif entry.name.endswith(".py") and entry.is_file():
                yield entry
