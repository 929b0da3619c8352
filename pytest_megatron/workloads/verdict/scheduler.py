"""Drives the repeats of many workloads over one engine at the same time.

As much as the engine has room for is ordered at once, the longest first; one `poll` is for all of
them. The outcome of a submission goes to the generator that yielded it, and the next one from there
to the engine. A workload that ended is handed out and forgotten. Reads no clock but the one given.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from pytest_megatron.errors import LaunchError
from pytest_megatron.workloads.engine.api import (
    Engine,
    EngineError,
    Submission,
    SubmissionOutcome,
    SubmissionPhase,
    TroubleKind,
    Update,
)
from pytest_megatron.workloads.verdict.attempt import Attempt
from pytest_megatron.workloads.verdict.driver import Repeat

DEFAULT_MOST_SUBMISSIONS = 1_000
_CHUNK = 500  # submissions that are planned before the first of them is submitted

Rank = tuple[float, int]  # the least comes first: -seconds, -GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedWorkload:
    """A workload that is to be run.

    Attributes:
        name: Node id.
        begin: Plans it and returns its repeats; called once, shortly before it is submitted.
        expected_s: Duration of one attempt by its history; None if unknown.
        num_gpus: Over all nodes.
        rank: The longest first, so that no long one begins when the others end; among those of a
            length the biggest, which need the most room at once. Set by the scheduler.
    """

    name: str
    begin: Callable[[], Sequence[Repeat]]
    expected_s: float | None = None
    num_gpus: int = 1
    rank: Rank = (0.0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkEnd:
    """End of a workload.

    Attributes:
        attempts: Of the repeats, in their order; where one was no good, others may be missing.
        error: What kept it from being run or judged, or None.
    """

    name: str
    attempts: tuple[Attempt, ...] = ()
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueProgress:
    """Progress of a scheduler, in numbers of submissions.

    Attributes:
        num_works: Workloads in all.
        num_ended: Workloads that were handed out.
        num_waiting: Orders that the engine has and does not run yet.
        num_held: What was not submitted yet: it has enough, or a further attempt pauses first.
        detail: From the engine, for the first submission that waits, else the first that runs.
    """

    num_works: int
    num_ended: int
    num_running: int
    num_waiting: int
    num_held: int
    detail: str


@dataclass(slots=True, kw_only=True)
class _Open:
    """A workload that has not ended.

    Attributes:
        repeats: By index, those that have not ended.
        attempts: By index, of those that have.
    """

    work: QueuedWorkload
    repeats: dict[int, Repeat] = field(default_factory=dict)
    attempts: dict[int, tuple[Attempt, ...]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Order:
    """A submission that has not ended.

    Attributes:
        of: The workload that it is an attempt of.
        index: Of its repeat.
        due: When the engine may have it.
        phase: None before the engine has it.
        since: When it began to wait, or to run, as `phase` says.
    """

    of: _Open
    index: int
    submission: Submission
    due: float
    phase: SubmissionPhase | None = None
    detail: str = ""
    since: float = 0.0


class WorkloadScheduler:
    """The workloads of a run that one engine has in its queue."""

    def __init__(
        self,
        engine: Engine,
        *,
        most_submissions: int = DEFAULT_MOST_SUBMISSIONS,
        queue_timeout_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing to do.

        Args:
            engine: Runs the submissions.
            most_submissions: Those that it has at a time. More than run at once, and some to
                follow, is of no use: a further attempt of a long workload would come last.
            queue_timeout_s: How long one may wait in the engine's queue; 0 is without limit.
            clock: In seconds.
        """
        self._engine = engine
        self._most_submissions = most_submissions
        self._queue_timeout_s = queue_timeout_s
        self._clock = clock
        self._todo: list[QueuedWorkload] = []  # by rank
        self._orders: dict[str, _Order] = {}  # by the key of the submission
        self._num_works = self._num_ended = 0
        self._poll_at = float("-inf")

    def add(self, works: Iterable[QueuedWorkload]) -> None:
        """Take workloads; the next calls of `step` order them.

        One of unknown length counts as the mean of the others.
        """
        chosen = list(works)
        known = [work.expected_s for work in chosen if work.expected_s is not None]
        mean_s = sum(known) / len(known) if known else 0.0
        for work in chosen:
            expected_s = mean_s if work.expected_s is None else work.expected_s
            rank = (-expected_s, -work.num_gpus)
            self._todo.append(replace(work, rank=rank))
        self._todo.sort(key=lambda work: work.rank)
        self._num_works += len(chosen)

    @property
    def is_done(self) -> bool:
        """True if every workload has been handed out."""
        return self._num_ended == self._num_works

    @property
    def standing(self) -> QueueProgress:
        """How many submissions ended, run and wait."""
        phases = Counter(order.phase for order in self._orders.values())
        details = {o.phase: o.detail for o in reversed(self._orders.values()) if o.detail}
        return QueueProgress(
            num_works=self._num_works,
            num_ended=self._num_ended,
            num_running=phases[SubmissionPhase.RUNNING],
            num_waiting=phases[SubmissionPhase.WAITING],
            num_held=len(self._todo) + phases[None],
            detail=details.get(SubmissionPhase.WAITING) or details.get(SubmissionPhase.RUNNING, ""),
        )

    def step(self) -> list[WorkEnd]:
        """Order what there is room for, ask the engine if it is time to; return what ended.

        Raises:
            KeyboardInterrupt: From the engine; nothing was cancelled.
        """
        ended = self._fill()
        if self._clock() < self._poll_at:
            return ended
        for update in self._engine.poll():
            ended += self._take(update)
        ended += self._end_overdue()
        self._poll_at = self._clock() + self._engine.interval_s
        return ended + self._fill()

    def pause_s(self) -> float:
        """Return how long there is nothing to do."""
        now = self._clock()
        if self.is_done or (self._todo and self._room):
            return 0.0
        held = [o.due for o in self._orders.values() if o.phase is None] if self._room else []
        return max(0.0, min([self._poll_at, *held]) - now)

    def cancel(self) -> None:
        """End all submissions; nothing more is handed out."""
        self._todo.clear()
        self._engine.cancel([key for key, o in self._orders.items() if o.phase is not None])
        for order in self._orders.values():
            _close(order.of)
        self._orders.clear()

    @property
    def _room(self) -> int:
        """Return how many submissions more the engine may have."""
        num_there = sum(order.phase is not None for order in self._orders.values())
        return max(0, self._most_submissions - num_there)

    def _fill(self) -> list[WorkEnd]:
        """Submit what the engine has room for, the longest first, some at a time."""
        now, room = self._clock(), min(_CHUNK, self._room)
        due = [o for o in self._orders.values() if o.phase is None and o.due <= now]
        due.sort(key=lambda order: order.of.work.rank, reverse=True)
        ended: list[WorkEnd] = []
        chosen: list[_Order] = []
        while len(chosen) < room and (due or self._todo):
            if due and (not self._todo or due[-1].of.work.rank < self._todo[0].rank):
                chosen.append(due.pop())
                continue
            found = _Open(work=self._todo.pop(0))
            try:
                found.repeats.update(enumerate(found.work.begin()))
                first = [(index, next(repeat)) for index, repeat in found.repeats.items()]
            except Exception as error:  # noqa: BLE001 - the item says it; others go on
                ended.append(self._end(found, error))
                continue
            chosen += [self._keep(found, index, submission) for index, submission in first]
        return ended + self._submit(chosen)

    def _keep(self, found: _Open, index: int, submission: Submission) -> _Order:
        """Keep a submission until its outcome is there."""
        assert submission.key not in self._orders, submission.key
        due = self._clock() + submission.delay_s
        order = _Order(of=found, index=index, submission=replace(submission, delay_s=0.0), due=due)
        self._orders[submission.key] = order
        return order

    def _submit(self, orders: Sequence[_Order]) -> list[WorkEnd]:
        """Hand submissions to the engine."""
        if not orders:
            return []
        try:
            self._engine.submit([order.submission for order in orders])
        except LaunchError as error:
            found = {id(order.of): order.of for order in orders}
            return [self._end(of, error) for of in found.values()]
        for order in orders:
            order.phase, order.since = SubmissionPhase.WAITING, self._clock()
        return []

    def _end_overdue(self) -> list[WorkEnd]:
        """End what has waited in the queue for too long."""
        limit_s, now = self._queue_timeout_s, self._clock()
        late = {
            key: order.detail
            for key, order in self._orders.items()
            if order.phase is SubmissionPhase.WAITING and limit_s and now - order.since >= limit_s
        }
        if not late:
            return []
        self._engine.cancel(list(late))
        found = [_never_ran(key, detail, limit_s) for key, detail in late.items()]
        return [end for update in found for end in self._take(update)]

    def _take(self, update: Update) -> list[WorkEnd]:
        """Handle an update of the engine; return the workload that ended by it, if any."""
        order = self._orders.get(update.key)
        if order is None:  # of a workload that ended meanwhile
            return []
        outcome, now = update.outcome, self._clock()
        if outcome is None:
            order.since = order.since if update.phase is order.phase else now
            order.phase, order.detail = update.phase, update.detail
            return []
        del self._orders[update.key]
        found, index = order.of, order.index
        if order.phase is SubmissionPhase.RUNNING and not outcome.ends:
            outcome = replace(outcome, lost_s=now - order.since)
        try:
            self._keep(found, index, found.repeats[index].send(outcome))
        except StopIteration as done:
            del found.repeats[index]
            found.attempts[index] = done.value
            is_good = done.value[-1].cause is None
            return [] if is_good and found.repeats else [self._end(found)]
        except Exception as error:  # noqa: BLE001 - the item says it; others go on
            return [self._end(found, error)]
        return []

    def _end(self, found: _Open, error: Exception | None = None) -> WorkEnd:
        """Forget a workload; submissions of it that the engine still has are of no use any more."""
        own = {key: order for key, order in self._orders.items() if order.of is found}
        if running := [key for key, order in own.items() if order.phase is not None]:
            self._engine.cancel(running)
        for key in own:
            del self._orders[key]
        _close(found)
        self._num_ended += 1
        attempts = tuple(one for index in sorted(found.attempts) for one in found.attempts[index])
        return WorkEnd(name=found.work.name, attempts=attempts, error=error)


def _never_ran(key: str, detail: str, limit_s: float) -> Update:
    """Return the end of a submission that waited for too long."""
    last = f"; last: {detail}" if detail else ""
    trouble = EngineError(
        kind=TroubleKind.NOT_STARTED,
        text=f"it waited in the queue for longer than megatron_queue_timeout, {limit_s:g} s{last}",
        is_transient=False,
    )
    return Update(key=key, phase=SubmissionPhase.ENDED, outcome=SubmissionOutcome(trouble=trouble))


def _close(found: _Open) -> None:
    for repeat in found.repeats.values():
        repeat.close()
