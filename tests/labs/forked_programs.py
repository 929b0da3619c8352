"""Programs that run as `python` runs them, forked off one process that has imported libraries.

Imported by tests for `run_programs`; itself the program that forks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

LIMIT_S = 240


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a process is started with.

    Attributes:
        words: Behind `python`: a script, or `-m` and a module, and arguments.
        output: Of both streams.
    """

    words: Sequence[str]
    output: str
    env: Mapping[str, str] = field(default_factory=dict)


def run_programs(
    programs: Sequence[Program], imported: Sequence[str], path: Sequence[Path] = ()
) -> list[int]:
    """Run one after the other; return their exit codes.

    Args:
        imported: Modules that are imported before the forks.
        path: Where they are found, besides the environment.
    """
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    paths = [*map(str, path), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, __file__, *imported],
        input=json.dumps([asdict(program) for program in programs]),
        env=alone | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    codes: list[int] = json.loads(done.stdout)
    return codes


def main() -> Program | None:
    """Fork all programs; return, in each fork, the one that it is."""
    orders = [Program(**order) for order in json.load(sys.stdin)]
    gc.disable()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # no program searches the libraries for garbage
    gc.enable()
    codes = []
    for order in orders:
        pid = os.fork()
        if pid == 0:
            return order
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.stdout.write(json.dumps(codes))
    return None


def become(program: Program) -> None:
    """Be a program in this process."""
    os.environ |= program.env
    output = os.open(program.output, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    words = list(program.words)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__" and (program := main()) is not None:
    become(program)
