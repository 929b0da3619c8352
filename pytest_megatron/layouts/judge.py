"""Judgement of recorded ranks against one another. Pure.

Their programs are played as well, to find waits that never end. A rank issues calls and waits for
some. A collective ends when each member that was run has issued it; a message when both ends have.
With NCCL the calls of one communicator end in the order in which they were issued: those of a
group share one, and unbatched messages have one for each pair, unless the group was made for a
device. Ranks that were not run are always ready.

Source: ProcessGroupNCCL.cpp of torch, `getKeySendRecv`, `pointToPoint` and `eagerInit_`; v2.13.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, pairwise, product, takewhile, zip_longest
from operator import itemgetter

from pytest_megatron.base.text import counted, name_ranks
from pytest_megatron.layouts.model import EAGER, Call, MadeGroup, RankRecord, kinds_of
from pytest_megatron.layouts.report import size_text
from pytest_megatron.runs.record import RecordedFakeRank, RecordedFault, RecordedLayout

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that waits for ever, in a call, for another rank."""

    rank: int
    call: Call
    for_rank: int


Channel = tuple[str, int, int, bool]
_Ends = tuple[Sequence[Call], Sequence[Call]]  # sends, and receives


def channel_of(rank: int, call: Call, paired: Collection[str]) -> Channel:
    """Return group, source and destination of a message, and whether it is for its pair alone."""
    peer = -1 if call.peer is None else call.peer
    ends = (rank, peer) if call.kind == "send" else (peer, rank)
    return (call.group, *ends, call.batch is None and call.group in paired)


def paired_groups(records: Mapping[int, RankRecord]) -> set[str]:
    """Return the groups whose unbatched messages have a communicator for each pair of ranks."""
    groups = (group for record in records.values() for group in record.groups)
    return {g.name for g in groups if "nccl" in g.backend and EAGER not in g.backend}


