"""Many trainings over one engine: what is ordered when, and that one's trouble is no other's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_megatron.errors import LaunchError
from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.workloads.engine.api import (
    Planned,
    Resources,
    Submission,
    SubmissionOutcome,
    SubmissionPhase,
    TroubleKind,
    Update,
)
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import Setting
from pytest_megatron.workloads.training.run.runner import Progress
from pytest_megatron.workloads.verdict.attempt import Attempt, FailureCause
from pytest_megatron.workloads.verdict.driver import Repeat
from pytest_megatron.workloads.verdict.scheduler import QueuedWorkload, WorkloadScheduler

NEEDED = Resources(
    platform="cpu", num_nodes=1, gpus_per_node=0, ranks_per_node=1, time_limit_s=60.0
)


class Silent:
    def on_lines(self, lines: list[str]) -> None: ...

    def on_progress(self, phase: str, progress: Progress) -> None: ...


@dataclass
class FakeEngine:
    """Ends what a test says has ended.

    Attributes:
        taken: Keys in the order of their submission.
        held: Orders that have not ended.
        says: What the next `poll` tells of.
    """

    name: str = "fake"
    is_queue: bool = True
    interval_s: float = 10.0
    taken: list[str] = field(default_factory=list)
    held: dict[str, Submission] = field(default_factory=dict)
    says: list[Update] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    num_polls: int = 0
    refusal: str = ""

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        return setting

    def lacks(self, _needed: Resources) -> str | None:
        return None

    def submit(self, orders: Sequence[Submission]) -> None:
        if self.refusal:
            raise LaunchError("fake", self.refusal)
        self.taken += [order.key for order in orders]
        self.held |= {order.key: order for order in orders}

    def poll(self) -> Sequence[Update]:
        self.num_polls += 1
        said, self.says = self.says, []
        return said

    def cancel(self, keys: Sequence[str]) -> None:
        self.cancelled += keys
        for key in keys:
            self.held.pop(key)

    def close(self) -> None: ...

    def end(self, *keys: str) -> None:
        for key in keys:
            del self.held[key]
            self.says.append(
                Update(key=key, phase=SubmissionPhase.ENDED, outcome=SubmissionOutcome())
            )

    def tell(self, key: str, phase: SubmissionPhase, detail: str) -> None:
        self.says.append(Update(key=key, phase=phase, detail=detail))


@dataclass
class FakeClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def plan_nothing(_devices: tuple[str, ...] | None) -> Planned:
    raise AssertionError


def order(key: str, *, delay_s: float = 0.0) -> Submission:
    return Submission(
        key=key,
        node_id=key.partition("/")[0],
        resources=NEEDED,
        dirs=AttemptDirs(root=Path(key)),
        planned=plan_nothing,
        delay_s=delay_s,
        listener=Silent(),
    )


def ended(*, is_good: bool = True) -> tuple[Attempt, ...]:
    attempt = Attempt(
        repeat=1,
        number=1,
        dirs=AttemptDirs(root=Path("a")),
        ends=(),
        metrics=(),
        cause=None if is_good else FailureCause(text="no good"),
    )
    return (attempt,)


def repeat(
    name: str, number: int = 1, *, pauses_s: Sequence[float] = (), is_good: bool = True
) -> Repeat:
    """A repeat that needs an attempt more than there are pauses."""
    for attempt, pause_s in enumerate((0.0, *pauses_s), start=1):
        yield order(f"{name}/{number}/{attempt}", delay_s=pause_s)
    return ended(is_good=is_good)


def work(
    name: str,
    begin: Callable[[], Sequence[Repeat]] | None = None,
    *,
    expected_s: float | None = None,
    num_gpus: int = 1,
) -> QueuedWorkload:
    return QueuedWorkload(
        name=name,
        begin=begin or (lambda: [repeat(name)]),
        expected_s=expected_s,
        num_gpus=num_gpus,
    )


def test_the_longest_is_ordered_first_and_the_biggest_of_a_length() -> None:
    engine = FakeEngine()
    scheduler = WorkloadScheduler(engine, clock=FakeClock())
    works = [
        work("short", expected_s=10.0),
        work("unknown"),  # counts as the mean, 40 s
        work("long", expected_s=90.0),
        work("small", expected_s=30.0),
        work("big", expected_s=30.0, num_gpus=8),
    ]
    scheduler.add(works)
    scheduler.step()
    assert [key.split("/")[0] for key in engine.taken] == [
        "long",
        "unknown",
        "big",
        "small",
        "short",
    ]


def test_one_question_an_interval_and_the_ended_are_handed_out_once() -> None:
    engine, clock = FakeEngine(), FakeClock()
    scheduler = WorkloadScheduler(engine, clock=clock)
    scheduler.add([work("a"), work("b")])
    assert scheduler.step() == []
    engine.end("b/1/1")
    assert (scheduler.step(), engine.num_polls, scheduler.pause_s()) == ([], 1, 10.0)
    clock.now = 10.0
    assert [end.name for end in scheduler.step()] == ["b"]
    engine.end("a/1/1")
    clock.now = 20.0
    assert [(end.name, len(end.attempts)) for end in scheduler.step()] == [("a", 1)]
    assert (scheduler.is_done, engine.num_polls, scheduler.pause_s()) == (True, 3, 0.0)


def test_a_further_attempt_waits_for_its_pause_and_goes_before_what_is_shorter() -> None:
    engine, clock = FakeEngine(), FakeClock()
    scheduler = WorkloadScheduler(engine, most_submissions=2, clock=clock)
    scheduler.add(
        [
            work("long", lambda: [repeat("long", pauses_s=[15.0])], expected_s=100.0),
            *(work(f"short{n}", expected_s=float(10 - n)) for n in range(4)),
        ]
    )
    scheduler.step()
    assert engine.taken == ["long/1/1", "short0/1/1"]
    for clock.now in (10.0, 20.0):
        engine.end(next(iter(engine.held)))
        scheduler.step()
    assert engine.taken[2:] == ["short1/1/1", "short2/1/1"]
    clock.now = 30.0
    engine.end(next(iter(engine.held)))
    assert scheduler.pause_s() == 0.0
    scheduler.step()
    # One that is due is ordered as soon as there is room, without another pause by the engine.
    assert engine.taken[4:] == ["long/1/2"]
    assert engine.held["long/1/2"].delay_s == 0.0


def test_what_waits_in_the_queue_for_too_long_is_cancelled_and_says_why() -> None:
    engine, clock = FakeEngine(), FakeClock()
    scheduler = WorkloadScheduler(engine, queue_timeout_s=60.0, clock=clock)
    told: list[SubmissionOutcome] = []

    def hears(name: str) -> Repeat:
        told.append((yield order(f"{name}/1/1")))
        return ended(is_good=False)

    def begin_one(name: str) -> Sequence[Repeat]:
        return [hears(name)]

    names = ("stays", "runs", "new")
    scheduler.add([work(name, functools.partial(begin_one, name)) for name in names])
    scheduler.step()
    engine.tell("stays/1/1", SubmissionPhase.WAITING, "job 41 waits: Priority")
    engine.tell("runs/1/1", SubmissionPhase.RUNNING, "")
    engine.tell("new/1/1", SubmissionPhase.RUNNING, "")
    clock.now = 30.0
    assert scheduler.step() == []
    engine.tell("new/1/1", SubmissionPhase.WAITING, "it was put into the queue again")
    clock.now = 60.0
    (end,) = scheduler.step()
    assert (end.name, engine.cancelled, list(engine.held)) == (
        "stays",
        ["stays/1/1"],
        ["runs/1/1", "new/1/1"],
    )
    (outcome,) = told
    assert outcome.trouble is not None
    assert (outcome.trouble.kind, outcome.trouble.is_transient) == (TroubleKind.NOT_STARTED, False)
    assert outcome.trouble.text == (
        "it waited in the queue for longer than megatron_queue_timeout, 60 s; last: job 41 waits: "
        "Priority"
    )
    clock.now = 120.0
    assert [end.name for end in scheduler.step()] == ["new"]


def test_an_order_of_which_no_phase_is_left_ran_as_long_as_was_seen() -> None:
    engine, clock = FakeEngine(), FakeClock()
    scheduler = WorkloadScheduler(engine, clock=clock)
    told: list[SubmissionOutcome] = []

    def hears() -> Repeat:
        told.append((yield order("lost/1/1")))
        return ended(is_good=False)

    scheduler.add([work("lost", lambda: [hears()])])
    scheduler.step()
    engine.tell("lost/1/1", SubmissionPhase.RUNNING, "")
    clock.now = 10.0
    scheduler.step()
    engine.tell("lost/1/1", SubmissionPhase.RUNNING, "on another node")
    clock.now = 20.0
    scheduler.step()
    engine.end("lost/1/1")
    clock.now = 90.0
    assert [end.name for end in scheduler.step()] == ["lost"]
    assert [outcome.lost_s for outcome in told] == [80.0]
    assert replace(ended()[0], lost_s=80.0).duration_s == 80.0


def test_a_bad_repeat_ends_the_others_of_its_workload_alone() -> None:
    engine, clock = FakeEngine(), FakeClock()
    scheduler = WorkloadScheduler(engine, clock=clock)
    scheduler.add(
        [
            work("a", lambda: [repeat("a", n, is_good=n != 2) for n in (1, 2, 3)]),
            work("b"),
        ]
    )
    scheduler.step()
    engine.end("a/1/1", "a/2/1")
    clock.now = 10.0
    (end,) = scheduler.step()
    assert (end.name, len(end.attempts), engine.cancelled) == ("a", 2, ["a/3/1"])
    assert list(engine.held) == ["b/1/1"]


def test_a_repeat_that_raises_ends_its_workload_and_others_go_on() -> None:
    def raising() -> Generator[Submission, SubmissionOutcome, tuple[Attempt, ...]]:
        yield order("a/1/1")
        raise RuntimeError("a bug")

    engine, clock = FakeEngine(), FakeClock()
    scheduler = WorkloadScheduler(engine, clock=clock)

    def cannot_begin() -> Sequence[Repeat]:
        raise LaunchError("c", "cannot be planned")

    scheduler.add([work("a", lambda: [raising()]), work("b"), work("c", cannot_begin)])
    (first,) = scheduler.step()
    engine.end("a/1/1", "b/1/1")
    clock.now = 10.0
    errors = [str(end.error) for end in (first, *scheduler.step())]
    assert errors == ["c: cannot be planned", "a bug", "None"]


def test_an_engine_that_takes_nothing_breaks_what_it_was_given() -> None:
    engine = FakeEngine(refusal="is full")
    scheduler = WorkloadScheduler(engine, clock=FakeClock())
    scheduler.add([work("a", lambda: [repeat("a", 1), repeat("a", 2)]), work("b")])
    found = [(end.name, str(end.error)) for end in scheduler.step()]
    assert found == [("a", "fake: is full"), ("b", "fake: is full")]
    assert scheduler.is_done


def test_cancel_ends_what_the_engine_has_and_closes_every_repeat() -> None:
    closed = []

    def watched(name: str) -> Generator[Submission, SubmissionOutcome, tuple[Attempt, ...]]:
        try:
            yield order(f"{name}/1/1")
        finally:
            closed.append(name)
        return ended()

    engine = FakeEngine()
    scheduler = WorkloadScheduler(engine, most_submissions=2, clock=FakeClock())
    scheduler.add([work(name, lambda name=name: [watched(name)]) for name in "abc"])  # type: ignore[misc]
    scheduler.step()
    scheduler.cancel()
    assert (engine.cancelled, closed) == (["a/1/1", "b/1/1"], ["a", "b"])


def test_an_answer_about_a_workload_that_ended_is_passed_over() -> None:
    engine, clock = FakeEngine(), FakeClock()
    scheduler = WorkloadScheduler(engine, clock=clock)
    scheduler.add([work("a", lambda: [repeat("a", n, is_good=n != 1) for n in (1, 2)])])
    scheduler.step()
    engine.end("a/1/1")
    engine.tell("a/2/1", SubmissionPhase.RUNNING, "late")
    clock.now = 10.0
    assert [end.name for end in scheduler.step()] == ["a"]
    assert scheduler.standing.num_running == 0
