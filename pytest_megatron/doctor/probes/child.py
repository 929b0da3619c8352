"""Asks another process for a line of JSON; a crash or a hang is an answer too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_megatron.base.files import JsonValue, parse_json
from pytest_megatron.base.text import describe_exit

_MOST_SHOWN = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildAnswer:
    """Answer of a process.

    Attributes:
        values: The last line of its output that is a JSON object.
        text: Everything it printed, both streams.
        problem: Why there is no answer, None where there is one.
    """

    values: Mapping[str, JsonValue] = field(default_factory=dict)
    text: str = ""
    problem: str | None = None


def run(
    command: Sequence[str], *, limit_s: float, env: Mapping[str, str], cwd: Path | None = None
) -> ChildAnswer:
    """Run a command to its end or its time limit; nothing that it started is left."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(env),
            cwd=cwd,
        )
    except OSError as error:
        return ChildAnswer(problem=f"{command[0]} cannot be started: {error.strerror}")
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return ChildAnswer(problem=f"no answer within {limit_s:g} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver
            process.wait(timeout=1.0)
        if process.stdout is not None:
            process.stdout.close()
    text = output.decode(errors="replace")
    if process.returncode:
        said = text.strip().rpartition("\n")[2][:_MOST_SHOWN]
        ended = f"the process {describe_exit(process.returncode)}"
        return ChildAnswer(text=text, problem=f"{ended}{': ' if said else ''}{said}")
    return ChildAnswer(text=text)


def ask(
    python: Path,
    script: Path,
    *arguments: str,
    limit_s: float,
    env: Mapping[str, str],
    cwd: Path | None = None,
) -> ChildAnswer:
    """Have a Python run a script of ours, as if its text had been typed after `-c`."""
    command = [str(python), "-c", script.read_text(encoding="utf-8"), *arguments]
    answer = run(command, limit_s=limit_s, env=env, cwd=cwd)
    if answer.problem is not None:
        return answer
    for line in reversed(answer.text.splitlines()):
        with contextlib.suppress(ValueError):
            value = parse_json(line)
            if isinstance(value, dict):
                return ChildAnswer(values=value, text=answer.text)
    return ChildAnswer(
        text=answer.text, problem=f"no JSON in {answer.text.strip()[:_MOST_SHOWN]!r}"
    )
