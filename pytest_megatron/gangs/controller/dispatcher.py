"""Assignment of items to gangs, and their results."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from pytest_megatron.gangs.controller.gang_pool import GangPool, has_left
from pytest_megatron.gangs.controller.reports import merge_problem
from pytest_megatron.gangs.crash import crash_stack
from pytest_megatron.gangs.ipc.messages import NOTHING, UNKNOWN, PhaseReport, Run
from pytest_megatron.gangs.lifecycle import GangState
from pytest_megatron.gangs.merge import Merged, RankResult, RunEnd, merge, merge_late
from pytest_megatron.gangs.rank.logs import file_size, read_piece
from pytest_megatron.gangs.record import execution_record
from pytest_megatron.gangs.schedule import Schedule
from pytest_megatron.gangs.supervisor.supervisor import Gang
from pytest_megatron.gangs.topology import GangSpec
from pytest_megatron.gpu.host import is_awaited
from pytest_megatron.runs.record import RecordedExecution
from pytest_megatron.session.options import Options
from pytest_megatron.triage.signatures import Signature

_STACK_BYTES = 1 << 14


class _Running(NamedTuple):
    """An item that runs on a gang, or was sent ahead.

    Attributes:
        before: The item that the same gang ran before it, if any.
        log_starts: Size of stderr.log of each rank at its start, if it may be rerun.
    """

    gang: Gang
    item: pytest.Item
    before: pytest.Item | None
    log_starts: Sequence[int | None]


# Characters of a node id. Tests that are sent ahead have to fit into the buffers of sockets: a rank
# in a test reads nothing while it waits for one that has not received that test yet.
_LONGEST_AHEAD = 500
_LEASE_POLL_S = 0.2  # between checks for others that wait for devices


class Dispatcher:
    """Assigns items to gangs.

    Attributes:
        ended: Items that have run and are not reported yet.
        history: Every execution of an item.
        is_in_order: Whether items run in the order of collection, so that the controller's own
            tests can run between them.
        is_stopping: Set when no further test may start.
        lock: Held by the thread that uses gangs; see `let_go_for_others`.
    """

    def __init__(
        self,
        session: pytest.Session,
        pool: GangPool,
        *,
        specs: Mapping[pytest.Item, GangSpec],
        limits: Mapping[pytest.Item, float],
        options: Options,
        is_by_hand: bool,
    ) -> None:
        """Plan the order of tests.

        Args:
            session: One that has collected.
            pool: Gangs of the session.
            specs: Items of gangs.
            limits: Limit of each phase of each, in seconds.
            options: Options of the session.
            is_by_hand: Whether pytest-xdist or `--sw` chooses the next test, not the schedule.
        """
        self._pool = pool
        self._items = session.items
        self._index = {item: index for index, item in enumerate(session.items)}
        self._specs = specs
        self._limits = limits
        self._num_reruns = options.num_transient_reruns
        self._is_by_hand = is_by_hand
        tests = [(self._index[item], spec, str(item.path)) for item, spec in specs.items()]
        self._schedule = Schedule([] if is_by_hand else tests, num_slots=pool.num_slots)
        self.is_in_order = is_by_hand or _is_one_by_one(set(specs.values()), pool.num_slots)
        self.ended: dict[pytest.Item, RunEnd] = {}
        self.history: dict[pytest.Item, list[RecordedExecution]] = {}
        self.is_stopping = False
        self.lock = threading.RLock()
        self._running: dict[int, _Running] = {}  # by number of the execution
        self._last: dict[int, pytest.Item] = {}
        self._late: list[tuple[pytest.Item, Merged]] = []
        self._num_runs = 0
        self._is_claiming = False  # room is being made for a test outside of the schedule
        option = session.config.option
        # Ranks that are copied live are copied under the name of the test that they run.
        self._may_send_ahead = not (pool.tee.is_on or self._num_reruns) and not any(
            getattr(option, name, None) for name in ("maxfail", "usepdb", "trace")
        )
        self._has_closed = threading.Event()

    # For the run loop

    @property
    def is_serial(self) -> bool:
        """True if at most one gang can run at any time."""
        return self._schedule.is_serial()

    @property
    def is_done(self) -> bool:
        """True if nothing is left to run or to report."""
        return self._schedule.is_empty and not self._running and not self.ended

    def next_to_report(self) -> pytest.Item | None:
        """Return an item that has run; or the running one, if no other can run beside it."""
        if self.ended:
            return next(iter(self.ended))
        if self.is_serial and self._running:
            return next(iter(self._running.values())).item
        return None

    def index(self, item: pytest.Item) -> int:
        """Return the index of an item in the session."""
        return self._index[item]

    def take_late(self) -> list[tuple[pytest.Item, Merged]]:
        """Return failed teardowns of tests that were already reported, once."""
        late, self._late = self._late, []
        return late

    def wait_for(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Wait until an item has run; start it if it is not scheduled.

        Args:
            item: An item of a gang.
            nextitem: The next item, if it is known.
        """
        while item not in self.ended:
            is_running = any(running.item is item for running in self._running.values())
            if not is_running and not self._schedule.holds(self._index[item]):
                self._start_by_hand(item, nextitem)
            self.dispatch()
            if item not in self.ended:
                self.pump()

    def rerun(self, item: pytest.Item, signature: Signature, nextitem: pytest.Item | None) -> None:
        """Run an item again, on a gang that nothing has run on."""
        self.history[item][-1] = replace(
            self.history[item][-1], signature=signature.id, is_transient=True
        )
        del self.ended[item]
        gang = self._start_alone(self._specs[item])
        self._assign(gang, self._index[item], self._next_by_hand(gang, nextitem))

    def dispatch(self) -> None:
        """Assign tests to idle gangs, close those without tests, and start new ones."""
        is_held = any(end.may_end_session for end in self.ended.values())
        if self.is_stopping or is_held or self._is_by_hand or self._is_claiming:
            return
        schedule, pool = self._schedule, self._pool
        for gang in list(pool.gangs.values()):
            if self._is_free(gang):
                taken = schedule.take(gang.number, gang.spec)
                if taken is None:
                    pool.supervisor.close(gang)
                else:
                    self._assign(gang, *taken)
            elif has_left(gang):
                schedule.forget(gang.number)
            self._send_ahead(gang)
        while (spec := schedule.wanted(pool.num_free(), pool.count())) is not None:
            started = pool.start(spec)
            if started is None:
                return
            taken = schedule.take(started.number, spec)
            assert taken is not None
            self._assign(started, *taken)

    def pump(self) -> None:
        """Wait for news, and handle it."""
        self._pool.pump()
        self._sweep()
        self.dispatch()

    # The end

    def interrupt(self) -> None:
        """Interrupt running tests as Ctrl-C does, and start no others."""
        running = [g for g in self._pool.gangs.values() if g.lifecycle.state is GangState.RUNNING]
        self._pool.interrupt(running)
        self.is_stopping = True

    def shut_down(self) -> None:
        """Close every gang, and the process that starts ranks."""
        self._has_closed.set()
        with self.lock:
            if self._pool.is_closed:
                return
            try:
                self._pool.close_all()
                for gang in list(self._pool.gangs.values()):
                    self._forget(gang)
            finally:
                self._pool.shut_down()

    def let_go_for_others(self) -> None:
        """From now on, close idle gangs whose leased devices another process waits for.

        A thread checks for that: the session may be busy with a test of the controller, or, as a
        worker of pytest-xdist, wait for its controller. Workloads of this session also wait.
        """
        if any(spec.device == "cuda" for spec in self._specs.values()):
            threading.Thread(target=self._watch_for_others, daemon=True).start()

    def _watch_for_others(self) -> None:
        """Give idle GPUs back while another session waits, in a thread."""
        while not self._has_closed.wait(_LEASE_POLL_S):
            is_held = bool(self._pool.leases.of_gangs)
            if is_held and is_awaited() and self.lock.acquire(blocking=False):
                try:
                    self._let_go()
                finally:
                    self.lock.release()

    def _let_go(self) -> None:
        """Close idle gangs that hold GPUs."""
        pool = self._pool
        if pool.is_closed:
            return
        pool.supervisor.pump(0.0)
        self._sweep()
        for gang in list(pool.gangs.values()):
            if self._is_free(gang) and gang.number in pool.leases.of_gangs:
                pool.supervisor.close(gang)

    # Gangs and their executions

    def _start_by_hand(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Start an item outside of the schedule: a rerun, or one that pytest-xdist chose."""
        spec = self._specs[item]
        free = [gang for gang in self._pool.gangs.values() if self._is_free(gang)]
        fitting = [gang for gang in free if gang.spec == spec and not spec.is_isolated]
        gang = fitting[0] if fitting else self._start_alone(spec)
        self._assign(gang, self._index[item], self._next_by_hand(gang, nextitem))

    def _start_alone(self, spec: GangSpec) -> Gang:
        """Close idle gangs, and start a new one as soon as there is room for it."""
        pool = self._pool
        self._is_claiming = True  # else the next scheduled test would take the room
        try:
            while True:
                for other in [gang for gang in pool.gangs.values() if self._is_free(gang)]:
                    pool.supervisor.close(other)
                has_room = pool.num_free() >= min(spec.world_size, pool.num_slots)
                if has_room and (gang := pool.start(spec)) is not None:
                    return gang
                self.pump()
        finally:
            self._is_claiming = False

    def _next_by_hand(self, gang: Gang, nextitem: pytest.Item | None) -> int:
        """Return the next test of a gang after an item outside of the schedule."""
        if gang.spec.is_isolated:
            return NOTHING
        if not self._is_by_hand:
            return self._schedule.planned(gang.number, gang.spec)
        if nextitem is None:
            return NOTHING
        return self._index[nextitem] if self._specs.get(nextitem) == gang.spec else UNKNOWN

    def _is_free(self, gang: Gang) -> bool:
        is_busy = any(r.gang is gang for r in self._running.values())
        return not is_busy and gang.lifecycle.state in (GangState.IDLE, GangState.STARTING)

    def _send_ahead(self, gang: Gang) -> None:
        """Send tests ahead if their order is fixed and nothing can prevent them.

        A limit of failures, reruns, a debugger and other idle gangs can.
        """
        is_alone = self.is_in_order or self.is_serial
        if not (self._may_send_ahead and gang.spec.device == "cpu" and is_alone):
            return
        queue = gang.lifecycle.queue
        if queue.has_enough or not gang.is_in_lockstep:
            return
        after = queue.last
        runs: list[tuple[Run, float]] = []
        for _ in range(gang.lifecycle.room_ahead):
            taken = self._schedule.take_planned(gang.number, gang.spec)
            if taken is None:
                break
            index, next_index = taken
            item = self._items[index]
            if len(item.nodeid) > _LONGEST_AHEAD:
                self._schedule.put_back(gang.number, index)
                break
            run = self._prepare(gang, index, next_index, after)
            after = run.run
            runs.append((run, self._limits[item]))
        if runs:
            self._pool.supervisor.send_ahead(gang, runs)

    def _assign(self, gang: Gang, index: int, next_index: int) -> None:
        """Send a test to a gang, and the one after it if that can be."""
        run = self._prepare(gang, index, next_index)
        self._pool.supervisor.assign(gang, run, limit_s=self._limits[self._items[index]])
        self._take_ends(gang)

    def _prepare(self, gang: Gang, index: int, next_index: int, after: int = 0) -> Run:
        """Record an execution of a gang, and return the message for its ranks."""
        self._num_runs += 1
        item = self._items[index]
        maxfail = item.config.option.maxfail
        log_starts: list[int | None] = [None] * len(gang.configs)
        if self._num_reruns:
            log_starts = [file_size(Path(c.log_dir, "stderr.log")) for c in gang.configs]
        before = self._last.get(gang.number)
        self._running[self._num_runs] = _Running(gang, item, before, log_starts)
        self._last[gang.number] = item
        return Run(
            run=self._num_runs,
            index=index,
            node_id=str(item.nodeid),
            next_index=next_index,
            next_node_id=str(self._items[next_index].nodeid) if next_index >= 0 else "",
            shared_dir=f"{self._pool.rank_configs.shared_dir(gang.configs)}{os.sep}{self._num_runs}",
            is_last_if_failed=bool(maxfail) and item.session.testsfailed + 1 >= maxfail,
            after=after,
        )

    def _sweep(self) -> None:
        """Take ends of tests of all gangs, and forget gangs that are gone."""
        for gang in list(self._pool.gangs.values()):
            self._take_ends(gang)
            if gang.is_gone:
                self._forget(gang)

    def _take_ends(self, gang: Gang) -> None:
        """Take the ends of tests of a gang."""
        if gang.ends:
            self._pool.tee.catch_up(gang)
        for ended in gang.ends:
            running = self._running.pop(ended.run)
            ranks = tuple(map(_with_log, ended.ranks, running.log_starts))
            end = replace(ended, ranks=ranks)
            end = replace(end, merged=merge(end, gang.spec.world_size))
            self.ended[running.item] = end
            directory = gang.configs[0].log_dir.rpartition(os.sep)[0]
            self.history.setdefault(running.item, []).append(
                execution_record(gang.number, directory, end)
            )
            late = {r.rank: r.done.late for r in end.ranks if r.done and r.done.late is not None}
            self._keep_late(running.before, late, gang)
        if gang.ends:
            self._take_back(gang)
        gang.ends.clear()

    def _take_back(self, gang: Gang) -> None:
        """Reschedule tests that were sent ahead, if the test before them failed."""
        kept = gang.lifecycle.queue.numbers
        for number, running in self._running_on(gang):
            if number not in kept:
                del self._running[number]
                assert running.before is not None
                self._last[gang.number] = running.before
                self._schedule.put_back(gang.number, self._index[running.item])

    def _running_on(self, gang: Gang) -> list[tuple[int, _Running]]:
        """Return the executions of a gang with their numbers, the last first."""
        return [(n, r) for n, r in reversed(self._running.items()) if r.gang is gang]

    def _keep_late(
        self, item: pytest.Item | None, late: Mapping[int, PhaseReport], gang: Gang
    ) -> None:
        """Keep failed teardowns of fixtures of `item`, which was already reported."""
        if late and item is not None:
            log_dirs = [rank_config.log_dir for rank_config in gang.configs]
            self._late.append((item, merge_late(late, log_dirs)))

    def _forget(self, gang: Gang) -> None:
        """Drop a gang that is gone; tests that it has not run go back to the schedule."""
        self._pool.forget(gang)
        item = self._last.pop(gang.number, None)
        self._schedule.forget(gang.number)
        for number, running in self._running_on(gang):
            # Interrupted by the end of another test: it runs again.
            del self._running[number]
            if not self._is_by_hand:
                self._schedule.give_back(self._index[running.item])
            if gang.lifecycle.unbegun:
                item = running.before
        self._keep_late(item, gang.lifecycle.late, gang)
        if item is not None:
            self._late += [(item, merge_problem(text)) for text in gang.lifecycle.problems]


def _is_one_by_one(specs: set[GangSpec], num_slots: int) -> bool:
    """Return whether all tests run on one gang, in the order of collection."""
    return len(specs) == 1 and all(s.world_size * 2 > num_slots for s in specs)


def _with_log(rank: RankResult, log_start: int | None) -> RankResult:
    """Return a rank with the start of its log, one that a signal ended with its last stack."""
    if log_start is not None:
        rank = replace(rank, log_start=log_start)
    if rank.stack or rank.exit_code is None or rank.exit_code >= 0:
        return rank
    path = Path(rank.log_dir, "stderr.log")
    size = file_size(path)
    return replace(rank, stack=crash_stack(read_piece(path, max(0, size - _STACK_BYTES), size)))
