"""Which test runs next, on which gang, and which gangs there should be: pure.

Wide gangs first: what is left for the end are the small ones, which fill gaps. Tests of one file
stay on one gang as long as others have work, so that module fixtures are set up once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_megatron.gang.spec import GangSpec


@dataclass(slots=True)
class _Chunk:
    """Consecutive tests of one file."""

    indices: deque[int]
    owner: int | None = None


class Schedule:
    """The tests that have not run yet; gangs are known by number."""

    def __init__(
        self, tests: Sequence[tuple[int, GangSpec, str]], *, num_slots: int, is_ordered: bool
    ) -> None:
        """Begin.

        Args:
            tests: Index, spec and file of each, in the order of collection.
            num_slots: Ranks that may run at one time.
            is_ordered: Whether tests must run one after the other, as collected.
        """
        self._num_slots = num_slots
        self._is_ordered = is_ordered
        self._order = deque(index for index, _, _ in tests)
        self._spec_of = {index: spec for index, spec, _ in tests}
        self._chunks: dict[GangSpec, list[_Chunk]] = {}
        self._planned: dict[int, int] = {}
        last: tuple[GangSpec, str] | None = None
        for index, spec, file in tests:
            chunks = self._chunks.setdefault(spec, [])
            if last != (spec, file) or not chunks:
                chunks.append(_Chunk(deque()))
            chunks[-1].indices.append(index)
            last = (spec, file)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to hand out."""
        return not self._planned and not any(self._chunks.values())

    def is_serial(self) -> bool:
        """Whether at most one gang can run at any time."""
        if self._is_ordered:
            return True
        return all(
            spec.world_size * 2 > self._num_slots for spec, chunks in self._chunks.items() if chunks
        )

    def take(self, gang: int, spec: GangSpec) -> tuple[int, int] | None:
        """Return the test that a gang should run now and the one after it (-1: none), or None."""
        index = self._planned.pop(gang, None)
        if index is None:
            index = self._pick(gang, spec)
        if index is None:
            index = self._steal(spec)
        if index is None:
            return None
        if self._is_ordered:
            self._order.remove(index)
        if spec.is_isolated:
            return index, -1
        following = self._pick(gang, spec)
        if following is None:
            return index, -1
        self._planned[gang] = following
        return index, following

    def give_back(self, index: int) -> None:
        """Put a test that was interrupted back, in front."""
        spec = self._spec_of[index]
        self._chunks.setdefault(spec, []).insert(0, _Chunk(deque([index])))
        if self._is_ordered:
            self._order.appendleft(index)

    def forget(self, gang: int) -> None:
        """Free what was meant for a gang that is gone."""
        planned = self._planned.pop(gang, None)
        for chunks in self._chunks.values():
            for chunk in chunks:
                if chunk.owner == gang:
                    chunk.owner = None
        if planned is not None:
            spec = self._spec_of[planned]
            self._chunks.setdefault(spec, []).insert(0, _Chunk(deque([planned])))

    def has_work(self, spec: GangSpec) -> bool:
        """Whether a test of this kind waits, not counting those meant for a gang."""
        if self._is_ordered and self._order:
            return self._spec_of[self._order[0]] == spec
        return bool(self._chunks.get(spec))

    def wanted(self, num_free: int, gangs: Mapping[GangSpec, int]) -> GangSpec | None:
        """Return the spec of a gang that should be started now, or None.

        Args:
            num_free: Ranks that may be started.
            gangs: How many gangs of each spec there are.
        """
        waiting = [s for s, chunks in self._chunks.items() if chunks]
        if self._is_ordered:
            waiting = [s for s in waiting if self._order and s == self._spec_of[self._order[0]]]
        for spec in sorted(waiting, key=lambda s: -s.world_size):
            num_waiting = sum(len(c.indices) for c in self._chunks[spec])
            has_any = gangs.get(spec, 0) > 0
            is_alone = num_free >= self._num_slots  # wider than all slots: it may run by itself
            if spec.world_size <= num_free or is_alone:
                if not has_any or num_waiting > 0:
                    return spec
            elif not has_any:
                return None  # narrower ones would keep it waiting
        return None

    def _pick(self, gang: int, spec: GangSpec) -> int | None:
        chunks = self._chunks.get(spec)
        if not chunks:
            return None
        if self._is_ordered and (not self._order or self._spec_of[self._order[0]] != spec):
            return None
        mine = [c for c in chunks if c.owner == gang]
        free = [c for c in chunks if c.owner is None]
        chunk = (mine or free or [max(chunks, key=lambda c: len(c.indices))])[0]
        if chunk.owner is None:
            chunk.owner = gang
        index = chunk.indices.popleft()
        if not chunk.indices:
            chunks.remove(chunk)
        return index

    def _steal(self, spec: GangSpec) -> int | None:
        """Take the test that is meant for another gang, which is busy."""
        for gang, index in self._planned.items():
            if self._spec_of[index] == spec and not self._is_ordered:
                del self._planned[gang]
                return index
        return None
