"""Two curves in a terminal: both overlaid, and below them how far they are apart. Pure.

Whole characters, so that old and new can be told apart without colour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pytest_megatron.golden.comparison import relative
from pytest_megatron.golden.model import Series, is_finite

OLD, NEW, BOTH = "\N{MIDDLE DOT}", "+", "\N{BULLET}"
_BARS = (
    " \N{LOWER ONE EIGHTH BLOCK}\N{LOWER ONE QUARTER BLOCK}\N{LOWER THREE EIGHTHS BLOCK}"
    "\N{LOWER HALF BLOCK}\N{LOWER FIVE EIGHTHS BLOCK}\N{LOWER THREE QUARTERS BLOCK}"
    "\N{LOWER SEVEN EIGHTHS BLOCK}\N{FULL BLOCK}"
)
_LABEL = 11  # characters left of the plot


def plot(old: Series | None, new: Series | None, *, width: int = 60, height: int = 8) -> str:
    """Return a plot of two series over their steps; either may be missing.

    Args:
        old: Drawn as a dot.
        new: Drawn as a plus; a bullet where both are.
        width: Of the whole plot, in characters.
        height: Of the curves, in lines; two more show the deviation.
    """
    sides = (_finite(old), _finite(new))
    everything = {step: value for side in sides for step, value in side.items()}
    if not everything:
        return "(no finite value)"
    num_columns = max(10, width - _LABEL)
    first, last = min(everything), max(everything)
    values = [value for side in sides for value in side.values()]
    low, high = min(values), max(values)
    grid: list[list[str]] = [[" "] * num_columns for _ in range(height)]
    for side, mark in zip(sides, (OLD, NEW), strict=True):
        for step, value in side.items():
            column = _scaled(step, first, last, num_columns)
            row = height - 1 - _scaled(value, low, high, height)
            cell = grid[row][column]
            grid[row][column] = mark if cell in (" ", mark) else BOTH
    lines = [_labelled(_label(row, height, low, high), cells) for row, cells in enumerate(grid)]
    lines += _deviation_lines(sides, first, last, num_columns)
    axis = f"{first}".ljust(num_columns - len(f"{last}")) + f"{last}"
    return "\n".join([*lines, _labelled("step", axis)])


def _finite(series: Series | None) -> Mapping[int, float]:
    if series is None:
        return {}
    return {s: v for s, v in series.items() if isinstance(v, float) and is_finite(v)}


def _deviation_lines(
    sides: tuple[Mapping[int, float], Mapping[int, float]], first: int, last: int, num_columns: int
) -> Sequence[str]:
    """Return a line of bars for steps where the new value is larger, and one where it is not."""
    old, new = sides
    peaks = {1: [0.0] * num_columns, -1: [0.0] * num_columns}
    for step in old.keys() & new.keys():
        off = relative(new[step], old[step])
        if off:
            row = peaks[1 if off > 0 else -1]
            column = _scaled(step, first, last, num_columns)
            row[column] = max(row[column], abs(off))
    finite = [off for row in peaks.values() for off in row if math.isfinite(off)]
    largest = max(finite, default=0.0)
    if not largest:
        return ()
    return [
        _labelled(f"{sign}{largest:.1e}", [_bar(off, largest) for off in peaks[key]])
        for key, sign in ((1, "+"), (-1, "-"))
    ]


def _bar(off: float, largest: float) -> str:
    if not off:
        return " "
    share = min(1.0, off / largest)  # over an old value of 0 it is infinite
    return _BARS[max(1, math.ceil(share * (len(_BARS) - 1)))]


def _scaled(value: float, low: float, high: float, size: int) -> int:
    if high <= low:
        return size // 2
    return min(size - 1, int((value - low) / (high - low) * size))


def _label(row: int, height: int, low: float, high: float) -> str:
    if row == 0:
        return f"{high:.5g}"
    return f"{low:.5g}" if row == height - 1 else ""


def _labelled(label: str, cells: Sequence[str]) -> str:
    return f"{label:>{_LABEL - 1}} {''.join(cells)}".rstrip()
