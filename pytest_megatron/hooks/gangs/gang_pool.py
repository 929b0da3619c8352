"""The gangs of one session, from the process that their ranks come from to their devices.

Knows which gangs there are and starts and ends them; what they run is `hooks.dispatch`'s.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest

from pytest_megatron.base.text import counted
from pytest_megatron.gang.ipc.channel import listen_locally
from pytest_megatron.gang.ipc.messages import Welcome
from pytest_megatron.gang.lifecycle import Lifecycle
from pytest_megatron.gang.rank import coverage as measure
from pytest_megatron.gang.rank.bootstrap import state_if_seeded
from pytest_megatron.gang.rank.logs import open_standard_descriptors
from pytest_megatron.gang.spec import GangSpec
from pytest_megatron.gang.supervisor.supervisor import Gang, Supervisor
from pytest_megatron.gang.timers import GangState
from pytest_megatron.gang.topology import Nodes, count_gpus
from pytest_megatron.gpu.host import this_host
from pytest_megatron.gpu.lease import Lease, LeaseWaiter, try_lease, waiting_text
from pytest_megatron.hooks.gangs.debug_console import Console
from pytest_megatron.hooks.gangs.rank_config import RankConfigs, refuse_unfit_host
from pytest_megatron.hooks.gangs.tee import Tee
from pytest_megatron.hooks.nodes.leader import Leader, nodes_of
from pytest_megatron.hooks.session import RunSession, write_line
from pytest_megatron.hooks.start.environment import KEY
from pytest_megatron.hooks.start.forkserver import SessionTemplate, TemplateProcess
from pytest_megatron.hooks.start.start_mode import PerRank, modules_to_load, why_per_rank


class Leases:
    """Leases of gangs, and of those whose ranks still collect."""

    def __init__(self, write_line: Callable[[str], None]) -> None:
        """Hold nothing yet.

        Args:
            write_line: Told once whenever there is something to wait for.
        """
        self._write_line = write_line
        self._prepared: dict[GangSpec, Lease] = {}
        self._of_gangs: dict[int, Lease] = {}
        self._waiting: LeaseWaiter | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether devices are wanted that others hold; those others know of it."""
        return self._waiting is not None

    @property
    def is_empty(self) -> bool:
        """Whether no gang holds devices."""
        return not self._of_gangs

    def take(self, spec: GangSpec, num_gpus: int) -> Lease | None:
        """Lease devices for a gang, without waiting for them.

        Args:
            spec: What was put aside for such a gang is taken first.
            num_gpus: Devices of this host that it needs.
        """
        lease = self._prepared.pop(spec, None)
        if lease is not None:
            return lease
        gpus = this_host().gpus
        lease = try_lease(gpus, num_gpus)
        if lease is None and self._waiting is None:
            self._write_line(waiting_text(gpus, num_gpus))
            self._waiting = LeaseWaiter()
        if lease is not None and self._waiting is not None:
            self._waiting.close()
            self._waiting = None
        return lease

    def put_aside(self, spec: GangSpec, lease: Lease) -> None:
        """Keep a lease for a gang whose ranks still collect."""
        self._prepared[spec] = lease

    def keep(self, gang: int, lease: Lease) -> None:
        """Keep a lease as long as a gang lives."""
        self._of_gangs[gang] = lease

    def is_held_by(self, gang: int) -> bool:
        """Whether a gang holds devices."""
        return gang in self._of_gangs

    def release(self, gang: int) -> None:
        """Let go of what a gang held, if anything."""
        lease = self._of_gangs.pop(gang, None)
        if lease is not None:
            lease.close()

    def close(self) -> None:
        """Let go of everything."""
        for lease in (*self._of_gangs.values(), *self._prepared.values()):
            lease.close()
        self._of_gangs.clear()
        self._prepared.clear()


_CLOSING_S = 5.0  # for ranks to tear down after Ctrl-C
_PUMP_S = 0.5
_LEASE_PUMP_S = 0.2  # between two looks at devices that others hold


