"""Find the rank and the event that a failure began with. Pure.

The earliest event over all ranks that is not a consequence of another one. Order of evidence: what
explains everything else (a job's time limit, a GPU that is gone); signals; exceptions; exit codes;
and, if there are only ranks that waited, the one that did not come.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from pytest_megatron.base.text import counted, grouped, name_ranks
from pytest_megatron.runs.headline import where_ranks_were
from pytest_megatron.triage.logs.exits import how_it_ended
from pytest_megatron.triage.rank_log import (
    End,
    Event,
    Fatal,
    LogLine,
    RankLog,
    RankStory,
    Root,
)
from pytest_megatron.triage.signatures import LineRole, Signature, Table, is_own_mistake

_FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=\d+, )?(?P<call>OpType=[^)]*?TensorDtypes=[^,)]*|OpType=[^),]*)"
)
_TIMEOUTS = ("nccl_timeout", "store_timeout")


def is_watchdog(event: Event) -> bool:
    """Return true if a line reports that a rank was ended because of others."""
    return event.signature.is_fatal and event.signature.role is LineRole.CASCADE


def find_absent(rank_log: RankLog, table: Table) -> Root | None:
    """Return the rank to blame, by the logs of ranks that only waited for others or lost them."""
    hurt = {r: rank for r, rank in rank_log.ranks.items() if cascade_of(rank) is not None}
    if not hurt:
        fatal = rank_log.launcher.fatal
        if fatal is None or fatal.signature.family not in _TIMEOUTS:
            return None
        absent = [rank for rank in range(rank_log.world_size) if rank not in rank_log.ranks]
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
    came, late = _came(rank_log, hurt)
    named = tuple(rank for rank in _named(hurt.values()) if rank not in hurt) or late
    silent = named or tuple(r for r in _silent(rank_log, hurt.keys()) if r not in came)
    is_elsewhere = not (is_timeout or named or rank_log.has_exits or rank_log.ranks.keys() - hurt)
    also = _collectives(hurt)
    if silent and is_elsewhere:
        silent, also = (), ("another rank ended first, and its log is not here", *also)
    odd = () if silent else _odd(hurt)
    if silent and not is_timeout:
        signature = table["silent_exit"]
    if odd:
        signature = table["collective_differs"]
    ranks = silent or odd
    if len(ranks) > max(1, rank_log.world_size // 2):
        ranks = ()
    return Root(
        signature=signature,
        ranks=ranks,
        who=None if ranks else f"{name_ranks(hurt)} of {rank_log.world_size}",
        what=_what_it_did(ranks, hurt, rank_log, worst, is_timeout=is_timeout),
        places=worst.places,
        message=worst.message,
        frame=_stack_frame(rank_log, ranks),
        also=also,
    )


def _what_it_did(
    ranks: Sequence[int],
    hurt: dict[int, RankStory],
    rank_log: RankLog,
    worst: Fatal,
    *,
    is_timeout: bool,
) -> str:
    """Describe what the ranks that failed did."""
    if not ranks:
        what = "waited for a collective that did not finish"
        return what if is_timeout else f"lost another rank: {worst.headline}"
    rank = rank_log.ranks.get(ranks[0])
    if rank is not None and ranks[0] in hurt:
        call = _collective_call(rank)
        return "called another collective" + ("" if call is None else f", {call}")
    if is_timeout:
        return "did not come to a collective that the others waited in"
    return "ended without a word while the others went on"


def _stack_frame(rank_log: RankLog, ranks: Sequence[int]) -> str | None:
    return rank_log.ranks[ranks[0]].stack_frame if ranks and ranks[0] in rank_log.ranks else None


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


def _silent(rank_log: RankLog, hurt: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks that neither waited nor were stopped by the launcher.

    torch's agent reports every rank that it stopped; one that it does not report had ended well.
    """
    others = [rank for rank in range(rank_log.world_size) if rank not in set(hurt)]
    if not rank_log.has_exits:
        return tuple(others)
    unreported = [r for r in others if r not in rank_log.ranks or rank_log.ranks[r].exit is None]
    return tuple(unreported or others)


