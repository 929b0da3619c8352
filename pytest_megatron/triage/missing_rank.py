"""Find the rank that the others waited for, or lost, where each log is about others. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from pytest_megatron.base.text import name_ranks
from pytest_megatron.triage.collectives import Desync
from pytest_megatron.triage.rank_log import Event, Fatal, RankLog, RankStory, Root
from pytest_megatron.triage.signatures import LineRole, Table

_FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=\d+, )?(?P<call>OpType=[^)]*?TensorDtypes=[^,)]*|OpType=[^),]*)"
)
_TIMEOUTS = ("nccl_timeout", "store_timeout")


def is_watchdog(event: Event) -> bool:
    """Return true if a line reports that a rank was ended because of others."""
    return event.signature.is_fatal and event.signature.role is LineRole.CASCADE


def find_absent(story: RankLog, table: Table) -> Root | None:
    """Return the rank to blame, by the logs of ranks that only waited for others or lost them."""
    hurt = {r: rank for r, rank in story.ranks.items() if cascade_of(rank) is not None}
    if story.collectives:
        return _by_flights(story, table, hurt)
    if not hurt:
        fatal = story.launcher.fatal
        if fatal is None or fatal.signature.family not in _TIMEOUTS:
            return None
        absent = [rank for rank in range(story.world_size) if rank not in story.ranks]
        return Root(
            signature=fatal.signature,
            ranks=tuple(absent[:1]),
            what="never came",
            places=fatal.places,
            message=fatal.message,
        )
    worst = _worst(hurt.values())
    signature = worst.signature
    is_timeout = signature.family in _TIMEOUTS
    named = tuple(rank for rank in _named(hurt.values()) if rank not in hurt)
    silent = named or _silent(story, hurt.keys())
    odd = () if silent else _odd(hurt)
    if silent and not is_timeout:
        signature = table["silent_exit"]
    if odd:
        signature = table["collective_differs"]
    ranks = silent or odd
    if len(ranks) > max(1, story.world_size // 2):
        ranks = ()
    return Root(
        signature=signature,
        ranks=ranks,
        what=_what_it_did(ranks, hurt, story, is_timeout=is_timeout),
        places=worst.places,
        message=worst.message,
        frame=_stack_frame(story, ranks),
        also=_collectives(hurt),
    )


def _by_flights(story: RankLog, table: Table, hurt: dict[int, RankStory]) -> Root:
    """Return the root by the collective that ranks disagree about in flight recorders."""
    first = story.collectives[0]
    is_other = first.kind in (Desync.OP, Desync.SIZE, Desync.DTYPE, Desync.EXTRA)
    shown = next((c for rank in hurt.values() if (c := cascade_of(rank)) is not None), None)
    ranks = first.ranks if first.is_certain else ()
    return Root(
        signature=table["collective_differs" if is_other else "nccl_timeout"],
        ranks=ranks,
        what=_what_it_did_there(first.kind),
        places=() if shown is None else shown.places,
        message=None if shown is None else shown.message,
        frame=_stack_frame(story, ranks),
        also=tuple(f"flight recorders: {finding.text}" for finding in story.collectives),
    )


def _what_it_did_there(kind: Desync) -> str:
    match kind:
        case Desync.OP | Desync.SIZE | Desync.DTYPE:
            return f"called a collective with {kind.value} than the others"
        case Desync.EXTRA:
            return "called a collective that the others did not"
        case Desync.MISSED | Desync.NOT_STARTED | Desync.NO_DUMP:
            return "did not come to a collective that the others waited in"


def _what_it_did(
    ranks: Sequence[int], hurt: dict[int, RankStory], story: RankLog, *, is_timeout: bool
) -> str:
    if not ranks:
        return "waited for a collective that did not finish" if is_timeout else "lost another rank"
    rank = story.ranks.get(ranks[0])
    if rank is not None and ranks[0] in hurt:
        call = _collective_call(rank)
        return "called another collective" + ("" if call is None else f", {call}")
    if is_timeout:
        return "did not come to a collective that the others waited in"
    return "ended without a word while the others went on"


def _stack_frame(story: RankLog, ranks: Sequence[int]) -> str | None:
    return story.ranks[ranks[0]].stack_frame if ranks and ranks[0] in story.ranks else None


def cascade_of(rank: RankStory) -> Fatal | None:
    """Return what shows that a rank only waited for others or lost them."""
    if rank.fatal is not None and rank.fatal.signature.role is LineRole.CASCADE:
        return rank.fatal
    event = next(filter(is_watchdog, rank.events), None)
    if event is None:
        return None
    return Fatal(signature=event.signature, message=event.place.text, place=event.place)


def _worst(ranks: Iterable[RankStory]) -> Fatal:
    """Return what most ranks report; a time-out wins over a lost connection."""
    found = [c for rank in ranks if (c := cascade_of(rank)) is not None]
    counts = Counter(fatal.signature.id for fatal in found)
    return min(found, key=lambda f: (f.signature.family not in _TIMEOUTS, -counts[f.signature.id]))


def _named(ranks: Iterable[RankStory]) -> tuple[int, ...]:
    """Return the ranks that others name as missing."""
    names: set[int] = set()
    for rank in ranks:
        if rank.fatal is not None:
            match = rank.fatal.signature.search(rank.fatal.message)
            missing = None if match is None else match.groupdict().get("missing")
            names |= {int(n) for n in missing.split(",")} if missing else set()
    return tuple(sorted(names))


def _silent(story: RankLog, hurt: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks that neither waited nor were stopped by the launcher.

    torch's agent reports every rank that it stopped; one that it does not report had ended well.
    """
    others = [rank for rank in range(story.world_size) if rank not in set(hurt)]
    if not story.has_exits:
        return tuple(others)
    unreported = [r for r in others if r not in story.ranks or story.ranks[r].exit is None]
    return tuple(unreported or others)


