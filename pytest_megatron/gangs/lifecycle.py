"""The state machine of one gang: from messages and the clock to actions, without effects.

A gang lives and dies as a whole. The first failure (a rank that failed, skipped or died) starts the
grace period in which the others may still end; without one the time limit applies. Ranks that are
not done by then are asked for their stacks and killed with the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from pytest_megatron.base.text import describe_exit, name_ranks
from pytest_megatron.gangs.ipc.messages import (
    Broken,
    Closed,
    DebuggerLeft,
    DebuggerWanted,
    Died,
    Done,
    Killed,
    Message,
    PhaseEnded,
    PhaseReport,
    Ready,
    Run,
    Stacks,
)
from pytest_megatron.gangs.merge import RankResult, Reason, RunEnd, is_consequence

START_LIMIT_S = 300.0  # to import torch and collect from a slow file system


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRuns:
    """Send tests to every rank, in order."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendClose:
    """Send `Close` to every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForStacks:
    """Request the stacks of these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KillGang:
    """Kill every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Hand the result of the test to the controller."""

    end: RunEnd


Action: TypeAlias = SendRuns | SendClose | AskForStacks | KillGang | Finish


class GangState(Enum):
    """State of a gang."""

    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    STOPPING = "stopping"
    CLOSING = "closing"
    KILLING = "killing"
    GONE = "gone"


class Timers:
    """Timers of one gang, in seconds of one monotonic clock.

    Attributes:
        began_at: Start of the running test, or of the gang.
        first_failure_at: When a rank first failed, skipped or died in the running test, or None.
        grace_s: Time for the other ranks from then on.
        closing_s: Time limit of the last teardown.
    """

    def __init__(self, grace_s: float, now: float) -> None:
        self.grace_s = grace_s
        self.closing_s = grace_s
        self._stop_by = 0.0
        self._debugging: set[int] = set()
        self.begin(now)

    def begin(self, now: float) -> None:
        """Restart for a new test."""
        self.began_at = self._phase_at = now
        self.first_failure_at: float | None = None

    def begin_phase(self, now: float) -> None:
        """Restart the limit of a phase."""
        self._phase_at = now

    def record_failure(self, now: float) -> None:
        """Record the time of a failure, if it is the first."""
        if self.first_failure_at is None:
            self.first_failure_at = now

    def begin_closing(self, limit_s: float, now: float) -> None:
        """Start the limit of the last teardown, which is that of a phase."""
        self.closing_s = max(self.grace_s, limit_s)
        self._stop_by = now + self.closing_s

    def begin_stopping(self, limit_s: float, now: float) -> None:
        """Start the limit for stacks to arrive."""
        self._stop_by = now + limit_s

    def suspend(self, rank: int) -> None:
        """Stop the timers while a rank is in its debugger."""
        self._debugging.add(rank)

    def forget(self, rank: int) -> None:
        """Ignore the debugger of a rank that died."""
        self._debugging.discard(rank)

    def resume(self, rank: int, state: GangState, now: float) -> None:
        """Restart the timers when a rank has left its debugger."""
        self._debugging.discard(rank)
        self._phase_at = now
        if self.first_failure_at is not None:
            self.first_failure_at = now
        if state is GangState.CLOSING:
            self._stop_by = now + self.closing_s

    def deadline(self, state: GangState, limit_s: float) -> float | None:
        """Return the deadline of a state, or None.

        Args:
            state: State of the gang.
            limit_s: Limit of a phase of the running test; 0 is no limit.
        """
        match state:
            case GangState.CLOSING if self._debugging:
                return None
            case GangState.STOPPING | GangState.CLOSING:
                return self._stop_by
            case GangState.STARTING:
                return self.began_at + START_LIMIT_S
            case GangState.RUNNING if not self._debugging:
                if self.first_failure_at is not None:
                    return self.first_failure_at + self.grace_s
                return self._phase_at + limit_s if limit_s else None
            case _:
                return None


MOST_AHEAD = 64  # tests of a gang beside the running one
ORPHANED = "ended, as the process that starts ranks was killed"
_STACKS_WAIT_S = 3.0  # for an agent to send stacks; it gives ranks one second


