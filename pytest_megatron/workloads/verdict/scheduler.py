"""Drives the repeats of many workloads over one engine at the same time.

As much as the engine has room for is ordered at once, the longest first; one `poll` is for all of
them. The outcome of a submission goes to the generator that yielded it, and the next one from there
to the engine. A workload that ended is handed out and forgotten. Reads no clock but the one given.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

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
        share_done: Share of the expected GPU time, from 0 to 1; None where nothing is known.
    """

    num_works: int
    num_ended: int
    num_running: int
    num_waiting: int
    num_held: int
    detail: str
    share_done: float | None


@dataclass(slots=True, kw_only=True)
class _Open:
    """A workload that has not ended.

    Attributes:
        repeats: By index, those that have not ended.
        attempts: By index, of those that have.
        keys: Orders that have not ended, by key, with the index of their repeat.
    """

    work: QueuedWorkload
    repeats: dict[int, Repeat]
    attempts: dict[int, tuple[Attempt, ...]]
    keys: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Next:
    """A submission that the engine does not have yet."""

    of: _Open
    submission: Submission


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
        self._waits_since: dict[str, float] = {}
        self._runs_since: dict[str, float] = {}
        self._clock = clock
        self._number = itertools.count()
        self._todo: list[tuple[Rank, int, QueuedWorkload | _Next]] = []
        self._delayed: list[tuple[float, int, _Next]] = []
        self._open: dict[str, _Open] = {}  # by the key of each submission, wherever that is
        self._phases: dict[str, tuple[SubmissionPhase, str]] = {}  # of those that the engine has
        self._num_works = self._num_ended = 0
        self._expected = self._done = 0.0
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
            heapq.heappush(self._todo, (rank, next(self._number), replace(work, rank=rank)))
            self._expected += _weight(rank)
        self._num_works += len(chosen)

    @property
    def is_done(self) -> bool:
        """True if every workload has been handed out."""
        return self._num_ended == self._num_works

    @property
    def standing(self) -> QueueProgress:
        """How many submissions ended, run and wait."""
        phases = Counter(phase for phase, _ in self._phases.values())
        details = {phase: text for phase, text in reversed(self._phases.values()) if text}
        return QueueProgress(
            num_works=self._num_works,
            num_ended=self._num_ended,
            num_running=phases[SubmissionPhase.RUNNING],
            num_waiting=phases[SubmissionPhase.WAITING],
            num_held=len(self._todo) + len(self._delayed),
            detail=details.get(SubmissionPhase.WAITING) or details.get(SubmissionPhase.RUNNING, ""),
            share_done=self._done / self._expected if self._expected else None,
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
        if self.is_done or (self._todo and self._has_room):
            return 0.0
        due = self._delayed[0][0] if self._delayed else self._poll_at
        return max(0.0, min(due, self._poll_at) - self._clock())

    def cancel(self) -> None:
        """End all submissions; nothing more is handed out."""
        self._todo.clear()
        self._delayed.clear()
        self._engine.cancel(tuple(self._phases))
        for found in {id(found): found for found in self._open.values()}.values():
            _close(found)
        self._open.clear()
        self._phases.clear()

    @property
    def _has_room(self) -> bool:
        return len(self._phases) < self._most_submissions

    def _fill(self) -> list[WorkEnd]:
        """Submit what the engine has room for, the longest first, some at a time."""
        while self._delayed and self._delayed[0][0] <= self._clock():
            following = heapq.heappop(self._delayed)[2]
            rank = following.of.work.rank
            at_once = replace(following, submission=replace(following.submission, delay_s=0.0))
            heapq.heappush(self._todo, (rank, next(self._number), at_once))
        ended: list[WorkEnd] = []
        submissions: list[Submission] = []
        room = min(_CHUNK, self._most_submissions - len(self._phases))
        while self._todo and len(submissions) < room:
            _, _, entry = heapq.heappop(self._todo)
            if isinstance(entry, _Next):
                submissions.append(entry.submission)
                continue
            found = _Open(work=entry, repeats={}, attempts={}, keys={})
            try:
                found.repeats.update(enumerate(entry.begin()))
                first = [(index, next(repeat)) for index, repeat in found.repeats.items()]
            except Exception as error:  # noqa: BLE001 - the item says it; others go on
                ended.append(self._end(found, error))
                continue
            for index, submission in first:
                self._keep(found, index, submission)
                submissions.append(submission)
        return ended + self._submit(submissions)

    def _keep(self, found: _Open, index: int, submission: Submission) -> None:
        """Keep a submission until its outcome is there."""
        assert submission.key not in self._open, submission.key
        found.keys[submission.key] = index
        self._open[submission.key] = found

    def _submit(self, submissions: Sequence[Submission]) -> list[WorkEnd]:
        """Hand submissions to the engine."""
        if not submissions:
            return []
        try:
            self._engine.submit(submissions)
        except LaunchError as error:
            found = {
                id(of): of for submission in submissions if (of := self._open.get(submission.key))
            }
            return [self._end(of, error) for of in found.values()]
        self._phases |= {
            submission.key: (SubmissionPhase.WAITING, "") for submission in submissions
        }
        return []

    def _end_overdue(self) -> list[WorkEnd]:
        """End what has waited in the queue for too long."""
        if not self._queue_timeout_s:
            return []
        now, waiting = self._clock(), set()
        for key, (phase, _) in self._phases.items():
            if phase is SubmissionPhase.WAITING:
                waiting.add(key)
                self._waits_since.setdefault(key, now)
        self._waits_since = {k: t for k, t in self._waits_since.items() if k in waiting}
        late = [k for k, t in self._waits_since.items() if now - t >= self._queue_timeout_s]
        if not late:
            return []
        details = {key: self._phases[key][1] for key in late}
        self._engine.cancel(late)
        found = [_never_ran(key, details[key], self._queue_timeout_s) for key in late]
        return [end for update in found for end in self._take(update)]

    def _take(self, update: Update) -> list[WorkEnd]:
        """Handle an update of the engine."""
        found = self._open.get(update.key)
        if found is None:  # of a workload that ended meanwhile
            return []
        outcome = update.outcome
        if outcome is None:
            self._phases[update.key] = (update.phase, update.detail)
            if update.phase is SubmissionPhase.RUNNING:
                self._runs_since.setdefault(update.key, self._clock())
            else:  # put into the queue again
                self._runs_since.pop(update.key, None)
            return []
        del self._phases[update.key], self._open[update.key]
        index = found.keys.pop(update.key)
        since = self._runs_since.pop(update.key, None)
        if since is not None and not outcome.ends:
            outcome = replace(outcome, lost_s=self._clock() - since)
        try:
            submission = found.repeats[index].send(outcome)
        except StopIteration as done:
            del found.repeats[index]
            found.attempts[index] = done.value
            is_good = done.value[-1].cause is None
            return [] if is_good and found.repeats else [self._end(found)]
        except Exception as error:  # noqa: BLE001 - the item says it; others go on
            return [self._end(found, error)]
        self._keep(found, index, submission)
        due = self._clock() + submission.delay_s
        heapq.heappush(
            self._delayed, (due, next(self._number), _Next(of=found, submission=submission))
        )
        return []

    def _end(self, found: _Open, error: Exception | None = None) -> WorkEnd:
        """Forget a workload; submissions of it that the engine still has are of no use any more."""
        running = [key for key in found.keys if key in self._phases]
        if running:
            self._engine.cancel(running)
        if len(running) < len(found.keys):  # some are still with us
            self._todo = [e for e in self._todo if not _is_of(e[2], found)]
            self._delayed = [e for e in self._delayed if not _is_of(e[2], found)]
            heapq.heapify(self._todo)
            heapq.heapify(self._delayed)
        for key in found.keys:
            self._open.pop(key, None)
            self._phases.pop(key, None)
            self._runs_since.pop(key, None)
        _close(found)
        self._num_ended += 1
        self._done += _weight(found.work.rank)
        attempts = tuple(one for index in sorted(found.attempts) for one in found.attempts[index])
        return WorkEnd(name=found.work.name, attempts=attempts, error=error)


def _weight(rank: Rank) -> float:
    """Return the GPU seconds that a workload is expected to take; 0 where nothing is known."""
    return rank[0] * min(-1, rank[1])


def _never_ran(key: str, detail: str, limit_s: float) -> Update:
    """Return the end of a submission that waited for too long."""
    last = f"; last: {detail}" if detail else ""
    trouble = EngineError(
        kind=TroubleKind.NOT_STARTED,
        text=f"it waited in the queue for longer than megatron_queue_timeout, {limit_s:g} s{last}",
        is_transient=False,
    )
    return Update(key=key, phase=SubmissionPhase.ENDED, outcome=SubmissionOutcome(trouble=trouble))


def _is_of(entry: QueuedWorkload | _Next, found: _Open) -> bool:
    return isinstance(entry, _Next) and entry.of is found


def _close(found: _Open) -> None:
    for repeat in found.repeats.values():
        repeat.close()
