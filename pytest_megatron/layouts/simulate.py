"""Recorded programs of ranks played against one another, to find waits that never end. Pure.

A rank issues calls and waits for some. A collective ends when each member that was run has issued
it; a message when both ends have. With NCCL the calls of one communicator end in the order in
which they were issued: those of a group share one, and unbatched messages have one for each pair.
Ranks that were not run are always ready.

Source: ProcessGroupNCCL.cpp of torch, `getKeySendRecv` and `pointToPoint`; v2.13.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_megatron.layouts.model import Call, RankRecord

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that waits for ever, in a call, for another rank."""

    rank: int
    call: Call
    for_rank: int


def channel_of(rank: int, call: Call) -> tuple[str, int, int]:
    """Return group, source and destination of a message."""
    peer = -1 if call.peer is None else call.peer
    return (call.group, rank, peer) if call.kind == "send" else (call.group, peer, rank)


class Simulation:
    """Ranks that run side by side until none goes on."""

    def __init__(
        self, records: Mapping[int, RankRecord], members: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._records = records
        self._members = {n: [r for r in ranks if r in records] for n, ranks in members.items()}
        backends = next(iter(records.values())).groups
        self._nccl = {group.name for group in backends if "nccl" in group.backend}
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
            return ("channel", *channel_of(rank, call))
        return ("group", call.group)

    def _communicator(self, call: Call) -> Key:
        """Return the queue in which calls have to meet in order."""
        if call.group not in self._nccl:
            return ("free", call.group)
        if call.kind in ("send", "recv") and call.batch is None:
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
