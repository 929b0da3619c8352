"""The role that runs python tests on gangs: the controller's run loop.

Lives in the controller, and under pytest-xdist in each of its workers, where xdist has the loop and
only the phases of an item are replaced. Whoever runs an item, pytest's own protocol is what runs:
a plugin that reruns or times items sees them as ever.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pluggy
import pytest

from pytest_megatron.errors import LaunchError, MegatronError
from pytest_megatron.gang.bootstrap import rank_env
from pytest_megatron.gang.channel import Channel, listen_locally
from pytest_megatron.gang.fleet import Fleet, Gang
from pytest_megatron.gang.lifecycle import Lifecycle, State
from pytest_megatron.gang.messages import Message, RankOrder, Run, Welcome
from pytest_megatron.gang.nodes import Nodes
from pytest_megatron.gang.placement import Schedule
from pytest_megatron.gang.spec import GangSpec, RunEnd
from pytest_megatron.gang.stores import LOCAL_HOST
from pytest_megatron.hooks.markers import spec_of, timeout_of
from pytest_megatron.hooks.merged import build_report, warn_again
from pytest_megatron.hooks.nodes import Leader, address_of, nodes_of
from pytest_megatron.hooks.options import Options
from pytest_megatron.hooks.session import RunSession
from pytest_megatron.hooks.template import Template
from pytest_megatron.host import this_host
from pytest_megatron.lease import Lease, lease_gpus
from pytest_megatron.report.merge import Merged, merge

PLUGIN_NAME = "megatron-gangs"
_NURSERY_S = 60.0  # to call after it was forked
_CLOSING_S = 5.0  # for ranks to tear down after Ctrl-C
_PUMP_S = 0.5


@dataclass(slots=True)
class _Execution:
    """One item while it runs, and when it has run."""

    index: int
    item: pytest.Item
    end: RunEnd | None = None
    merged: tuple[Merged, ...] = ()


class GangPlugin:
    """Runs items on gangs."""

    def __init__(self, config: pytest.Config, run: RunSession) -> None:
        self._config = config
        self._run = run
        self._options: Options = run.options
        self._random_before = random.getstate()
        self._specs: dict[pytest.Item, GangSpec] = {}
        self._fleet: Fleet | None = None
        self._template: int | None = None
        self._gangs: dict[int, Gang] = {}
        self._leases: dict[int, Lease] = {}
        self._running: dict[int, tuple[Gang, _Execution]] = {}
        self._ended: dict[pytest.Item, _Execution] = {}
        self._schedule: Schedule | None = None
        self._items: list[pytest.Item] = []
        self._index: dict[pytest.Item, int] = {}
        self._num_runs = 0
        self._is_stopping = False
        self._nodes = Nodes(num_nodes=1, ranks_per_node=1)
        self._leader: Leader | None = None
        self._is_held = False  # nothing new starts before a failure was reported

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
            if spec.device == "cuda" and spec.world_size > self.num_gpus * self._options.num_nodes:
                reason = f"needs {spec.world_size} GPUs, this host has {self.num_gpus}"
                item.add_marker(pytest.mark.skip(reason=reason))
                continue
            self._specs[item] = spec

    # The loop

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all items, those of gangs on gangs; under pytest-xdist only get ready."""
        has_work = bool(self._specs) or self._options.num_nodes > 1  # others show what runs here
        if not has_work or session.config.option.collectonly:
            return None
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            return None  # pytest's own loop says so
        if getattr(session.config.option, "dist", "no") != "no" and not self._run.is_worker:
            return None
        self._open(session)
        if self._run.is_worker:
            return None
        try:
            self._loop(session)
        except KeyboardInterrupt:
            self._interrupt()
            raise
        finally:
            self._shut_down()
        return True

    def pytest_sessionfinish(self) -> None:
        """Leave no process behind, however the session ends."""
        self._shut_down()

    def _open(self, session: pytest.Session) -> None:
        """Fork the template, and take over the phases of our items."""
        self._items = session.items
        self._index = {item: index for index, item in enumerate(session.items)}
        listener = listen_locally()
        grace_s = self._options.rank_grace_s
        self._fleet = Fleet(listener, grace_s=grace_s, on_debugger=self._on_debugger)
        template = Template(
            session=session,
            address=listener.address,
            key=listener.key,
            random_before=self._random_before,
        )
        self._template = template.fork()
        original = session.gethookproxy

        def get_hooks(fspath: os.PathLike[str]) -> pluggy.HookRelay:
            return _Hooks(original(fspath), self)  # type: ignore[return-value]

        session.gethookproxy = get_hooks  # type: ignore[method-assign]
        is_ordered = self._run.is_worker or _is_stepwise(session.config)
        tests = [(self._index[item], spec, str(item.path)) for item, spec in self._specs.items()]
        num_slots = max([self.default_size, *(spec.world_size for _, spec, _ in tests)])
        self._schedule = Schedule(tests, num_slots=num_slots, is_ordered=is_ordered)
        self._num_slots = num_slots
        self._nodes = nodes_of(self._options, self.num_gpus)
        if self._options.num_nodes > 1:
            self._lead(session)
        else:
            self._nodes = Nodes(num_nodes=1, ranks_per_node=num_slots)

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
        )
        endpoint = self._options.rdzv_endpoint
        self._leader = Leader(self._config, self._open_fleet, welcome=welcome, endpoint=endpoint)
        self._config.pluginmanager.register(self._leader, "megatron-leader")

    def _loop(self, session: pytest.Session) -> None:
        """Run items of gangs, side by side where they are small, then the controller's own."""
        assert self._schedule is not None
        if self._leader is not None:
            self._leader.wait()
        for item in [i for i in session.items if i not in self._specs]:
            self._protocol(session, item)
        is_serial = self._schedule.is_serial()
        while not (self._schedule.is_empty and not self._running and not self._ended):
            self._dispatch()
            if self._ended:
                item = next(iter(self._ended))
            elif is_serial and self._running:
                item = next(iter(self._running.values()))[1].item
            else:
                self._pump()
                continue
            self._protocol(session, item)
        if self._leader is not None:
            self._leader.check_collections(session)

    def _protocol(self, session: pytest.Session, item: pytest.Item) -> None:
        index = self._index[item]
        nextitem = self._items[index + 1] if index + 1 < len(self._items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        self._ended.pop(item, None)
        self._is_held = False
        if session.shouldfail:
            self._is_stopping = True
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            self._is_stopping = True
            raise session.Interrupted(session.shouldstop)

    # One item, as its phases are asked for

    def is_ours(self, item: pytest.Item) -> bool:
        """Whether an item runs on a gang."""
        return item in self._specs

    def set_up(self, item: pytest.Item) -> None:
        """Wait until the item has run on its gang; all of its phases run there at once."""
        while item not in self._ended:
            if not any(e.item is item for _, e in self._running.values()):
                self._start_by_hand(item)
            self._dispatch()
            if item not in self._ended:
                self._pump()
        execution = self._ended[item]
        assert execution.end is not None
        warn_again(self._config, execution.end)
        self._print(execution.end)
        _stop_like(execution.end)

    def call(self, item: pytest.Item) -> None:
        """Report the subtests, which pytest reports before the test."""
        *subtests, _ = [m for m in self._ended[item].merged if m.when == "call"]
        for merged in subtests:
            report = build_report(item, merged)
            self._config.hook.pytest_runtest_logreport(report=report)

    def tear_down(self, item: pytest.Item) -> None:
        """Do nothing: it was torn down with the rest."""

    def make_report(self, item: pytest.Item, when: str) -> pytest.TestReport:
        """Return the report of a phase."""
        execution = self._ended[item]
        merged = [m for m in execution.merged if m.when == when][-1]
        if when == "teardown":
            del self._ended[item]  # a rerun of it runs again
        return build_report(item, merged)

    def _start_by_hand(self, item: pytest.Item) -> None:
        """Start an item that the loop did not hand out: a rerun, or one of pytest-xdist's."""
        spec = self._specs[item]
        self._dispatch_one(spec, self._index[item], -1)

    # Gangs

    def _dispatch(self) -> None:
        """Give idle gangs work, end those without, start those that are wanted."""
        if self._is_stopping or self._is_held or self._schedule is None or self._run.is_worker:
            return
        fleet, schedule = self._open_fleet, self._schedule
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

    def _dispatch_one(self, spec: GangSpec, index: int, next_index: int) -> None:
        for gang in list(self._gangs.values()):
            if self._is_free(gang) and gang.spec == spec and not spec.is_isolated:
                self._assign(gang, index, next_index)
                return
        for gang in list(self._gangs.values()):
            if self._is_free(gang):
                self._open_fleet.close(gang)
        while self._num_free() < min(spec.world_size, self._num_slots):
            self._pump()
        started: Gang | None = None
        while started is None:
            started = self._start(spec)
            if started is None:
                self._pump()
        self._assign(started, index, next_index)

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
        deadline = time.monotonic() + _NURSERY_S
        while not fleet.has_nursery(0, -1):
            fleet.pump(_PUMP_S)
            if time.monotonic() > deadline:
                raise LaunchError("gang", "the process that starts ranks did not call")
        lease = None
        if spec.device == "cuda":
            num_gpus = self._nodes.num_ranks_on(0, spec.world_size)
            lease = lease_gpus(this_host().gpus, num_gpus, self._tell_user)
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
        fleet.start(gang)
        return gang

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
        self._running[self._num_runs] = (gang, _Execution(index, item))
        limit_s = timeout_of(item, self._options.rank_timeout_s)
        self._open_fleet.assign(gang, run, limit_s=limit_s)
        self._take_ends(gang)

    def _pump(self) -> None:
        self._open_fleet.pump(_PUMP_S)
        for gang in list(self._gangs.values()):
            self._take_ends(gang)
            if gang.is_gone:
                self._forget(gang)
        self._dispatch()

    def _take_ends(self, gang: Gang) -> None:
        for end in gang.ends:
            _, execution = self._running.pop(end.run)
            execution.end = end
            execution.merged = merge(end, gang.spec.world_size)
            self._ended[execution.item] = execution
            if any(m.outcome == "failed" for m in execution.merged):
                self._is_held = True
        gang.ends.clear()

    def _forget(self, gang: Gang) -> None:
        del self._gangs[gang.number]
        if self._schedule is not None:
            self._schedule.forget(gang.number)
        lease = self._leases.pop(gang.number, None)
        if lease is not None:
            lease.close()
        for number, (owner, execution) in list(self._running.items()):
            if owner is gang:  # interrupted by what happened to others: it runs again
                del self._running[number]
                if self._schedule is not None and not self._run.is_worker:
                    self._schedule.give_back(execution.index)

    # The end

    def _interrupt(self) -> None:
        """Ctrl-C: ranks get it too and tear down; a second one does not wait for them."""
        fleet = self._open_fleet
        deadline = time.monotonic() + min(self._options.rank_grace_s, _CLOSING_S)
        for gang in self._gangs.values():
            fleet.interrupt(gang)
        with contextlib.suppress(KeyboardInterrupt):
            while self._gangs and time.monotonic() < deadline:
                fleet.pump(0.1)
                for gang in list(self._gangs.values()):
                    if gang.is_gone or not gang.channels:
                        self._gangs.pop(gang.number)

    def _shut_down(self) -> None:
        """End every gang, politely where it is idle; then the template and what it started."""
        if self._fleet is None:
            return
        fleet, self._fleet = self._fleet, None
        try:
            for gang in self._gangs.values():
                fleet.close(gang)
            while any(not gang.is_gone for gang in self._gangs.values()):
                fleet.pump(_PUMP_S)
        finally:
            for lease in self._leases.values():
                lease.close()
            self._leases.clear()
            self._gangs.clear()
            fleet.stop()
            if self._template is not None:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self._template, 0)

    # Small things

    @property
    def _open_fleet(self) -> Fleet:
        assert self._fleet is not None
        return self._fleet

    def _base_temp(self) -> Path:
        factory = self._config._tmp_path_factory  # type: ignore[attr-defined]  # noqa: SLF001
        found: Path = factory.getbasetemp()
        return found

    def _shared_dir(self, gang: Gang) -> Path:
        """Return where ranks of all nodes can write."""
        if gang.orders[-1].node_rank > 0:
            return self._run.run_dir.absolute() / "shared"
        return self._base_temp() / "shared"

    def _print(self, end: RunEnd) -> None:
        printed = end.ranks[0].done.printed if end.ranks[0].done else ""
        if printed.strip():
            self._config.get_terminal_writer().write(printed)

    def _tell_user(self, text: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(text)

    def _on_debugger(self, gang: Gang, rank: int, channel: Channel, message: Message) -> None:
        raise NotImplementedError


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
            self._gangs.tear_down(item)
            return None
        return self._hooks.pytest_runtest_teardown(item=item, nextitem=nextitem)

    def pytest_runtest_makereport(
        self, *, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> pytest.TestReport:
        if self._gangs.is_ours(item) and call.excinfo is None:
            return self._gangs.make_report(item, call.when)
        found: pytest.TestReport = self._hooks.pytest_runtest_makereport(item=item, call=call)
        return found


def _is_stepwise(config: pytest.Config) -> bool:
    return bool(getattr(config.option, "stepwise", False))


def _stop_like(end: RunEnd) -> None:
    """End the session as the test asked pytest to, by `pytest.exit` or KeyboardInterrupt."""
    for rank in end.ranks:
        stop: Sequence[object] = () if rank.done is None else rank.done.stop
        if stop and stop[0] == "exit":
            code = stop[2]
            raise pytest.exit.Exception(str(stop[1]), code if isinstance(code, int) else None)
        if stop:
            raise KeyboardInterrupt


__all__ = ["PLUGIN_NAME", "GangPlugin", "MegatronError"]
