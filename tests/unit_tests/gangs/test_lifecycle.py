from __future__ import annotations

from dataclasses import replace

import pytest
from gang_words import (
    DIRS,
    GRACE_S,
    LIMIT_S,
    SIZE,
    busy_gang,
    died,
    done,
    end_all_but,
    failed,
    late,
    new_gang,
    passed,
    run_of,
    stacks,
    the_end,
)

from pytest_megatron.base.text import describe_exit, name_ranks
from pytest_megatron.gangs.ipc.messages import (
    Broken,
    Closed,
    DebuggerLeft,
    DebuggerWanted,
    Done,
    Killed,
    PhaseReport,
    Ready,
)
from pytest_megatron.gangs.lifecycle import (
    START_LIMIT_S,
    AskForStacks,
    Finish,
    GangState,
    KillGang,
    SendClose,
    SendRuns,
)
from pytest_megatron.gangs.merge import RankResult, Reason, RunEnd


def test_a_test_ends_once_every_rank_has_ended_it() -> None:
    gang = busy_gang()
    assert end_all_but(gang, 5, now=1.0) == []
    assert gang.handle(5, done(), 2.5) == [
        Finish(
            end=RunEnd(
                run=1,
                reason=Reason.DONE,
                ranks=tuple(passed(rank) for rank in range(SIZE)),
                limit_s=0.0,
                duration_s=2.5,
                is_kept=True,
            )
        )
    ]
    assert (gang.state, gang.deadline) == (GangState.IDLE, None)


def test_a_test_assigned_to_a_starting_gang_is_sent_when_the_last_rank_is_ready() -> None:
    gang = new_gang(is_ready=False)
    assert gang.assign(run_of(), limit_s=LIMIT_S, is_isolated=False, now=0.0) == []
    ready = Ready()
    assert [gang.handle(rank, ready, 20.0) for rank in range(SIZE - 1)] == [[]] * (SIZE - 1)
    assert gang.handle(SIZE - 1, ready, 20.0) == [SendRuns(runs=(run_of(),))]
    assert gang.deadline == 20.0 + LIMIT_S


def test_after_a_first_death_the_others_have_the_grace_and_are_asked_where_they_are() -> None:
    gang = busy_gang()
    assert gang.handle(3, died(3, -11), 4.0) == []
    assert gang.deadline == 14.0
    assert end_all_but(gang, 3, 6) == []
    assert gang.tick(13.9) == []
    assert gang.tick(14.0) == [AskForStacks(ranks=(6,))]
    actions = gang.handle(0, stacks(6), 14.5)
    dead = RankResult(rank=3, exit_code=-11, at=4.0, phase="call", log_dir=DIRS[3])
    ranks = tuple({3: dead, 6: late(6)}.get(rank, passed(rank)) for rank in range(SIZE))
    assert actions == [
        KillGang(),
        Finish(
            end=RunEnd(
                run=1,
                reason=Reason.DIED,
                ranks=ranks,
                limit_s=GRACE_S,
                duration_s=14.5,
                is_kept=False,
            )
        ),
    ]
    assert gang.state is GangState.KILLING


def test_a_death_ends_the_test_at_once_where_all_others_ended_it() -> None:
    gang = busy_gang()
    assert end_all_but(gang, 7) == []
    actions = gang.handle(7, died(7), 5.0)
    assert actions[0] == KillGang()
    assert the_end([*actions]).reason is Reason.DIED


def test_a_second_death_neither_prolongs_the_grace_nor_becomes_the_cause() -> None:
    gang = busy_gang()
    gang.handle(2, died(2, -9), 4.0)
    gang.handle(1, died(1, -6), 9.0)
    assert gang.deadline == 14.0
    assert gang.handle(1, died(1, 0), 9.5) == []  # a death is told once
    gang.tick(14.0)
    end = the_end([*gang.handle(0, stacks(0, 3, 4, 5, 6, 7), 14.5)])
    assert [(r.rank, r.exit_code, r.at) for r in end.ranks if r.exit_code is not None] == [
        (1, -6, 9.0),
        (2, -9, 4.0),
    ]


def test_a_rank_that_dies_after_its_part_fails_the_test_that_others_still_run() -> None:
    gang = busy_gang()
    gang.handle(4, done(), 1.0)
    assert gang.handle(4, died(4, 1, phase=""), 2.0) == []
    actions = end_all_but(gang, 4)
    assert actions[0] == KillGang()
    end = the_end(actions)
    assert end.reason is Reason.DIED
    assert end.ranks[4] == RankResult(rank=4, exit_code=1, at=2.0, log_dir=DIRS[4])


