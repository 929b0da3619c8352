"""Finds which of the tests before an item its failure takes. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence


def smallest_cause(
    tests: Sequence[str], is_cause: Callable[[Sequence[str]], bool]
) -> tuple[str, ...]:
    """Return a part of `tests`, in their order, of which none can be left out.

    Source: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002 (ddmin).

    Args:
        tests: In the order in which they ran; together they are a cause.
        is_cause: Runs these and returns whether the failure is there. Called once for each part.
    """
    known: dict[tuple[str, ...], bool] = {}

    def holds(part: Sequence[str]) -> bool:
        """Return whether the item fails after these tests; each trial runs once."""
        key = tuple(part)
        if key not in known:
            known[key] = is_cause(key)
        return known[key]

    current, num_parts = list(tests), 2
    while len(current) > 1:
        parts = _split(current, num_parts)
        smaller = next((part for part in reversed(parts) if holds(part)), None)
        if smaller is not None:
            current, num_parts = smaller, 2
            continue
        rests = [[t for p in parts if p is not part for t in p] for part in parts]
        smaller = next((rest for rest in rests if num_parts > 2 and holds(rest)), None)  # noqa: PLR2004 - of two, the rest is the other part
        if smaller is not None:
            current, num_parts = smaller, max(num_parts - 1, 2)
        elif num_parts >= len(current):
            break
        else:
            num_parts = min(num_parts * 2, len(current))
    return tuple(current)


def _split(tests: Sequence[str], num_parts: int) -> list[list[str]]:
    """Return `tests` in parts of nearly equal length."""
    bounds = [len(tests) * number // num_parts for number in range(num_parts + 1)]
    return [list(tests[a:b]) for a, b in itertools.pairwise(bounds)]