def _odd(hurt: dict[int, RankStory]) -> tuple[int, ...]:
    """Return the ranks that waited in another collective, or behind it, than more than half did.

    How far ranks came behind a collective that none of them ended differs without any of them
    being at fault.
    """
    for key in (_collective_call, _last_enqueued):
        values = {rank: value for rank, story in hurt.items() if (value := key(story)) is not None}
        counts = Counter(values.values())
        ((usual, most),) = counts.most_common(1) or [("", 0)]
        if len(counts) > 1 and most * 2 > len(values):
            return tuple(sorted(rank for rank, value in values.items() if value != usual))
    return ()


def odd_by_fingerprint(story: RankLog) -> tuple[int, ...]:
    """Return the ranks whose collective differs from that of most, by the ranks' own reports.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL each rank prints its own collective and one of the others'.
    """
    values = {
        int(found["rank"]): found["call"]
        for rank in story.ranks.values()
        if rank.fatal is not None
        for found in _FINGERPRINT.finditer(rank.fatal.message)
    }
    counts = Counter(values.values()).most_common(2)
    if len(counts) <= 1 or counts[0][1] == counts[1][1]:
        return ()
    return tuple(sorted(rank for rank, call in values.items() if call != counts[0][0]))


def _collective_call(rank: RankStory) -> str | None:
    """Return the collective that a rank waited in, by its traceback or its watchdog."""
    for work in rank.enqueued:
        if work.op is not None:
            size = "" if work.num_elements is None else f" of {work.num_elements} elements"
            return f"{work.op} #{work.timed_out}{size}"
    if rank.fatal is None:
        return None
    calls = [f for f in rank.fatal.frames if f.startswith("distributed_c10d.py:")]
    return calls[-1].partition(" in ")[2] if calls else None


def _last_enqueued(rank: RankStory) -> str | None:
    return next((str(work.last) for work in rank.enqueued if work.last is not None), None)


def _collectives(hurt: dict[int, RankStory]) -> tuple[str, ...]:
    """Return the collective in which each rank waited, with the ranks of each together."""
    calls: dict[str, list[int]] = {}
    for rank, story in hurt.items():
        call = _collective_call(story)
        if call is not None:
            calls.setdefault(call, []).append(rank)
    return tuple(f"{name_ranks(ranks)} waited in {call}" for call, ranks in calls.items())