class Simulation:
    """Ranks that run side by side until none goes on."""

    def __init__(
        self, records: Mapping[int, RankRecord], members: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._records = records
        self._members = {n: [r for r in ranks if r in records] for n, ranks in members.items()}
        backends = next(iter(records.values())).groups
        self._nccl = {group.name for group in backends if "nccl" in group.backend}
        self._paired = paired_groups(records)
        self._events = {rank: _events(record) for rank, record in records.items()}
        self._next = dict.fromkeys(records, 0)
        self._posted: dict[tuple[int, Key], int] = defaultdict(int)  # of a rank on a channel
        self._done: set[int] = set()
        self._queues: dict[tuple[int, Key], list[tuple[Call, Key, int]]] = defaultdict(list)
        self._sides: dict[tuple[int, Key], list[Call]] = defaultdict(list)
        for rank, record in records.items():
            for call in record.calls:
                self._sides[rank, self._matching(rank, call)].append(call)

    def run(self) -> list[Blocked]:
        """Return a chain of waits, each for the next one's rank; empty if all ranks end."""
        is_moving = True
        while is_moving:
            is_moving = sum(self._advance(rank) for rank in self._records) > 0
            is_moving |= sum(self._finish(key) for key in list(self._queues)) > 0
        return self._chain()

    def _advance(self, rank: int) -> bool:
        """Run the calls of a rank until it waits; return whether any ran."""
        events, begin = self._events[rank], self._next[rank]
        while self._next[rank] < len(events):
            call, is_wait = events[self._next[rank]]
            if is_wait and id(call) not in self._done:
                break
            if not is_wait:
                matching = self._matching(rank, call)
                self._posted[rank, matching] += 1
                queue = self._queues[rank, self._communicator(call)]
                queue.append((call, matching, self._posted[rank, matching]))
            self._next[rank] += 1
        return self._next[rank] > begin

    def _finish(self, key: tuple[int, Key]) -> bool:
        """End the calls of a communicator that can end."""
        queue, begin = self._queues[key], len(self._queues[key])
        while queue:
            ready = [one for one in self._heads(key) if self._missing(key[0], *one) is None]
            if not ready:
                break
            for ended in ready:
                self._done.add(id(ended[0]))
                queue.remove(ended)
        return len(queue) < begin

    def _heads(self, key: tuple[int, Key]) -> list[tuple[Call, Key, int]]:
        """Return the calls of a communicator that wait for no earlier one."""
        queue = self._queues[key]
        if not queue or key[1][0] == "free":
            return list(queue)
        batch = queue[0][0].batch
        return [one for one in queue if batch is not None and one[0].batch == batch] or queue[:1]

    def _missing(self, rank: int, call: Call, matching: Key, number: int) -> int | None:
        """Return a rank whose side of a call has not begun; None if all have."""
        for other in self._others(rank, call):
            theirs = self._sides[other, matching]
            if number > len(theirs):
                continue  # what one rank does after its last step
            there = theirs[number - 1]
            if self._posted[other, matching] < number:
                return other
            heads = self._heads((other, self._communicator(there)))
            if id(there) not in self._done and all(one[0] is not there for one in heads):
                return other
        return None

    def _others(self, rank: int, call: Call) -> list[int]:
        """Return the ranks whose calls have to meet this one."""
        if call.kind in ("send", "recv"):
            peer = call.peer
            return [peer] if peer in self._records and peer is not None and peer != rank else []
        return [other for other in self._members.get(call.group, []) if other != rank]

    def _matching(self, rank: int, call: Call) -> Key:
        """Return what both ends of a call have in common; the n-th there meets the n-th here."""
        if call.kind in ("send", "recv"):
            # The two ends of a channel are counted apart, since one rank never is both.
            return ("channel", *channel_of(rank, call, self._paired))
        return ("group", call.group)

    def _communicator(self, call: Call) -> Key:
        """Return the queue in which calls have to meet in order."""
        if call.group not in self._nccl:
            return ("free", call.group)
        is_message = call.kind in ("send", "recv")
        if is_message and call.batch is None and call.group in self._paired:
            return ("ordered", call.group, call.peer)
        return ("ordered", call.group)

    def _chain(self) -> list[Blocked]:
        """Follow the waits from the first rank that does not end until a rank comes again."""
        stuck = {}
        for rank, events in self._events.items():
            if self._next[rank] < len(events):
                stuck[rank] = self._blocked(rank, events[self._next[rank]][0])
        rank = min(stuck, default=-1)
        seen: list[int] = []
        while rank in stuck and rank not in seen:
            seen.append(rank)
            rank = stuck[rank].for_rank
        start = seen.index(rank) if rank in seen else 0
        return [stuck[rank] for rank in seen[start:]]

    def _blocked(self, rank: int, waited: Call) -> Blocked:
        """Return what holds up a rank: the call it waits for, or one before that."""
        for call, matching, number in self._heads((rank, self._communicator(waited))):
            missing = self._missing(rank, call, matching, number)
            if missing is not None:
                return Blocked(rank, call, missing)
        return Blocked(rank, waited, rank)


def _events(record: RankRecord) -> list[tuple[Call, bool]]:
    """Return what a rank does, in order: it issues a call, or waits for one."""
    found = [(call.issued, call, False) for call in record.calls]
    found += [(call.waited, call, True) for call in record.calls if call.waited is not None]
    return [(call, is_wait) for _, call, is_wait in sorted(found, key=lambda event: event[0])]


_MOST_FAULTS = 10
_SHOWN_RANKS, _SHOWN_SHAPES = 8, 3
_BROKEN = ("failed", "lost", "unknown")


@dataclass(slots=True)
class _RankComparison:
    records: Mapping[int, RankRecord]
    num_compared: int = 0
    num_left_out: int = 0
    # Lines whose sizes follow from data of others, with the dimensions that do.
    of_data: Mapping[str, Collection[int]] = field(default_factory=dict)


def judge(
    records: Mapping[int, RankRecord],
    *,
    others: Iterable[RankRecord] = (),
    memory_bytes: int | None = None,
) -> RecordedLayout:
    """Compare the records of ranks; return what they disagree on.

    Args:
        records: Records of the ranks that were run.
        others: Ranks of the same that ran once more, with other data from all others.
        memory_bytes: Memory of the GPU of a rank; None compares none.
    """
    ran = dict(sorted(records.items()))
    again = {other.rank: other for other in others}
    decided, undecided = _cut_at_data(ran, again)
    found = _RankComparison(records=decided, of_data=_sizes_of_data(ran, again))
    faults = [*_failures(decided)]
    if undecided:  # others may fail by what these did not do
        undecided, faults = undecided + [replace(f, kind="undecided") for f in faults], []
    groups = [*_groups(decided)]
    faults += groups
    if not groups:
        made = [group for r in (*ran.values(), *decided.values()) for group in r.groups]
        names = {group.name: tuple(group.ranks) for group in made}
        communication = [*_collectives(found, names), *_messages(found)]
        faults += communication or _cycle(decided, names)
    faults += _micro_batches(decided)
    of_layers, unknown = judge_layers(ran)
    faults += [*of_layers, *_memory(ran, memory_bytes)]
    left_out = [f"sizes at {line}, which follow the data" for line in sorted(found.of_data)]
    left_out += [
        f"rank {rank} with other data, on which it fails: {other.problem}"
        for rank, other in again.items()
        if other.end == "failed" != ran[rank].end
    ]
    left_out += unknown
    if found.num_left_out:
        left_out.append(
            f"{counted(found.num_left_out, 'call')}, since their other ranks were not run"
        )
    return RecordedLayout(
        world_size=max(record.world_size for record in records.values()) or len(records),
        ranks=tuple(map(_row, ran.values())),
        faults=tuple(faults[:_MOST_FAULTS]),
        undecided=tuple(undecided[:_MOST_FAULTS]),
        left_out=tuple(left_out),
        num_compared=found.num_compared,
    )


def _cut_at_data(
    records: Mapping[int, RankRecord], again: Mapping[int, RankRecord]
) -> tuple[dict[int, RankRecord], list[RecordedFault]]:
    """Cut each rank where what it does next hangs on what other ranks have sent.

    Returns:
        The ranks, of which those that are cut end as `unknown`, and a fault for each kind of these.
    """
    decided, undecided = dict(records), []
    for kind in kinds_of(records.values()):
        first, other = kind[0], again.get(kind[0].rank)
        at = _hangs_at(first, other)
        if at is None:
            continue
        undecided.append(_undecided(first, other, at))
        num_groups = sum(group.after <= at for group in first.groups)
        if other is not None:
            num_groups = min(num_groups, _num_alike(first, other))
        for record in kind:
            decided[record.rank] = replace(
                record, calls=record.calls[:at], groups=record.groups[:num_groups], end="unknown"
            )
    return decided, undecided


def _hangs_at(here: RankRecord, other: RankRecord | None) -> int | None:
    """Return the index of the first call that hangs on data of others; None if none does.

    Args:
        here: A rank.
        other: The same rank with other data from all others; None if it did not run again.
    """
    if here.end == "unknown":
        return len(here.calls)
    if other is None:
        return None
    pairs = enumerate(zip(here.calls, other.calls, strict=False))
    found = [index for index, (a, b) in pairs if _what(a) != _what(b)][:1]
    if other.end not in _BROKEN or here.end in _BROKEN:
        num_groups = _num_alike(here, other)
        found += [group.after for r in (here, other) for group in r.groups[num_groups:][:1]]
    if found:
        return min(found)
    has_failed_alike = (here.end, here.problem_line) == (other.end, other.problem_line)
    is_longer = len(here.calls) != len(other.calls) and other.end not in _BROKEN
    hangs = not has_failed_alike if here.end == "failed" else is_longer
    return min(len(here.calls), len(other.calls)) if hangs else None


def _num_alike(here: RankRecord, other: RankRecord) -> int:
    """Return the number of groups that both make alike before one that they do not."""
    pairs = zip(here.groups, other.groups, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0].ranks == pair[1].ranks, pairs))


