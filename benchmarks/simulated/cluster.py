"""Nodes of GPUs, a queue of jobs and a clock: what a scheduler does, without a scheduler.

Jobs start in the order of their submission; a later one may start before an earlier one if that
does not put off the first of the queue, by the time limits that were asked for (backfill, as Slurm
does it). Time passes in `advance` alone.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum


class State(Enum):
    """Of a job, in Slurm's words."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    TIMEOUT = "TIMEOUT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a job asks for; jobs of one shape start in the order of their submission.

    Attributes:
        gpus: On each node.
        excluded: Names of nodes that it must not run on.
    """

    num_nodes: int
    gpus: int
    limit_s: float
    excluded: frozenset[str] = frozenset()


@dataclass(slots=True, kw_only=True)
class SimulatedJob:
    """A job from its submission to its end.

    Attributes:
        key: What it carries out.
        nodes: Where it runs, or ran.
        started, ended: By the cluster's clock.
    """

    number: int
    key: str
    shape: Shape
    state: State = State.PENDING
    nodes: tuple[str, ...] = ()
    started: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of a job once it runs, if nothing happens to its nodes.

    Attributes:
        duration_s: From its start to its end.
        state: COMPLETED or FAILED.
    """

    duration_s: float
    state: State = State.COMPLETED


@dataclass(slots=True, kw_only=True)
class _Node:
    name: str
    free: int
    is_up: bool = True
    jobs: dict[int, SimulatedJob] = field(default_factory=dict)


