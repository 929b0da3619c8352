"""Run a Python program with a trace of its training, unchanged; a program, run in each rank.

    python -m pytest_megatron.trace.run PROGRAM [ARGUMENT ...]
    python -m pytest_megatron.trace.run -m MODULE [ARGUMENT ...]

PROGRAM runs as `python PROGRAM` does: as `__main__`, with its arguments, its directory first on
the module path. Without the variable `PYTEST_MEGATRON_TRACE` nothing is recorded.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from pytest_megatron.errors import TraceError
from pytest_megatron.process.tree import large_imports
from pytest_megatron.trace.settings import read_settings

_USAGE = "usage: python -m pytest_megatron.trace.run {PROGRAM | -m MODULE} [ARGUMENT ...]"


def main() -> None:
    """Start the recorder, run the program of the command line, write the end of the trace."""
    is_module = sys.argv[1:2] == ["-m"]
    argv = sys.argv[2 if is_module else 1 :]
    if not argv or (argv[0].startswith("-") and not is_module):
        raise SystemExit(_USAGE)
    settings = read_settings()
    if settings is None:
        _run(argv, is_module=is_module)
        return
    with large_imports():  # torch, before the program loads anything
        from pytest_megatron.trace.recorder import Recorder
    recorder = Recorder(settings)
    recorder.start()
    is_whole = False
    try:
        _run(argv, is_module=is_module)
        is_whole = True
    except SystemExit as end:
        is_whole = not end.code
        raise
    finally:
        recorder.stop(is_whole=is_whole)


def _run(argv: list[str], *, is_module: bool) -> None:
    """Run a program or a module as `__main__`."""
    sys.argv = argv
    if is_module:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(argv[0]).resolve().parent)
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    try:
        main()
    except TraceError as error:
        raise SystemExit(f"pytest_megatron.trace: {error}") from None
