"""Order of tests on gangs, and the gangs to start: pure.

Wide gangs run first, and small ones fill the gaps at the end. Tests of one file stay on one gang as
long as others have work, so that module fixtures are set up once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_megatron.gang.ipc.messages import NOTHING, UNKNOWN
from pytest_megatron.gang.spec import GangSpec


@dataclass(slots=True)
class _Chunk:
    """Consecutive tests of one file and one spec."""

    file: str
    indices: deque[int]
    owner: int | None = None


_MIB = 1 << 20
_LEAST_MIB = 512  # CUDA's context alone takes about as much
_CONTEXT_MIB = 768  # beside torch's allocator, where NVML does not know the process
_SPARE = 1.1  # of what a test used before


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """One GPU of the session, and its gangs.

    Attributes:
        room_mib: Memory for all gangs.
        gangs: Memory of each; 0 is all of it.
    """

    room_mib: int
    gangs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Rules by which gangs share GPUs.

    Attributes:
        most: Gangs on one GPU at the same time; 1 if they do not share any.
        memory_mib: Of the smallest GPU.
    """

    most: int = 1
    memory_mib: int = 0

    @property
    def is_on(self) -> bool:
        """True if gangs may share GPUs."""
        return self.most > 1

    def num_on_gpu(self, spec: GangSpec) -> int:
        """Return the number of gangs of a spec that one GPU has room for."""
        if not self.is_on or not spec.memory_mib:
            return 1
        return max(1, min(self.most, self.memory_mib // spec.memory_mib))

    def fitting(self, loads: Mapping[str, GpuLoad], memory_mib: int) -> list[str]:
        """Return the GPUs that have room for one more gang, those with fewest gangs first."""
        found = [
            gpu
            for gpu, load in loads.items()
            if memory_mib
            and 0 not in load.gangs
            and len(load.gangs) < self.most
            and sum(load.gangs) + memory_mib <= load.room_mib
        ]
        return sorted(found, key=lambda gpu: len(loads[gpu].gangs))

    def memory_for(self, declared_mib: int, used_mib: int | None) -> int:
        """Return the memory to set aside for a test; 0 if it needs a GPU for itself.

        Args:
            declared_mib: By its mark; 0 without one.
            used_mib: Most that it has used before; None if that is not known.
        """
        needed = declared_mib
        if used_mib is not None and (not declared_mib or used_mib > declared_mib):
            needed = _round_up(int(max(used_mib, _LEAST_MIB) * _SPARE))
        return needed if needed <= self.memory_mib else 0


def _round_up(mib: int) -> int:
    """Return one of few sizes, at most a quarter more, so that tests can share gangs."""
    step = max(256, (1 << mib.bit_length()) // 8)
    return -(-mib // step) * step


def used_mib(ranks: Sequence[Sequence[int]], of_processes: Sequence[int | None]) -> int:
    """Return the memory that the rank used which used most.

    Args:
        ranks: Of each rank, bytes that torch's allocator has reserved, now and at most during the
            test; empty without CUDA in use.
        of_processes: Bytes that the process of each has now, None if NVML does not know.
    """
    found = []
    for words, in_process in zip(ranks, of_processes, strict=True):
        reserved, peak = words or (0, 0)
        beside = _CONTEXT_MIB * _MIB if words else 0
        found.append(peak + (beside if in_process is None else max(0, in_process - reserved)))
    return -(-max(found) // _MIB)


class Schedule:
    """Tests that have not run yet; gangs are identified by number."""

    def __init__(
        self,
        tests: Sequence[tuple[int, GangSpec, str]],
        *,
        num_slots: int,
        packing: Packing = Packing(),
    ) -> None:
        """Group the tests by spec and file.

        Args:
            tests: Index, spec and file of each, in the order of collection.
            num_slots: Ranks that may run at the same time, but for those that share GPUs.
            packing: By which gangs share GPUs.
        """
        self._num_slots = num_slots
        self._packing = packing
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
        return all(self.most_gangs(spec) == 1 for spec, chunks in self._chunks.items() if chunks)

    def most_gangs(self, spec: GangSpec) -> int:
        """Return the number of gangs of a spec that can run at the same time."""
        return max(1, self._num_slots * self._packing.num_on_gpu(spec) // spec.world_size)

    def holds(self, index: int) -> bool:
        """Return whether a test was not assigned yet."""
        return index in self._waiting

    def has_more(self, spec: GangSpec) -> bool:
        """Return whether tests of a spec wait that are planned for no gang."""
        return bool(self._chunks.get(spec))

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

    def wanted(
        self, has_room: Callable[[GangSpec], bool], gangs: Mapping[GangSpec, int]
    ) -> GangSpec | None:
        """Return the spec of the gang to start now, or None.

        Args:
            has_room: Returns whether a gang of a spec can run beside those that are there.
            gangs: Number of gangs of each spec.
        """
        waiting = [spec for spec, chunks in self._chunks.items() if chunks]
        for spec in sorted(waiting, key=lambda s: (-s.world_size, s.memory_mib > 0, -s.memory_mib)):
            if has_room(spec):
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
        num_rivals = self.most_gangs(spec)
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
