"""Order of tests on gangs, and the gangs to start: pure.

Wide gangs run first, and small ones fill the gaps at the end. Tests of one file stay on one gang as
long as others have work, so that module fixtures are set up once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_megatron.gangs.ipc.messages import NOTHING, UNKNOWN
from pytest_megatron.gangs.topology import GangSpec


@dataclass(slots=True)
class _Chunk:
    """Consecutive tests of one file and one spec."""

    file: str
    indices: deque[int]
    owner: int | None = None


class Schedule:
    """Tests that have not run yet; gangs are identified by number."""

    def __init__(self, tests: Sequence[tuple[int, GangSpec, str]], *, num_slots: int) -> None:
        """Group the tests by spec and file.

        Args:
            tests: Index, spec and file of each, in the order of collection.
            num_slots: Ranks that may run at the same time.
        """
        self._num_slots = num_slots
        self._tests = {index: (spec, file) for index, spec, file in tests}
        self._waiting = set(self._tests)
        self._chunks: dict[GangSpec, list[_Chunk]] = {}
        self._planned: dict[int, int] = {}
        for index, spec, file in tests:
            chunks = self._chunks.setdefault(spec, [])
            if not chunks or chunks[-1].file != file:
                chunks.append(_Chunk(file, deque()))
            chunks[-1].indices.append(index)

    @property
    def is_empty(self) -> bool:
        """True if all tests were assigned."""
        return not self._waiting

    def is_serial(self) -> bool:
        """Return whether at most one gang can run at any time."""
        return all(
            spec.world_size * 2 > self._num_slots for spec, chunks in self._chunks.items() if chunks
        )

    def holds(self, index: int) -> bool:
        """Return whether a test was not assigned yet."""
        return index in self._waiting

    def planned(self, gang: int, spec: GangSpec) -> int:
        """Return the test that is planned next for a gang, `NOTHING` or `UNKNOWN`."""
        if gang in self._planned:
            return self._planned[gang]
        return UNKNOWN if self._num_waiting(spec) else NOTHING

    def take(self, gang: int, spec: GangSpec) -> tuple[int, int] | None:
        """Return the test that a gang runs now and the one after it, or None.

        The one after it is a test, `NOTHING`, or `UNKNOWN` if another gang may take it.
        """
        index = self._planned.pop(gang, None)
        if index is None:
            index = self._pick(gang, spec)
        if index is None:
            index = self._steal(spec)
        if index is None:
            return None
        self._waiting.discard(index)
        return index, self._plan(gang, spec)

    def take_planned(self, gang: int, spec: GangSpec) -> tuple[int, int] | None:
        """Return the test that is planned next for a gang and the one after it, or None."""
        return self.take(gang, spec) if gang in self._planned else None

    def put_back(self, gang: int, index: int) -> None:
        """Undo `take_planned`: plan the test again, and the one after it behind it."""
        following = self._planned.pop(gang, None)
        if following is not None:
            self.give_back(following)
            self._chunks[self._tests[following][0]][0].owner = gang
        self._waiting.add(index)
        self._planned[gang] = index

    def give_back(self, index: int) -> None:
        """Put an interrupted test back, as the first."""
        spec, file = self._tests[index]
        self._waiting.add(index)
        self._chunks.setdefault(spec, []).insert(0, _Chunk(file, deque([index])))

    def forget(self, gang: int) -> None:
        """Release the tests that were planned for a gang that is gone."""
        for chunks in self._chunks.values():
            for chunk in chunks:
                if chunk.owner == gang:
                    chunk.owner = None
        planned = self._planned.pop(gang, None)
        if planned is not None:
            self.give_back(planned)

    def wanted(self, num_free: int, gangs: Mapping[GangSpec, int]) -> GangSpec | None:
        """Return the spec of the gang to start now, or None.

        Args:
            num_free: Ranks that may be started.
            gangs: Number of gangs of each spec.
        """
        waiting = [spec for spec, chunks in self._chunks.items() if chunks]
        for spec in sorted(waiting, key=lambda s: -s.world_size):
            is_alone = num_free >= self._num_slots  # wider than all slots: it may run by itself
            if spec.world_size <= num_free or is_alone:
                return spec
            if not gangs.get(spec, 0):
                return None  # narrower ones would keep it waiting
        return None

    def _num_waiting(self, spec: GangSpec) -> int:
        """Count tests that are planned for no gang."""
        return sum(len(chunk.indices) for chunk in self._chunks.get(spec, ()))

    def _plan(self, gang: int, spec: GangSpec) -> int:
        """Plan the test after the one that a gang was just assigned."""
        if spec.is_isolated:
            return NOTHING
        num_rivals = max(1, self._num_slots // spec.world_size)
        num_waiting = self._num_waiting(spec)
        if num_rivals == 1 or num_waiting > num_rivals:
            following = self._pick(gang, spec)
            if following is None:
                return NOTHING
            self._planned[gang] = following
            return following
        is_stealing = any(self._tests[i][0] == spec for i in self._planned.values())
        return UNKNOWN if num_waiting or is_stealing else NOTHING

    def _pick(self, gang: int, spec: GangSpec) -> int | None:
        """Take the next test for a gang, of its own file first."""
        chunks = self._chunks.get(spec)
        if not chunks:
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
        """Take the test that is planned for another gang, which is busy."""
        for gang, index in self._planned.items():
            if self._tests[index][0] == spec:
                del self._planned[gang]
                return index
        return None
