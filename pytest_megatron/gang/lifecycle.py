"""The state machine of one gang: from messages and the clock to actions; no effects.

One rule decides everything: a gang is alive or dead as one. The first sign of trouble (a rank that
failed, skipped or died) starts the grace in which the others may still end; without a sign the time
limit counts. Who is not done by then is asked for its stack and killed with the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import describe_exit, name_ranks
from pytest_megatron.gang.ipc.messages import (
    Broken,
    Closed,
    DebuggerLeft,
    DebuggerReads,
    DebuggerWanted,
    DebuggerWrote,
    Died,
    Done,
    Killed,
    Message,
    PhaseEnded,
    Ready,
    Run,
    Stacks,
)
from pytest_megatron.gang.rank_state import (
    MOST_AHEAD,
    RankState,
    RunQueue,
    kind_of_first_failure,
    settle,
)
from pytest_megatron.gang.spec import (
    Action,
    AskForStacks,
    Finish,
    KillGang,
    Reason,
    RunEnd,
    SendClose,
    SendRuns,
)
from pytest_megatron.gang.timers import START_LIMIT_S, GangState, Timers

_EXIT_S = 1.0  # for other ranks to end, where one has asked pytest itself to
_STACKS_WAIT_S = 3.0  # for a fork server to bring stacks; it gives ranks one second


class Lifecycle:
    """One gang, from its first rank to its last.

    Attributes:
        queue: The tests that it has.
        problems: What went wrong after the last test that ended.
        late: Rank -> report of a teardown that failed after that test was reported.
        unbegun: Number of the execution that the gang had when one of its ranks was found to be
            dead since the test before it; it has to run elsewhere. 0 without one.
    """

    def __init__(self, log_dirs: Sequence[str], *, grace_s: float, now: float) -> None:
        """Begin.

        Args:
            log_dirs: Of each rank, in order.
            grace_s: How long others may take after the first sign of trouble.
            now: Seconds of a monotonic clock.
        """
        self.state = GangState.STARTING
        self.problems: list[str] = []
        self.late: dict[int, JsonValue] = {}
        self.outputs: dict[int, str] = {}
        self.unbegun = 0
        self._ranks = [RankState(rank=rank, log_dir=path) for rank, path in enumerate(log_dirs)]
        self._timers = Timers(grace_s, now)
        self.queue = RunQueue()
        self._is_isolated = False
        self._stop: tuple[Reason, float] | None = None

    def assign(self, run: Run, *, limit_s: float, is_isolated: bool, now: float) -> list[Action]:
        """Take a test; it is sent as soon as every rank is ready.

        Args:
            run: The test.
            limit_s: For one phase; 0 is no limit. The call may have one of its own, in `run`.
            is_isolated: Whether nothing runs on this gang afterwards.
            now: Seconds of the clock.
        """
        assert self.queue.current is None
        self._is_isolated = is_isolated
        self._begin(run, limit_s, now)
        return self._send() if self.state is GangState.IDLE else []

    def _begin(self, run: Run, limit_s: float, now: float) -> None:
        self.queue.begin(run, limit_s)
        for rank in self._ranks:
            rank.reset()
        self._timers.begin(now)
        self._stop = None

    def send_ahead(self, runs: Sequence[tuple[Run, float]]) -> list[Action]:
        """Send tests that follow what the gang has; ranks start each if all end well before it.

        In any other case it is dropped, here as in the ranks, which know the same.

        Args:
            runs: Each with the limit of its phases in seconds, as in `assign`.
        """
        self.queue.add(runs)
        return [SendRuns(runs=tuple(run for run, _ in runs))]

    @property
    def room_ahead(self) -> int:
        """How many tests may be sent ahead, as the running one may end well."""
        is_well = self.state is GangState.RUNNING and self._timers.first_failure_at is None
        may_go_on = is_well and not self._is_isolated
        return MOST_AHEAD - self.queue.num_ahead if may_go_on else 0

    def is_past(self, rank: int) -> bool:
        """Whether what a rank says now may be of a test that was sent ahead.

        If it is, all ranks have said that they ended the running one.
        """
        return self.queue.num_ahead > 0 and self._ranks[rank].done is not None

    def is_awaited(self, rank: int) -> bool:
        """Whether a rank is the only one that has not ended the running test."""
        busy = [r.rank for r in self._ranks if not r.is_settled]
        return self.state is GangState.RUNNING and busy == [rank]

    def lose(self, rank: int) -> None:
        """Take note that a rank says no more; why it does not is told later.

        Until then no test ends well: the rank may have died before the others had ended it.
        """
        self._ranks[rank].is_lost = True

    def close(self, now: float) -> list[Action]:
        """Tear down an idle gang; one that is busy or starts is killed.

        It has the time of a phase of the last test, whose fixtures these are.
        """
        if self.state is GangState.IDLE:
            self.state = GangState.CLOSING
            self._timers.begin_closing(self.queue.limit_s, now)
            return [SendClose()]
        return [] if self.state is GangState.CLOSING else self.kill()

    def kill(self) -> list[Action]:
        """Kill the gang, whatever it does; a test on it is not reported."""
        if self.state in (GangState.KILLING, GangState.GONE):
            return []
        self.state = GangState.KILLING
        self.queue.drop()
        return [KillGang()]

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do at the latest."""
        return self._timers.deadline(self.state, self._limit_s)

    @property
    def _limit_s(self) -> float:
        """Limit of the running phase: the call may have one of its own."""
        run = self.queue.current
        if run is None or run.call_limit_s is None:
            return self.queue.limit_s
        ended = {rank.ended_phase for rank in self._ranks}  # "" of one in its setup
        return run.call_limit_s if "setup" in ended and "" not in ended else self.queue.limit_s

    def tick(self, now: float) -> list[Action]:
        """Look at the clock."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return []
        match self.state:
            case GangState.STOPPING:
                return self._finish(now)
            case GangState.CLOSING:
                alive = [r for r in self._ranks if r.exit_code is None]
                late = [r.rank for r in alive if not r.is_closed]
                what = "end the teardown" if late else "exit after the teardown"
                names = name_ranks(late or [r.rank for r in alive])
                self.problems.append(f"{names} did not {what} in {self._timers.closing_s:g} s")
                return self.kill()
            case GangState.STARTING:
                return self._begin_stop(Reason.NOT_STARTED, START_LIMIT_S, now)
            case _ if self._timers.first_failure_at is not None:
                limit_s = self._timers.after_failure_s
                return self._begin_stop(kind_of_first_failure(self._ranks), limit_s, now)
            case _:
                return self._begin_stop(Reason.HUNG, self._limit_s, now)

    def handle(self, rank: int, message: Message, now: float) -> list[Action]:
        """Take in what a rank, or a fork server about a rank, said."""
        if self.state is GangState.GONE:
            return []
        match message:
            case Killed():
                self.state = GangState.GONE
                return []
            case Stacks(stacks=stacks, flights=flights):
                for name, text in stacks.items():
                    self._ranks[int(name)].stack = text
                for name, text in flights.items():
                    self._ranks[int(name)].flight = text
                for name, phase in message.phases.items():
                    self._ranks[int(name)].phase = phase
                return self._finish(now) if self.state is GangState.STOPPING else []
            case Died():
                return self._on_death(self._ranks[rank], message, now)
            case _:
                return self._on_message(self._ranks[rank], message, now)

    def _on_message(self, rank: RankState, message: Message, now: float) -> list[Action]:
        match message:
            case Ready(missing=missing):
                rank.is_ready, rank.missing = True, dict(missing)
                return self._on_ready(now)
            case PhaseEnded(run=run) if self._is_current(run):
                self._timers.begin_phase(now)
                rank.ended_phase = message.when
                if message.report is not None:
                    rank.early += (message.report,)
                self._note(rank, message.when, message.outcome, now)
            case Done(run=run) if self._is_current(run) and self.state is GangState.RUNNING:
                rank.done = message
                if message.stop:  # the others may wait for it as for one that failed
                    self._record_failure(rank, now)
                if not rank.outcome:
                    rank.outcome = "passed"
                if message.stop:
                    self._record_failure(rank, now)
                    self._timers.hurry(_EXIT_S)
                return self._settle(now)
            case Broken(problem=problem):
                rank.is_lost = False
                rank.problem = rank.problem or problem
                return self._on_loss(rank, problem, now)
            case Closed():
                self._on_closed(rank, message)
            case _:
                self._on_debugger(rank, message, now)
        return []

    def _on_closed(self, rank: RankState, message: Closed) -> None:
        rank.is_closed = True
        self.outputs[rank.rank] = message.workeroutput
        if message.late is not None:
            self.late[rank.rank] = message.late
        if message.problem:
            self.problems.append(f"rank {rank.rank} in the last teardown: {message.problem}")

    def _on_ready(self, now: float) -> list[Action]:
        if self.state is not GangState.STARTING or not all(r.is_ready for r in self._ranks):
            return []
        self.state = GangState.IDLE
        if self.queue.current is None:
            return []
        self._timers.begin(now)
        return self._send()

    def _on_debugger(self, rank: RankState, message: Message, now: float) -> None:
        """Stop the clocks while a debugger is open; it starts them anew when it is left."""
        match message:
            case DebuggerWanted() | DebuggerWrote() | DebuggerReads():
                self._timers.suspend(rank.rank)
            case DebuggerLeft():
                self._timers.resume(rank.rank, self.state, now)
            case _:
                pass

    def _is_current(self, run: int) -> bool:
        return 0 < run == self.queue.number and self.state is not GangState.KILLING

    def _note(self, rank: RankState, when: str, outcome: str, now: float) -> None:
        if outcome != "passed" and not rank.failed_phase:
            rank.failed_phase, rank.outcome = when, outcome
            self._record_failure(rank, now)

    def _record_failure(self, rank: RankState, now: float) -> None:
        if rank.at is None:
            rank.at = now
        self._timers.record_failure(now)

    def _on_death(self, rank: RankState, died: Died, now: float) -> list[Action]:
        if rank.exit_code is not None or rank.death is not None:
            return []
        rank.is_lost = False
        self._timers.forget(rank.rank)
        if self.state is GangState.RUNNING and died.run in self.queue.numbers[1:]:
            rank.death = died  # it ended the running test, and what the others say of it will come
            return self._settle(now)
        rank.exit_code, rank.phase = died.exit_code, died.phase
        what = describe_exit(died.exit_code)
        if (
            self.state is GangState.RUNNING
            and 0 < died.run < self.queue.number
            and not rank.problem
        ):
            self.unbegun = self.queue.number
            self._blame_last(rank, f"{what} after its test")
            return self.kill()
        return self._on_loss(rank, what, now)

    def _blame_last(self, rank: RankState, what: str) -> None:
        """Note a problem of the test that ended last."""
        if not rank.is_closed:
            self.problems.append(f"rank {rank.rank} {what}")

    def _on_loss(self, rank: RankState, what: str, now: float) -> list[Action]:
        """Go on after a rank was lost, be it its process or its connection."""
        if self.state is GangState.IDLE:
            self._blame_last(rank, f"{what} after its test")
        if self.state is GangState.CLOSING:
            self._blame_last(rank, f"{what} in the last teardown")
        match self.state:
            case GangState.STARTING:
                self._record_failure(rank, now)
                return self._begin_stop(Reason.NOT_STARTED, 0.0, now)
            case GangState.RUNNING:
                rank.undo()
                self._record_failure(rank, now)
                return self._settle(now)
            case GangState.IDLE:
                return self.kill()
            case GangState.CLOSING if all(r.exit_code is not None for r in self._ranks):
                return self.kill()
            case _:
                return []

    def _send(self) -> list[Action]:
        assert self.queue.current is not None
        self.state = GangState.RUNNING
        node_id = self.queue.current.node_id
        lacking = [r for r in self._ranks if node_id in r.missing]
        if lacking:
            for rank in lacking:
                rank.problem = rank.missing[node_id]
                rank.at = self._timers.began_at
            return self._end(Reason.NOT_COLLECTED, 0.0, self._timers.began_at, is_kept=True)
        return [SendRuns(runs=(self.queue.current,))]

    def _settle(self, now: float) -> list[Action]:
        """End the test if every rank has."""
        if self.state is not GangState.RUNNING:
            return []
        found = settle(self._ranks, is_isolated=self._is_isolated)
        if found is None:
            return []
        reason, is_kept = found
        if (
            is_kept
            and self.queue.num_ahead
            and all(r.done and r.done.is_clean for r in self._ranks)
        ):
            return self._go_on(now)
        return self._end(reason, 0.0, now, is_kept=is_kept)

    def _go_on(self, now: float) -> list[Action]:
        """End the test and take up the one that the ranks have started by themselves."""
        actions: list[Action] = [self._finished(Reason.DONE, 0.0, now, is_kept=True)]
        self._begin(*self.queue.next(), now)
        for rank in self._ranks:
            if rank.death is not None and rank.death.run == self.queue.number:
                died, rank.death = rank.death, None
                actions += self._on_death(rank, died, now)
        return actions

    def _begin_stop(self, reason: Reason, limit_s: float, now: float) -> list[Action]:
        """Ask those that are still busy where they are; without any, end at once."""
        self._stop = (reason, limit_s)
        late = tuple(r.rank for r in self._ranks if not r.is_settled)
        if not late or (reason is Reason.NOT_STARTED and limit_s == 0.0):
            return self._end(reason, limit_s, now, is_kept=False)
        self.state = GangState.STOPPING
        self._timers.begin_stopping(_STACKS_WAIT_S, now)
        return [AskForStacks(ranks=late)]

    def _finish(self, now: float) -> list[Action]:
        assert self._stop is not None
        reason, limit_s = self._stop
        return self._end(reason, limit_s, now, is_kept=False)

    def _end(self, reason: Reason, limit_s: float, now: float, *, is_kept: bool) -> list[Action]:
        is_kept = is_kept and not self._is_isolated and all(r.death is None for r in self._ranks)
        actions: list[Action] = []
        if is_kept:
            self.state = GangState.IDLE
        else:
            self.state = GangState.KILLING
            actions.append(KillGang())
        if self.queue.current is not None:
            actions.append(self._finished(reason, limit_s, now, is_kept=is_kept))
        self.queue.drop()
        return actions

    def _finished(self, reason: Reason, limit_s: float, now: float, *, is_kept: bool) -> Finish:
        return Finish(
            end=RunEnd(
                run=self.queue.number,
                reason=reason,
                ranks=tuple(r.end() for r in self._ranks),
                limit_s=limit_s,
                duration_s=now - self._timers.began_at,
                is_kept=is_kept,
            )
        )
