"""Settings of a run of ranks, the choice of the ranks, and their records. Must not import torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, product
from pathlib import Path

from pytest_megatron.base.files import write_text_atomically
from pytest_megatron.base.schema import parse
from pytest_megatron.base.text import grouped
from pytest_megatron.errors import LaunchError
from pytest_megatron.runs.record import RankMemory

NUM_RANKS = 12
EAGER = "eager"
_OPTION = "--fake-ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Which ranks run, and where they write.

    Attributes:
        directory: Gets `rank_<r>.json` and `rank_<r>.log` of each rank.
        ranks: Those to run; None chooses them by the groups of rank 0.
        count: How many are chosen.
        steps: Optimizer steps of each; one more begins.
        jobs: Ranks side by side.
        time_limit_s: For one rank.
    """

    directory: Path
    world_size: int
    ranks_per_node: int = 8
    ranks: tuple[int, ...] | None = None
    count: int = NUM_RANKS
    steps: int = 2
    jobs: int = 2
    time_limit_s: float = 300.0

    def choose(self, text: str) -> Settings:
        """Return these settings with the ranks that `--fake-ranks` names.

        Raises:
            LaunchError: It names none, or one that is not of the world.
        """
        chosen = read_ranks(text)
        if chosen is None:
            return replace(self, ranks=tuple(range(self.world_size)))
        if isinstance(chosen, int):
            return replace(self, count=chosen)
        if chosen[-1] >= self.world_size:
            raise LaunchError(
                _OPTION,
                f"rank {chosen[-1]} of {self.world_size}, expected 0 to {self.world_size - 1}",
            )
        return replace(self, ranks=chosen)

    def to_json(self) -> str:
        """Return the settings as an argument."""
        return json.dumps(asdict(self), default=str)


def read_ranks(text: str) -> int | tuple[int, ...] | None:
    """Return how many ranks `--fake-ranks` asks for, or which, ascending; None for all.

    Raises:
        LaunchError: It names none.
    """
    words = [word.strip() for word in text.removesuffix(",").split(",")]
    if text == "all":
        return None
    if not all(word.isdecimal() for word in words) or text.strip() == "0":
        raise LaunchError(
            _OPTION, f"{text!r} names no ranks, expected all, how many (12), or which (0,8,511)"
        )
    numbers = sorted({int(word) for word in words})
    return tuple(numbers) if "," in text else numbers[0]


@dataclass(slots=True)
class MadeGroup:
    """A process group that a rank made, member or not.

    Attributes:
        name: By which its members meet.
        ranks: Global ranks, in the group's order.
        backend: As the program named it, and `eager` if it named a device with it.
        line: Where it was made.
        after: Number of calls that the rank had made before.
    """

    name: str
    ranks: list[int]
    backend: str
    line: str
    after: int = 0


@dataclass(slots=True)
class Call:
    """A collective or a point-to-point call.

    Attributes:
        index: Order within the group, from 0.
        shapes: Shapes of the tensors that the rank gives, or else of those it receives.
        step: Counted from 1.
        issued: Clock of this rank when the program made the call.
        waited: The same when the program waited for its end; None if it never did.
        batch: Number of the batch of `batch_isend_irecv`; None outside.
        root: Global rank of a broadcast, reduce, gather or scatter.
        peer: Global rank at the other end; None where any may be.
        has_own_size: False where the size follows from what others have sent.
        read: Line that last read a value of a tensor since the call before; "" if none did.
        sent: Elements for each rank of the group, of an exchange of unequal parts.
    """

    group: str
    index: int
    kind: str
    dtype: str
    shapes: list[list[int]]
    step: int
    line: str
    issued: int
    num_bytes: int
    waited: int | None = None
    batch: int | None = None
    reduction: str = ""
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    has_own_size: bool = True
    read: str = ""
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    @property
    def num_elements(self) -> int:
        """Over all tensors."""
        return sum(map(math.prod, self.shapes))


@dataclass(slots=True)
class RankRecord:
    """All that one rank did.

    Attributes:
        steps: Steps of the optimizer that ended.
        forwards: Calls of models in each step: micro-batches times chunks.
        models: Classes of the models.
        layers: Numbers of layers, by the name of what contains them.
        num_judged: Number of calls before the first forward pass after the last step.
        end: `whole`, `cut` in the step after the last, `failed`, or `unknown` at an object that
            a rank that was not run would have sent.
        problem: Last line of the traceback.
        sources: Files of the program itself.
    """

    rank: int
    world_size: int
    groups: list[MadeGroup] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    steps: int = 0
    forwards: list[int] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    layers: dict[str, list[int]] = field(default_factory=dict)
    num_judged: int = 0
    end: str = ""
    problem: str = ""
    problem_line: str = ""
    sources: list[str] = field(default_factory=list)
    memory: RankMemory = field(default_factory=RankMemory)