def settle(ranks: Sequence[RankResult], *, is_isolated: bool) -> tuple[Reason, bool] | None:
    """Return the reason of a test's end, and whether its gang may run another; None before."""
    if not all(r.is_settled for r in ranks):
        return None
    done = [r.done for r in ranks if r.done is not None]
    if len(done) < len(ranks):
        return kind_of_first_failure(ranks), False
    is_in_step = len({d.num_collectives for d in done}) == 1 or is_isolated
    if not is_in_step and not any(r.failed_phase for r in ranks):
        return Reason.DESYNCHRONISED, False
    # A rank that set up groups alone uses other keys of the store than the others; and a send
    # without a receive would be received in a later test.
    is_matched = len({d.num_rendezvous for d in done}) == 1 and not sum(
        d.num_unmatched for d in done
    )
    is_dead = any(r.exit_code is not None for r in ranks)
    is_sound = is_matched and not is_dead and not any(d.poison for d in done)
    return Reason.DONE, is_in_step and is_sound


def kind_of_first_failure(ranks: Sequence[RankResult]) -> Reason:
    """Return the kind of the first failure; peers may notice a death before it is reported."""
    failed = (r for r in ranks if r.at is not None)
    first = min(failed, key=lambda r: (is_consequence(r), r.at, r.rank))
    is_death = first.exit_code is not None and not first.failed_phase
    return Reason.DIED if is_death else Reason.FAILED


class RunQueue:
    """The tests of one gang, in the order in which they run.

    Attributes:
        current: The running one, or the next of a gang that starts; None without any.
        limit_s: Limit of each phase; 0 is no limit. It stays when the test has ended.
        most_ahead: Number of tests to send ahead. A failure drops them all, so there is one after
            it, and twice as many each time.
    """

    def __init__(self) -> None:
        self.current: Run | None = None
        self.limit_s = 0.0
        self.most_ahead = MOST_AHEAD
        self._ahead: deque[tuple[Run, float]] = deque()

    @property
    def number(self) -> int:
        """Number of the running execution, 0 without one."""
        return 0 if self.current is None else self.current.run

    @property
    def numbers(self) -> list[int]:
        """Numbers of all executions."""
        return [] if self.current is None else [self.number, *(run.run for run, _ in self._ahead)]

    @property
    def last(self) -> int:
        """Number of the last execution, 0 without any."""
        return self._ahead[-1][0].run if self._ahead else self.number

    @property
    def num_ahead(self) -> int:
        """Number of tests that were sent ahead and have not begun."""
        return len(self._ahead)

    @property
    def has_enough(self) -> bool:
        """True if enough tests were sent ahead for a while."""
        return self.num_ahead > self.most_ahead // 2

    def begin(self, run: Run, limit_s: float) -> None:
        """Set the running test."""
        self.current, self.limit_s = run, limit_s

    def add(self, runs: Sequence[tuple[Run, float]]) -> None:
        """Append tests, each with the limit of its phases."""
        for run, limit_s in runs:
            assert run.after == self.last
            self._ahead.append((run, limit_s))
        self.most_ahead = min(2 * self.most_ahead, MOST_AHEAD)

    def next(self) -> tuple[Run, float]:
        """Remove and return the next test with its limit."""
        return self._ahead.popleft()

    def drop(self) -> None:
        """Forget the current test and those that were sent ahead."""
        self.current = None
        if self._ahead:
            self.most_ahead = 1
        self._ahead.clear()


