"""Gangs of one session: starts and closes them, and leases their devices.

`gangs.controller.dispatcher` assigns their tests.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import pytest

from pytest_megatron.base.text import counted
from pytest_megatron.gangs.controller import testmon
from pytest_megatron.gangs.controller.console import Console, Tee
from pytest_megatron.gangs.controller.rank_config import RankConfigs, refuse_unfit_host
from pytest_megatron.gangs.ipc.messages import Welcome
from pytest_megatron.gangs.lifecycle import GangState, Lifecycle
from pytest_megatron.gangs.nodes.leader import Leader, nodes_of
from pytest_megatron.gangs.rank import coverage as measure
from pytest_megatron.gangs.rank.bootstrap import state_if_seeded
from pytest_megatron.gangs.rank.logs import open_standard_descriptors
from pytest_megatron.gangs.rank.process import RankContext
from pytest_megatron.gangs.start.environment import KEY
from pytest_megatron.gangs.start.forkserver import SessionTemplate, TemplateProcess
from pytest_megatron.gangs.start.start_mode import PerRank, modules_to_load, why_per_rank
from pytest_megatron.gangs.supervisor.supervisor import Gang, Supervisor
from pytest_megatron.gangs.topology import GangSpec, Nodes, count_gpus
from pytest_megatron.gpu.host import Lease, LeaseWaiter, this_host, try_lease, waiting_text
from pytest_megatron.session.state import RunSession, write_line

_LOG = logging.getLogger("pytest_megatron.gangs")


class Leases:
    """Leases of devices.

    Attributes:
        of_gangs: By number of the gang.
        prepared: Leases of gangs whose ranks still collect.
        waiter: Shows others that this session waits for devices that they hold; None while it
            does not.
    """

    def __init__(self, write_line: Callable[[str], None]) -> None:
        """Begin without leases of GPUs.

        Args:
            write_line: Writes a line to the terminal, when waiting begins.
        """
        self._write_line = write_line
        self.prepared: dict[GangSpec, Lease] = {}
        self.of_gangs: dict[int, Lease] = {}
        self.waiter: LeaseWaiter | None = None

    def take(self, spec: GangSpec, num_gpus: int) -> Lease | None:
        """Lease devices for a gang, without waiting for them.

        Args:
            spec: Spec of the gang; a lease that was put aside for it is taken first.
            num_gpus: Devices of this host that it needs.
        """
        lease = self.prepared.pop(spec, None)
        if lease is not None:
            return lease
        gpus = this_host().gpus
        lease = try_lease(gpus, num_gpus)
        if lease is None and self.waiter is None:
            self._write_line(waiting_text(gpus, num_gpus))
            self.waiter = LeaseWaiter()
        if lease is not None and self.waiter is not None:
            self.waiter.close()
            self.waiter = None
        return lease

    def release(self, gang: int) -> None:
        """Release the lease of a gang, if it has one."""
        lease = self.of_gangs.pop(gang, None)
        if lease is not None:
            lease.close()

    def close(self) -> None:
        """Release all leases of GPUs."""
        for lease in (*self.of_gangs.values(), *self.prepared.values()):
            lease.close()
        self.of_gangs.clear()
        self.prepared.clear()


_CLOSING_S = 5.0  # for ranks to tear down after Ctrl-C
_PUMP_S = 0.5
_LEASE_PUMP_S = 0.2  # between attempts to lease devices


class GangPool:
    """Starts and closes gangs.

    Attributes:
        gangs: By number; those that are being killed are among them.
        num_slots: Ranks that may run at the same time; a wider gang runs alone.
        leader: Node 0's side of a session over several nodes, or None.
        per_rank: Ranks that collect for themselves; None where they are forked from the session.
        rank_configs: Creates configurations of ranks.
        leases: Devices that gangs hold.
        tee: Copies output of ranks to the terminal.
    """

    def __init__(self, config: pytest.Config, run: RunSession) -> None:
        """Begin without gangs.

        Args:
            config: Configuration of the session.
            run: Run directory and options of the session.
        """
        open_standard_descriptors()
        self._config = config
        options = self._options = run.options
        self._run = run
        self.gangs: dict[int, Gang] = {}
        self._num_gangs = 0
        self.tee = Tee(config, options, is_worker=run.is_worker)
        self._console = Console(config, options.pdb_rank, is_refusing=run.is_worker)
        self.leases = Leases(partial(write_line, config))
        self.per_rank: PerRank | None = None
        self.leader: Leader | None = None
        self._default_size = nodes_of(options).num_ranks  # 0 if tests without a marker need no gang
        self._template: TemplateProcess | None = None
        self._begin()
        self.plan(())

    def _begin(self) -> None:
        """Begin without agents."""
        self._supervisor: Supervisor | None = Supervisor(on_debugger=self._console.handle)

    def plan(self, specs: Iterable[GangSpec]) -> None:
        """Make room for gangs of some specs."""
        config, options = self._config, self._options
        self._specs = set(specs)
        self.num_slots = max([self._default_size, *(spec.world_size for spec in self._specs)])
        self._nodes = nodes_of(options)
        if options.num_nodes == 1:
            self._nodes = Nodes(num_nodes=1, ranks_per_node=self.num_slots)
        is_measured = not testmon.is_recording(config)
        coverage = measure.settings_of_running() if is_measured else {}
        self.rank_configs = RankConfigs(config, self._run, self._nodes, coverage)

    def begin_ahead(self, spec: GangSpec) -> None:
        """Have ranks collect beside the controller.

        Args:
            spec: A gang that the session will probably have. If no devices are free for it, its
                ranks begin later.

        Raises:
            pytest.UsageError, LaunchError: Ranks cannot be started here.
        """
        self.plan([spec])
        self.per_rank = PerRank(self._config, self.supervisor, self._options, None)
        start_env = self._config.stash[KEY]
        lease, start_env.lease = start_env.lease, None
        if spec.device == "cuda":
            num_gpus = count_gpus(spec.world_size, self._options.ranks_per_gpu)
            lease = lease or try_lease(this_host().gpus, num_gpus)
            if lease is None:
                return
            self.leases.prepared[spec] = lease
        self.per_rank.start_ahead(self.rank_configs.write(0, spec, lease, is_ahead=True))

    def drop_ahead(self) -> None:
        """End ranks that collected for nothing, as if there had been none."""
        if self.per_rank is not None:
            self.close_ahead()
            self.per_rank = None
            self._begin()

    def close_ahead(self) -> None:
        """End ranks that collected, in a session that runs none of its tests."""
        if not self.is_closed:
            if self.per_rank is not None:
                self.per_rank.look()
            self.shut_down()
            self.rank_configs.remove_ahead()

    def open(self, session: pytest.Session) -> None:
        """Start the process that starts ranks, and listen for other nodes.

        Raises:
            pytest.UsageError: Other nodes cannot connect, or ranks of this one cannot.
        """
        refuse_unfit_host(self._options)
        self._session = session
        config, sizes = session.config, {spec.world_size for spec in self._specs}
        # Forked processes share present objects, and neither they nor pytest at its end search all
        # of torch for garbage, which took 0.6 s. A fork of what has loaded torch has it frozen, and
        # finds what it has to flush at its end among the other objects.
        if not gc.get_freeze_count():
            gc.freeze()
        reason = why_per_rank(config, self._options, sizes, self._default_size)
        self.leases.close()  # those of ranks that began ahead: a wider gang may come first
        if reason:
            _LOG.info("every rank collects for itself: %s", reason)
            if config.getoption("verbose", 0) > 0:
                write_line(config, f"every rank collects for itself: {reason}")
            if self.per_rank is None:
                self.per_rank = PerRank(config, self.supervisor, self._options, session.items)
            else:
                self.per_rank.compare_with(session.items)
        else:
            _LOG.info("ranks are forked from the session")
            for item in session.items:
                _ = item.location  # cached by pytest, so that ranks inherit it
            context = RankContext(
                session=session,
                random_state=state_if_seeded(config.stash[KEY].random_state),
            )
            template = SessionTemplate(
                context=context,
                coverage=self.rank_configs.coverage,
                coverage_file=str(self.rank_configs.coverage_dir / "template"),
                forget=self.supervisor.calls.forget,
                loads=modules_to_load(session),
            )
            self._template = TemplateProcess(template, self.supervisor)
        if self._options.num_nodes > 1:
            self.leader = self._lead(session)

    def _lead(self, session: pytest.Session) -> Leader:
        """Listen for the sessions of other nodes."""
        nodes = self._nodes
        needed = [
            place.local_world_size
            for spec in self._specs
            for place in nodes.place(spec.world_size)
            if spec.device == "cuda" and place.node_rank > 0
        ]
        welcome = Welcome(
            num_nodes=nodes.num_nodes,
            ranks_per_node=nodes.ranks_per_node,
            num_gpus=max(needed, default=0),
            node_ids=tuple(item.nodeid for item in session.items),
            is_collecting=self.per_rank is not None,
        )
        leader = Leader(self._config, self.supervisor, welcome=welcome, options=self._options)
        self._config.pluginmanager.register(leader, "megatron-leader")
        return leader

    @property
    def supervisor(self) -> Supervisor:
        """The supervisor of gangs; only before `shut_down`."""
        assert self._supervisor is not None
        return self._supervisor

    @property
    def is_closed(self) -> bool:
        """True if it was shut down."""
        return self._supervisor is None

    def start(self, spec: GangSpec) -> Gang | None:
        """Start a gang; return None while its devices are leased, or its ranks still collect."""
        supervisor, per_rank = self.supervisor, self.per_rank
        if self._template is not None:
            self._template.wait()
        lease = None
        if spec.device == "cuda":
            num_here = self._nodes.num_ranks_on(0, spec.world_size)
            lease = self.leases.take(spec, count_gpus(num_here, self._options.ranks_per_gpu))
            if lease is None:
                return None
        if per_rank is not None and not self._has_collected(per_rank, spec, lease):
            return None
        gang = self._make(spec, lease)
        self.tee.follow(gang)
        if per_rank is None:
            supervisor.start(gang)
            return gang
        gang.missing = per_rank.missing(spec.world_size)
        if per_rank.is_lost(spec.world_size):
            supervisor.start_without_ranks(gang)
        else:
            supervisor.start(gang)
        return gang

    def _has_collected(self, per_rank: PerRank, spec: GangSpec, lease: Lease | None) -> bool:
        """Report errors of ranks that collect; return whether all have collected without errors."""
        is_ready = per_rank.is_ready(self.rank_configs.write(0, spec, lease))
        # Gangs of other sizes may have other parameters than the session.
        size, widest = spec.world_size, max(s.world_size for s in self._specs)
        has_extra = size == widest and not self._run.is_worker  # each of which runs what it has
        failures = per_rank.take_failures(size, has_extra=has_extra) if is_ready else []
        if lease is not None and (failures or not is_ready):
            self.leases.prepared[spec] = lease
        self._report_failures(failures, is_lost=is_ready and per_rank.is_lost(size))
        return is_ready and not failures

    def _report_failures(self, failures: Sequence[tuple[str, str]], *, is_lost: bool) -> None:
        """Report collection errors of ranks as pytest reports its own.

        A worker of pytest-xdist goes on, as pytest-xdist does after errors of its own collection;
        without a rank, it stops after the running test. One that ends earlier counts as crashed.

        Raises:
            pytest.Session.Interrupted: There are errors, without an option to continue.
        """
        for place, reason in failures:
            report = pytest.CollectReport(place, "failed", reason, [])
            self._config.hook.pytest_collectreport(report=report)
        if not failures or self._config.option.continue_on_collection_errors:
            return
        problem = f"{counted(len(failures), 'error')} during collection of ranks"
        if not self._run.is_worker:
            raise pytest.Session.Interrupted(problem)
        if is_lost:
            self._session.shouldstop = problem

    def _make(self, spec: GangSpec, lease: Lease | None) -> Gang:
        """Make a gang, with directories and configurations of its ranks."""
        self._num_gangs += 1
        number = self._num_gangs
        rank_configs = self.rank_configs.write(number, spec, lease)
        gang = Gang(
            number=number,
            spec=spec,
            configs=rank_configs,
            lifecycle=Lifecycle(
                [rank_config.log_dir for rank_config in rank_configs],
                grace_s=self._options.rank_grace_s,
                now=time.monotonic(),
            ),
            descriptors=lease.descriptors if lease else (),
        )
        self.gangs[number] = gang
        gpus = ", ".join(gpu.uuid for gpu in lease.gpus) if lease else "no GPU"
        _LOG.info("gang %d: %d ranks on %s, %s", number, spec.world_size, spec.device, gpus)
        if lease is not None:
            self.leases.of_gangs[number] = lease
        return gang

    def num_free(self) -> int:
        """Return the number of ranks that may be started."""
        sizes = [gang.spec.world_size for gang in self._present()]
        return self._nodes.num_free(sizes) if sizes else self.num_slots

    def count(self) -> Mapping[GangSpec, int]:
        """Return the number of gangs of each spec."""
        return Counter(gang.spec for gang in self._present())

    def _present(self) -> list[Gang]:
        return [g for g in self.gangs.values() if not has_left(g)]

    def pump(self) -> None:
        """Handle messages of ranks until there is news; copy their output."""
        self.supervisor.pump(self.tee.wait_s(_LEASE_PUMP_S if self.leases.waiter else _PUMP_S))
        self._console.settle()
        self.tee.poll()

    def forget(self, gang: Gang) -> None:
        """Remove a gang that is gone, and release its devices."""
        del self.gangs[gang.number]
        self.tee.forget(gang)
        self.leases.release(gang.number)

    def interrupt(self, busy: list[Gang]) -> None:
        """Send Ctrl-C to ranks, which tear down; a second Ctrl-C does not wait for them."""
        supervisor = self.supervisor
        self._console.is_refusing = True
        deadline = time.monotonic() + min(self._options.rank_grace_s, _CLOSING_S)
        for gang in busy:
            supervisor.interrupt(gang)
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < deadline and any(
                gang.lifecycle.state is GangState.RUNNING for gang in busy
            ):
                supervisor.pump(0.1)

    def close_all(self) -> None:
        """Close every gang, with teardown if it is idle."""
        for gang in self.gangs.values():
            self.supervisor.close(gang)
        while any(not gang.is_gone for gang in self.gangs.values()):
            self.supervisor.pump(_PUMP_S)

    def shut_down(self) -> None:
        """End the process that starts ranks, and its ranks.

        The kernel takes longer for that than the rest of the session: see `wait_for_end`.
        """
        supervisor, self._supervisor = self.supervisor, None
        self.leases.close()
        self.gangs.clear()
        supervisor.stop()
        if self.rank_configs.coverage:  # its processes write their data at their end
            self.wait_for_end()
        if self.per_rank is not None:
            self.per_rank.close()
        for problem in measure.merge_into_running(self.rank_configs.coverage_dir):
            write_line(self._config, f"coverage of a rank cannot be read: {problem}")

    def wait_for_end(self) -> None:
        """Wait until the process that starts ranks has ended; may be called again."""
        template, self._template = self._template, None
        if template is not None:
            template.close()
        # At Python's end, nanobind (triton's bindings) prints what is frozen as leaked. Before
        # that, pytest searches for garbage five times.
        if any(found.__module__ == "nanobind" for found in type.__subclasses__(type)):
            atexit.register(gc.unfreeze)


def has_left(gang: Gang) -> bool:
    """Return whether a gang may be replaced, though its ranks may not all be gone yet.

    They were killed and need no resources of others; GPUs are free only when ranks are gone.
    """
    return gang.lifecycle.state in (GangState.KILLING, GangState.GONE) and gang.spec.device == "cpu"
