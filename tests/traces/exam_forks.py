"""Runs ranks, each forked off this process, which has loaded torch and megatron-core once."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from exam_cases import Value
from ports import held_port

from pytest_megatron.trace import recorder  # noqa: F401 - imported once for all ranks


def words_of(arguments: Mapping[str, Value]) -> list[str]:
    """Spell MODEL_ARGS on a command line."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words += [name, str(value)]
    return words


def run_ranks(size: int, act: Callable[[int], None], directory: Path) -> str:
    """Do something on each rank of a world; gives the last line of a rank that failed, or nothing.

    What the ranks print is in `directory`.
    """
    children = []
    gc.freeze()  # no rank searches all of torch for garbage
    with held_port("localhost") as port:
        for rank in range(size):
            child = os.fork()
            if child == 0:
                os.environ.update(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(size),
                    MASTER_ADDR="localhost",
                    MASTER_PORT=str(port),
                )
                _run(rank, act, directory / f"{rank}.txt")
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if not any(codes):
        return ""
    logs = [(directory / f"{rank}.txt").read_text().strip() for rank in range(size)]
    return max(log.splitlines()[-1] if log else "died" for log in logs)


def _run(rank: int, act: Callable[[int], None], log: Path) -> None:
    """Act in this process and end it."""
    said, code = io.StringIO(), 1
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            act(rank)
            code = 0
        finally:
            failure = "" if code == 0 else traceback.format_exc()
            log.write_text(f"{said.getvalue()}\n{failure}")
            os._exit(code)
