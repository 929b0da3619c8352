"""Find missed and mismatched collectives in the flight recorders of a hung run. Pure.

Only collectives that some rank still waits for are looked at: what has ended on every rank was
called by all of them. A rank that waits in one group keeps others waiting in the next, so of
several findings the one whose guilty ranks wait for nobody else comes first.

`torch.distributed.flight_recorder` answers another question. Tried with torch 2.13 on the dumps of
`test_flight.py`: it takes the lowest rank for right, so that all others are called wrong where that
one is; says nothing where a dump is missing; calls what is queued behind an open collective missed,
and the same number of elements in another shape a mismatch; ends at an operation that it does not
know; and reads dumps with `pickle.load`, which runs what a stranger's file says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from pytest_megatron.base.text import name_ranks
from pytest_megatron.triage.logs.flight_recorder import FlightDump, FlightEntry

# Every rank must give as much as the others; what is not here may be uneven (gather, all_to_all).
_EVEN_INPUT = frozenset(
    {"all_reduce", "allreduce", "allreduce_coalesced", "broadcast", "reduce", "reduce_scatter"}
    | {"_all_gather_base", "_reduce_scatter_base", "allgather_into_tensor_coalesced"}
)
_EVEN_OUTPUT = frozenset({"all_gather", "allgather"})  # inputs may be uneven, the sum is not


class Desync(Enum):
    """Kind of disagreement of ranks about a collective."""

    MISSED = "missed"  # not called by ranks that had to
    EXTRA = "extra"  # called by few ranks; the others never came to it
    OP = "different operations"
    SIZE = "different sizes"
    DTYPE = "different types"
    NOT_STARTED = "not started"  # in the stream of a GPU that is still busy with something else
    NO_DUMP = "no dump"  # everybody whose dump is there waits: the silent ranks are left


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveMismatch:
    """A collective that ranks disagree about.

    Attributes:
        ranks: Who is guilty; all that took part where the two sides are equally many.
        is_certain: Whether the guilty ranks are in the minority, so that they can be named.
        entry: The collective, as one of the other ranks recorded it.
        text: One line for a person.
    """

    kind: Desync
    ranks: tuple[int, ...]
    is_certain: bool
    entry: FlightEntry
    text: str


def analyse(
    dumps: Mapping[int, FlightDump], world_size: int | None = None
) -> tuple[CollectiveMismatch, ...]:
    """Return where ranks disagree, the origin of the others first; nothing if they agree.

    Args:
        dumps: Rank -> what it recorded. Ranks may be missing.
        world_size: Number of ranks, where it is known; else taken from the groups.
    """
    names = sorted({e.group for dump in dumps.values() for e in dump.entries})
    groups = [_GroupCalls.of(name, dumps, world_size) for name in names]
    found = [finding for group in groups if (finding := _compare(group)) is not None]
    found = found or [finding for group in groups if (finding := _silent(group)) is not None]
    waiting = {f.entry.group: _waiting(dumps, f.entry.group) for f in found}

    def order(finding: CollectiveMismatch) -> tuple[bool, bool, int]:
        """Sort findings: certain ones first, of groups that wait for none."""
        elsewhere = [ranks for group, ranks in waiting.items() if group != finding.entry.group]
        is_victim = any(set(finding.ranks) & ranks for ranks in elsewhere)
        return is_victim, not finding.is_certain, finding.entry.created_ns

    return tuple(sorted(found, key=order))


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupCalls:
    """The collectives of one group, side by side.

    Attributes:
        calls: Rank -> number of the collective -> what was recorded; of ranks with a dump.
        silent: Members without a dump.
        name: For a person.
        first: Number of the first collective that is in every dump that could hold it.
    """

    calls: Mapping[int, Mapping[int, FlightEntry]]
    silent: tuple[int, ...]
    name: str
    first: int

    @classmethod
    def of(cls, group: str, dumps: Mapping[int, FlightDump], world_size: int | None) -> _GroupCalls:
        """Return the collectives of a group, by rank and number."""
        calls = {
            rank: {e.seq: e for e in dump.entries if e.group == group and not e.is_p2p}
            for rank, dump in dumps.items()
        }
        entry = next(e for dump in dumps.values() for e in dump.entries if e.group == group)
        known = {rank for dump in dumps.values() for rank in dump.groups.get(group, ())}
        if not known and entry.group_name == "default_pg":
            known = set(range(max(world_size or 0, *(rank + 1 for rank in dumps))))
        members = known | {rank for rank, found in calls.items() if found}
        full = [rank for rank, d in dumps.items() if d.entries and d.entries[0].record > 0]
        named = f"{group} ({entry.group_name})" if entry.group_name else group
        return cls(
            calls={rank: found for rank, found in calls.items() if rank in members},
            silent=tuple(sorted(members - dumps.keys())),
            name=named,
            first=max((min(calls[rank], default=0) for rank in full), default=0),
        )


def _compare(group: _GroupCalls) -> CollectiveMismatch | None:
    """Return how ranks disagree about the first collective of a group that has not ended.

    Where nobody has ended it, what was called after it proves nothing: a rank that waits in it
    comes to no later one. One that some rank has ended, all came to.
    """
    numbers = sorted({n for found in group.calls.values() for n in found if n >= group.first})
    for number in numbers:
        at = {rank: found[number] for rank, found in group.calls.items() if number in found}
        if not any(entry.is_open for entry in at.values()):
            continue
        lack = [rank for rank in group.calls if rank not in at]
        finding = _differ(group, at) or _lack(group, at, lack) or _not_started(group, at)
        if finding is not None or all(entry.is_open for entry in at.values()):
            return finding
    return None


def _differ(group: _GroupCalls, at: Mapping[int, FlightEntry]) -> CollectiveMismatch | None:
    """Compare what ranks called by one number."""
    called = {
        Desync.OP: {rank: entry.op for rank, entry in at.items()},
        Desync.DTYPE: {rank: " ".join(entry.input_dtypes) for rank, entry in at.items()},
        Desync.SIZE: {rank: _numel(entry) for rank, entry in at.items()},
    }
    differing = (kind for kind, values in called.items() if len(set(values.values())) > 1)
    kind = next(differing, None)
    return None if kind is None else _split(group, kind, at, called[kind])


def _split(
    group: _GroupCalls,
    kind: Desync,
    at: Mapping[int, FlightEntry],
    values: Mapping[int, str],
) -> CollectiveMismatch:
    """Return the mismatch of ranks that called different collectives."""
    (usual, most), *rest = Counter(values.values()).most_common()
    is_certain = all(num < most for _, num in rest)
    guilty = [rank for rank, value in values.items() if value != usual or not is_certain]
    said = "; ".join(
        f"{name_ranks([r for r in at if values[r] == value])} called {_describe(at, values, value)}"
        for value, _ in [(usual, most), *rest]
    )
    entry = next(at[rank] for rank in at if values[rank] == usual)
    return CollectiveMismatch(
        kind=kind,
        ranks=tuple(sorted(guilty)),
        is_certain=is_certain,
        entry=entry,
        text=f"collective {entry.seq} of group {group.name}: {kind.value}: {said}",
    )


def _describe(at: Mapping[int, FlightEntry], values: Mapping[int, str], value: str) -> str:
    """Describe the collective that ranks with one value called."""
    entry = next(at[rank] for rank in at if values[rank] == value)
    tensors = ", ".join(
        f"{dtype}{list(shape)}"
        for shape, dtype in zip(entry.input_sizes, entry.input_dtypes, strict=False)
    )
    return f"{entry.op}({tensors}){_place(entry)}"


def _lack(
    group: _GroupCalls, at: Mapping[int, FlightEntry], lack: Sequence[int]
) -> CollectiveMismatch | None:
    """Return the ranks that did not reach a collective in which others wait."""
    if not lack:
        return None
    entry = next(entry for entry in at.values() if entry.is_open)
    callers = name_ranks(at)
    if len(lack) > len(at):
        kind, ranks = Desync.EXTRA, sorted(at)
        said = f"called by {callers} alone, and never by {name_ranks(lack)}"
    else:
        kind, ranks = Desync.MISSED, sorted(lack)
        said = f"called by {callers}, not by {name_ranks(lack)}"
    is_certain = len(lack) != len(at)
    return CollectiveMismatch(
        kind=kind,
        ranks=tuple(ranks if is_certain else sorted([*lack, *at])),
        is_certain=is_certain,
        entry=entry,
        text=f"{entry.op}, collective {entry.seq} of group {group.name}: {said}{_place(entry)}",
    )


def _not_started(group: _GroupCalls, at: Mapping[int, FlightEntry]) -> CollectiveMismatch | None:
    """Return the ranks whose GPU did not reach a collective in which the kernels of others wait."""
    late = [rank for rank, entry in at.items() if entry.state == "scheduled"]
    if not late or not any(entry.state == "started" for entry in at.values()):
        return None
    entry = at[late[0]]
    return CollectiveMismatch(
        kind=Desync.NOT_STARTED,
        ranks=tuple(sorted(late)),
        is_certain=len(late) * 2 < len(at),
        entry=entry,
        text=f"{entry.op}, collective {entry.seq} of group {group.name}: called by "
        f"{name_ranks(at)}, not started on the GPU of {name_ranks(late)}, which is busy with "
        f"something else{_place(entry)}",
    )


def _silent(group: _GroupCalls) -> CollectiveMismatch | None:
    """Return the ranks without a dump, if all others wait for the same collective."""
    ends = [calls[max(calls)] for calls in group.calls.values() if calls]
    entry = next((entry for entry in ends if entry.is_open), None)
    if not group.silent or entry is None:
        return None
    return CollectiveMismatch(
        kind=Desync.NO_DUMP,
        ranks=group.silent,
        is_certain=len(group.silent) < len(group.calls),
        entry=entry,
        text=f"{entry.op}, collective {entry.seq} of group {group.name}: "
        f"{name_ranks(group.calls)} wait in it, {name_ranks(group.silent)} left no dump"
        f"{_place(entry)}",
    )


def _waiting(dumps: Mapping[int, FlightDump], group: str) -> set[int]:
    """Return the ranks that wait in a collective of a group."""
    return {
        rank
        for rank, dump in dumps.items()
        if any(entry.is_open and entry.group == group for entry in dump.entries)
    }


def _numel(entry: FlightEntry) -> str:
    """Return how many elements a rank gives or gets, where that is the same for all."""
    if entry.op in _EVEN_OUTPUT:
        return str(sum(map(math.prod, entry.output_sizes)))
    if entry.op in _EVEN_INPUT:
        return " ".join(str(math.prod(shape)) for shape in entry.input_sizes)
    return ""


def _place(entry: FlightEntry) -> str:
    return f" at {entry.own_frame}" if entry.own_frame is not None else ""
