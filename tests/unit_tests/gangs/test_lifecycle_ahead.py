from __future__ import annotations

from dataclasses import replace

import pytest
from gang_words import (
    GRACE_S,
    LIMIT_S,
    SIZE,
    busy_gang,
    clean,
    died,
    done,
    end_all_but,
    failed,
    new_gang,
    run_of,
    stacks,
    the_end,
)

from pytest_megatron.gangs.ipc.messages import Broken, Done
from pytest_megatron.gangs.lifecycle import MOST_AHEAD, GangState, KillGang, Lifecycle, SendRuns
from pytest_megatron.gangs.merge import Reason


def ahead_gang(*, num_ahead: int = 1) -> Lifecycle:
    """A gang that runs test 1 and goes on with test 2, and more, if all ends well."""
    gang = busy_gang()
    for number in range(2, 2 + num_ahead):
        run = replace(run_of(number), after=number - 1)
        assert gang.send_ahead([(run, LIMIT_S / 2)]) == [SendRuns(runs=(run,))]
    return gang


def test_a_gang_goes_on_with_the_test_sent_ahead_once_all_ended_well() -> None:
    gang = ahead_gang()
    assert [gang.handle(rank, clean(), 1.0) for rank in range(SIZE - 1)] == [[]] * (SIZE - 1)
    assert [gang.is_early(clean(run)) for run in (1, 2)] == [False, True]
    end = the_end(list(gang.handle(SIZE - 1, clean(), 4.0)))
    assert (end.run, end.reason, end.is_kept, end.duration_s) == (1, Reason.DONE, True, 4.0)
    assert (gang.state, gang.queue.number, gang.queue.numbers) == (GangState.RUNNING, 2, [2])
    assert not gang.is_early(clean(2))
    assert gang.deadline == 4.0 + LIMIT_S / 2
    assert gang.room_ahead == MOST_AHEAD
    end = the_end([a for r in range(SIZE) for a in gang.handle(r, clean(2), 5.0)])
    assert (end.run, end.duration_s, gang.state) == (2, 1.0, GangState.IDLE)


@pytest.mark.parametrize("last", [done(), replace(clean(), num_collectives=4)])
def test_a_test_sent_ahead_is_dropped_where_a_rank_ended_otherwise(last: Done) -> None:
    gang = ahead_gang()
    for rank in range(SIZE - 1):
        gang.handle(rank, clean(), 1.0)
    assert the_end(list(gang.handle(SIZE - 1, last, 1.0))).run == 1
    assert gang.queue.numbers == []


def test_after_a_failure_one_test_is_sent_ahead_and_then_twice_as_many_each_time() -> None:
    gang = ahead_gang(num_ahead=3)
    assert gang.room_ahead == MOST_AHEAD - 3
    for rank in range(SIZE):
        gang.handle(rank, done(), 1.0)
    number = 5
    rooms: list[int] = []
    gang.assign(run_of(number), limit_s=LIMIT_S, is_isolated=False, now=2.0)
    while not rooms or rooms[-1] < MOST_AHEAD:
        rooms.append(gang.room_ahead)
        runs = [
            (replace(run_of(number + n), after=number + n - 1), LIMIT_S)
            for n in range(1, rooms[-1] + 1)
        ]
        gang.send_ahead(runs)
        for _ in runs:
            for rank in range(SIZE):
                gang.handle(rank, clean(number), 3.0)
            number += 1
    assert rooms == [2**n for n in range(len(rooms))]


def test_a_rank_that_dies_once_all_have_gone_on_fails_the_next_test() -> None:
    gang = ahead_gang()
    for rank in range(SIZE):
        gang.handle(rank, clean(), 1.0)
    gang.handle(0, died(0, run=2), 1.0)
    gang.tick(1.0 + GRACE_S)
    end = the_end(list(gang.handle(0, stacks(*range(1, SIZE)), 12.0)))
    assert (end.run, end.reason, end.ranks[0].exit_code) == (2, Reason.DIED, -9)


def test_a_rank_that_dies_before_all_have_gone_on_fails_the_test_it_ended() -> None:
    gang = ahead_gang()
    gang.handle(0, clean(), 1.0)
    gang.handle(0, died(0), 1.0)
    end = the_end(end_all_but(gang, 0))
    assert (end.run, end.reason, end.ranks[0].exit_code) == (1, Reason.DIED, -9)
    assert (gang.state, gang.queue.numbers) == (GangState.KILLING, [])


def test_nothing_is_sent_ahead_of_a_test_in_trouble() -> None:
    assert busy_gang().room_ahead == MOST_AHEAD
    gang = busy_gang()
    gang.handle(0, failed(), 1.0)
    assert gang.room_ahead == 0
    assert ahead_gang(num_ahead=MOST_AHEAD - 1).room_ahead == 1
    assert busy_gang(is_isolated=True).room_ahead == 0


def test_a_death_in_a_test_sent_ahead_waits_for_what_others_say_of_those_before() -> None:
    gang = ahead_gang(num_ahead=3)
    assert [gang.is_early(died(0, run=run)) for run in (1, 3)] == [False, True]
    assert not gang.is_early(Broken(problem="pytest itself failed"))
    gang.kill()
    assert not gang.is_early(died(0, run=3))


def test_a_rank_that_ended_a_test_and_died_before_the_others_did_fails_it() -> None:
    gang = busy_gang()
    gang.handle(3, done(), 1.0)
    gang.handle(3, died(3), 2.0)
    end = the_end(end_all_but(gang, 3))
    assert (end.reason, end.ranks[3].exit_code, end.ranks[3].done) == (Reason.DIED, -9, None)


def test_a_rank_that_died_after_its_test_has_the_next_one_run_elsewhere() -> None:
    gang = new_gang()
    for run in (1, 2):
        gang.assign(run_of(run), limit_s=LIMIT_S, is_isolated=False, now=0.0)
        if run == 1:
            end_all_but(gang)
    assert gang.handle(2, died(2, run=1, phase=""), 3.0) == [KillGang()]
    assert (gang.unbegun, gang.problems) == (2, ["rank 2 was killed by SIGKILL after its test"])


def test_a_rank_that_died_before_its_first_test_fails_that() -> None:
    gang = busy_gang()
    gang.handle(2, died(2, run=0, phase=""), 0.0)
    end = the_end(end_all_but(gang, 2))
    assert (end.run, end.reason, gang.unbegun) == (1, Reason.DIED, 0)