def _undecided(here: RankRecord, other: RankRecord | None, at: int) -> RecordedFault:
    """Return where a rank hangs on data of others, with the line that reads it."""
    runs = [record for record in (here, other) if record is not None]
    calls = [record.calls[at] for record in runs if at < len(record.calls)]
    reads = [call.read for call in (*calls, *reversed(here.calls[:at])) if call.read]
    is_object = here.end == "unknown"
    lines = [here.problem_line] if is_object else reads[:1]
    lines += [*(call.line for call in calls), here.problem_line]
    return RecordedFault(
        kind="undecided",
        ranks=(here.rank,),
        text=f"what rank {here.rank} does after its call {at} hangs on what other ranks have sent"
        + (f", which line {lines[0]} reads" if is_object or reads else ""),
        lines=tuple((here.rank, line) for line in dict.fromkeys(lines) if line),
    )


def _what(call: Call) -> tuple[object, ...]:
    """Return what two runs of a rank do alike unless data of others decides it."""
    return (call.kind, call.group, call.peer, call.root, call.reduction, call.dtype, call.line)


def _sizes_of_data(
    records: Mapping[int, RankRecord], again: Mapping[int, RankRecord]
) -> dict[str, set[int]]:
    """Return the lines whose calls have another size when others have sent something else.

    Each has the dimensions that change; the others have to be alike in all ranks.
    """
    found: dict[str, set[int]] = defaultdict(set)
    for rank, other in again.items():
        for one, same in zip(records[rank].calls, other.calls, strict=False):
            if _what(one) != _what(same):
                break
            if _sizes(one) != _sizes(same):
                found[one.line].update(_changing(one, same))
    return dict(found)