def test_a_hang_is_found_by_the_limit_and_every_late_rank_is_asked() -> None:
    gang = busy_gang()
    assert end_all_but(gang, 0, 1) == []
    assert gang.tick(LIMIT_S) == [AskForStacks(ranks=(0, 1))]
    end = the_end([*gang.handle(0, stacks(0, 1), LIMIT_S + 1)])
    assert (end.reason, end.limit_s, end.is_kept) == (Reason.HUNG, LIMIT_S, False)
    assert end.ranks[:2] == (late(0), late(1))


def test_without_a_limit_a_hang_lasts() -> None:
    gang = busy_gang(limit_s=0.0)
    assert gang.deadline is None
    assert gang.tick(1e9) == []


def test_each_phase_has_the_limit_of_its_own() -> None:
    gang = busy_gang()
    gang.handle(0, failed("setup", "passed"), 50.0)
    assert gang.deadline == 50.0 + LIMIT_S


def test_stacks_that_never_come_do_not_keep_a_hang() -> None:
    gang = busy_gang()
    gang.tick(LIMIT_S)
    assert gang.deadline is not None
    assert LIMIT_S < gang.deadline <= LIMIT_S + 5
    end = the_end([*gang.tick(gang.deadline)])
    assert (end.reason, end.ranks[0].stack) == (Reason.HUNG, "")


def test_a_done_that_comes_while_the_gang_is_stopped_is_ignored() -> None:
    gang = busy_gang()
    end_all_but(gang, 0)
    gang.tick(LIMIT_S)
    assert gang.handle(0, done(), LIMIT_S + 0.1) == []
    end = the_end([*gang.handle(0, stacks(0), LIMIT_S + 1)])
    assert (end.reason, end.ranks[0].done) == (Reason.HUNG, None)


def test_a_failed_rank_gives_the_others_the_grace() -> None:
    gang = busy_gang()
    gang.handle(1, failed(), 5.0)
    assert gang.deadline == 15.0
    assert end_all_but(gang, 0) == []
    gang.tick(15.0)
    end = the_end([*gang.handle(0, stacks(0), 16.0)])
    assert (end.reason, end.limit_s) == (Reason.FAILED, GRACE_S)
    assert (end.ranks[1].at, end.ranks[1].failed_phase) == (5.0, "call")


def test_a_failure_on_every_rank_keeps_the_gang() -> None:
    gang = busy_gang()
    for rank in range(SIZE):
        gang.handle(rank, failed(), 5.0)
    end = the_end(end_all_but(gang))
    assert (end.reason, end.is_kept) == (Reason.DONE, True)


def test_a_death_that_a_peer_noticed_first_is_the_cause() -> None:
    gang = busy_gang()
    lost = PhaseReport("call", "failed", full={"longrepr": "Connection closed by peer"})
    gang.handle(1, replace(failed(), report=lost), 5.0)
    gang.handle(1, done(), 5.5)
    gang.handle(2, died(2, -11), 6.0)
    assert the_end(end_all_but(gang, 1, 2)).reason is Reason.DIED


def test_a_death_behind_a_failure_does_not_become_the_cause() -> None:
    gang = busy_gang()
    gang.handle(1, failed(), 5.0)
    gang.handle(2, died(2), 6.0)
    assert the_end(end_all_but(gang, 2)).reason is Reason.FAILED


@pytest.mark.parametrize(
    ("odd", "is_isolated", "reason", "is_kept"),
    [
        pytest.param(done(collectives=2), False, Reason.DESYNCHRONISED, False, id="missed-one"),
        pytest.param(done(collectives=2), True, Reason.DONE, False, id="isolated"),
        pytest.param(done(poison="illegal access"), False, Reason.DONE, False, id="poisoned"),
        pytest.param(
            replace(done(), num_unmatched=1), False, Reason.DONE, False, id="sent-to-nobody"
        ),
        pytest.param(done(), True, Reason.DONE, False, id="isolated-in-step"),
    ],
)
def test_a_gang_that_another_test_cannot_use_is_replaced(
    odd: Done, *, is_isolated: bool, reason: Reason, is_kept: bool
) -> None:
    gang = busy_gang(is_isolated=is_isolated)
    end_all_but(gang, 2)
    actions = gang.handle(2, odd, 2.0)
    end = the_end([*actions])
    assert (end.reason, end.is_kept, actions[0]) == (reason, is_kept, KillGang())


