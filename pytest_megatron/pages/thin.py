"""Fewer steps for a long curve, so that a page stays small: every extreme is kept. Pure.

All curves of a chart keep the same steps. What is drawn at a step is what was measured there, and
the deviation from the golden can be taken at every step that is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

# What a step without a finite number has.
Column = Sequence[float]


def deviations(golden: Column, other: Column) -> list[float]:
    """Return |other - golden| relative to the golden at each step; nan where one has no number."""
    return [
        abs(o - g) / (abs(g) or 1.0) if math.isfinite(o - g) else math.nan
        for g, o in zip(golden, other, strict=True)
    ]


def choose(columns: Sequence[Column], *, most: int, keep: Iterable[int] = ()) -> list[int]:
    """Return which of the steps to keep, ascending.

    Args:
        columns: (num_columns, num_steps) curves and deviations, each with extremes to keep.
        most: How many steps may be left, about.
        keep: Those that must be.
    """
    num_steps = len(columns[0])
    if num_steps <= most:
        return list(range(num_steps))
    num_buckets = max(1, most // 2)
    while True:
        kept = _extremes(columns, num_steps, num_buckets)
        if len(kept) <= most or num_buckets == 1:
            kept.update((0, num_steps - 1), (k for k in keep if 0 <= k < num_steps))
            return sorted(kept)
        num_buckets = max(1, min(num_buckets - 1, int(num_buckets * most / len(kept))))


def _extremes(columns: Sequence[Column], num_steps: int, num_buckets: int) -> set[int]:
    """Return where the smallest and the largest number of each column in each bucket are."""
    kept: set[int] = set()
    for bucket in range(num_buckets):
        start, end = (num_steps * b // num_buckets for b in (bucket, bucket + 1))
        for column in columns:
            part = column[start:end]
            # A nan compares false with everything, which would hide the numbers after it.
            if any(map(math.isnan, part)):
                part = [v for v in part if not math.isnan(v)]
                if not part:
                    continue
            kept.add(column.index(min(part), start, end))
            kept.add(column.index(max(part), start, end))
    return kept


def shares(needs: Sequence[int], total: int) -> list[int]:
    """Return what each gets of `total`: what it needs, or an equal part of what is left."""
    given = [0] * len(needs)
    left, open_needs = total, len(needs)
    for at in sorted(range(len(needs)), key=needs.__getitem__):
        given[at] = min(needs[at], left // open_needs)
        left, open_needs = left - given[at], open_needs - 1
    return given
