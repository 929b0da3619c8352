"""The state machine of one gang: from messages and the clock to actions; no effects.

One rule decides everything: a gang is alive or dead as one. The first sign of trouble (a rank that
failed, skipped or died) starts the grace in which the others may still end; without a sign the time
limit counts. Who is not done by then is asked for its stack and killed with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from pytest_megatron.files import JsonValue
from pytest_megatron.gang.messages import (
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
from pytest_megatron.gang.spec import RankEnd, Reason, RunEnd
from pytest_megatron.wording import describe_exit, name_ranks

_EXIT_S = 1.0  # for other ranks to end, where one has asked pytest itself to
_STACKS_WAIT_S = 3.0  # for a nursery to bring stacks; it gives ranks one second
START_LIMIT_S = 300.0  # to import torch and collect; slow file systems exist


class State(Enum):
    """Where a gang is in its life."""

    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    STOPPING = "stopping"
    CLOSING = "closing"
    KILLING = "killing"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRun:
    """Send the test to every rank."""

    run: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class SendClose:
    """Tell every rank to tear down and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForStacks:
    """Ask these ranks where they are."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KillGang:
    """Kill every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Tell whoever waits how the test ended."""

    end: RunEnd


Action: TypeAlias = SendRun | SendClose | AskForStacks | KillGang | Finish


@dataclass(slots=True, kw_only=True)
class _Rank:
    """What is known of one rank."""

    rank: int
    log_dir: str
    is_ready: bool = False
    exit_code: int | None = None
    is_closed: bool = False
    problem: str = ""
    missing: dict[str, str] = field(default_factory=dict)
    # Of the current run:
    done: Done | None = None
    early: list[JsonValue] = field(default_factory=list)
    at: float | None = None
    failed_phase: str = ""
    outcome: str = ""
    phase: str = ""
    stack: str = ""
    flight: str = ""

    def reset(self) -> None:
        self.done, self.at, self.failed_phase, self.outcome, self.phase = None, None, "", "", ""
        self.problem = self.stack = self.flight = ""
        self.early = []

    def undo(self) -> None:
        """Take back that it ended the test: it was lost before the others did."""
        if self.done is not None:
            self.early = [
                report
                for report in self.done.reports
                if isinstance(report, dict) and report.get("outcome") != "passed"
            ]
            self.done = None

    @property
    def is_settled(self) -> bool:
        return self.done is not None or self.exit_code is not None or bool(self.problem)

    def end(self) -> RankEnd:
        return RankEnd(
            rank=self.rank,
            done=self.done,
            early=tuple(self.early),
            exit_code=self.exit_code,
            at=self.at,
            failed_phase=self.failed_phase,
            outcome=self.outcome,
            phase=self.phase,
            problem=self.problem,
            stack=self.stack,
            flight=self.flight,
            log_dir=self.log_dir,
        )


class Lifecycle:
    """One gang, from its first rank to its last."""

    def __init__(self, log_dirs: Sequence[str], *, grace_s: float, now: float) -> None:
        """Begin.

        Args:
            log_dirs: Of each rank, in order.
            grace_s: How long others may take after the first sign of trouble.
            now: Seconds of a monotonic clock.
        """
        self.state = State.STARTING
        self.problems: list[str] = []
        self.late: dict[int, JsonValue] = {}
        self._ranks = [_Rank(rank=rank, log_dir=path) for rank, path in enumerate(log_dirs)]
        self._grace_s = grace_s
        self._run: Run | None = None
        self._limit_s = 0.0
        self._is_isolated = False
        self._started_at = now
        self._phase_at = now
        self._sign_at: float | None = None
        self._patience_s = grace_s
        self._stop: tuple[Reason, float] | None = None
        self._stop_by = 0.0
        self._closing_s = grace_s
        self._debugging: set[int] = set()

    def assign(self, run: Run, *, limit_s: float, is_isolated: bool, now: float) -> list[Action]:
        """Take a test; it is sent as soon as every rank is ready.

        Args:
            run: The test.
            limit_s: For one phase; 0 is no limit.
            is_isolated: Whether nothing runs on this gang afterwards.
            now: Seconds of the clock.
        """
        assert self._run is None
        self._run, self._limit_s, self._is_isolated = run, limit_s, is_isolated
        for rank in self._ranks:
            rank.reset()
        self._started_at = self._phase_at = now
        self._sign_at = self._stop = None
        self._patience_s = self._grace_s
        return self._send() if self.state is State.IDLE else []

    def close(self, now: float) -> list[Action]:
        """Tear down an idle gang; one that is busy or starts is killed.

        It has the time of a phase of the last test, whose fixtures these are.
        """
        if self.state is State.IDLE:
            self.state = State.CLOSING
            self._closing_s = max(self._grace_s, self._limit_s)
            self._stop_by = now + self._closing_s
            return [SendClose()]
        return [] if self.state is State.CLOSING else self.kill()

    def kill(self) -> list[Action]:
        """Kill the gang, whatever it does; a test on it is not reported."""
        if self.state in (State.KILLING, State.GONE):
            return []
        self.state = State.KILLING
        self._run = None
        return [KillGang()]

    @property
    def run(self) -> int:
        """Number of the execution that it has, 0 without one."""
        return 0 if self._run is None else self._run.run

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do at the latest."""
        match self.state:
            case State.CLOSING if self._debugging:
                return None
            case State.STOPPING | State.CLOSING:
                return self._stop_by
            case State.STARTING:
                return self._started_at + START_LIMIT_S
            case State.RUNNING if not self._debugging:
                if self._sign_at is not None:
                    return self._sign_at + self._patience_s
                return self._phase_at + self._limit_s if self._limit_s else None
            case _:
                return None

    def tick(self, now: float) -> list[Action]:
        """Look at the clock."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return []
        match self.state:
            case State.STOPPING:
                return self._finish(now)
            case State.CLOSING:
                late = [r.rank for r in self._ranks if not r.is_closed and r.exit_code is None]
                self.problems.append(
                    f"{name_ranks(late)} did not end the teardown in {self._closing_s:g} s"
                )
                return self.kill()
            case State.STARTING:
                return self._begin_stop(Reason.NOT_STARTED, START_LIMIT_S, now)
            case _ if self._sign_at is not None:
                return self._begin_stop(self._kind_of_sign(), self._patience_s, now)
            case _:
                return self._begin_stop(Reason.HUNG, self._limit_s, now)

    def handle(self, rank: int, message: Message, now: float) -> list[Action]:
        """Take in what a rank, or a nursery about a rank, said."""
        if self.state is State.GONE:
            return []
        match message:
            case Killed():
                self.state = State.GONE
                return []
            case Stacks(stacks=stacks, flights=flights):
                for name, text in stacks.items():
                    self._ranks[int(name)].stack = text
                for name, text in flights.items():
                    self._ranks[int(name)].flight = text
                for name, phase in message.phases.items():
                    self._ranks[int(name)].phase = phase
                return self._finish(now) if self.state is State.STOPPING else []
            case Died(exit_code=exit_code):
                self._ranks[rank].phase = message.phase
                return self._on_death(self._ranks[rank], exit_code, now)
            case _:
                return self._on_word(self._ranks[rank], message, now)

    def _on_word(self, rank: _Rank, message: Message, now: float) -> list[Action]:
        match message:
            case Ready(missing=missing):
                rank.is_ready, rank.missing = True, dict(missing)
                return self._on_ready(now)
            case PhaseEnded(run=run) if self._is_current(run):
                self._phase_at = now
                if message.report is not None:
                    rank.early.append(message.report)
                self._note(rank, message.when, message.outcome, now)
            case Done(run=run) if self._is_current(run) and self.state is State.RUNNING:
                rank.done = message
                if message.stop:  # the others may wait for it as for one that failed
                    self._sign(rank, now)
                if not rank.outcome:
                    rank.outcome = "passed"
                if message.stop:
                    self._sign(rank, now)
                    self._patience_s = min(self._grace_s, _EXIT_S)
                return self._settle(now)
            case Broken(problem=problem):
                rank.problem = rank.problem or problem
                return self._on_loss(rank, problem, now)
            case Closed():
                self._on_closed(rank, message)
            case _:
                self._on_debugger(rank, message, now)
        return []

    def _on_closed(self, rank: _Rank, message: Closed) -> None:
        rank.is_closed = True
        if message.late is not None:
            self.late[rank.rank] = message.late
        if message.problem:
            self.problems.append(f"rank {rank.rank} in the last teardown: {message.problem}")

    def _on_ready(self, now: float) -> list[Action]:
        if self.state is not State.STARTING or not all(r.is_ready for r in self._ranks):
            return []
        self.state = State.IDLE
        if self._run is None:
            return []
        self._started_at = self._phase_at = now
        return self._send()

    def _on_debugger(self, rank: _Rank, message: Message, now: float) -> None:
        """Stop the clocks while a debugger is open; it starts them anew when it is left."""
        match message:
            case DebuggerWanted() | DebuggerWrote() | DebuggerReads():
                self._debugging.add(rank.rank)
            case DebuggerLeft():
                self._debugging.discard(rank.rank)
                self._phase_at = now
                if self._sign_at is not None:
                    self._sign_at = now
                if self.state is State.CLOSING:
                    self._stop_by = now + self._closing_s
            case _:
                pass

    def _is_current(self, run: int) -> bool:
        return self._run is not None and self._run.run == run and self.state is not State.KILLING

    def _note(self, rank: _Rank, when: str, outcome: str, now: float) -> None:
        if outcome != "passed" and not rank.failed_phase:
            rank.failed_phase, rank.outcome = when, outcome
            self._sign(rank, now)

    def _sign(self, rank: _Rank, now: float) -> None:
        if rank.at is None:
            rank.at = now
        if self._sign_at is None:
            self._sign_at = now

    def _on_death(self, rank: _Rank, exit_code: int, now: float) -> list[Action]:
        if rank.exit_code is not None:
            return []
        rank.exit_code = exit_code
        self._debugging.discard(rank.rank)
        return self._on_loss(rank, describe_exit(exit_code), now)

    def _on_loss(self, rank: _Rank, what: str, now: float) -> list[Action]:
        """Go on after a rank was lost, be it its process or its connection."""
        is_between = self.state in (State.IDLE, State.CLOSING)
        if is_between and not rank.is_closed:
            when = "after its test" if self.state is State.IDLE else "in the last teardown"
            self.problems.append(f"rank {rank.rank} {what} {when}")
        match self.state:
            case State.STARTING:
                self._sign(rank, now)
                return self._begin_stop(Reason.NOT_STARTED, 0.0, now)
            case State.RUNNING:
                rank.undo()
                self._sign(rank, now)
                return self._settle(now)
            case State.IDLE:
                return self.kill()
            case State.CLOSING if all(r.exit_code is not None for r in self._ranks):
                return self.kill()
            case _:
                return []

    def _send(self) -> list[Action]:
        assert self._run is not None
        self.state = State.RUNNING
        node_id = self._run.node_id
        lacking = [r for r in self._ranks if node_id in r.missing]
        if lacking:
            for rank in lacking:
                rank.problem = rank.missing[node_id]
                rank.at = self._started_at
            return self._end(Reason.NOT_COLLECTED, 0.0, self._started_at, is_kept=True)
        return [SendRun(run=self._run)]

    def _settle(self, now: float) -> list[Action]:
        """End the test if every rank has."""
        if self.state is not State.RUNNING or not all(r.is_settled for r in self._ranks):
            return []
        if any(r.done is None for r in self._ranks):
            return self._end(self._kind_of_sign(), 0.0, now, is_kept=False)
        done = [r.done for r in self._ranks if r.done is not None]
        is_in_step = (
            len({(d.num_collectives, d.num_rendezvous) for d in done}) == 1 or self._is_isolated
        )
        if not is_in_step and all(r.outcome == "passed" for r in self._ranks):
            return self._end(Reason.DESYNCHRONISED, 0.0, now, is_kept=False)
        is_dead = any(r.exit_code is not None for r in self._ranks)
        is_kept = is_in_step and not is_dead and not any(d.poison for d in done)
        return self._end(Reason.DONE, 0.0, now, is_kept=is_kept)

    def _kind_of_sign(self) -> Reason:
        first = min((r for r in self._ranks if r.at is not None), key=lambda r: (r.at, r.rank))
        return (
            Reason.DIED if first.exit_code is not None and not first.failed_phase else Reason.FAILED
        )

    def _begin_stop(self, reason: Reason, limit_s: float, now: float) -> list[Action]:
        """Ask those that are still busy where they are; without any, end at once."""
        self._stop = (reason, limit_s)
        late = tuple(r.rank for r in self._ranks if not r.is_settled)
        if not late or (reason is Reason.NOT_STARTED and limit_s == 0.0):
            return self._end(reason, limit_s, now, is_kept=False)
        self.state = State.STOPPING
        self._stop_by = now + _STACKS_WAIT_S
        return [AskForStacks(ranks=late)]

    def _finish(self, now: float) -> list[Action]:
        assert self._stop is not None
        reason, limit_s = self._stop
        return self._end(reason, limit_s, now, is_kept=False)

    def _end(self, reason: Reason, limit_s: float, now: float, *, is_kept: bool) -> list[Action]:
        is_kept = is_kept and not self._is_isolated
        run = self._run
        self._run = None
        actions: list[Action] = []
        if is_kept:
            self.state = State.IDLE
        else:
            self.state = State.KILLING
            actions.append(KillGang())
        if run is not None:
            end = RunEnd(
                run=run.run,
                reason=reason,
                ranks=tuple(r.end() for r in self._ranks),
                limit_s=limit_s,
                duration_s=now - self._started_at,
                is_kept=is_kept,
            )
            actions.append(Finish(end=end))
        return actions
