"""The lines of a log that a person reads first: its end, or a traceback in it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_megatron.base.files import read_end

_TAIL_BYTES = 1 << 16
_TAIL_LINES = 10
_TRACE_LINES = 30
_TRACE_STARTS = ("Traceback (most recent call last)", "Fatal Python error:")
_OF_STACK = ("  ", "Current thread ", "Thread ")
_RANK_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]: ?")


def tail(path: Path, is_noise: Callable[[str], bool] | None = None) -> tuple[str, ...]:
    """Return the last meaningful lines of a log; none where it cannot be read.

    Of a log that ends in a traceback, only that, without torch's `[rank0]:` in front.

    Args:
        path: The log.
        is_noise: Returns if a line is meaningless; empty ones always are.
    """
    try:
        text = read_end(path, _TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ()
    said = _plain(text.splitlines())
    lines = [line for line in said if is_noise is None or not is_noise(line)]
    starts = [index for index, line in enumerate(lines) if line.startswith(_TRACE_STARTS)]
    return _cut(lines[starts[-1] :]) if starts else tuple(lines[-_TAIL_LINES:])


def traceback_at(path: Path, number: int) -> tuple[str, ...]:
    """Return the traceback that ends, or the stack that begins, in a line; none where none does.

    Args:
        path: The log.
        number: Number of the line, from 1.
    """
    try:
        with path.open(errors="replace") as file:
            lines = [line for _, line in zip(range(number + _TRACE_LINES), file, strict=False)]
    except OSError:
        return ()
    said, below = _plain(lines[:number]), _plain(lines[number:])
    if said and said[-1].startswith(_TRACE_STARTS):
        stack = itertools.takewhile(lambda line: line.startswith(_OF_STACK), below)
        return _cut([said[-1], *stack])
    starts = [at for at, line in enumerate(said) if line.startswith(_TRACE_STARTS[0])]
    trace = said[starts[-1] :] if starts else []
    is_whole = all(line.startswith("  ") for line in trace[1:-1])
    return _cut(trace) if is_whole else ()


def _plain(lines: Sequence[str]) -> list[str]:
    return [_RANK_PREFIX.sub("", line).rstrip() for line in lines if line.strip()]


def _cut(lines: Sequence[str]) -> tuple[str, ...]:
    """Return a traceback without its middle, if it is long."""
    if len(lines) > _TRACE_LINES:
        lines = [*lines[:2], "  ...", *lines[3 - _TRACE_LINES :]]
    return tuple(line for line in lines if not line.startswith("Extension modules:"))