def write_record(path: Path, record: RankRecord) -> None:
    """Write the file of a rank."""
    write_text_atomically(path, json.dumps(asdict(record)))


def read_record(path: Path) -> RankRecord:
    """Read the file of a rank."""
    return parse(RankRecord, path.read_text())


_WHOLE_PIPELINE = 8  # stages; of longer ones, the ends and the middle


def choose(
    world_size: int,
    count: int,
    first: RankRecord | None,
    named: Sequence[frozenset[int]] = (),
) -> list[int]:
    """Return ranks, the most telling first.

    Args:
        world_size: Ranks of the training.
        count: How many may be chosen.
        first: Record of rank 0; None if there is none.
        named: Sets of ranks that the program treats apart, of which some are added.
    """
    if count >= world_size:
        return list(range(world_size))
    if first is None:
        return [0, world_size - 1][:count]
    partitions = partitions_of(first, world_size)
    lines = _lines(first, partitions, world_size)
    last = lines[0][-1] if lines else world_size - 1
    own = [_own(partition, anchor) for partition in partitions for anchor in (0, last)]
    ends = list(dict.fromkeys([0, *_ends(lines, own, {0, last})]))[:count]
    distances = {abs(line[1] - line[0]) for line in lines}

    def groups_of(rank: int) -> list[tuple[int, ...]]:
        """Return the groups and the lines of a rank."""
        groups = [_own(partition, rank) for partition in partitions]
        return [*filter(None, groups), *(tuple(range(rank % d, world_size, d)) for d in distances)]

    added: list[list[int]] = []
    for sign, ranks in product((1, -1), named):  # the lowest of each, then the highest
        found = _best_of(ranks, ends, groups_of, sign)
        if found[0] not in (*ends, world_size - 1):
            added.append(found)
    room = count - len(ends)
    num_each, most = (2, room) if room >= count // 4 else (1, count // 4)
    taken = list(dict.fromkeys(rank for ranks in added for rank in ranks[:num_each]))[:most]
    chosen = [*ends[: count - len(taken)], *taken, *chain(*added[:most]), world_size - 1]
    return list(dict.fromkeys([*chosen, *_middles(partitions, own)]))[:count]


def _best_of(
    ranks: frozenset[int],
    chosen: Collection[int],
    groups_of: Callable[[int], list[tuple[int, ...]]],
    sign: int,
) -> list[int]:
    """Return the rank of a set that can be compared the most, then who is beside it.

    Args:
        ranks: The set.
        chosen: Ranks that are run.
        groups_of: Returns the groups of a rank.
        sign: 1 for the lowest of equal ones, -1 for the highest.

    Returns:
        The rank, and one outside of the set from each of its groups in which none is run.
    """
    others = set(chosen) - ranks

    def lacking(rank: int) -> list[tuple[int, ...]]:
        return [group for group in groups_of(rank) if others.isdisjoint(group)]

    best = min(ranks, key=lambda rank: (len(lacking(rank)), rank not in chosen, sign * rank))
    around = ([*g[g.index(best) + 1 :], *g[: g.index(best)][::-1]] for g in lacking(best))
    return [best, *(next((r for r in group if r not in ranks), best) for group in around)]


def _ends(
    lines: Sequence[Sequence[int]], own: Sequence[Sequence[int]], anchors: Collection[int]
) -> Iterator[int]:
    """Yield neighbours in pipelines, then the other ends of the groups of the anchors."""
    for line in lines:
        middle = len(line) // 2
        is_whole = line is lines[0] and len(line) <= _WHOLE_PIPELINE
        yield from line if is_whole else (line[i] for i in (0, 1, -1, -2, middle, middle - 1))
    yield from (group[0] if group[-1] in anchors else group[-1] for group in own if group)


def _middles(
    partitions: Sequence[Sequence[tuple[int, ...]]], own: Sequence[Sequence[int]]
) -> Iterator[int]:
    """Yield second and middle members of groups, then of each partition of the world."""
    yield from (rank for group in own if group for rank in (group[1], group[len(group) // 2]))
    for partition in partitions:
        yield partition[-1][0]
        yield partition[len(partition) // 2][0]


def kinds_of(records: Iterable[RankRecord]) -> list[list[RankRecord]]:
    """Return ranks by kind: those of a kind make the same calls from the same lines.

    The lowest rank of a kind comes first, and stands for the others.
    """
    kinds = grouped(
        ((record.problem, frozenset((call.kind, call.line) for call in record.calls)), record)
        for record in sorted(records, key=lambda record: record.rank)
    )
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
