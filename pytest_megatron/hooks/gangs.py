"""The role that runs python tests on gangs: the controller's run loop.

Lives in the controller, and under pytest-xdist in each of its workers, where xdist has the loop and
only the phases of an item are replaced. Whoever runs an item, pytest's own protocol is what runs:
a plugin that reruns or times items sees them as ever.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pluggy
import pytest

from pytest_megatron.errors import LaunchError
from pytest_megatron.files import JsonValue
from pytest_megatron.gang import measure
from pytest_megatron.gang.bootstrap import rank_env, state_if_seeded
from pytest_megatron.gang.channel import Listener, listen_locally
from pytest_megatron.gang.fleet import Fleet, Gang
from pytest_megatron.gang.lifecycle import Lifecycle, State
from pytest_megatron.gang.logs import file_size, read_piece
from pytest_megatron.gang.messages import NOTHING, UNKNOWN, RankOrder, Run, Welcome
from pytest_megatron.gang.nodes import Nodes
from pytest_megatron.gang.placement import Schedule
from pytest_megatron.gang.spec import GangSpec, RunEnd
from pytest_megatron.gang.stores import LOCAL_HOST
from pytest_megatron.hooks import recipes
from pytest_megatron.hooks.beginning import KEY
from pytest_megatron.hooks.console import Console
from pytest_megatron.hooks.gang_results import RECORD
from pytest_megatron.hooks.markers import num_reruns_of, spec_of, timeout_of
from pytest_megatron.hooks.merged import (
    build_report,
    count_failed_subtest,
    excinfo_of,
    merge_problem,
    warn_again,
)
from pytest_megatron.hooks.nodes import Leader, address_of, nodes_of
from pytest_megatron.hooks.options import Options
from pytest_megatron.hooks.origins import PerRank, make_extra_item, why_per_rank
from pytest_megatron.hooks.session import RunSession
from pytest_megatron.hooks.tee import Tee
from pytest_megatron.hooks.template import Template
from pytest_megatron.host import this_host
from pytest_megatron.lease import Lease, Waiting, is_awaited, try_lease, waiting_text
from pytest_megatron.report.executed import Executed, test_record
from pytest_megatron.report.gangs import plan_lines
from pytest_megatron.report.merge import Merged, has_reported, merge, merge_late
from pytest_megatron.report.transient import transient_cause
from pytest_megatron.verdict.signature import Signature

PLUGIN_NAME = "megatron-gangs"
_NURSERY_S = 60.0  # to call after it was forked
_CALL_S = 0.02  # between looks at a template that has not called
_CLOSING_S = 5.0  # for ranks to tear down after Ctrl-C
_PUMP_S = 0.5
_LEASE_PUMP_S = 0.2  # between two looks at devices that others hold


@dataclass(slots=True)
class _Execution:
    """One item while it runs, and when it has run.

    Attributes:
        before: What the same gang ran before it, if anything.
        log_starts: Where stderr of each rank stood, where that may matter.
    """

    index: int
    item: pytest.Item
    before: pytest.Item | None
    log_starts: Sequence[int] = ()
    end: RunEnd | None = None
    merged: tuple[Merged, ...] = ()

    @property
    def may_end_session(self) -> bool:
        """Whether it has to be reported before anything new starts."""
        stops = [r.done.stop for r in self.end.ranks if r.done] if self.end else []
        return any(stops) or any(m.outcome == "failed" for m in self.merged)


class GangPlugin:
    """Runs items on gangs."""

    def __init__(self, config: pytest.Config, run: RunSession) -> None:
        self._config = config
        self._run = run
        self._options: Options = run.options
        self._specs: dict[pytest.Item, GangSpec] = {}
        self._fleet: Fleet | None = None
        self._make_template: Template | None = None
        self._template: int | None = None
        self._per_rank: PerRank | None = None
        self._prepared: dict[GangSpec, Lease] = {}  # of gangs whose ranks still collect
        self._gangs: dict[int, Gang] = {}
        self._leases: dict[int, Lease] = {}
        self._running: dict[int, tuple[Gang, _Execution]] = {}
        self._ended: dict[pytest.Item, _Execution] = {}
        self._schedule: Schedule | None = None
        self._items: list[pytest.Item] = []
        self._index: dict[pytest.Item, int] = {}
        self._num_runs = 0
        self._coverage: dict[str, JsonValue] = {}
        self._is_stopping = False
        self._nodes = Nodes(num_nodes=1, ranks_per_node=1)
        self._leader: Leader | None = None
        self._is_by_hand = False  # pytest-xdist or --sw say what runs next, not the schedule
        self._is_in_order = False
        self._is_replaying = False
        self._last: dict[int, pytest.Item] = {}
        self._late: list[tuple[pytest.Item, Merged]] = []
        self._current: pytest.Item | None = None
        self._nextitem: pytest.Item | None = None
        self._waiting: Waiting | None = None
        self._lock = threading.RLock()  # gangs are one thread's at a time; see `_let_go_for_others`
        self._has_ended = threading.Event()
        self._limits_s: dict[pytest.Item, float] = {}
        self._make_report: pluggy.HookCaller | None = None
        self._history: dict[pytest.Item, list[Executed]] = {}
        self._reruns: dict[pytest.Item, list[Signature]] = {}
        self._is_claiming = False  # room is being made for a test that the schedule does not have
        self._tee = Tee(config, self._options, is_worker=run.is_worker)
        self._console = Console(config, self._options.pdb_rank, is_refusing=run.is_worker)

    # Collection

    @property
    def num_gpus(self) -> int:
        """CUDA devices that this host has for us."""
        return len(this_host().gpus)

    @property
    def default_size(self) -> int:
        """World size of a test without a mark; 0 if it stays in the controller."""
        nodes = nodes_of(self._options, self.num_gpus)
        return nodes.ranks_per_node * nodes.num_nodes

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Find out which items run on which gang; skip those that this host has no GPUs for."""
        for item in items:
            spec = spec_of(
                item, self._options, default_size=self.default_size, num_gpus=self.num_gpus
            )
            if spec is None:
                continue
            self._limits_s[item] = timeout_of(item, self._options.rank_timeout_s)
            if spec.device == "cuda" and spec.world_size > self.num_gpus * self._options.num_nodes:
                reason = f"needs {spec.world_size} GPUs, this host has {self.num_gpus}"
                item.add_marker(pytest.mark.skip(reason=reason))
                continue
            self._specs[item] = spec
        self._refuse_pdb_rank()

    def _refuse_pdb_rank(self) -> None:
        """Make sure that some gang has the rank to debug.

        Raises:
            pytest.UsageError: None has.
        """
        rank = self._options.pdb_rank
        widest = max((spec.world_size for spec in self._specs.values()), default=0)
        if rank is not None and 0 < widest <= rank:
            raise pytest.UsageError(
                f"--pdb-rank: {rank} is no rank of a gang, expected 0 to {widest - 1}; lower it"
            )

    # The loop

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all items, those of gangs on gangs; under pytest-xdist only get ready."""
        # Plugins may have reordered and deselected since we looked.
        self._specs = {item: self._specs[item] for item in session.items if self.is_ours(item)}
        has_work = bool(self._specs) or self._options.num_nodes > 1  # others show what runs here
        if not has_work or session.config.option.collectonly:
            return None
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            return None  # pytest's own loop says so
        if getattr(session.config.option, "dist", "no") != "no" and not self._run.is_worker:
            return None
        if self._options.is_plan:
            return self._print_plan(session)
        if not self._run.is_worker:
            self._run.refuse_used_run_dir()
        self._open(session)
        if self._run.is_worker:
            return None
        try:
            self._loop(session)
        except KeyboardInterrupt:
            self._interrupt()
            raise
        return True

    @pytest.hookimpl(specname="pytest_runtestloop", wrapper=True, trylast=True)
    def pytest_megatron_finish_loop(self) -> Generator[None, object, object]:
        """End gangs before whoever wraps the loop (pytest-cov) looks at what they measured."""
        try:
            return (yield)
        finally:
            self._shut_down()

    def pytest_sessionfinish(self) -> None:
        """Leave no process behind, however the session ends."""
        self._shut_down()

    def _print_plan(self, session: pytest.Session) -> bool | None:
        """Print which gangs would run how many tests; workloads print theirs."""
        from pytest_megatron.hooks.item import WorkloadItem  # noqa: PLC0415 - loads all of recipes

        items = [item for item in session.items if not isinstance(item, WorkloadItem)]
        for line in plan_lines(self._specs.get(item) for item in items):
            self._tell_user(line)
        return None if self._config.pluginmanager.has_plugin(recipes.PLUGIN_NAME) else True

    def _open(self, session: pytest.Session) -> None:
        """Fork the template, and take over the phases of our items."""
        self._items = session.items
        self._index = {item: index for index, item in enumerate(session.items)}
        self._coverage = measure.settings_of_running(
            is_by_test=getattr(self._config.option, "cov_context", None) == "test"
        )
        listener = listen_locally()
        grace_s = self._options.rank_grace_s
        self._fleet = Fleet(listener, grace_s=grace_s, on_debugger=self._console.handle)
        self._choose_origin(session, listener)
        original = session.gethookproxy

        def get_hooks(fspath: os.PathLike[str]) -> pluggy.HookRelay:
            return _Hooks(original(fspath), self)  # type: ignore[return-value]

        session.gethookproxy = get_hooks  # type: ignore[method-assign]
        tests = [(self._index[item], spec, str(item.path)) for item, spec in self._specs.items()]
        num_slots = max([self.default_size, *(spec.world_size for _, spec, _ in tests)])
        self._is_by_hand = self._run.is_worker or _is_stepwise(session.config)
        self._schedule = Schedule([] if self._is_by_hand else tests, num_slots=num_slots)
        self._is_in_order = self._is_by_hand or _is_one_by_one(set(self._specs.values()), num_slots)
        self._num_slots = num_slots
        self._nodes = nodes_of(self._options, self.num_gpus)
        if self._options.num_nodes > 1:
            self._lead(session)
        else:
            self._nodes = Nodes(num_nodes=1, ranks_per_node=num_slots)
        if any(spec.device == "cuda" for spec in self._specs.values()):
            threading.Thread(target=self._let_go_for_others, daemon=True).start()

    def _lead(self, session: pytest.Session) -> None:
        """Listen for the sessions of other nodes."""
        nodes = self._nodes
        needed = [
            place.local_world_size
            for spec in set(self._specs.values())
            for place in nodes.place(spec.world_size)
            if spec.device == "cuda" and place.node_rank > 0
        ]
        welcome = Welcome(
            num_nodes=nodes.num_nodes,
            ranks_per_node=nodes.ranks_per_node,
            num_gpus=max(needed, default=0),
            node_ids=tuple(item.nodeid for item in session.items),
            collecting="" if self._per_rank is None else self._options.gang_start,
        )
        endpoint = self._options.rdzv_endpoint
        self._leader = Leader(self._config, self._open_fleet, welcome=welcome, endpoint=endpoint)
        self._config.pluginmanager.register(self._leader, "megatron-leader")

    def _choose_origin(self, session: pytest.Session, listener: Listener) -> None:
        """Fork the template, unless ranks have to collect for themselves."""
        sizes = {spec.world_size for spec in self._specs.values()}
        reason = why_per_rank(self._config, self._options, sizes, self.default_size)
        if reason:
            if self._config.option.verbose > 0:
                self._tell_user(f"every rank collects for itself: {reason}")
            self._per_rank = PerRank(session, self._open_fleet, listener, self._options)
            return
        self._make_template = Template(
            session=session,
            address=listener.address,
            key=listener.key,
            random_state=state_if_seeded(self._config.stash[KEY].random_state),
            coverage=self._coverage,
            coverage_file=str(self._coverage_dir / "template"),
            forget=self._open_fleet.forget,
        )
        self._template = self._make_template.fork()

    def _loop(self, session: pytest.Session) -> None:
        """Run items of gangs, side by side where they are small; the controller's own first."""
        assert self._schedule is not None
        if self._leader is not None:
            self._leader.wait()
        own = (
            session.items if self._is_in_order else [i for i in self._items if not self.is_ours(i)]
        )
        for item, following in itertools.zip_longest(own, own[1:]):
            self._protocol(session, item, following)
        is_serial = self._schedule.is_serial()
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if not (self._is_in_order or is_serial) and reporter is not None:
            reporter.showfspath = False  # the file changes with every test, as in pytest-xdist
        while not (self._schedule.is_empty and not self._running and not self._ended):
            with self._lock:
                self._dispatch()
                if not self._ended and not (is_serial and self._running):
                    self._pump()
            self._report_late()
            if self._ended:
                item = next(iter(self._ended))
            elif is_serial and self._running:
                item = next(iter(self._running.values()))[1].item
            else:
                continue
            index = self._index[item]
            self._protocol(
                session, item, self._items[index + 1] if item != self._items[-1] else None
            )
        self._fail_extra(session)

    def _fail_extra(self, session: pytest.Session) -> None:
        """Fail tests that only some ranks have, under their own names."""
        extra = {} if self._per_rank is None else self._per_rank.extra()
        if self._leader is not None:
            extra = {**extra, **self._leader.extra()}
        for node_id, reason in extra.items():
            item = make_extra_item(session, node_id, reason)
            session.items.append(item)
            session.testscollected += 1
            self._protocol(session, item, None)

    def _protocol(
        self, session: pytest.Session, item: pytest.Item, nextitem: pytest.Item | None
    ) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        self._ended.pop(item, None)
        self._report_late()
        if session.shouldfail:
            self._is_stopping = True
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            self._is_stopping = True
            raise session.Interrupted(session.shouldstop)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Remember what comes next; rank 0 shows the fixtures of our items, not the controller."""
        self._current, self._nextitem = item, nextitem
        if not self.is_ours(item):
            return (yield)
        option = item.config.option
        shown, option.setupshow = option.setupshow, False
        try:
            with self._lock:
                return (yield)
        finally:
            option.setupshow = shown
            if self._run.is_worker:
                self._report_late()

    # One item, as its phases are asked for

    def is_ours(self, item: pytest.Item) -> bool:
        """Whether an item runs on a gang."""
        return item in self._specs

    def set_up(self, item: pytest.Item) -> None:
        """Wait until the item has run on its gang; all of its phases run there at once."""
        self._reruns[item] = []
        try:
            self._wait_for(item)
            while self._is_rerun_due(item):
                self._rerun(item)
                self._wait_for(item)
        except KeyboardInterrupt:
            if not self._config.getoption("usepdb"):
                raise
            self._interrupt()  # pytest would debug the controller now
            raise pytest.exit.Exception("KeyboardInterrupt") from None
        execution = self._ended[item]
        assert execution.end is not None
        warn_again(self._config, execution.end)
        self._print(execution.end)
        _stop_like(item, execution.end, "setup")

    def _wait_for(self, item: pytest.Item) -> None:
        while item not in self._ended:
            if not self._is_coming(item):
                self._start_by_hand(item)
            self._dispatch()
            if item not in self._ended:
                self._pump()

    def _is_rerun_due(self, item: pytest.Item) -> bool:
        """Whether a test failed for a transient cause, and may run again; notes the cause."""
        causes = self._reruns[item]
        if len(causes) >= num_reruns_of(item, self._options.num_transient_reruns):
            return False
        execution = self._ended[item]
        assert execution.end is not None
        lines: list[str] = []
        for rank, start in zip(execution.end.ranks, execution.log_starts, strict=True):
            path = Path(rank.log_dir, "stderr.log")
            lines += read_piece(path, start, file_size(path)).splitlines()
        signature = transient_cause(execution.merged, lines)
        if signature is None or self._run.ledger.claim(item.nodeid, signature.id) is not None:
            return False
        causes.append(signature)
        self._history[item][-1] = replace(self._history[item][-1], signature=signature)
        return True

    def _rerun(self, item: pytest.Item) -> None:
        """Run a test again, on a gang that nothing has run on."""
        del self._ended[item]
        gang = self._start_alone(self._specs[item])
        self._assign(gang, self._index[item], self._next_by_hand(gang))

    def call(self, item: pytest.Item) -> None:
        """Report the subtests, which pytest reports before the test."""
        execution = self._ended[item]
        assert execution.end is not None
        _stop_like(item, execution.end, "call")
        *subtests, _ = [m for m in execution.merged if m.when == "call"]
        for merged in subtests:
            report = build_report(item, merged)
            if report.failed:
                count_failed_subtest(item)
            self._config.hook.pytest_runtest_logreport(report=report)

    def tear_down(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Tear down what the controller's own tests left, which this one would have ended."""
        end = self._ended[item].end
        assert end is not None
        _stop_like(item, end, "teardown")
        self._print(end, is_late=True)
        item.session._setupstate.teardown_exact(nextitem)  # noqa: SLF001 - pytest's own way

    def report_phase(self, item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport:
        """Have plugins see the report of a phase; those in conftest files saw it in the ranks."""
        manager = self._config.pluginmanager
        if self._make_report is None:
            conftests = manager._conftest_plugins  # noqa: SLF001 - not to be told apart otherwise
            self._make_report = manager.subset_hook_caller("pytest_runtest_makereport", conftests)
        seen = copy.copy(call)
        seen.excinfo = excinfo_of(self._phase(item, call.when))
        self._is_replaying = True
        try:
            report: pytest.TestReport = self._make_report(item=item, call=seen)
        finally:
            self._is_replaying = False
        causes = self._reruns[item]
        if causes:
            report.user_properties.append(("megatron.reruns", len(causes)))
            report.user_properties.append(("megatron.signature", causes[-1].id))
        if call.when == "teardown":
            merged, history = self._ended[item].merged, self._history[item]
            report.__dict__[RECORD] = test_record(merged, self._specs[item], history)
            del self._ended[item]  # a rerun of it runs again
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> pytest.TestReport | None:
        """Return the report of a phase that ran on a gang."""
        return build_report(item, self._phase(item, call.when)) if self._is_replaying else None

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item) -> bool | None:
        """Keep pytest-timeout from stopping the controller: the gang has the limit."""
        return True if self.is_ours(item) else None

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool | None:
        """There is no timer to cancel."""
        return True if self.is_ours(item) else None

    def _phase(self, item: pytest.Item, when: str) -> Merged:
        return [m for m in self._ended[item].merged if m.when == when][-1]

    def _is_coming(self, item: pytest.Item) -> bool:
        """Whether an item runs now, or will without our doing."""
        assert self._schedule is not None
        is_running = any(e.item is item for _, e in self._running.values())
        return is_running or self._schedule.holds(self._index[item])

    @property
    def _is_held(self) -> bool:
        """Whether nothing new may start, as a failure was not reported yet."""
        return any(execution.may_end_session for execution in self._ended.values())

    # Gangs

    def _dispatch(self) -> None:
        """Give idle gangs work, end those without, start those that are wanted."""
        schedule = self._schedule
        if self._is_stopping or self._is_held or schedule is None or self._is_by_hand:
            return
        if self._is_claiming:
            return
        fleet = self._open_fleet
        for gang in list(self._gangs.values()):
            if self._is_free(gang):
                taken = schedule.take(gang.number, gang.spec)
                if taken is None:
                    fleet.close(gang)
                else:
                    self._assign(gang, *taken)
        while (spec := schedule.wanted(self._num_free(), self._count_gangs())) is not None:
            started = self._start(spec)
            if started is None:
                return
            taken = schedule.take(started.number, spec)
            assert taken is not None
            self._assign(started, *taken)

    def _start_by_hand(self, item: pytest.Item) -> None:
        """Start an item that the schedule does not have: a rerun, or one of pytest-xdist's."""
        spec = self._specs[item]
        free = [gang for gang in self._gangs.values() if self._is_free(gang)]
        fitting = [gang for gang in free if gang.spec == spec and not spec.is_isolated]
        gang = fitting[0] if fitting else self._start_alone(spec)
        self._assign(gang, self._index[item], self._next_by_hand(gang))

    def _start_alone(self, spec: GangSpec) -> Gang:
        """Start a gang in the place of those that are idle, as soon as there is room for it."""
        self._is_claiming = True  # else what the schedule has next would take the room
        try:
            while True:
                for other in [gang for gang in self._gangs.values() if self._is_free(gang)]:
                    self._open_fleet.close(other)
                has_room = self._num_free() >= min(spec.world_size, self._num_slots)
                if has_room and (gang := self._start(spec)) is not None:
                    return gang
                self._pump()
        finally:
            self._is_claiming = False

    def _next_by_hand(self, gang: Gang) -> int:
        """Return what a gang runs after an item that was started by hand."""
        assert self._schedule is not None
        if gang.spec.is_isolated:
            return NOTHING
        if not self._is_by_hand:
            return self._schedule.planned(gang.number, gang.spec)
        if self._nextitem is None:
            return NOTHING
        is_same = self._specs.get(self._nextitem) == gang.spec
        return self._index[self._nextitem] if is_same else UNKNOWN

    def _is_free(self, gang: Gang) -> bool:
        is_busy = any(g is gang for g, _ in self._running.values())
        return not is_busy and gang.lifecycle.state in (State.IDLE, State.STARTING)

    def _num_free(self) -> int:
        if not self._gangs:
            return self._num_slots
        return self._nodes.num_free([gang.spec.world_size for gang in self._gangs.values()])

    def _count_gangs(self) -> dict[GangSpec, int]:
        counts: dict[GangSpec, int] = {}
        for gang in self._gangs.values():
            counts[gang.spec] = counts.get(gang.spec, 0) + 1
        return counts

    def _start(self, spec: GangSpec) -> Gang | None:
        """Start a gang; None while its devices are not free."""
        fleet = self._open_fleet
        per_rank = self._per_rank
        if per_rank is None:
            self._wait_for_template()
        lease = self._prepared.pop(spec, None)
        if spec.device == "cuda" and lease is None:
            lease = self._lease(self._nodes.num_ranks_on(0, spec.world_size))
            if lease is None:
                return None
        if per_rank is not None and not per_rank.is_ready(self._orders(0, spec, lease)):
            if lease is not None:
                self._prepared[spec] = lease
            return None
        number = fleet.new_number()
        orders = self._orders(number, spec, lease)
        gang = Gang(
            number=number,
            spec=spec,
            orders=orders,
            lifecycle=Lifecycle(
                [order.log_dir for order in orders],
                grace_s=self._options.rank_grace_s,
                now=time.monotonic(),
            ),
            descriptors=lease.descriptors if lease else (),
        )
        self._gangs[number] = gang
        if lease is not None:
            self._leases[number] = lease
        self._tee.follow(gang)
        if per_rank is None:
            if self._leader is not None:
                gang.missing = self._leader.missing(orders)
            fleet.start(gang)
            return gang
        gang.missing = per_rank.missing(spec.world_size)
        if per_rank.is_lost(spec.world_size):
            fleet.pretend(gang)
        else:
            fleet.start(gang)
            per_rank.take(spec.world_size)
        return gang

    def _lease(self, num_gpus: int) -> Lease | None:
        """Lease devices, without waiting for them; while there are none, others know of it."""
        gpus = this_host().gpus
        lease = try_lease(gpus, num_gpus)
        if lease is None and self._waiting is None:
            self._tell_user(waiting_text(gpus, num_gpus))
            self._waiting = Waiting()
        if lease is not None and self._waiting is not None:
            self._waiting.close()
            self._waiting = None
        return lease

    def _let_go_for_others(self) -> None:
        """End idle gangs that hold devices for which somebody waits.

        Runs in a thread of its own: the session may be busy with a test of the controller, or, as
        a worker of pytest-xdist, wait for orders. A workload of this same session may be the one
        that waits.
        """
        while not self._has_ended.wait(_LEASE_PUMP_S):
            if self._leases and is_awaited() and self._lock.acquire(blocking=False):
                try:
                    self._let_go()
                finally:
                    self._lock.release()

    def _let_go(self) -> None:
        fleet = self._fleet
        if fleet is None:
            return
        fleet.pump(0.0)
        for gang in list(self._gangs.values()):
            self._take_ends(gang)
            if gang.is_gone:
                self._forget(gang)
            elif self._is_free(gang) and gang.number in self._leases:
                fleet.close(gang)

    def _close_all(self) -> None:
        fleet = self._fleet
        if fleet is None:
            return
        for gang in self._gangs.values():
            fleet.close(gang)
        while any(not gang.is_gone for gang in self._gangs.values()):
            fleet.pump(_PUMP_S)
        for gang in list(self._gangs.values()):
            self._forget(gang)

    def _wait_for_template(self) -> None:
        """Wait until the template has called; one that was killed gets a successor, once."""
        deadline = time.monotonic() + _NURSERY_S
        num_left = 1
        while not self._open_fleet.has_nursery(0, -1):
            if self._has_template_ended() and num_left and self._make_template is not None:
                num_left -= 1
                self._template = self._make_template.fork()
            self._open_fleet.pump(_CALL_S)
            if time.monotonic() > deadline:
                raise LaunchError("gang", "the process that starts ranks did not call")

    def _has_template_ended(self) -> bool:
        if self._template is None:
            return True
        try:
            pid, _ = os.waitpid(self._template, os.WNOHANG)
        except ChildProcessError:  # somebody else collected it
            pid = self._template
        if pid:
            self._template = None
        return bool(pid)

    def _orders(self, number: int, spec: GangSpec, lease: Lease | None) -> tuple[RankOrder, ...]:
        directory = self._run.open_run_dir() / self._run.ranks_dir / f"attempt_{number}"
        places = self._nodes.place(spec.world_size)
        common = {"MASTER_ADDR": LOCAL_HOST, "TORCHELASTIC_RUN_ID": self._run.run_dir.name}
        if places[-1].node_rank > 0:
            common["MASTER_ADDR"], _ = address_of(self._options.rdzv_endpoint)
        own = {}  # of this node: others lease by themselves
        if lease is not None:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in lease.gpus)
        base_temp = self._base_temp() / f"gang{number}"
        return tuple(
            RankOrder(
                gang=number,
                rank=place.rank,
                local_rank=place.local_rank,
                world_size=spec.world_size,
                node_rank=place.node_rank,
                device=spec.device,
                env={
                    **common,
                    **(own if place.node_rank == 0 else {}),
                    **rank_env(place, spec.world_size),
                    "TORCHELASTIC_ERROR_FILE": str(directory / str(place.rank) / "error.json"),
                },
                log_dir=str(directory / str(place.rank)),
                base_temp=str(base_temp / f"rank{place.rank}"),
                is_capturing=self._config.option.capture != "no",
                coverage=self._coverage,
                coverage_file=str(self._coverage_dir / f"{number}-{place.rank}"),
            )
            for place in places
        )

    def _assign(self, gang: Gang, index: int, next_index: int) -> None:
        self._num_runs += 1
        item = self._items[index]
        config = self._config
        maxfail = config.option.maxfail
        run = Run(
            run=self._num_runs,
            index=index,
            node_id=str(item.nodeid),
            next_index=next_index,
            next_node_id=str(self._items[next_index].nodeid) if next_index >= 0 else "",
            shared_dir=str(self._shared_dir(gang) / str(self._num_runs)),
            is_last_if_failed=bool(maxfail) and item.session.testsfailed + 1 >= maxfail,
        )
        log_starts: list[int] = []
        if num_reruns_of(item, self._options.num_transient_reruns):
            log_starts = [file_size(Path(o.log_dir, "stderr.log")) for o in gang.orders]
        execution = _Execution(index, item, self._last.get(gang.number), log_starts)
        self._running[self._num_runs] = gang, execution
        self._last[gang.number] = item
        self._open_fleet.assign(gang, run, limit_s=self._limits_s[item])
        self._take_ends(gang)

    def _pump(self) -> None:
        self._open_fleet.pump(self._tee.wait_s(_PUMP_S if self._waiting is None else _LEASE_PUMP_S))
        self._console.settle()
        self._tee.poll()
        for gang in list(self._gangs.values()):
            self._take_ends(gang)
            if gang.is_gone:
                self._forget(gang)
        self._dispatch()

    def _take_ends(self, gang: Gang) -> None:
        if gang.ends:
            self._tee.catch_up(gang)
        for end in gang.ends:
            _, execution = self._running.pop(end.run)
            execution.end = end
            execution.merged = merge(end, gang.spec.world_size)
            self._ended[execution.item] = execution
            directory = str(Path(gang.orders[0].log_dir).parent)
            self._history.setdefault(execution.item, []).append(
                Executed(gang=gang.number, directory=directory, end=end)
            )
            late = {r.rank: r.done.late for r in end.ranks if r.done and r.done.late is not None}
            self._keep_late(execution.before, late, gang)
        gang.ends.clear()

    def _keep_late(
        self, item: pytest.Item | None, late: Mapping[int, JsonValue], gang: Gang
    ) -> None:
        """Keep what went wrong when ranks tore down what `item` left, after it was reported."""
        if late and item is not None:
            log_dirs = [order.log_dir for order in gang.orders]
            self._late.append((item, merge_late(late, log_dirs)))

    def _report_late(self) -> None:
        """Report late teardowns as errors of the tests that they belong to."""
        late, self._late = self._late, []
        for item, merged in late:
            if self._run.is_worker and self._current is not None:
                item = self._current  # noqa: PLW2901 - pytest-xdist takes reports of no other
            self._config.hook.pytest_runtest_logreport(report=build_report(item, merged))

    def _forget(self, gang: Gang) -> None:
        del self._gangs[gang.number]
        self._tee.forget(gang)
        item = self._last.pop(gang.number, None)
        self._keep_late(item, gang.lifecycle.late, gang)
        if item is not None:
            self._late += [(item, merge_problem(text)) for text in gang.lifecycle.problems]
        if self._schedule is not None:
            self._schedule.forget(gang.number)
        lease = self._leases.pop(gang.number, None)
        if lease is not None:
            lease.close()
        for number, (owner, execution) in list(self._running.items()):
            if owner is gang:  # interrupted by what happened to others: it runs again
                del self._running[number]
                if self._schedule is not None and not self._is_by_hand:
                    self._schedule.give_back(execution.index)

    # The end

    def _interrupt(self) -> None:
        """Ctrl-C: ranks get it too and tear down; a second one does not wait for them."""
        fleet = self._open_fleet
        self._console.is_refusing = True
        deadline = time.monotonic() + min(self._options.rank_grace_s, _CLOSING_S)
        busy = [gang for gang in self._gangs.values() if gang.lifecycle.state is State.RUNNING]
        for gang in busy:
            fleet.interrupt(gang)
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < deadline and any(
                gang.lifecycle.state is State.RUNNING for gang in busy
            ):
                fleet.pump(0.1)
        self._is_stopping = True

    def _shut_down(self) -> None:
        """End every gang, politely where it is idle; then the template and what it started."""
        self._has_ended.set()
        with self._lock:
            if self._fleet is None:
                return
            fleet = self._fleet
            try:
                self._close_all()
            finally:
                self._fleet = None
                for lease in self._leases.values():
                    lease.close()
                for lease in self._prepared.values():
                    lease.close()
                self._prepared.clear()
                self._leases.clear()
                self._gangs.clear()
                fleet.stop()
                if self._template is not None:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(self._template, 0)
                if self._per_rank is not None:
                    self._per_rank.close()
                for problem in measure.merge_into_running(self._coverage_dir):
                    self._tell_user(f"coverage of a rank cannot be read: {problem}")
            self._report_late()

    # Small things

    @property
    def _open_fleet(self) -> Fleet:
        assert self._fleet is not None
        return self._fleet

    @property
    def _coverage_dir(self) -> Path:
        return self._run.run_dir / self._run.ranks_dir / "coverage"

    def _base_temp(self) -> Path:
        factory = self._config._tmp_path_factory  # type: ignore[attr-defined]  # noqa: SLF001
        found: Path = factory.getbasetemp()
        return found

    def _shared_dir(self, gang: Gang) -> Path:
        """Return where ranks of all nodes can write."""
        if gang.orders[-1].node_rank > 0:
            return self._run.run_dir.absolute() / "shared"
        return self._base_temp() / "shared"

    def _print(self, end: RunEnd, *, is_late: bool = False) -> None:
        """Write what pytest wrote to the terminal of rank 0, up to the teardown or from it on."""
        done = end.ranks[0].done
        printed = "" if done is None else done.printed_late if is_late else done.printed
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if printed.strip() and reporter is not None:
            self._config.get_terminal_writer().write(printed)

    def _tell_user(self, text: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(text)


class _Hooks:
    """Pytest's hooks, with the phases of our items replaced."""

    def __init__(self, hooks: pluggy.HookRelay, gangs: GangPlugin) -> None:
        self._hooks = hooks
        self._gangs = gangs

    def __getattr__(self, name: str) -> object:
        return getattr(self._hooks, name)

    def pytest_runtest_setup(self, *, item: pytest.Item) -> object:
        if self._gangs.is_ours(item):
            self._gangs.set_up(item)
            return None
        return self._hooks.pytest_runtest_setup(item=item)

    def pytest_runtest_call(self, *, item: pytest.Item) -> object:
        if self._gangs.is_ours(item):
            self._gangs.call(item)
            return None
        return self._hooks.pytest_runtest_call(item=item)

    def pytest_runtest_teardown(self, *, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        if self._gangs.is_ours(item):
            self._gangs.tear_down(item, nextitem)
            return None
        return self._hooks.pytest_runtest_teardown(item=item, nextitem=nextitem)

    def pytest_runtest_makereport(
        self, *, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> pytest.TestReport:
        if self._gangs.is_ours(item) and call.excinfo is None:
            return self._gangs.report_phase(item, call)
        found: pytest.TestReport = self._hooks.pytest_runtest_makereport(item=item, call=call)
        return found


def _is_stepwise(config: pytest.Config) -> bool:
    return bool(getattr(config.option, "stepwise", False))


def _is_one_by_one(specs: set[GangSpec], num_slots: int) -> bool:
    """Whether all tests run on one gang, in the order of collection."""
    return len(specs) == 1 and all(s.world_size * 2 > num_slots for s in specs)


def _stop_like(item: pytest.Item, end: RunEnd, when: str) -> None:
    """End the session as the test asked pytest to, by `pytest.exit` or KeyboardInterrupt.

    It ends in the first phase that the rank did not report; those before it count.
    """
    for rank in end.ranks:
        stop: Sequence[object] = () if rank.done is None else rank.done.stop
        if not stop or has_reported(rank, when):
            continue
        where = f"rank {rank.rank} of {len(end.ranks)} in {item.nodeid}"
        if stop[0] == "exit":
            code = stop[2] if isinstance(stop[2], int) else None
            raise pytest.exit.Exception(f"{stop[1]} ({where})", code)
        raise KeyboardInterrupt(where)