def test_a_gang_is_kept_whose_sends_were_all_received() -> None:
    gang = busy_gang()
    end_all_but(gang, 1, 2)
    gang.handle(1, replace(done(), num_unmatched=2), 2.0)
    end = the_end([*gang.handle(2, replace(done(), num_unmatched=-2), 2.0)])
    assert (end.reason, end.is_kept) == (Reason.DONE, True)


def test_collectives_that_differ_after_a_failure_replace_the_gang_and_say_no_more() -> None:
    gang = busy_gang()
    gang.handle(2, failed(), 1.0)
    end_all_but(gang, 2)
    end = the_end([*gang.handle(2, done(collectives=2), 2.0)])
    assert (end.reason, end.is_kept) == (Reason.DONE, False)


def test_an_open_debugger_stops_the_clocks() -> None:
    gang = busy_gang()
    gang.handle(1, failed(), 5.0)
    gang.handle(1, DebuggerWanted(reason="exception", pid=7), 5.0)
    assert gang.deadline is None
    assert gang.tick(1000.0) == []
    gang.handle(1, DebuggerLeft(), 1000.0)
    assert gang.deadline == 1000.0 + GRACE_S


def test_a_rank_that_dies_in_the_debugger_starts_the_clocks() -> None:
    gang = busy_gang()
    gang.handle(1, DebuggerWanted(reason="breakpoint", pid=7), 5.0)
    gang.handle(1, died(1), 70.0)
    assert gang.deadline == 70.0 + GRACE_S


def test_pytest_that_breaks_in_a_rank_fails_the_test() -> None:
    gang = busy_gang()
    gang.handle(1, Broken(problem="Traceback"), 1.0)
    end = the_end(end_all_but(gang, 1))
    assert (end.reason, end.ranks[1].problem, end.is_kept) == (Reason.FAILED, "Traceback", False)


def test_a_gang_that_breaks_between_tests_is_replaced_in_silence() -> None:
    gang = new_gang()
    assert gang.handle(1, died(1), 1.0) == [KillGang()]
    other = new_gang()
    assert other.handle(1, Broken(problem="rank 1 closed its connection"), 1.0) == [KillGang()]


def test_a_rank_that_dies_before_the_gang_has_started_fails_the_first_test_at_once() -> None:
    gang = new_gang(is_ready=False)
    gang.assign(run_of(), limit_s=LIMIT_S, is_isolated=False, now=0.0)
    actions = gang.handle(2, died(2, 1, phase=""), 3.0)
    end = the_end([*actions])
    assert (actions[0], end.reason, end.limit_s) == (KillGang(), Reason.NOT_STARTED, 0.0)
    assert end.ranks[2].exit_code == 1


def test_a_rank_that_breaks_before_the_gang_has_started_fails_the_first_test_at_once() -> None:
    gang = new_gang(is_ready=False)
    gang.assign(run_of(), limit_s=LIMIT_S, is_isolated=False, now=0.0)
    end = the_end([*gang.handle(2, Broken(problem="ImportError: torch"), 3.0)])
    assert (end.reason, end.ranks[2].problem) == (Reason.NOT_STARTED, "ImportError: torch")


def test_a_gang_that_never_gets_ready_is_given_up() -> None:
    gang = new_gang(is_ready=False)
    gang.assign(run_of(), limit_s=LIMIT_S, is_isolated=False, now=0.0)
    assert gang.tick(START_LIMIT_S) == [AskForStacks(ranks=tuple(range(SIZE)))]
    assert gang.deadline is not None
    end = the_end([*gang.tick(gang.deadline)])
    assert (end.reason, end.limit_s) == (Reason.NOT_STARTED, START_LIMIT_S)


def test_a_test_that_a_rank_has_not_collected_fails_and_keeps_the_gang() -> None:
    gang = new_gang(is_ready=False)
    node_id = run_of().node_id
    for rank in range(SIZE):
        missing = {node_id: "not collected"} if rank == 2 else {}
        gang.handle(rank, Ready(missing=missing), 0.0)
    end = the_end([*gang.assign(run_of(), limit_s=LIMIT_S, is_isolated=False, now=1.0)])
    told = (end.reason, end.ranks[2].problem, end.is_kept)
    assert told == (Reason.NOT_COLLECTED, "not collected", True)
    assert gang.assign(run_of(2), limit_s=LIMIT_S, is_isolated=False, now=2.0) == [
        SendRuns(runs=(run_of(2),))
    ]


def test_words_of_an_earlier_test_change_nothing() -> None:
    gang = busy_gang()
    end_all_but(gang)
    gang.assign(run_of(2), limit_s=LIMIT_S, is_isolated=False, now=2.0)
    assert gang.handle(0, done(run=1), 3.0) == []
    assert gang.handle(0, failed(run=1), 3.0) == []
    assert gang.deadline == 2.0 + LIMIT_S
    for rank in range(SIZE):
        actions = gang.handle(rank, done(run=2), 4.0)
    assert the_end([*actions]).ranks[0].failed_phase == ""


