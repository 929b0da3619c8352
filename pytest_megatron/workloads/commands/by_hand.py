"""One run of a command by hand: how it ends, what it prints, where it leaves metrics."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from pytest_megatron.base.text import printable
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.host import Gpu, lease_gpus
from pytest_megatron.process.guarded import CommandEnd, GuardedProcess
from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.workloads.commands.found import Found, MetricSearch
from pytest_megatron.workloads.recipe.short_rows import (
    after_torchrun,
    is_python,
    with_logs_of_ranks,
)
from pytest_megatron.workloads.training.run.runner import STOP_GRACE_S, FollowedFile, tail

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class RunByHand:
    """One run of the command as it is.

    Attributes:
        places: Where it left metrics to compare, the best first.
        others: Where it left others.
        passed_over: Places with metrics that cannot be read, and why, a line each.
    """

    end: CommandEnd
    places: tuple[Found, ...]
    others: tuple[Found, ...]
    passed_over: tuple[str, ...]


def in_this_environment(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command whose Python is named in full where it is not beside that of pytest.

    Rows start `python` as the interpreter that pytest runs in.
    """
    found = shutil.which(words[0])
    if found is None:
        raise LaunchError(
            words[0], "is no command that can be found, expected a program; nothing was run"
        )
    is_ours = Path(found).parent == Path(sys.executable).parent
    if is_ours or is_python(words[0]) is None or after_torchrun(words) is not None:
        return words
    return (found, *words[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """A command that is run as it is.

    Attributes:
        words: The command.
        root: Where it runs.
        directory: For its logs.
        limit_s: When to end it, in seconds.
        env: Variables beside those of the shell.
        is_joint: Whether it starts ranks which all print into one log.
        gpus: Those that its row may have; it runs on `num_gpus` of them, and sees no others.
    """

    words: Sequence[str]
    root: Path
    directory: Path
    limit_s: float
    env: Mapping[str, str]
    is_joint: bool
    gpus: Sequence[Gpu]
    num_gpus: int

    def run(self, name: str) -> RunByHand:
        """Run it, copy its output, and look for its metrics.

        Args:
            name: Of the directory of its logs; torchrun is told to leave those of its ranks there.

        Raises:
            LaunchError: It did not end, or not well.
        """
        words, limit_s = self.words, self.limit_s
        dirs = PhaseDirs(root=self.directory / name)
        dirs.logs.mkdir(parents=True)
        search = MetricSearch(self.root, tuple(dict.fromkeys(_directories_in(words, self.root))))
        search.mark()
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self.env}
        command = with_logs_of_ranks(words, dirs.logs)
        lease = lease_gpus(self.gpus, self.num_gpus, click.echo)
        if lease.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in lease.gpus)
        followed, deadline = FollowedFile(dirs.launcher_log), time.monotonic() + limit_s
        with (
            contextlib.closing(lease),
            GuardedProcess(
                command, env=env, cwd=self.root, output=dirs.launcher_log, grace_s=STOP_GRACE_S
            ) as process,
        ):
            while (end := process.poll(_POLL_S)) is None and time.monotonic() < deadline:
                _copy(followed)
            if end is None:
                process.stop()
                process.wait()
        _copy(followed)
        search.look(dirs, is_joint=self.is_joint)
        line, far = shlex.join(words), _how_far(search.places)
        if end is None:
            raise LaunchError(
                line,
                f"did not end within {limit_s:g} s, {far}; give it an end, such as --max_steps 20, "
                f"or --time-limit; nothing was written",
            )
        if end.returncode:
            logs = (*sorted(dirs.logs.rglob("stderr.log")), dirs.launcher_log)
            ends = [tail(log) for log in logs]  # of a rank its traceback says more than torchrun's
            traces = (lines for lines in ends if lines and lines[0].startswith("Traceback"))
            told = [line.strip() for line in next(traces, ends[-1]) if line.strip("^~ ")]
            said = "; ".join(told[-2:])
            raise LaunchError(
                line,
                f"ended with exit code {end.returncode}, {far}: {said}; fix it, then record it; "
                f"nothing was written",
            )
        return RunByHand(end, tuple(search.places), tuple(search.others), tuple(search.passed_over))


def _directories_in(words: Sequence[str], root: Path) -> Iterator[Path]:
    """Yield the directories outside of the project that a command names."""
    for path in (Path(word.rpartition("=")[2]) for word in words):
        is_outside = path.is_absolute() and not path.is_relative_to(root)
        if is_outside and not path.is_file() and path.parent.is_dir():
            yield path


def _copy(followed: FollowedFile) -> None:
    """Print the lines that a log has got since."""
    for line in followed.new_lines():
        click.echo(f"    {printable(line)}")


def _how_far(places: Sequence[Found]) -> str:
    """Describe how far a command was when it ended."""
    if not places:
        return "before it wrote any metric"
    return f"after step {places[0].last_step} ({places[0].names[0]})"