def _changing(one: Call, other: Call) -> Iterator[int]:
    """Yield the dimensions in which the tensors of two calls differ."""
    for shape, same in zip_longest(one.shapes, other.shapes, fillvalue=()):
        pairs = enumerate(zip_longest(shape, same))
        yield from (index for index, (size, theirs) in pairs if size != theirs)


def _row_sizes(call: Call, changing: Collection[int]) -> set[int]:
    """Return the elements of each tensor for one index of the dimensions that change."""
    return {
        math.prod(size for index, size in enumerate(shape) if index not in changing)
        for shape in call.shapes
        if math.prod(shape)
    }


def _sizes(call: Call) -> tuple[object, ...]:
    """Return sizes that data of others may decide."""
    return (call.num_elements, call.sent, call.received)


def _row(record: RankRecord) -> RecordedFakeRank:
    """Return what run.json says of a rank."""
    sizes = {group.name: len(group.ranks) for group in record.groups}
    sent: dict[str, int] = defaultdict(int)
    for call in record.calls:
        if call.step <= max(record.steps, 1):
            sent[str(sizes[call.group])] += 0 if call.kind == "recv" else call.num_bytes
    return RecordedFakeRank(
        rank=record.rank,
        end=record.end,
        num_calls=len(record.calls),
        micro_batches=tuple(record.forwards),
        **asdict(record.memory),
        sent={size: number // max(record.steps, 1) for size, number in sorted(sent.items())},
    )


def _memory(records: Mapping[int, RankRecord], memory_bytes: int | None) -> Iterator[RecordedFault]:
    """Yield the rank that needs the most, if it is more than its GPU has."""
    fullest = max(records.values(), key=lambda record: record.memory.peak)
    memory = fullest.memory
    if memory_bytes is None or memory.peak <= memory_bytes:
        return
    yield RecordedFault(
        kind="memory",
        ranks=(fullest.rank,),
        text=f"rank {fullest.rank} needs {size_text(memory.peak)} at its peak, and its GPU has "
        f"{size_text(memory_bytes)}: parameters {size_text(memory.parameters)}, gradients "
        f"{size_text(memory.gradients)}, optimizer {size_text(memory.optimizer)}, activations "
        f"{size_text(memory.activations)}",
    )


def _failures(records: Mapping[int, RankRecord]) -> Iterator[RecordedFault]:
    """Yield ranks that failed, each cause once."""
    seen: dict[tuple[str, str], int] = {}
    for rank, record in records.items():
        if record.end in ("failed", "lost"):
            what = record.problem, record.problem_line
            if what not in seen:
                seen[what] = rank
                yield RecordedFault(
                    kind="failed",
                    ranks=(rank,),
                    text=f"rank {rank} failed: {record.problem}",
                    lines=((rank, record.problem_line),),
                )


def _groups(records: Mapping[int, RankRecord]) -> Iterator[RecordedFault]:
    """Yield the first group, if any, that one rank makes with other members than another."""
    ranks = list(records)
    for rank in ranks[1:]:
        here = records[rank]
        for other in ranks[: ranks.index(rank)]:
            there = records[other]
            fault = _first_other_group(there, here) or _first_other_group(here, there)
            if fault is not None:
                yield fault
                return


def _first_other_group(one: RankRecord, other: RankRecord) -> RecordedFault | None:
    """Return the first group that two ranks made of different ranks, None without one."""
    theirs = {group.name: group for group in other.groups}
    for position, group in enumerate(one.groups):
        found = theirs.get(group.name)
        if found is not None and found.ranks != group.ranks:
            return RecordedFault(
                kind="groups",
                ranks=(one.rank, other.rank),
                text=f"group {position} has the ranks {members(group.ranks)} in rank {one.rank} "
                f"and {members(found.ranks)} in rank {other.rank}: groups are made in another "
                f"order, or with other members",
                lines=((one.rank, group.line), (other.rank, found.line)),
            )
        if found is None and other.rank in group.ranks and other.end not in _BROKEN:
            return RecordedFault(
                kind="groups",
                ranks=(one.rank, other.rank),
                text=f"group {position} with the ranks {members(group.ranks)} is made by rank "
                f"{one.rank} and never by rank {other.rank}, a member",
                lines=((one.rank, group.line), (other.rank, _last_group(other))),
            )
    return None


def _last_group(record: RankRecord) -> str:
    last: MadeGroup | None = record.groups[-1] if record.groups else None
    return "makes no group" if last is None else f"its last group: {last.line}"


def members(ranks: Sequence[int]) -> str:
    """Return `0, 8, ..., 56 (8 ranks)`."""
    if len(ranks) <= _SHOWN_RANKS:
        return "[" + ", ".join(map(str, ranks)) + "]"
    return f"[{ranks[0]}, {ranks[1]}, {ranks[2]}, ..., {ranks[-1]}] ({len(ranks)} ranks)"


def _calls_of(record: RankRecord) -> dict[str, list[Call]]:
    """Return the collectives of each group, in order."""
    found: dict[str, list[Call]] = defaultdict(list)
    for call in record.calls:
        if call.kind not in ("send", "recv"):
            found[call.group].append(call)
    return found


def _collectives(
    found: _RankComparison, names: Mapping[str, tuple[int, ...]]
) -> Iterator[RecordedFault]:
    """Yield the first difference of each group; of several from one line, the first."""
    calls = {rank: _calls_of(record) for rank, record in found.records.items()}
    seen: set[tuple[str, ...]] = set()
    for name in dict.fromkeys(name for of_rank in calls.values() for name in of_rank):
        run = [rank for rank in names[name] if rank in found.records]
        if len(run) == 1 < len(names[name]):
            found.num_left_out += len(calls[run[0]][name])
        for other in run[1:]:
            fault = _first_difference(
                found, names[name], (run[0], other), [calls[r][name] for r in (run[0], other)]
            )
            if (
                fault is not None
                and (key := tuple(sorted(line for _, line in fault.lines))) not in seen
            ):
                seen.add(key)
                yield fault
        if not any(call.sent for rank in run for call in calls[rank][name]):
            continue
        parts = [
            _first_uneven(
                names[name],
                (source, calls[source][name]),
                (target, calls[target][name]),
                of_data=found.of_data,
            )
            for source, target in product(run, repeat=2)
        ]
        if uneven := [part for part in parts if part is not None]:
            yield min(uneven, key=itemgetter(0))[1]


def _first_uneven(
    ranks: Sequence[int],
    source: tuple[int, Sequence[Call]],
    target: tuple[int, Sequence[Call]],
    *,
    of_data: Collection[str],
) -> tuple[int, RecordedFault] | None:
    """Return the first exchange in which one rank sends more or less than another expects of it."""
    here, there = ranks.index(source[0]), ranks.index(target[0])
    for index, (sent, received) in enumerate(zip(source[1], target[1], strict=False)):
        if sent.kind != received.kind:
            return None  # a fault of its own
        has_own = sent.has_own_size and not {sent.line, received.line} & set(of_data)
        if not (sent.sent or received.received) or not has_own:
            continue
        parts = [
            part[index] if part else call.num_elements / len(ranks)
            for call, part, index in ((sent, sent.sent, there), (received, received.received, here))
        ]
        if parts[0] != parts[1]:
            return index, RecordedFault(
                kind="collective",
                ranks=(source[0], target[0]),
                text=f"collective {index} of the group {members(ranks)}, in step {sent.step}, "
                f"differs in size: rank {source[0]} {describe(sent)} sends {parts[0]:g} elements "
                f"to rank {target[0]}, which expects {parts[1]:g}",
                lines=((source[0], sent.line), (target[0], received.line)),
            )
    return None


def _first_difference(
    found: _RankComparison,
    ranks: Sequence[int],
    pair: tuple[int, int],
    programs: Sequence[Sequence[Call]],
) -> RecordedFault | None:
    """Return the first call that two ranks of a group make differently, None without one."""
    one, other = programs
    for index, (here, there) in enumerate(zip(one, other, strict=False)):
        found.num_compared += 1
        differs = _difference(here, there, found.of_data)
        if differs:
            return RecordedFault(
                kind="collective",
                ranks=pair,
                text=f"collective {index} of the group {members(ranks)}, in step {here.step}, "
                f"{differs}: rank {pair[0]} {describe(here)}, rank {pair[1]} {describe(there)}",
                lines=((pair[0], here.line), (pair[1], there.line)),
            )
    longer, shorter = (0, 1) if len(one) > len(other) else (1, 0)
    extra = programs[longer][len(programs[shorter]) :]
    if not extra or not _is_required(
        found.records[pair[longer]], found.records[pair[shorter]], extra[0]
    ):
        return None
    call, last = extra[0], programs[shorter][-1:]
    return RecordedFault(
        kind="collective",
        ranks=(pair[longer], pair[shorter]),
        text=f"collective {len(programs[shorter])} of the group {members(ranks)}, in step "
        f"{call.step}, is made by rank {pair[longer]} alone ({describe(call)}); rank "
        f"{pair[shorter]} makes {len(programs[shorter])} in this group, rank {pair[longer]} "
        f"{len(programs[longer])}",
        lines=(
            (pair[longer], call.line),
            (pair[shorter], f"its last one there: {last[0].line}" if last else "makes none there"),
        ),
    )


def _is_required(record: RankRecord, other: RankRecord, call: Call) -> bool:
    """Return true if the other rank would have made its side of a call, had there been one."""
    if other.end in _BROKEN or (other.end == "cut" and record.end != "cut"):
        return False
    # Receives may begin ahead of a step, and their senders end before they send.
    is_ahead = call.kind == "recv" and call.step > record.steps
    is_judged = any(c is call for c in record.calls[: record.num_judged])
    return record.end != "cut" or (is_judged and not is_ahead)


def _difference(here: Call, there: Call, of_data: Mapping[str, Collection[int]]) -> str:
    """Return in what two calls differ that have to be alike; "" if they are."""
    for name in ("kind", "reduction", "root"):
        if getattr(here, name) != getattr(there, name):
            return f"differs in {name}"
    if here.kind == "barrier":
        return ""
    if here.dtype != there.dtype:
        return "differs in dtype"
    return "differs in size" if _differs_in_size(here, there, of_data) else ""


def _differs_in_size(here: Call, there: Call, of_data: Mapping[str, Collection[int]]) -> bool:
    """Return true if two calls have other sizes where data of others does not decide them."""
    if not (here.has_own_size and there.has_own_size):
        return False
    if here.line in of_data or there.line in of_data:
        changing = {0, *of_data.get(here.line, ()), *of_data.get(there.line, ())}
        rows = [_row_sizes(call, changing) for call in (here, there)]
        return all(rows) and rows[0] != rows[1]
    has_parts = bool(here.sent or there.sent)  # which are compared pair by pair
    return not has_parts and here.num_elements != there.num_elements


def describe(call: Call) -> str:
    """Return `all_reduce(sum) of float32 [64, 2, 64]`."""
    options = ", ".join(
        filter(None, (call.reduction, f"root {call.root}" if call.root is not None else ""))
    )
    shapes = " + ".join(str(shape) for shape in call.shapes[:_SHOWN_SHAPES])
    hidden = len(call.shapes) - _SHOWN_SHAPES
    more = f" + {hidden} more" if hidden > 0 else ""
    what = f" of {call.dtype} {shapes}{more}" if call.shapes else ""
    return f"{call.kind}{f'({options})' if options else ''}{what}"


def _messages(found: _RankComparison) -> Iterator[RecordedFault]:
    """Yield the first difference of each pair of ranks that send to one another."""
    paired = paired_groups(found.records)
    channels: dict[Channel, tuple[list[Call], list[Call]]] = defaultdict(lambda: ([], []))
    for rank, record in found.records.items():
        for call in record.calls:
            if call.kind in ("send", "recv") and call.peer is not None:
                channels[channel_of(rank, call, paired)][call.kind == "recv"].append(call)
    anywhere = {
        rank
        for rank, r in found.records.items()
        if any(c.kind == "recv" and c.peer is None for c in r.calls)
    }
    for (group, source, target, is_alone), (sends, receives) in list(channels.items()):
        if source not in found.records or target not in found.records or target in anywhere:
            found.num_left_out += len(sends) + len(receives)
            continue
        apart = channels[group, source, target, not is_alone]
        fault = _first_lost(found, (source, target), (sends, receives), apart)
        if fault is not None:
            yield fault


def _first_lost(
    found: _RankComparison, pair: tuple[int, int], calls: _Ends, apart: _Ends
) -> RecordedFault | None:
    """Return the first message that is not received as it was sent, None without one.

    Args:
        found: The ranks.
        pair: Source and target.
        calls: Sends and receives that can meet.
        apart: Those of the same ranks in another communicator.
    """
    (source, target), (sends, receives) = pair, calls
    for index, (sent, received) in enumerate(zip(sends, receives, strict=False)):
        found.num_compared += 1
        is_alike = sent.num_elements == received.num_elements or sent.line in found.of_data
        if sent.dtype != received.dtype or not is_alike:
            return RecordedFault(
                kind="message",
                ranks=pair,
                text=f"message {index} from rank {source} to rank {target}, in step {sent.step}, "
                f"is sent as {sent.dtype} {sent.shapes[0]} and received as {received.dtype} "
                f"{received.shapes[0]}",
                lines=((source, sent.line), (target, received.line)),
            )
    has_more = len(sends) > len(receives)
    longer, shorter = (sends, receives) if has_more else (receives, sends)
    owner, other = pair if has_more else (target, source)
    extra = longer[len(shorter) :]
    if not extra or not _is_required(found.records[owner], found.records[other], extra[0]):
        return None
    did, lacks = ("sent", "received") if has_more else ("awaited", "sent")
    what = f"is {did} by rank {owner} and never {lacks} by rank {other}"
    last = f"its last one: {shorter[-1].line}" if shorter else "has none"
    if meant := apart[has_more][len(apart[not has_more]) :]:
        if extra[0].batch is None:
            return None  # told of the side that is in a batch
        what = f"is {did} by rank {owner} in a batch and {lacks} by rank {other} outside of one"
        what += ": NCCL has a communicator for each"
        last = meant[0].line
    return RecordedFault(
        kind="message",
        ranks=(owner, other),
        text=f"message {len(shorter)} from rank {source} to rank {target}, {describe(extra[0])} in "
        f"step {extra[0].step}, {what}",
        lines=((owner, extra[0].line), (other, last)),
    )


def _cycle(
    records: Mapping[int, RankRecord], names: Mapping[str, tuple[int, ...]]
) -> Iterator[RecordedFault]:
    """Yield the ranks that wait for one another, found by running their calls."""
    alive = {rank: record for rank, record in records.items() if record.end not in _BROKEN}
    chain = Simulation(alive, names).run() if alive else []
    if chain:
        yield RecordedFault(
            kind="cycle",
            ranks=tuple(blocked.rank for blocked in chain),
            text="ranks wait for one another: " + "; ".join(map(_waits, chain)),
            lines=tuple((blocked.rank, blocked.call.line) for blocked in chain),
        )


def _waits(blocked: Blocked) -> str:
    """Describe for which rank a rank waits, and in which call."""
    call = blocked.call
    where = f"{call.kind} {call.index} of group {call.group}"
    peer = f" with rank {call.peer}" if call.peer is not None else ""
    return (
        f"rank {blocked.rank} in {where}{peer} (step {call.step}) waits for rank {blocked.for_rank}"
    )


def _micro_batches(records: Mapping[int, RankRecord]) -> Iterator[RecordedFault]:
    """Yield the first rank that runs its models another number of times than a like rank."""
    firsts: dict[tuple[str, ...], RankRecord] = {}
    for record in records.values():
        if record.end in _BROKEN or not record.forwards:
            continue
        first = firsts.setdefault(tuple(record.models), record)
        for step, (here, there) in enumerate(zip(first.forwards, record.forwards, strict=False), 1):
            if here != there:
                yield RecordedFault(
                    kind="micro-batches",
                    ranks=(first.rank, record.rank),
                    text=f"in step {step} rank {first.rank} runs its model {here} times and rank "
                    f"{record.rank} {there} times",
                )
                return


# Layers have numbers: megatron-core's `layer_number`, else the names of the parts of a container,
# as in `layers.7`. They tell something only where the numbers go on from stage to stage.
def judge_layers(records: Mapping[int, RankRecord]) -> tuple[list[RecordedFault], list[str]]:
    """Return the first fault of each container of layers, and what cannot be known."""
    peers = {rank: _peers(record) for rank, record in records.items()}
    faults: dict[str, RecordedFault] = {}
    unknown: dict[str, None] = {}
    for pipeline, name in product(_pipelines(peers), _containers(records)):
        held = {r: records[r].layers[name] for r in pipeline if records[r].layers.get(name)}
        if len(held) < 2:  # noqa: PLR2004 - no other to compare with
            continue
        is_repeated = any(len(set(numbers)) < len(numbers) for numbers in held.values())
        if is_repeated or len({min(numbers) for numbers in held.values()}) == 1:
            unknown[f"layers of {name}, whose numbers begin again in each rank"] = None
            continue
        for fault in (*_doubled(name, held), *_lacking(name, held, peers)):
            faults.setdefault(name, fault)
    for name in set(_containers(records)) - faults.keys():
        numbers = {n for record in records.values() for n in record.layers.get(name, ())}
        for low, high in _gaps(numbers):
            what = _between(low, high)
            unknown[f"{what} of {name}, since ranks that may hold them were not run"] = None
    return list(faults.values()), list(unknown)


def _containers(records: Mapping[int, RankRecord]) -> list[str]:
    """Return the names of all containers of layers."""
    return list(dict.fromkeys(name for record in records.values() for name in record.layers))


def _peers(record: RankRecord) -> set[int]:
    """Return the ranks that a rank sends to, or receives from."""
    found = {call.peer for call in record.calls if call.kind in ("send", "recv")}
    return {peer for peer in found if peer is not None and peer != record.rank}


def _pipelines(peers: Mapping[int, set[int]]) -> Iterator[list[int]]:
    """Yield the ranks of each pipeline: those that messages join."""
    left = sorted(peers)
    while left:
        found, waiting = set[int](), [left[0]]
        while waiting:
            rank = waiting.pop()
            if rank in peers and rank not in found:
                found.add(rank)
                waiting += peers[rank]
        left = [rank for rank in left if rank not in found]
        yield sorted(found)


def _doubled(name: str, held: Mapping[int, Sequence[int]]) -> Iterator[RecordedFault]:
    """Yield a layer that two stages hold; ranks that hold the same ones are copies of a stage."""
    for one, other in combinations(held, 2):
        both = set(held[one]) & set(held[other])
        if both and set(held[one]) != set(held[other]):
            yield _fault(f"layer {min(both)} of {name} is held twice", held, (one, other))


def _lacking(
    name: str, held: Mapping[int, Sequence[int]], peers: Mapping[int, set[int]]
) -> Iterator[RecordedFault]:
    """Yield layers that no rank holds, where no rank that was not run can hold them."""
    is_whole = all(peers[rank] <= peers.keys() for rank in held)
    for low, high in _gaps({number for numbers in held.values() for number in numbers}):
        for one, other in product(held, repeat=2):
            is_next = other in peers[one] and peers[one] <= peers.keys()
            if low in held[one] and high in held[other] and (is_whole or is_next):
                what = f"{_between(low, high)} of {name} {'are' if high > low + 2 else 'is'}"
                yield _fault(f"{what} held by no rank", held, (one, other))


def _gaps(numbers: set[int]) -> list[tuple[int, int]]:
    """Return the numbers before and after each gap."""
    return [(low, high) for low, high in pairwise(sorted(numbers)) if high > low + 1]


def _between(low: int, high: int) -> str:
    """Return `layer 3`, or `layers 3-4`, of those between two numbers."""
    return name_ranks(range(low + 1, high), "layer")


def _fault(what: str, held: Mapping[int, Sequence[int]], pair: tuple[int, int]) -> RecordedFault:
    """Return a fault with what the ranks of a pair hold."""
    holds = (f"rank {rank} holds {name_ranks(held[rank], 'layer')}" for rank in dict.fromkeys(pair))
    return RecordedFault(
        kind="parameters", ranks=tuple(dict.fromkeys(pair)), text=f"{what}: {', '.join(holds)}"
    )