def test_an_idle_gang_tears_down_and_is_gone() -> None:
    gang = new_gang()
    assert gang.close(1.0) == [SendClose()]
    for rank in range(SIZE):
        assert gang.handle(rank, Closed(problem=""), 2.0) == []
    for rank in range(SIZE - 1):
        assert gang.handle(rank, died(rank, 0, phase=""), 2.0) == []
    assert gang.handle(SIZE - 1, died(SIZE - 1, 0, phase=""), 2.0) == [KillGang()]
    assert gang.handle(0, Killed(gang=1), 3.0) == []
    assert (gang.state, gang.problems) == (GangState.GONE, [])
    assert gang.handle(0, died(0), 4.0) == []


@pytest.mark.parametrize("is_stopping", [False, True], ids=["running", "stopping"])
def test_a_test_ends_whose_processes_are_all_gone(*, is_stopping: bool) -> None:
    gang = busy_gang()
    end_all_but(gang, 3, 6)
    if is_stopping:
        assert gang.tick(LIMIT_S) == [AskForStacks(ranks=(3, 6))]
    gang.handle(3, Broken(problem="ended with its parent"), 31.0)
    end = the_end([*gang.handle(0, Killed(gang=1), 32.0)])
    problems = {rank.rank: rank.problem for rank in end.ranks if rank.problem}
    assert problems.pop(3) == "ended with its parent"
    assert problems.keys() == {6}
    assert end.reason is (Reason.HUNG if is_stopping else Reason.FAILED)
    assert (end.is_kept, gang.state) == (False, GangState.GONE)


def test_a_death_in_the_teardown_is_a_problem_of_the_gang() -> None:
    gang = new_gang()
    gang.close(1.0)
    gang.handle(0, Closed(problem="E: fixture"), 2.0)
    gang.handle(1, died(1, -11), 2.0)
    assert gang.problems == [
        "rank 0 in the last teardown: E: fixture",
        "rank 1 was killed by SIGSEGV in the last teardown",
    ]


def test_a_teardown_that_does_not_end_is_killed() -> None:
    gang = new_gang()
    gang.close(1.0)
    for rank in range(2, SIZE):
        gang.handle(rank, Closed(problem=""), 2.0)
    assert gang.tick(1.0 + GRACE_S) == [KillGang()]
    assert gang.problems == ["ranks 0-1 did not end the teardown in 10 s"]


def test_a_rank_that_stays_after_its_teardown_is_named() -> None:
    gang = new_gang()
    gang.close(1.0)
    for rank in range(SIZE):
        gang.handle(rank, Closed(problem=""), 2.0)
    for rank in range(1, SIZE):
        gang.handle(rank, died(rank, 0, phase=""), 2.0)
    assert gang.tick(1.0 + GRACE_S) == [KillGang()]
    assert gang.problems == ["rank 0 did not exit after the teardown in 10 s"]


def test_a_teardown_has_the_limit_of_the_last_test() -> None:
    gang = busy_gang()
    end_all_but(gang)
    gang.close(2.0)
    assert gang.tick(2.0 + GRACE_S) == []
    assert gang.tick(2.0 + LIMIT_S) == [KillGang()]


def test_a_busy_gang_is_killed_without_a_report() -> None:
    gang = busy_gang()
    assert gang.close(1.0) == [KillGang()]
    assert gang.kill() == []
    assert gang.handle(0, done(), 1.0) == []
    assert gang.handle(0, died(0), 1.0) == []
    assert gang.deadline is None


def test_exits_are_named_as_people_know_them() -> None:
    assert [describe_exit(code) for code in (0, 3, -11, -63)] == [
        "exited with code 0",
        "exited with code 3",
        "was killed by SIGSEGV",
        "was killed by signal 63",
    ]


def test_ranks_are_named_in_ranges() -> None:
    assert [name_ranks(ranks) for ranks in ([3], [4, 0, 1, 2], [1, 3], [2, 2])] == [
        "rank 3",
        "ranks 0-2, 4",
        "ranks 1, 3",
        "rank 2",
    ]


def test_a_gang_that_is_asked_to_close_again_tears_down_in_peace() -> None:
    gang = new_gang()
    assert gang.close(1.0) == [SendClose()]
    assert gang.close(1.1) == []
    assert gang.state is GangState.CLOSING
