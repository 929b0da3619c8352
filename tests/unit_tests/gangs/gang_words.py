"""What tests of `Lifecycle` say to a gang of eight ranks, and what it says."""

from __future__ import annotations

from dataclasses import replace

from pytest_megatron.gangs.ipc.messages import Died, Done, PhaseEnded, Ready, Run, Stacks
from pytest_megatron.gangs.lifecycle import Finish, Lifecycle, SendRuns
from pytest_megatron.gangs.merge import RankResult, RunEnd

SIZE = 8
GRACE_S = 10.0
LIMIT_S = 60.0
DIRS = [f"logs/{rank}" for rank in range(SIZE)]


def run_of(number: int = 1) -> Run:
    return Run(
        run=number,
        index=number,
        node_id=f"test_a.py::test_{number}",
        next_index=-1,
        next_node_id="",
        shared_dir="",
        is_last_if_failed=False,
    )


def new_gang(*, is_ready: bool = True) -> Lifecycle:
    gang = Lifecycle(DIRS, grace_s=GRACE_S, now=0.0)
    for rank in range(SIZE if is_ready else 0):
        assert gang.handle(rank, Ready(), 0.0) == []
    return gang


def busy_gang(*, limit_s: float = LIMIT_S, is_isolated: bool = False) -> Lifecycle:
    """A gang whose ranks began test 1 at time 0."""
    gang = new_gang()
    sent = gang.assign(run_of(), limit_s=limit_s, is_isolated=is_isolated, now=0.0)
    assert sent == [SendRuns(runs=(run_of(),))]
    return gang


def done(run: int = 1, *, collectives: int = 3, poison: str = "") -> Done:
    return Done(run=run, reports=(), num_collectives=collectives, poison=poison)


def failed(when: str = "call", outcome: str = "failed", run: int = 1) -> PhaseEnded:
    return PhaseEnded(run=run, when=when, outcome=outcome)


def clean(run: int = 1) -> Done:
    return replace(done(run), is_clean=True)


def died(rank: int, exit_code: int = -9, phase: str = "call", run: int = 1) -> Died:
    return Died(gang=1, rank=rank, exit_code=exit_code, phase=phase, run=run)


def end_all_but(gang: Lifecycle, *late: int, now: float = 1.0) -> list[object]:
    """All other ranks end the test in order; return what the last one brings about."""
    actions: list[object] = []
    for rank in set(range(SIZE)) - set(late):
        actions += gang.handle(rank, done(), now)
    return actions


def the_end(actions: list[object]) -> RunEnd:
    (finish,) = [a for a in actions if isinstance(a, Finish)]
    return finish.end


def passed(rank: int) -> RankResult:
    return RankResult(rank=rank, done=done(), log_dir=DIRS[rank])


def stacks(*ranks: int) -> Stacks:
    return Stacks(
        gang=1,
        stacks={str(rank): f"stack {rank}" for rank in ranks},
        flights={str(rank): "{}" for rank in ranks},
        phases={str(rank): "call" for rank in ranks},
    )


def late(rank: int) -> RankResult:
    return RankResult(
        rank=rank, phase="call", stack=f"stack {rank}", flight="{}", log_dir=DIRS[rank]
    )
