"""The schedule alone, driven by a clock of its own: no processes."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from pytest_megatron.gangs.ipc.messages import NOTHING, UNKNOWN
from pytest_megatron.gangs.schedule import Schedule
from pytest_megatron.gangs.topology import GangSpec

SLOTS = 8


def spec(world_size: int, *, is_isolated: bool = False) -> GangSpec:
    return GangSpec(world_size=world_size, device="cpu", is_isolated=is_isolated)


def file_of(*specs: GangSpec, name: str = "test_a.py") -> list[tuple[int, GangSpec, str]]:
    return [(index, one, name) for index, one in enumerate(specs)]


@dataclass(slots=True)
class Machine:
    """Runs a schedule as the controller does, in no time."""

    schedule: Schedule
    durations: Sequence[float]
    num_slots: int = SLOTS
    now: float = 0.0
    gangs: dict[int, GangSpec] = field(default_factory=dict)
    order: list[tuple[int, int]] = field(default_factory=list)
    planned: dict[int, int] = field(default_factory=dict)
    surprises: int = 0
    busy: list[tuple[float, int]] = field(default_factory=list)
    num_gangs: int = 0

    def run(self) -> float:
        """Return when the last test ended."""
        self.dispatch()
        while self.busy:
            self.now, gang = heapq.heappop(self.busy)
            self.work(gang)
            self.dispatch()
        assert self.schedule.is_empty
        return self.now

    def work(self, gang: int) -> None:
        taken = self.schedule.take(gang, self.gangs[gang])
        if taken is None or (self.gangs[gang].is_isolated and gang in self.planned):
            del self.gangs[gang]
            return
        index, following = taken
        self.surprises += self.planned.get(gang, UNKNOWN) not in (UNKNOWN, index)
        self.planned[gang] = following
        self.order.append((gang, index))
        heapq.heappush(self.busy, (self.now + self.durations[index], gang))

    def dispatch(self) -> None:
        while (one := self.schedule.wanted(self.num_free(), self.counts())) is not None:
            self.num_gangs += 1
            self.gangs[self.num_gangs] = one
            self.work(self.num_gangs)

    def num_free(self) -> int:
        return max(0, self.num_slots - sum(one.world_size for one in self.gangs.values()))

    def counts(self) -> Mapping[GangSpec, int]:
        return {one: list(self.gangs.values()).count(one) for one in self.gangs.values()}


def play(
    tests: Sequence[tuple[int, GangSpec, str]], durations: Sequence[float], num_slots: int = SLOTS
) -> Machine:
    machine = Machine(Schedule(tests, num_slots=num_slots), durations, num_slots)
    machine.run()
    assert sorted(index for _, index in machine.order) == list(range(len(tests)))
    return machine


def floor(tests: Sequence[tuple[int, GangSpec, str]], durations: Sequence[float]) -> float:
    """No schedule ends earlier than this."""
    work = sum(one.world_size * durations[index] for index, one, _ in tests)
    return max(work / SLOTS, *durations)


def test_one_gang_runs_in_the_order_of_collection() -> None:
    tests = [(i, spec(8), f"test_{i // 3}.py") for i in range(10)]
    machine = play(tests, [1.0] * 10)
    assert machine.order == [(1, i) for i in range(10)]
    assert machine.surprises == 0
    assert Schedule(tests, num_slots=SLOTS).is_serial()


def test_a_gang_is_told_what_comes_next() -> None:
    schedule = Schedule(file_of(spec(8), spec(8)), num_slots=SLOTS)
    assert schedule.take(1, spec(8)) == (0, 1)
    assert schedule.planned(1, spec(8)) == 1
    assert schedule.holds(1)
    assert schedule.take(1, spec(8)) == (1, NOTHING)
    assert not schedule.holds(1)
    assert schedule.take(1, spec(8)) is None


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_test_that_was_sent_ahead_in_vain_comes_next(is_gone: bool) -> None:  # noqa: FBT001
    tests = [(i, spec(8), f"test_{i // 3}.py") for i in range(6)]
    schedule = Schedule(tests, num_slots=SLOTS)
    assert schedule.take_planned(1, spec(8)) is None
    assert schedule.take(1, spec(8)) == (0, 1)
    assert schedule.take_planned(1, spec(8)) == (1, 2)
    schedule.put_back(1, 1)
    assert schedule.holds(1)
    if is_gone:
        schedule.forget(1)
    gang = 2 if is_gone else 1
    taken = [schedule.take(gang, spec(8)) for _ in range(5)]
    assert taken == [(1, 2), (2, 3), (3, 4), (4, 5), (5, NOTHING)]
    assert schedule.is_empty


def test_what_another_gang_may_take_is_not_promised() -> None:
    schedule = Schedule(file_of(spec(4), spec(4), spec(4)), num_slots=SLOTS)
    assert schedule.take(1, spec(4)) == (0, UNKNOWN)
    assert schedule.take(2, spec(4)) == (1, UNKNOWN)
    assert schedule.take(1, spec(4)) == (2, NOTHING)


def test_an_isolated_gang_expects_nothing() -> None:
    one = spec(2, is_isolated=True)
    schedule = Schedule(file_of(one, one), num_slots=SLOTS)
    assert schedule.take(1, one) == (0, NOTHING)
    assert schedule.take(2, one) == (1, NOTHING)


def test_an_idle_gang_takes_what_a_busy_one_was_to_run() -> None:
    tests = file_of(*[spec(4)] * 8)
    machine = play(tests, [100.0, *[1.0] * 7])
    assert machine.now == 100.0
    assert [index for gang, index in machine.order if gang == 1] == [0]


def test_wide_tests_come_first_and_are_not_kept_waiting() -> None:
    tests = file_of(*[spec(1)] * 20, spec(8))
    machine = play(tests, [1.0] * 21)
    assert machine.order[0] == (1, 20)
    schedule = Schedule(tests, num_slots=SLOTS)
    assert schedule.wanted(4, {}) is None  # narrow ones would take what the wide one needs
    assert schedule.wanted(8, {}) == spec(8)
    assert schedule.wanted(4, {spec(8): 1}) == spec(1)


def test_a_gang_wider_than_all_slots_runs_alone() -> None:
    tests = file_of(spec(2), spec(16), spec(2))
    machine = play(tests, [1.0] * 3)
    assert (machine.order[0], machine.now) == ((1, 1), 2.0)


def test_an_interrupted_test_runs_next_and_once() -> None:
    schedule = Schedule(file_of(*[spec(8)] * 3), num_slots=SLOTS)
    assert schedule.take(1, spec(8)) == (0, 1)
    schedule.forget(1)
    schedule.give_back(0)
    taken = [schedule.take(2, spec(8)) for _ in range(4)]
    assert [t and t[0] for t in taken] == [0, 1, 2, None]
    assert schedule.is_empty


def test_a_file_stays_on_one_gang_while_there_is_other_work() -> None:
    """Also where tests of other sizes are between its own."""
    tests = [(i, spec(4 if i % 2 else 2), f"test_{i // 20}.py") for i in range(80)]
    machine = play(tests, [1.0] * 80)
    for size in (2, 4):
        for file in range(4):
            gangs = {
                gang
                for gang, index in machine.order
                if tests[index][1].world_size == size and index // 20 == file
            }
            assert len(gangs) <= 2


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["equal", "random", "few_long"])
def test_mixed_sizes_are_packed_within_a_fifth_of_the_best(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice((1, 2, 4)) for _ in range(120)]
    tests = [(i, spec(size), f"test_{i // 10}.py") for i, size in enumerate(sizes)]
    durations = {
        "equal": [1.0] * 120,
        "random": [chance.uniform(0.1, 2.0) for _ in range(120)],
        "few_long": [chance.choice((0.1, 0.1, 0.1, 3.0)) for _ in range(120)],
    }[kind]
    machine = play(tests, durations)
    assert machine.now <= 1.2 * floor(tests, durations)


def test_no_size_starves() -> None:
    """With every mix of sizes, also odd ones, everything runs and the machine is used."""
    chance = random.Random(7)
    for _ in range(200):
        sizes = [chance.randint(1, 10) for _ in range(chance.randint(1, 40))]
        tests = [(i, spec(size), "test_a.py") for i, size in enumerate(sizes)]
        durations = [chance.uniform(0.1, 1.0) for _ in sizes]
        machine = play(tests, durations)
        assert machine.now <= 3.0 * floor(tests, durations)