class Lifecycle:
    """One gang, from its first rank to its last.

    Attributes:
        queue: The running test, and those sent ahead.
        problems: Errors after the last test that ended.
        late: Rank -> report of a teardown that failed after that test was reported.
        unbegun: Number of an execution that has to run elsewhere, as a rank had already died after
            the test before it; 0 without one.
    """

    def __init__(self, log_dirs: Sequence[str], *, grace_s: float, now: float) -> None:
        """Create the state of a gang that starts.

        Args:
            log_dirs: Log directory of each rank, in order.
            grace_s: Time for the other ranks after the first failure.
            now: Seconds of a monotonic clock.
        """
        self.state = GangState.STARTING
        self.problems: list[str] = []
        self.late: dict[int, PhaseReport] = {}
        self.unbegun = 0
        self._ranks = [RankResult(rank=rank, log_dir=path) for rank, path in enumerate(log_dirs)]
        self._missing: dict[int, Mapping[str, str]] = {}  # of each rank that is ready
        self._closed: set[int] = set()
        self._timers = Timers(grace_s, now)
        self.queue = RunQueue()
        self._is_isolated = False
        self._stop: tuple[Reason, float] | None = None

    def assign(self, run: Run, *, limit_s: float, is_isolated: bool, now: float) -> list[Action]:
        """Assign a test; it is sent as soon as every rank is ready.

        Args:
            run: The test.
            limit_s: For one phase; 0 is no limit.
            is_isolated: Whether nothing runs on this gang afterwards.
            now: Seconds of the clock.
        """
        assert self.queue.current is None
        self._is_isolated = is_isolated
        self._begin(run, limit_s, now)
        return self._send() if self.state is GangState.IDLE else []

    def _begin(self, run: Run, limit_s: float, now: float) -> None:
        """Begin a test: forget what ranks did before, start the clock."""
        self.queue.begin(run, limit_s)
        self._ranks = [
            RankResult(rank=rank.rank, log_dir=rank.log_dir, exit_code=rank.exit_code)
            for rank in self._ranks
        ]
        self._timers.begin(now)
        self._stop = None

    def send_ahead(self, runs: Sequence[tuple[Run, float]]) -> list[Action]:
        """Send tests ahead; ranks start each if the test before it passes on all of them.

        Otherwise it is dropped, here and in the ranks, by the same rule.

        Args:
            runs: Each with the limit of its phases in seconds, as in `assign`.
        """
        self.queue.add(runs)
        return [SendRuns(runs=tuple(run for run, _ in runs))]

    @property
    def room_ahead(self) -> int:
        """Number of tests that may be sent ahead; 0 once the running one has failed."""
        is_well = self.state is GangState.RUNNING and self._timers.first_failure_at is None
        may_go_on = is_well and not self._is_isolated
        return max(0, self.queue.most_ahead - self.queue.num_ahead) if may_go_on else 0

    def is_early(self, message: Message) -> bool:
        """Return whether a message is about a test that was sent ahead.

        Then all ranks have reported the end of the running one, or soon will.
        """
        return self.queue.num_ahead > 0 and getattr(message, "run", 0) > self.queue.number

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank has died or cannot be used any more."""
        return self._ranks[rank].exit_code is not None or bool(self._ranks[rank].problem)

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
        """Kill the gang in any state; its running test is not reported."""
        if self.state in (GangState.KILLING, GangState.GONE):
            return []
        self.state = GangState.KILLING
        self.queue.drop()
        return [KillGang()]

    @property
    def deadline(self) -> float | None:
        """The time at which `tick` has to be called."""
        return self._timers.deadline(self.state, self.queue.limit_s)

    def tick(self, now: float) -> list[Action]:
        """Return the actions for deadlines that have passed."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return []
        match self.state:
            case GangState.STOPPING:
                return self._finish(now)
            case GangState.CLOSING:
                alive = [r for r in self._ranks if r.exit_code is None]
                late = [r.rank for r in alive if r.rank not in self._closed]
                what = "end the teardown" if late else "exit after the teardown"
                names = name_ranks(late or [r.rank for r in alive])
                self.problems.append(f"{names} did not {what} in {self._timers.closing_s:g} s")
                return self.kill()
            case GangState.STARTING:
                return self._begin_stop(Reason.NOT_STARTED, START_LIMIT_S, now)
            case _ if self._timers.first_failure_at is not None:
                limit_s = self._timers.grace_s
                return self._begin_stop(kind_of_first_failure(self._ranks), limit_s, now)
            case _:
                return self._begin_stop(Reason.HUNG, self.queue.limit_s, now)

    def handle(self, rank: int, message: Message, now: float) -> list[Action]:
        """Handle a message of a rank, or of an agent about a rank."""
        if self.state is GangState.GONE:
            return []
        match message:
            case Killed():
                ended = self._end_without_ranks(now)
                self.state = GangState.GONE
                return ended
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
            case DebuggerWanted():  # no time passes meanwhile
                self._timers.suspend(rank)
            case DebuggerLeft():
                self._timers.resume(rank, self.state, now)
            case _:
                return self._on_message(self._ranks[rank], message, now)
        return []

    def _on_message(self, rank: RankResult, message: Message, now: float) -> list[Action]:
        """Take a message of a rank; return what to do."""
        match message:
            case Ready(missing=missing):
                self._missing[rank.rank] = missing
                return self._on_ready(now)
            case PhaseEnded(run=run) if self._is_current(run):
                self._timers.begin_phase(now)
                if message.report is not None:
                    rank.reports += (message.report,)
                self._note(rank, message.when, message.outcome, now)
            case Done(run=run) if self._is_current(run) and self.state is GangState.RUNNING:
                rank.done = message
                rank.reports += message.reports
                if message.stop:  # the others may wait for it, as for a failed rank
                    self._record_failure(rank, now)
                return self._settle(now)
            case Broken(problem=problem):
                rank.problem = rank.problem or problem
                return self._on_loss(rank, problem, now)
            case Closed():
                self._on_closed(rank, message)
            case _:
                pass
        return []

    def _on_closed(self, rank: RankResult, message: Closed) -> None:
        """Note that a rank has torn down everything."""
        self._closed.add(rank.rank)
        if message.late is not None:
            self.late[rank.rank] = message.late
        if message.problem:
            self.problems.append(f"rank {rank.rank} in the last teardown: {message.problem}")

    def _on_ready(self, now: float) -> list[Action]:
        """Begin with tests once every rank is ready."""
        if self.state is not GangState.STARTING or len(self._missing) < len(self._ranks):
            return []
        self.state = GangState.IDLE
        if self.queue.current is None:
            return []
        self._timers.begin(now)
        return self._send()

    def _end_without_ranks(self, now: float) -> list[Action]:
        """End a test that runs still, as nothing more will be reported of the ranks."""
        if self.state not in (GangState.RUNNING, GangState.STOPPING):
            return []
        for rank in self._ranks:
            if not rank.is_settled:
                rank.undo()
                rank.problem = rank.problem or ORPHANED
                self._record_failure(rank, now)
        if self.state is GangState.RUNNING:
            self._stop = kind_of_first_failure(self._ranks), 0.0
        return [action for action in self._finish(now) if isinstance(action, Finish)]

    def _is_current(self, run: int) -> bool:
        return 0 < run == self.queue.number and self.state is not GangState.KILLING

    def _note(self, rank: RankResult, when: str, outcome: str, now: float) -> None:
        """Note the first phase of a rank that did not pass."""
        if outcome != "passed" and not rank.failed_phase:
            rank.failed_phase = when
            self._record_failure(rank, now)

    def _record_failure(self, rank: RankResult, now: float) -> None:
        """Note when a rank failed first, which begins the grace."""
        if rank.at is None:
            rank.at = now
        self._timers.record_failure(now)

    def _on_death(self, rank: RankResult, died: Died, now: float) -> list[Action]:
        """Take the death of a rank; return what to do."""
        if rank.exit_code is not None:
            return []
        self._timers.forget(rank.rank)
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

    def _blame_last(self, rank: RankResult, what: str) -> None:
        """Record a problem of the test that ended last."""
        if rank.rank not in self._closed:
            self.problems.append(f"rank {rank.rank} {what}")

    def _on_loss(self, rank: RankResult, what: str, now: float) -> list[Action]:
        """Handle the loss of a rank's process or connection."""
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
        """Have the current test sent, or end it where a rank lacks it."""
        assert self.queue.current is not None
        self.state = GangState.RUNNING
        node_id = self.queue.current.node_id
        lacking = [r for r in self._ranks if node_id in self._missing[r.rank]]
        if lacking:
            for rank in lacking:
                rank.problem = self._missing[rank.rank][node_id]
                rank.at = self._timers.began_at
            return self._end(Reason.NOT_COLLECTED, 0.0, self._timers.began_at, is_kept=True)
        return [SendRuns(runs=(self.queue.current,))]

    def _settle(self, now: float) -> list[Action]:
        """End the test if every rank has ended it."""
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
        """End the test and switch to the one that the ranks have started in lockstep."""
        finished = self._finished(Reason.DONE, 0.0, now, is_kept=True)
        self._begin(*self.queue.next(), now)
        return [finished]

    def _begin_stop(self, reason: Reason, limit_s: float, now: float) -> list[Action]:
        """Request the stacks of busy ranks; without any, end at once."""
        self._stop = (reason, limit_s)
        late = tuple(r.rank for r in self._ranks if not r.is_settled)
        if not late or (reason is Reason.NOT_STARTED and limit_s == 0.0):
            return self._end(reason, limit_s, now, is_kept=False)
        self.state = GangState.STOPPING
        self._timers.begin_stopping(_STACKS_WAIT_S, now)
        return [AskForStacks(ranks=late)]

    def _finish(self, now: float) -> list[Action]:
        """End the test for the reason for which the gang was stopped."""
        assert self._stop is not None
        reason, limit_s = self._stop
        return self._end(reason, limit_s, now, is_kept=False)

    def _end(self, reason: Reason, limit_s: float, now: float, *, is_kept: bool) -> list[Action]:
        """End the current test; the gang is kept for the next one, or killed."""
        is_kept = is_kept and not self._is_isolated
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
        """Return the action that reports the end of the current test."""
        return Finish(
            end=RunEnd(
                run=self.queue.number,
                reason=reason,
                ranks=tuple(map(replace, self._ranks)),
                limit_s=limit_s,
                duration_s=now - self._timers.began_at,
                is_kept=is_kept,
            )
        )