class Cluster:
    """Equal nodes, all in one partition.

    Attributes:
        now: Seconds since the start.
        gpu_seconds: That jobs had GPUs for, whatever came of them.
    """

    def __init__(
        self,
        num_nodes: int,
        gpus_per_node: int,
        fate_of: Callable[[SimulatedJob], Fate],
        on_end: Callable[[SimulatedJob], None],
    ) -> None:
        """Make a cluster with nothing on it.

        Args:
            num_nodes: All of them up.
            gpus_per_node: Of each.
            fate_of: Asked once when a job starts.
            on_end: Told of every job that has run, before its state can be asked for.
        """
        self.now = 0.0
        self.gpu_seconds = 0.0
        self._size = gpus_per_node
        self._fate_of = fate_of
        self._on_end = on_end
        names = (f"node{number:04d}" for number in range(1, num_nodes + 1))
        self._nodes = {name: _Node(name=name, free=gpus_per_node) for name in names}
        self._jobs: dict[int, SimulatedJob] = {}
        self._queues: dict[Shape, list[int]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._number = itertools.count(1)
        self._is_dirty = False

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes."""
        return tuple(self._nodes)

    @property
    def down(self) -> frozenset[str]:
        """Names of the nodes that have failed and are not back."""
        return frozenset(node.name for node in self._nodes.values() if not node.is_up)

    def submit(self, key: str, shape: Shape) -> SimulatedJob:
        """Put a job at the end of the queue; it starts in `advance`, at the earliest."""
        assert shape.gpus <= self._size
        job = SimulatedJob(number=next(self._number), key=key, shape=shape)
        self._jobs[job.number] = job
        insort(self._queues.setdefault(shape, []), job.number)
        self._is_dirty = True
        return job

    def cancel(self, number: int) -> None:
        """End a job, whether it runs or not."""
        job = self._jobs.get(number)
        if job is not None and job.state in (State.PENDING, State.RUNNING):
            self._finish(job, State.CANCELLED)

    def forget(self, number: int) -> None:
        """Drop the record of a job that has ended, as a scheduler does after a while."""
        if self._jobs[number].ended is not None:
            del self._jobs[number]

    def jobs(self) -> Iterator[SimulatedJob]:
        """Return all jobs that are not forgotten."""
        return iter(self._jobs.values())

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Have something happen at a time that is to come."""
        heapq.heappush(self._events, (when, next(self._order), event))

    def advance(self, until: float) -> None:
        """Let time pass."""
        self._schedule()
        while self._events and self._events[0][0] <= until:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                heapq.heappop(self._events)[2]()
            self._schedule()
        self.now = until

    def pass_by(self, seconds: float) -> None:
        """Let so much time pass."""
        self.advance(self.now + seconds)

    def take_down(self, name: str, for_s: float) -> None:
        """Have a node fail, with all that runs on it, and come back after a time."""
        node = self._nodes[name]
        if not node.is_up:
            return
        node.is_up = False
        for job in list(node.jobs.values()):
            self._finish(job, State.NODE_FAIL)
        self.at(self.now + for_s, lambda: self._bring_up(node))

    def preempt(self, number: int) -> None:
        """Take the GPUs away from a job that runs."""
        if self._jobs[number].state is State.RUNNING:
            self._finish(self._jobs[number], State.PREEMPTED)

    def _bring_up(self, node: _Node) -> None:
        node.is_up = True
        self._is_dirty = True

    def _finish(self, job: SimulatedJob, state: State) -> None:
        if job.state is State.PENDING:
            self._queues[job.shape].remove(job.number)
        job.ended = self.now
        job.state = state
        for name in job.nodes:
            node = self._nodes[name]
            node.free += job.shape.gpus
            del node.jobs[job.number]
        if job.started is not None:
            lasted_s = self.now - job.started
            self.gpu_seconds += lasted_s * job.shape.gpus * job.shape.num_nodes
            self._on_end(job)
        self._is_dirty = True

    def _start(self, job: SimulatedJob, nodes: list[_Node]) -> None:
        job.state = State.RUNNING
        job.started = self.now
        job.nodes = tuple(node.name for node in nodes)
        for node in nodes:
            node.free -= job.shape.gpus
            node.jobs[job.number] = job
        fate = self._fate_of(job)
        is_over = fate.duration_s > job.shape.limit_s
        state = State.TIMEOUT if is_over else fate.state
        lasts_s = min(fate.duration_s, job.shape.limit_s)

        def end() -> None:
            if job.state is State.RUNNING:
                self._finish(job, state)

        self.at(self.now + lasts_s, end)

    def _schedule(self) -> None:
        """Start what can be started."""
        if not self._is_dirty:
            return
        self._is_dirty = False
        reserved: frozenset[str] = frozenset()
        from_s = float("inf")
        while (first := self._first()) is not None:
            nodes = self._room_for(first.shape)
            if nodes is None:
                reserved, from_s = self._reservation(first.shape)
                break
            self._take_first(first.shape, nodes)
        self._backfill(reserved, from_s)

    def _backfill(self, reserved: frozenset[str], from_s: float) -> None:
        """Start later jobs where that does not put off the first one."""
        stuck: set[Shape] = set()
        while (first := self._first(stuck)) is not None:
            shape = first.shape
            is_short = self.now + shape.limit_s <= from_s
            nodes = self._room_for(shape, frozenset() if is_short else reserved)
            if nodes is None:
                stuck.add(shape)
            else:
                self._take_first(shape, nodes)

    def _first(self, but: set[Shape] | None = None) -> SimulatedJob | None:
        numbers = (q[0] for shape, q in self._queues.items() if q and shape not in (but or ()))
        number = min(numbers, default=None)
        return None if number is None else self._jobs[number]

    def _take_first(self, shape: Shape, nodes: list[_Node]) -> None:
        self._start(self._jobs[self._queues[shape].pop(0)], nodes)

    def _room_for(self, shape: Shape, but: frozenset[str] = frozenset()) -> list[_Node] | None:
        """Return nodes that a job can start on now, the fullest ones that do."""
        barred = shape.excluded | but
        fitting = [
            node
            for node in self._nodes.values()
            if node.is_up and node.free >= shape.gpus and node.name not in barred
        ]
        if len(fitting) < shape.num_nodes:
            return None
        return heapq.nsmallest(shape.num_nodes, fitting, key=lambda node: node.free)

    def _reservation(self, shape: Shape) -> tuple[frozenset[str], float]:
        """Return where and when a job can start, if all that runs uses its time limit."""
        times: list[tuple[float, str]] = []
        for node in self._nodes.values():
            if not node.is_up or node.name in shape.excluded:
                continue
            free, when = node.free, self.now
            for ends, gpus in sorted((_limit_of(j), j.shape.gpus) for j in node.jobs.values()):
                if free >= shape.gpus:
                    break
                free, when = free + gpus, ends
            times.append((when, node.name))
        chosen = heapq.nsmallest(shape.num_nodes, times)
        if len(chosen) < shape.num_nodes:
            return frozenset(), float("inf")
        return frozenset(name for _, name in chosen), chosen[-1][0]


def _limit_of(job: SimulatedJob) -> float:
    assert job.started is not None
    return job.started + job.shape.limit_s