class GangPool:
    """Starts gangs and ends them.

    Attributes:
        gangs: By number; those that are being killed are among them.
        num_slots: Ranks that may run side by side; a wider gang runs by itself.
        leader: Node 0's side of a session over several nodes, or None.
        per_rank: Where ranks collect for themselves; None where they are forked off the session.
        rank_configs: Writes what ranks are told.
        leases: Devices that gangs hold.
    """

    def __init__(
        self, config: pytest.Config, run: RunSession, specs: Iterable[GangSpec], default_size: int
    ) -> None:
        """Listen.

        Args:
            config: Of the session.
            run: Its run directory and options.
            specs: Gangs that its tests need.
            default_size: World size of tests without a mark; 0 where they need no gang.
        """
        open_standard_descriptors()
        self._config = config
        options = self._options = run.options
        self._is_worker = run.is_worker
        self._specs = set(specs)
        self.gangs: dict[int, Gang] = {}
        self._num_gangs = 0
        self._spares: dict[GangSpec, Gang] = {}
        self.num_slots = max([default_size, *(spec.world_size for spec in self._specs)])
        self._nodes = nodes_of(options)
        if options.num_nodes == 1:
            self._nodes = Nodes(num_nodes=1, ranks_per_node=self.num_slots)
        coverage = measure.settings_of_running(
            is_by_test=getattr(config.option, "cov_context", None) == "test"
        )
        self.rank_configs = RankConfigs(config, run, self._nodes, coverage)
        self._tee = Tee(config, options, is_worker=run.is_worker)
        self._console = Console(config, options.pdb_rank, is_refusing=run.is_worker)
        self.leases = Leases(partial(write_line, config))
        self.per_rank: PerRank | None = None
        self.leader: Leader | None = None
        self._default_size = default_size
        self._template: TemplateProcess | None = None
        self._listener = listen_locally()
        self._supervisor: Supervisor | None = Supervisor(
            self._listener, on_debugger=self._console.handle
        )

    def open(self, session: pytest.Session) -> None:
        """Begin to start the process that ranks come from, and have other nodes come.

        Raises:
            pytest.UsageError: Other nodes cannot come, or ranks of this one cannot meet.
        """
        refuse_unfit_host(self._options)
        config, sizes = session.config, {spec.world_size for spec in self._specs}
        # What is loaded by now stays: processes forked from here share it, and neither they nor
        # pytest at its end look through all of torch for garbage, which took 0.6 s.
        gc.freeze()
        reason = why_per_rank(config, self._options, sizes, self._default_size)
        if reason:
            if config.getoption("verbose", 0) > 0:
                write_line(config, f"every rank collects for itself: {reason}")
            self.per_rank = PerRank(session, self.supervisor, self._listener, self._options)
        else:
            for item in session.items:
                _ = item.location  # pytest keeps it: found here, no rank has to
            template = SessionTemplate(
                session=session,
                address=self._listener.address,
                key=self._listener.key,
                random_state=state_if_seeded(config.stash[KEY].random_state),
                coverage=self.rank_configs.coverage,
                coverage_file=str(self.rank_configs.coverage_dir / "template"),
                forget=self.supervisor.forget,
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
            collecting="" if self.per_rank is None else self._options.gang_start,
        )
        leader = Leader(self._config, self.supervisor, welcome=welcome, options=self._options)
        self._config.pluginmanager.register(leader, "megatron-leader")
        return leader

    @property
    def supervisor(self) -> Supervisor:
        """Connections and processes; only before `shut_down`."""
        assert self._supervisor is not None
        return self._supervisor

    @property
    def is_copying(self) -> bool:
        """Whether ranks are copied to the terminal while they run."""
        return self._tee.is_on

    @property
    def is_closed(self) -> bool:
        """Whether it was shut down."""
        return self._supervisor is None

    def start_ahead(self, spec: GangSpec) -> None:
        """Start the gang that `start` will return next, while others run.

        Only where that is one fork and holds nothing that others need: on the CPU of this node.
        """
        is_plain = self.per_rank is None and self.leader is None and spec.device == "cpu"
        if is_plain and spec not in self._spares and self.supervisor.fork_servers.has(0):
            gang = self._spares[spec] = self._make(spec, None)
            self._tee.follow(gang)
            self.supervisor.start(gang)

    def is_spare(self, gang: Gang) -> bool:
        """Whether a gang was started ahead, and nobody has asked for it."""
        return self._spares.get(gang.spec) is gang

    def start(self, spec: GangSpec) -> Gang | None:
        """Start a gang; None while its devices are not free, or its ranks still collect."""
        supervisor, per_rank = self.supervisor, self.per_rank
        spare = self._spares.pop(spec, None)
        if spare is not None and spare.lifecycle.state in (GangState.STARTING, GangState.IDLE):
            return spare
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
        self._tee.follow(gang)
        if per_rank is None:
            if self.leader is not None:
                gang.missing = self.leader.missing(gang.configs)
            supervisor.start(gang)
            return gang
        gang.missing = per_rank.missing(spec.world_size)
        if per_rank.is_lost(spec.world_size):
            supervisor.start_without_ranks(gang)
        else:
            supervisor.start(gang)
            per_rank.take(spec.world_size)
        return gang

    def _has_collected(self, per_rank: PerRank, spec: GangSpec, lease: Lease | None) -> bool:
        """Whether the ranks of a gang have collected; what they could not is reported first."""
        is_ready = per_rank.is_ready(self.rank_configs.write(0, spec, lease))
        failures = per_rank.take_failures(spec.world_size) if is_ready else []
        if lease is not None and (failures or not is_ready):
            self.leases.put_aside(spec, lease)
        self._report_failures(failures)
        return is_ready and not failures

    def _report_failures(self, failures: Sequence[tuple[str, str]]) -> None:
        """Report what ranks could not collect as pytest reports what it cannot collect.

        A worker of pytest-xdist goes on: one that ends early is reported as crashed.

        Raises:
            pytest.Session.Interrupted: There is something, and the user did not ask to go on.
        """
        for place, reason in failures:
            report = pytest.CollectReport(place, "failed", reason, [])
            self._config.hook.pytest_collectreport(report=report)
        may_go_on = self._is_worker or self._config.option.continue_on_collection_errors
        if failures and not may_go_on:
            num = counted(len(failures), "error")
            raise pytest.Session.Interrupted(f"{num} during collection of ranks")

    def _make(self, spec: GangSpec, lease: Lease | None) -> Gang:
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
        if lease is not None:
            self.leases.keep(number, lease)
        return gang

    def num_free(self) -> int:
        """Return how many ranks may be started."""
        sizes = [gang.spec.world_size for gang in self._present()]
        return self._nodes.num_free(sizes) if sizes else self.num_slots

    def count(self) -> dict[GangSpec, int]:
        """Return how many gangs of each spec there are."""
        counts: dict[GangSpec, int] = {}
        for gang in self._present():
            counts[gang.spec] = counts.get(gang.spec, 0) + 1
        return counts

    def _present(self) -> list[Gang]:
        return [g for g in self.gangs.values() if not has_left(g) and not self.is_spare(g)]

    def pump(self) -> None:
        """Take in what ranks say, until there is news; copy what they print."""
        self.supervisor.pump(self._tee.wait_s(_LEASE_PUMP_S if self.leases.is_waiting else _PUMP_S))
        self._console.settle()
        self._tee.poll()

    def catch_up(self, gang: Gang) -> None:
        """Copy all that a gang has printed."""
        self._tee.catch_up(gang)

    def forget(self, gang: Gang) -> None:
        """Let go of a gang that is gone."""
        del self.gangs[gang.number]
        if self.is_spare(gang):
            del self._spares[gang.spec]
        self._tee.forget(gang)
        self.leases.release(gang.number)
        if self.per_rank is not None:
            self.per_rank.take_outputs(gang)

    def interrupt(self, busy: list[Gang]) -> None:
        """Ctrl-C: ranks get it too and tear down; a second one does not wait for them."""
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
        """End every gang: politely where it is idle."""
        for gang in self.gangs.values():
            self.supervisor.close(gang)
        while any(not gang.is_gone for gang in self.gangs.values()):
            self.supervisor.pump(_PUMP_S)

    def shut_down(self) -> None:
        """End the process that ranks come from, and what is left of its ranks.

        It takes the kernel longer than what the session has left to do: see `wait_for_end`.
        """
        supervisor, self._supervisor = self.supervisor, None
        self.leases.close()
        self.gangs.clear()
        self._spares.clear()
        supervisor.stop()
        if self.rank_configs.coverage:  # its processes write what they measured when they end
            self.wait_for_end()
        if self.per_rank is not None:
            self.per_rank.close()
        for problem in measure.merge_into_running(self.rank_configs.coverage_dir):
            write_line(self._config, f"coverage of a rank cannot be read: {problem}")

    def wait_for_end(self) -> None:
        """Wait until the process that ranks came from has ended; may be called again."""
        template, self._template = self._template, None
        if template is not None:
            template.close()


def has_left(gang: Gang) -> bool:
    """Whether the place of a gang may be taken, though its ranks may not all be gone yet.

    They were killed, and hold nothing that others need; devices are free only when they are gone.
    """
    return gang.lifecycle.state in (GangState.KILLING, GangState.GONE) and gang.spec.device == "cpu"
