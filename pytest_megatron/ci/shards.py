"""Test files shared out over a number of jobs by how long they took. Pure.

Longest first, each to the job with the least work so far: at most 4/3 of the best there is.
Source: R. L. Graham, Bounds on multiprocessing timing anomalies, 1969.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEFAULT_S = 1.0  # of a file, where nothing at all has been recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One job of several.

    Attributes:
        files: Sorted; at least one.
        expected_s: How long they take together, as recorded.
    """

    number: int
    files: tuple[str, ...]
    expected_s: float


def balance(
    files: Sequence[str], durations_s: Mapping[str, float], num_shards: int
) -> tuple[Shard, ...]:
    """Return the shards; together they hold every file exactly once.

    The same files and durations give the same shards, in whatever order they come. A file without
    a duration counts as the median of those that have one. There is no shard without files.

    Args:
        files: Test files.
        durations_s: File -> seconds; may lack files, and have others.
        num_shards: How many jobs; fewer files give fewer.
    """
    known = [durations_s[file] for file in files if file in durations_s]
    default_s = statistics.median(known) if known else DEFAULT_S
    weights = {file: durations_s.get(file, default_s) for file in files}
    loads = [(0.0, 0, number) for number in range(1, min(num_shards, len(weights)) + 1)]
    held: dict[int, list[str]] = {number: [] for _, _, number in loads}
    for file in sorted(weights, key=lambda file: (-weights[file], file)):
        load, num_files, number = heapq.heappop(loads)
        held[number].append(file)
        heapq.heappush(loads, (load + weights[file], num_files + 1, number))
    return tuple(
        Shard(
            number=number,
            files=tuple(sorted(mine)),
            expected_s=round(sum(weights[file] for file in mine), 3),
        )
        for number, mine in held.items()
    )