def _came(rank_log: RankLog, hurt: dict[int, RankStory]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the other ranks that had called the collective that timed out, and that had not."""
    works = [work for story in hurt.values() for work in story.enqueued]
    number = min((w.timed_out for w in works if w.timed_out is not None), default=None)
    groups = {w.group for w in works if w.timed_out == number and w.group}
    last = {
        rank: max(numbers)
        for rank, story in rank_log.ranks.items()
        if rank not in hurt
        and (
            numbers := [
                w.last
                for w in story.enqueued
                if w.last is not None and (w.group in groups or not (groups and w.group))
            ]
        )
    }
    if number is None:
        return (), ()
    late = tuple(rank for rank, found in last.items() if found < number)
    return tuple(last.keys() - set(late)), late


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


def odd_by_fingerprint(rank_log: RankLog) -> tuple[int, ...]:
    """Return the ranks whose collective differs from that of most, by the ranks' own reports.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL each rank prints its own collective and one of the others'.
    """
    values = {
        int(found["rank"]): found["call"]
        for rank in rank_log.ranks.values()
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
            size = (
                "" if work.num_elements is None else f" of {counted(work.num_elements, 'element')}"
            )
            return f"{work.op} #{work.timed_out}{size}"
    if rank.fatal is None:
        return None
    calls = [f for f in rank.fatal.frames if f.startswith("distributed_c10d.py:")]
    return calls[-1].partition(" in ")[2] if calls else None


def _last_enqueued(rank: RankStory) -> str | None:
    return next((str(work.last) for work in rank.enqueued if work.last is not None), None)


def _collectives(hurt: dict[int, RankStory]) -> tuple[str, ...]:
    """Return the collective in which each rank waited, with the ranks of each together."""
    found = ((_collective_call(story), rank) for rank, story in hurt.items())
    calls = grouped((call, rank) for call, rank in found if call is not None)
    return tuple(f"{name_ranks(ranks)} waited in {call}" for call, ranks in calls.items())


TIE_S = 2.0  # stamps have whole seconds, and clocks of nodes differ
_NOT_THE_CAUSE = ("SIGTERM", "exit code 0")
_ENDED_BY_US = (End.TIME_LIMIT, End.HUNG_COLLECTIVE, End.STOPPED, End.NOT_EXITED)
_FROM_OUTSIDE = ("SIGABRT", "SIGINT", "SIGKILL", "SIGQUIT")  # where it ended every rank
_SPEAKS_FIRST = ("SIGABRT",)  # what a process does to itself after it said why


class _CauseKind(IntEnum):
    """Evidence that a rank failed; of two at the same time the lower one is the cause."""

    SIGNAL = 0
    NATIVE = 1
    RAISED = 2
    SILENT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _CauseCandidate:
    """A rank that may be the one."""

    story: RankStory
    kind: _CauseKind
    signature: Signature
    what: str
    places: tuple[LogLine, ...]
    fatal: Fatal | None = None

    @property
    def is_first(self) -> bool:
        """True if the launcher saw it before every other one."""
        return self.story.exit is not None and self.story.exit.is_first

    @property
    def is_own_mistake(self) -> bool:
        """True if it raised what no network and no machine raises."""
        fatal = self.fatal
        return fatal is not None and is_own_mistake(fatal.message, fatal.frames)


def find_root(rank_log: RankLog, table: Table) -> Root | None:
    """Return what a failure began with; None if nothing failed."""
    candidates = [
        c for rank in rank_log.ranks.values() if (c := _candidate(rank, table)) is not None
    ]
    is_stopped = _is_stopped(rank_log)
    if is_stopped:
        ranks = (replace(rank, exit=None) for rank in rank_log.ranks.values())
        own = [c for rank in ranks if (c := _candidate(rank, table)) is not None and _is_own(c)]
        candidates = own if rank_log.unit.known.ended in _ENDED_BY_US else own or candidates
    root = _choose_root(candidates, rank_log)
    if root is not None and (odd := odd_by_fingerprint(rank_log)):
        guilty = next((_root_of(c, odd) for c in candidates if c.story.rank == odd[0]), root)
        root = replace(guilty, ranks=odd, is_all=False, what="called another collective")
    launcher = _candidate(rank_log.launcher, table)
    is_ended = rank_log.unit.known.ended not in _ENDED_BY_US
    if root is None and launcher is not None and is_ended and launcher.is_own_mistake:
        root = _root_of(launcher, ())
    limit = next((e for e in _events(rank_log) if _is_limit_after(e, root)), None)
    is_done = root is None and rank_log.unit.known.ended is End.NOT_EXITED
    explained = None if limit is not None or is_done else _explained(rank_log, root)
    if explained is not None or is_done:
        return explained
    if root is not None and (is_stopped or limit is not None):
        root = _with_hang_after(root, rank_log, limit)
    if root is not None or rank_log.unit.known.ended is End.STOPPED:
        return root or _line(rank_log)
    if rank_log.unit.known.ended is End.TIME_LIMIT:
        return _time_limit(rank_log, table)
    if launcher is not None and rank_log.unit.known.ended is not End.HUNG_COLLECTIVE:
        return _root_of(launcher, ())
    waiting = _lone_root(rank_log) or find_absent(rank_log, table)
    if waiting is not None:
        return waiting
    found = (
        _line(rank_log) or _outcome(rank_log, table) or _raised(rank_log, table) or _hint(rank_log)
    )
    return found or _root_in_silent(rank_log, table)


def _is_stopped(rank_log: RankLog) -> bool:
    """Return true if whoever started the ranks ended them; one signal of all comes from there."""
    ends = [rank.how for rank in rank_log.ranks.values() if rank.how]
    is_one = len(ends) > 1 and len(set(ends)) == 1 and ends[0] in _FROM_OUTSIDE
    return is_one or rank_log.unit.known.ended in _ENDED_BY_US


def _is_limit_after(event: Event, root: Root | None) -> bool:
    """Return true if a line tells of a time limit that was reached after an exception.

    In another log, whose times may be other ones, after what no end of a job raises.
    """
    if root is None or root.message is None or event.signature.family != "time_limit":
        return False
    if not root.places or root.places[0].log != event.place.log:
        return is_own_mistake(root.message)
    return root.places[0].offset < event.place.offset


def _with_hang_after(root: Root, rank_log: RankLog, limit: Event | None) -> Root:
    """Add to an exception that its rank did not exit afterwards; any other root is unchanged.

    `limit` is the line on the time limit that then ended the rank.
    """
    story = rank_log.ranks.get(root.ranks[0]) if root.ranks else rank_log.launcher
    if root.message is None or story is None or story.how.startswith("exit code "):
        return root
    where = "" if story.stack_frame is None else f", it was at {story.stack_frame}"
    also = () if limit is None else (f"its log says {limit.place.text.strip()!r}",)
    places = () if limit is None else (limit.place,)
    return replace(
        root,
        then=f"did not exit afterwards{where}",
        places=(*root.places, *places),
        also=(*also, *root.also),
    )


def _is_own(candidate: _CauseCandidate) -> bool:
    """Return true if a rank of a launch that was stopped failed by itself.

    Not by the signal that had it print its stack, nor by what a wait for others ends in.
    """
    return candidate.kind is _CauseKind.RAISED and not candidate.signature.is_transient


def _candidate(rank: RankStory, table: Table) -> _CauseCandidate | None:
    """Return how a rank failed by itself, None if it did not, or only followed another one."""
    how, fatal, native = rank.how, rank.fatal, _native(rank)
    is_signal = how.startswith("SIG") and how not in _NOT_THE_CAUSE
    ends = () if rank.exit_place is None else (rank.exit_place,)
    places: tuple[LogLine, ...] = ends if native is None else (native.place, *ends)
    what = _describe_end(how)
    has_waited = any(map(is_watchdog, rank.events))
    is_line = has_waited and fatal is not None and fatal.signature.id == "exit_code"
    if is_signal and how not in _SPEAKS_FIRST:
        kind = _CauseKind.SIGNAL
        signature = _signature_of_exit(table, how) if native is None else native.signature
    elif fatal is not None and fatal.signature.role is LineRole.CAUSE and not is_line:
        return _raised_by(rank, fatal)
    elif native is not None and how != "exit code 0":
        kind, signature = _CauseKind.NATIVE, native.signature
        what = f"{_quoted(native)} and {what}" if how else _quoted(native)
    elif not how or how in _NOT_THE_CAUSE or fatal is not None or has_waited:
        return None
    else:
        kind = _CauseKind.SIGNAL if is_signal else _CauseKind.SILENT
        signature, places = _signature_of_exit(table, how), (*ends, *rank.last_words[-2:])
    return _CauseCandidate(story=rank, kind=kind, signature=signature, what=what, places=places)


def _raised_by(rank: RankStory, fatal: Fatal) -> _CauseCandidate:
    """Return the exception of a rank, or of the launcher."""
    return _CauseCandidate(
        story=rank,
        kind=_CauseKind.RAISED,
        signature=fatal.signature,
        what=f"{fatal.verb} {fatal.headline}",
        places=fatal.places,
        fatal=fatal,
    )


def _lone_root(rank_log: RankLog) -> Root | None:
    """Return the ranks whose own Python raised that a child or a pipe of theirs failed.

    A pipe may have broken since a rank ended well: one that torch's agent, who reports all others,
    does not list; without its reports, a silent one that others lost.
    """
    lone = [
        _raised_by(rank, rank.fatal)
        for rank in rank_log.ranks.values()
        if rank.fatal is not None and rank.fatal.is_lone
    ]
    ranks = [rank_log.ranks.get(rank) for rank in range(rank_log.world_size)]
    num_hurt = sum(rank is not None and cascade_of(rank) is not None for rank in ranks)
    is_one_silent = len(lone) < num_hurt < rank_log.world_size
    if any(rank is not None and rank.exit is not None and rank.exit.pid for rank in ranks):
        is_one_silent = any(rank is None or rank.exit is None for rank in ranks)
    if is_one_silent:
        lone = [candidate for candidate in lone if candidate.signature.family == "exit"]
    return _choose_root(lone, rank_log)


def _native(rank: RankStory) -> Event | None:
    """Return the line with which native code, or a program before its start, ended a process."""
    return next(
        (e for e in rank.events if e.signature.is_fatal and e.signature.role is LineRole.CAUSE),
        None,
    )


def _signature_of_exit(table: Table, how: str) -> Signature:
    return table.exit(how) or table["exit_code"]


def _describe_end(how: str) -> str:
    return f"was killed by {how}" if how.startswith("SIG") else f"ended with {how}"


def _choose_root(candidates: Sequence[_CauseCandidate], rank_log: RankLog) -> Root | None:
    """Return the cause that came before all others, with all ranks that it is alike on.

    Where the times do not tell, the stronger kind of evidence decides (`_CauseKind`), then what is
    not transient, the first exit that the launcher saw, and the lowest rank.
    """
    if not candidates:
        return None
    tied = [c for c in candidates if not any(_is_before(other, c) for other in candidates)]
    tied = tied or list(candidates)

    def order(candidate: _CauseCandidate) -> tuple[int, bool, bool, int]:
        """Sort candidates for the cause."""
        rank = candidate.story.rank
        return (
            candidate.kind,
            candidate.signature.is_transient,
            not candidate.is_first,
            -1 if rank is None else rank,
        )

    root = min(tied, key=order)
    alike = [c for c in candidates if _is_alike(c, root)]
    ranks = sorted(c.story.rank for c in alike if c.story.rank is not None)
    is_all = 1 < rank_log.world_size == len(ranks)
    if not is_all and root.story.rank is not None:
        ranks.remove(root.story.rank)
        ranks.insert(0, root.story.rank)
    return _root_of(root, tuple(ranks), is_all=is_all)


def _is_alike(one: _CauseCandidate, other: _CauseCandidate) -> bool:
    """Return whether two ranks failed in the same way."""
    if one.signature.id != other.signature.id or one.kind is not other.kind:
        return False
    if one.fatal is None or other.fatal is None:
        return one.story.how == other.story.how
    return one.fatal.frame == other.fatal.frame


def _is_before(one: _CauseCandidate, other: _CauseCandidate) -> bool:
    """Return true if one happened clearly before another, by a clock that both have."""
    for a, b in zip(_times(one), _times(other), strict=True):
        if a is not None and b is not None:
            return a + TIE_S < b
    return False


def _times(candidate: _CauseCandidate) -> tuple[float | None, float | None, float | None]:
    """Return when a rank failed by torch's error file, by its log and by the launcher."""
    fatal, end = candidate.fatal, candidate.story.exit
    epoch_s = None if fatal is None else fatal.epoch_s
    time_s = None if fatal is None else fatal.time_s
    return epoch_s, time_s, None if end is None else end.time_s


def _root_of(candidate: _CauseCandidate, ranks: tuple[int, ...], *, is_all: bool = False) -> Root:
    """Return the root cause from a candidate."""
    fatal = candidate.fatal
    rank = candidate.story
    return Root(
        signature=candidate.signature,
        ranks=ranks,
        what=candidate.what,
        places=candidate.places,
        frame=rank.stack_frame if fatal is None else fatal.frame,
        message=None if fatal is None else fatal.message,
        is_all=is_all,
    )


def _explained(rank_log: RankLog, root: Root | None) -> Root | None:
    """Return what makes the root that was found a consequence, such as a job's time limit."""
    waited = [c for rank in rank_log.ranks.values() if (c := cascade_of(rank)) is not None]
    family = "unknown" if root is None else root.signature.family
    if root is None and any(c.signature.family == "nccl_timeout" for c in waited):
        family = "nccl_timeout"  # it is known what failed, and not what is to blame
    events = [e for e in _events(rank_log) if e.signature.explains]
    fitting = [e for e in events if family in e.signature.explains]
    if root is None and rank_log.unit.known.returncode == 0:
        fitting = []
    if root is None and (rank_log.is_presumed_clean or rank_log.success is not None):
        fitting = [e for e in fitting if e.signature.is_fatal]  # the others only warn
    if not fitting:
        return None
    event = fitting[0]
    is_of_job = event.signature.family in ("time_limit", "preempt", "node_fail")
    ranks = () if root is None or is_of_job else root.ranks
    said = f"its log says {event.place.text.strip()!r}"
    return Root(
        signature=event.signature,
        ranks=ranks if event.rank is None else (event.rank,),
        what=f"failed: {said}" if root is None or not ranks else root.what,
        who=None if ranks or event.rank is not None else "the launch",
        places=(event.place, *(() if root is None else root.places[:1])),
        also=(said,) if root is not None and ranks else (),
    )


def _events(rank_log: RankLog) -> Iterable[Event]:
    for rank in (rank_log.launcher, *rank_log.ranks.values()):
        yield from rank.events


def _time_limit(rank_log: RankLog, table: Table) -> Root:
    """Return the root cause of a time limit: where each rank was."""
    frames = {r: rank.stack_frame for r, rank in rank_log.ranks.items() if rank.stack_frame}
    counts = Counter(frames.values())
    odd = tuple(r for r, frame in frames.items() if counts[frame] < max(counts.values()))
    limit_s = rank_log.unit.known.limit_s
    limit = "time limit" if limit_s is None else f"time limit of {limit_s:g} s"
    return Root(
        signature=table["time_limit"],
        ranks=odd if len(odd) == 1 else (),
        who="",
        what=f"{limit} reached",
        where=where_ranks_were(frames),
    )


def _line(rank_log: RankLog) -> Root | None:
    """Return a line of a log that shows a failure where no rank, and no launcher, reported one."""
    is_clean = rank_log.unit.known.returncode == 0
    causes = [e for e in _events(rank_log) if e.signature.role is LineRole.CAUSE]
    fatal = [e for e in causes if e.signature.is_fatal and not is_clean]
    soft = [e for e in causes if e.signature.family == "nonfinite_loss"]
    return next(map(_wrote, (*fatal, *soft)), None)


def _wrote(event: Event) -> Root:
    """Return the root cause that a line of a log is."""
    return Root(
        signature=event.signature,
        ranks=() if event.rank is None else (event.rank,),
        what=_quoted(event),
        places=(event.place,),
    )


def _quoted(event: Event) -> str:
    return f"wrote {event.place.text.strip()[:200]!r}"


def _outcome(rank_log: RankLog, table: Table) -> Root | None:
    """Return that a step or a process failed, as a runner or another launcher reports.

    Of several the one with a signal. An exception explains more than an outcome.
    """
    if rank_log.unit.known.returncode == 0:
        return None
    events = [e for e in _events(rank_log) if e.signature.role is LineRole.OUTCOME]
    ended = [(event, _end_told_by(event)) for event in events]
    known = [(e, row) for e, how in ended if (row := _known_end(table, how)) is not None]
    plain = [(e, e.signature) for e in events] if rank_log.launcher.fatal is None else []
    found = (replace(_wrote(event), signature=row, ranks=()) for event, row in [*known, *plain])
    return next(found, None)


def _end_told_by(event: Event) -> str | None:
    """Return `SIGKILL` or `exit code 3` of a line that reports an end."""
    match = event.signature.search(event.place.text)
    told = None if match is None else next((g for g in match.groups() if g), None)
    if told is None or told.startswith("SIG"):
        return told
    return how_it_ended(int(told))


def _known_end(table: Table, how: str | None) -> Signature | None:
    """Return the row for an end by a signal; a plain exit code has none."""
    row = None if how is None else table.exit(how)
    return row if row is not None and row.id in ("sigkill", "native_crash", "terminated") else None


def _hint(rank_log: RankLog) -> Root | None:
    """Return the last warning of a log that shows neither a failure nor a good end."""
    if rank_log.is_presumed_clean or rank_log.success is not None:
        return None
    roles = (LineRole.CAUSE, LineRole.CASCADE, LineRole.CONFIRMATION)
    events = [e for e in _events(rank_log) if e.signature.family != "unknown"]
    telling = (event for role in roles for event in events if event.signature.role is role)
    return next(map(_wrote, telling), None)


def _raised(rank_log: RankLog, table: Table) -> Root | None:
    """Return what the launcher's log says: SIGTERM stopped all, or its own exception."""
    if {rank.how for rank in rank_log.ranks.values()} - {""} == {"SIGTERM"}:
        what, words = "was stopped by SIGTERM", rank_log.launcher.last_words[-2:]
        return Root(signature=table["terminated"], ranks=(), what=what, places=words)
    fatal = rank_log.launcher.fatal
    if fatal is None:
        return None
    root = _root_of(_raised_by(rank_log.launcher, fatal), ())
    return replace(root, frame=None, message=None) if fatal.is_of_agent else root


def _root_in_silent(rank_log: RankLog, table: Table) -> Root | None:
    """Return that something failed for an unknown reason, if it did."""
    code, words = rank_log.unit.known.returncode, rank_log.launcher.last_words[-3:]
    if not rank_log.has_exits and code in (None, 0):
        return None
    what = "failed" if code in (None, 0) else _describe_end(how_it_ended(code))
    said = f"its last words: {words[-1].text.strip()[:200]!r}" if words else "it says nothing"
    return Root(signature=table["unknown"], ranks=(), what=f"{what}; {said}", places=words)
