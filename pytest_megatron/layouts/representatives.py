"""Choice of the ranks that can differ, by the process groups of one of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_megatron.layouts.model import RankRecord

_WHOLE_PIPELINE = 8  # stages; of longer ones, the ends and the middle


def choose(world_size: int, count: int, first: RankRecord | None) -> list[int]:
    """Return ranks, the most telling first.

    Args:
        world_size: Ranks of the training.
        count: How many may be chosen.
        first: Record of rank 0; None if there is none.
    """
    if count >= world_size:
        return list(range(world_size))
    chosen = dict.fromkeys([0, *_candidates(world_size, first)])
    return list(chosen)[:count]


def _candidates(world_size: int, first: RankRecord | None) -> Iterator[int]:
    """Yield neighbours in pipelines, then ends of each partition of the world."""
    last = world_size - 1
    if first is None:
        yield last
        return
    partitions = partitions_of(first, world_size)
    lines = _lines(first, partitions, world_size)
    for line in lines:
        middle = len(line) // 2
        is_whole = line is lines[0] and len(line) <= _WHOLE_PIPELINE
        yield from line if is_whole else (line[i] for i in (0, 1, -1, -2, middle, middle - 1))
    anchors = (0, lines[0][-1] if lines else last)
    own = [_own(partition, anchor) for partition in partitions for anchor in anchors]
    yield from (group[0] if group[-1] in anchors else group[-1] for group in own if group)
    yield last
    yield from (rank for group in own if group for rank in (group[1], group[len(group) // 2]))
    for partition in partitions:
        yield partition[-1][0]
        yield partition[len(partition) // 2][0]


def kinds_of(records: Iterable[RankRecord]) -> list[list[RankRecord]]:
    """Return ranks by kind: those of a kind make the same calls from the same lines.

    The lowest rank of a kind comes first, and stands for the others.
    """
    kinds: dict[tuple[object, ...], list[RankRecord]] = {}
    for record in sorted(records, key=lambda record: record.rank):
        calls = frozenset((call.kind, call.line) for call in record.calls)
        kinds.setdefault((record.problem, calls), []).append(record)
    return list(kinds.values())


def _own(partition: list[tuple[int, ...]], rank: int) -> tuple[int, ...]:
    """Return the group of a rank; () if it is in none."""
    return next((group for group in partition if rank in group), ())


def _lines(
    record: RankRecord, partitions: list[list[tuple[int, ...]]], world_size: int
) -> list[tuple[int, ...]]:
    """Return the lines of ranks along which messages go, that of the farthest neighbour first.

    A line is a group, or, where messages go through a larger one, ranks at equal distances.
    """
    peers = {call.peer for call in record.calls if call.peer}
    found: dict[tuple[int, ...], None] = {}
    for peer in sorted(peers):
        own = [_own(partition, record.rank) for partition in partitions]
        group = next((group for group in own if peer in group), ())
        found[group or tuple(range(0, world_size, peer))] = None
    lines = [line for line in found if len(line) > 1]
    return sorted(lines, key=lambda line: line[0] - line[1])


def partitions_of(record: RankRecord, world_size: int) -> list[list[tuple[int, ...]]]:
    """Return the ways in which groups divide ranks, smallest groups first, the world left out."""
    found: dict[int, dict[tuple[int, ...], None]] = {}
    families: list[list[tuple[int, ...]]] = []
    for group in record.groups:
        ranks = tuple(group.ranks)
        if 1 < len(ranks) < world_size:
            found.setdefault(len(ranks), {})[ranks] = None
    for size in sorted(found):
        current: list[tuple[int, ...]] = []
        seen: set[int] = set()
        for ranks in sorted(found[size], key=lambda ranks: (ranks[1] - ranks[0], ranks)):
            if current and (
                seen & set(ranks) or ranks[1] - ranks[0] != current[0][1] - current[0][0]
            ):
                families.append(current)
                current, seen = [], set()
            current.append(ranks)
            seen.update(ranks)
        families.append(current)
    return [sorted(family) for family in families]
