"""Ranks that agree among themselves whether to go on, as processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from pytest_megatron.gangs.ipc.messages import Done
from pytest_megatron.gangs.rank.lockstep import Lockstep

SIZE = 3


def ending(
    run: int = 1, *, is_clean: bool = True, collectives: int = 5, unmatched: int = 0
) -> Done:
    return Done(
        run=run,
        reports=(),
        is_clean=is_clean,
        num_collectives=collectives,
        num_rendezvous=1,
        num_unmatched=unmatched,
    )


@pytest.fixture
def lockstep() -> Iterator[Lockstep]:
    made = Lockstep(SIZE)
    yield made
    made.close()


def fork(work: Callable[[], bool]) -> int:
    """Start a rank that exits with 0 for True and 1 for False."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        code = 0 if work() else 1
    finally:
        os._exit(code)


def answers(*pids: int) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def others_end(lockstep: Lockstep, their: Done) -> None:
    def work(rank: int) -> bool:
        lockstep.publish(rank, their)
        return True

    assert answers(fork(lambda: work(1)), fork(lambda: work(2))) == [0, 0]


def ranks_that_end(lockstep: Lockstep, *endings: Done) -> list[int]:
    """Return what ranks that end test 1 in these ways answer; two wait before the last one ends."""

    def work(rank: int, mine: Done) -> bool:
        lockstep.publish(rank, mine)
        return lockstep.may_start(rank, run=2, after=1)

    def start(rank: int, mine: Done) -> int:
        return fork(lambda: work(rank, mine))

    return answers(*(start(rank, mine) for rank, mine in enumerate(endings)))


def test_ranks_go_on_if_all_ended_well_and_in_step(lockstep: Lockstep) -> None:
    assert ranks_that_end(lockstep, *[ending()] * SIZE) == [0] * SIZE


@pytest.mark.parametrize(
    "other",
    [ending(is_clean=False), ending(collectives=6)],
    ids=["one failed", "one took part in another collective"],
)
def test_no_rank_goes_on_if_one_ended_otherwise(lockstep: Lockstep, other: Done) -> None:
    assert ranks_that_end(lockstep, ending(), ending(), other) == [1] * SIZE


def test_ranks_go_on_if_all_that_was_sent_was_received(lockstep: Lockstep) -> None:
    endings = [ending(unmatched=number) for number in (700, -1, -699)]
    assert ranks_that_end(lockstep, *endings) == [0] * SIZE


def test_no_rank_goes_on_if_a_send_was_not_received(lockstep: Lockstep) -> None:
    endings = [ending(unmatched=number) for number in (2, -1, 0)]
    assert ranks_that_end(lockstep, *endings) == [1] * SIZE


def test_a_rank_that_comes_late_follows_whatever_was_sent_since(lockstep: Lockstep) -> None:
    lockstep.publish(0, ending())
    others_end(lockstep, ending(2, unmatched=1))
    assert lockstep.may_start(0, run=2, after=1)


def test_a_rank_without_a_group_is_in_step_with_its_like(lockstep: Lockstep) -> None:
    assert ranks_that_end(lockstep, *[ending(collectives=-1)] * SIZE) == [0] * SIZE


def test_a_rank_that_comes_late_stays_where_others_were_told_something_else(
    lockstep: Lockstep,
) -> None:
    lockstep.publish(0, ending())
    others_end(lockstep, ending(3))
    assert not lockstep.may_start(0, run=2, after=1)


def test_a_test_that_follows_another_one_is_not_started(lockstep: Lockstep) -> None:
    assert not lockstep.may_start(0, run=2, after=1)
    lockstep.publish(0, ending(3))
    assert not lockstep.may_start(0, run=2, after=1)


def test_ranks_agree_also_where_a_test_closed_what_wakes_them(lockstep: Lockstep) -> None:
    def work(rank: int) -> bool:
        os.closerange(3, 1 << 10)
        lockstep.publish(rank, ending())
        return lockstep.may_start(rank, run=2, after=1)

    started = [fork(lambda: work(0)), fork(lambda: work(1)), fork(lambda: work(2))]
    assert answers(*started) == [0] * SIZE
