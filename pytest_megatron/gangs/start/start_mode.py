"""Start mode of ranks: forked from the session, or from processes that collect for themselves.

Forking the session is fastest, and correct if collecting did not depend on the rank and left no
state that a fork breaks. Otherwise each rank collects for itself, in a child of the preloaded
process.
"""

from __future__ import annotations

import copy
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import assert_never

import pytest

from pytest_megatron.base.text import describe_exit, name_ranks
from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.controller.other_plugins import configure_node, encode
from pytest_megatron.gangs.controller.rank_config import RankConfigs
from pytest_megatron.gangs.crash import shorten_stack
from pytest_megatron.gangs.forkserver.store import with_store
from pytest_megatron.gangs.ipc.channel import Channel
from pytest_megatron.gangs.ipc.messages import (
    AskToCollect,
    Collected,
    Died,
    RankConfig,
    Stacks,
    Start,
)
from pytest_megatron.gangs.lifecycle import START_LIMIT_S
from pytest_megatron.gangs.nodes.leader import DEVICES, first_gang
from pytest_megatron.gangs.start.collector import (
    CollectionDifference,
    SessionInfo,
    compare,
    digest_of,
    last_line,
)
from pytest_megatron.gangs.start.environment import KEY, StartEnvironment, find_rank_words
from pytest_megatron.gangs.start.forkserver import wait_for_agent
from pytest_megatron.gangs.start.preload import PreloadedProcess, start_preloaded
from pytest_megatron.gangs.supervisor.connections import CollectorMessage, RankCollector
from pytest_megatron.gangs.supervisor.supervisor import Supervisor
from pytest_megatron.gangs.topology import Nodes, count_gpus
from pytest_megatron.gpu.host import this_host, try_lease
from pytest_megatron.process.fork_safety import find_obstacle
from pytest_megatron.session.options import Options
from pytest_megatron.session.state import is_run_dir_open, session_ahead

_TORCH = "torch"
_TORCH_FIXTURES = frozenset(("device", "process_group", "model_parallel"))
_PRELOAD_S = 120.0  # to load torch from a slow file system
_OTHERS_S = 2.0  # for other ranks to fail as well, if one could collect nothing
_EXTRA = "collected {}, and the session did not: does a condition depend on the rank?"
_NOTHING_FOUND = "collected none of these tests: does a hook or a condition depend on the rank?"
# Parts of texts that differ by rank for one error: addresses, and numbers except those of lines.
_OF_ONE_RANK = re.compile(r"0x[0-9a-f]+|(?<!\.py:)(?<!\d)\d+")
_STACKS_S = 5.0  # for stacks of ranks that are late


def why_per_rank(config: pytest.Config, options: Options, sizes: set[int], default: int) -> str:
    """Return the reason why ranks have to collect for themselves, or "" if they can be forked.

    Args:
        config: Configuration of a session that has collected.
        options: What the user asked for.
        sizes: World sizes of its gangs.
        default: World size that the controller collected as; 0 if as none.

    Raises:
        pytest.UsageError: They must be forked, and cannot be.
    """
    if options.gang_start == "collect":
        return "megatron_gang_start=collect"
    if options.gang_start == "fork":
        if obstacle := find_obstacle():
            raise pytest.UsageError(
                f"megatron_gang_start: fork is given, and this process cannot be forked: "
                f"{obstacle}; write auto"
            )
        return ""
    start_env = config.stash[KEY]
    watch = start_env.watch
    if start_env.reader:
        return start_env.reader
    if watch is None:
        found = find_rank_words(list(sys.modules.values()), config.rootpath)
    else:
        found = (watch.rank_readers or [""])[0]
        if not found and (sizes != {default} or options.ranks_per_gpu > 1):
            found = (watch.size_readers or [""])[0]
    return found or find_obstacle()


def modules_to_load(session: pytest.Session) -> tuple[str, ...]:
    """Return modules that the template process loads first, so that no rank has to.

    That is torch, if collecting has not loaded it but a fixture of ours will.
    """
    asked = (getattr(item, "fixturenames", ()) for item in session.items)
    is_needed = any(not _TORCH_FIXTURES.isdisjoint(names) for names in asked)
    return (_TORCH,) if is_needed and _TORCH not in sys.modules else ()


def make_session_info(config: pytest.Config) -> SessionInfo:
    """Return the data of a session on this node for ranks."""
    start_env = config.stash[KEY]
    arguments = [str(argument) for argument in config.invocation_params.args]
    if config.pluginmanager.has_plugin("capture"):  # ranks have logs instead
        arguments.append("--capture=no")
    if config.pluginmanager.has_plugin("pytest_cov"):  # it would erase the data of the controller
        arguments.append("--no-cov")
    return SessionInfo(
        node_rank=0,
        directory=str(config.invocation_params.dir),
        arguments=arguments,
        argv=start_env.argv,
        path=start_env.path,
        env=start_env.env,
    )


def load_ahead(config: pytest.Config) -> None:
    """Start ranks, which load conftest files beside the controller.

    Call it before conftest files are loaded. Where the session turns out to need other ranks than
    those that are predicted here, they have begun for nothing.
    """
    start_env = config.stash[KEY]
    preloaded = start_env.preloaded
    if preloaded is None:
        return
    before, config.option = config.option, copy.copy(config.known_args_namespace)
    try:  # again later: a hook of a conftest.py may change options
        run = session_ahead(config)
        if run.options.is_plan:
            return
        run.refuse_used_run_dir()
    except pytest.UsageError:  # reported then
        return
    finally:
        config.option = before
    options = run.options
    spec = first_gang(options)
    nodes = Nodes(num_nodes=1, ranks_per_node=spec.world_size)
    try:
        if spec.device == "cuda":
            num_gpus = count_gpus(spec.world_size, options.ranks_per_gpu)
            start_env.lease = try_lease(this_host().gpus, num_gpus)
            if start_env.lease is None:
                return
        writer = RankConfigs(config, run, nodes, {})
        rank_configs = writer.write(0, spec, start_env.lease, is_ahead=True)
        own = [replace(_for_collecting(c, 1), gang=-1) for c in rank_configs]
        store, start_env.begun = with_store(own)
    except LaunchError:  # reported when ranks are started
        return

    def end() -> None:
        """Stop processes that loaded ahead, if no run used them."""
        start_env.stop_preloaded()
        if not is_run_dir_open(config):
            writer.remove_ahead()

    config.add_cleanup(end)
    preloaded.send(make_session_info(config))
    start = Start(gang=-1, configs=tuple(start_env.begun), has_store=True)
    with store:
        Channel(preloaded.connection).send(start, [store.fileno()])


def serve_preloaded(start_env: StartEnvironment, info: SessionInfo) -> PreloadedProcess:
    """Send the session's data to the preloaded process; start one if none runs."""
    preloaded, start_env.preloaded = start_env.preloaded, None
    if preloaded is None:
        preloaded = start_preloaded(start_env.env, start_env.path)
    if not preloaded.stdin.closed:  # else it has them already
        preloaded.send(info)
    return preloaded


@dataclass(slots=True)
class _World:
    """All ranks of gangs of one size.

    Attributes:
        collected: Rank -> what it has collected.
        lost: Rank -> reason why it has none of its tests.
        lost_at: When the first rank was lost.
    """

    collected: dict[int, Collected] = field(default_factory=dict)
    differences: dict[int, CollectionDifference] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    lost_at: float = 0.0


class PerRank:
    """Ranks of a session that collect for themselves.

    They may begin before the controller has collected: what they collected is then compared later.
    """

    def __init__(
        self,
        config: pytest.Config,
        supervisor: Supervisor,
        options: Options,
        items: Sequence[pytest.Item] | None,
    ) -> None:
        """Send the session to the preloaded process; ranks are started with their first gang.

        Args:
            config: Configuration of the session.
            supervisor: Starts the ranks.
            options: What the user asked for.
            items: Tests of the controller; None until it has collected them.
        """
        self._config = config
        self._supervisor, self._collectors = supervisor, supervisor.collectors
        self._collectors.on_message = self._on_message
        self._start_env: StartEnvironment = config.stash[KEY]
        self._worlds: dict[int, _World] = {}
        self._reported: set[tuple[str, str]] = set()
        self._limit_s = options.rank_timeout_s or START_LIMIT_S
        self._node_ids: list[str] | None = None if items is None else _node_ids(items)
        self._has_nodes = any("::" in argument for argument in config.args)
        self._info = make_session_info(config)
        self._has_served = False
        self._preloaded = self._begin()

    def start_ahead(self, rank_configs: Sequence[RankConfig]) -> None:
        """Have the ranks of a gang collect while the controller does."""
        self._worlds[rank_configs[0].world_size] = _World()
        self._start_collectors(rank_configs)

    def compare_with(self, items: Sequence[pytest.Item]) -> None:
        """Take the tests of the controller, which has collected after ranks had begun."""
        self._node_ids = _node_ids(items)
        until = time.monotonic() + self._limit_s  # nobody has read the messages of ranks meanwhile
        for size, world in self._worlds.items():
            for rank, collected in world.collected.items():
                self._note_collected(world, rank, collected)
            for collector in self._collectors.of_size(size).values():
                collector.until = until

    def is_ready(self, rank_configs: Sequence[RankConfig]) -> bool:
        """Return whether a gang can be started now; starts missing collectors of its ranks."""
        self._wait_for_preloaded()
        size = rank_configs[0].world_size
        world = self._worlds.setdefault(size, _World())
        self._drop_late(size)
        collectors = self._collectors.of_size(size)
        are_all_there = all(
            self._supervisor.agents.has(rank_config.node_rank) for rank_config in rank_configs
        )
        if world.lost and are_all_there:
            world.lost_at = world.lost_at or time.monotonic()
            are_all_in = all(c.is_ready for c in collectors.values())
            return are_all_in or time.monotonic() > world.lost_at + _OTHERS_S
        if not are_all_there:
            return True
        for rank, collector in list(collectors.items()):
            devices = collector.config.env.get(DEVICES), rank_configs[rank].env.get(DEVICES)
            if collector.is_single and len({*devices}) > 1:
                self._collectors.lose(collector.peer.__eq__)
                del collectors[rank]
        wanted = [config for config in rank_configs if config.rank not in collectors]
        if wanted:
            self._start_collectors(wanted)
        return not wanted and all(c.is_ready for c in collectors.values())

    def missing(self, size: int) -> dict[int, dict[str, str]]:
        """Return rank -> node id -> reason why the rank lacks the test."""
        world = self._worlds[size]
        missing = {rank: dict(d.missing) for rank, d in world.differences.items()}
        for rank, reason in world.lost.items():
            missing[rank] = dict.fromkeys(self._node_ids or (), last_line(reason))
        return missing

    def take_failures(self, size: int, *, has_extra: bool) -> list[tuple[str, str]]:
        """Return collectors that failed on ranks, with reason and ranks, each once in a session.

        Instead of a node id, ranks are named that could collect nothing.

        Args:
            size: World size of the gangs.
            has_extra: Whether a test that only ranks have is a failure. It is none where the user
                named single tests, as ranks collect whole files.
        """
        world = self._worlds[size]
        differences = sorted(world.differences.items())
        found = [((c, t), r) for r, d in differences for c, t in d.failures.items()]
        found += [(("", reason), rank) for rank, reason in world.lost.items()]
        if has_extra and not self._has_nodes:
            extra = [(node_id, rank) for rank, d in differences for node_id in d.extra]
            found += [((node_id, _EXTRA.format(node_id)), rank) for node_id, rank in extra]
        ranks: dict[tuple[str, str], list[int]] = {}
        reasons: dict[tuple[str, str], str] = {}
        for (place, reason), rank in found:
            failure = place, _OF_ONE_RANK.sub("", reason)
            if failure not in self._reported:
                reasons.setdefault(failure, reason)
                ranks.setdefault(failure, []).append(rank)
        self._reported |= ranks.keys()
        failures = []
        for failure, who in ranks.items():
            traceback, _, line = reasons[failure].rstrip().rpartition("\n")
            where = failure[0] or name_ranks(who)
            failures.append((where, f"{name_ranks(who)} of {size} {line}\n{traceback}".rstrip()))
        return failures

    def is_lost(self, size: int) -> bool:
        """Return whether gangs of a size cannot be started, as a rank has none of their tests."""
        return bool(self._worlds[size].lost)

    def close(self) -> None:
        """Wait for the end of all processes, once the supervisor was stopped."""
        self._preloaded.stop(has_ranks=self._has_served)

    def look(self) -> None:
        """Notice whether there are ranks."""
        self._supervisor.pump(0.0)
        self._has_served = self._has_served or self._supervisor.agents.has(0)

    def _begin(self) -> PreloadedProcess:
        preloaded = serve_preloaded(self._start_env, self._info)
        self._supervisor.connect(Channel(preloaded.connection))
        return preloaded

    def _wait_for_preloaded(self) -> None:
        """Wait until the preloaded process is ready; restart it once if it was killed."""

        def restart() -> None:
            """Start the process with torch anew."""
            self._worlds.clear()
            self._start_env.begun = ()
            self._preloaded.stop()
            self._preloaded = self._begin()

        def problem() -> str:
            return self._preloaded.problem()

        wait_for_agent(self._supervisor, _PRELOAD_S, problem, restart)
        self._has_served = True

    def _start_collectors(self, rank_configs: Sequence[RankConfig]) -> None:
        """Start the collectors of ranks."""
        until = time.monotonic() + self._limit_s
        argv = self._start_env.argv
        nodes = {c.rank: configure_node(self._config, c, argv) for c in rank_configs}
        begun, self._start_env.begun = self._start_env.begun, ()
        wanted = [_for_collecting(c, self._collectors.num_starts + 1) for c in rank_configs]
        if begun and not _are_same(begun, wanted):
            self._collectors.kill(self._collectors.start(begun, until, has_begun=True))
            begun, wanted = (), [_for_collecting(c, 2) for c in rank_configs]
        number = self._collectors.start(begun or wanted, until, has_begun=bool(begun))
        base_temps = {rank_config.rank: rank_config.base_temp for rank_config in wanted}
        for collector in self._collectors.of_number(number):
            rank = collector.config.rank
            collect = AskToCollect(
                workerinput=encode(nodes[rank].workerinput),
                base_temp=base_temps[rank],
                digest="" if self._node_ids is None else digest_of(self._node_ids),
            )
            collector.peer.send(collect)

    def _on_message(self, collectors: Sequence[RankCollector], message: CollectorMessage) -> None:
        """Handle the message of a collector: tests, its death, or stacks of late ones."""
        config = collectors[0].config
        world = self._worlds.setdefault(config.world_size, _World())
        match message:
            case Stacks():
                self._give_up(collectors, message)
            case Collected():
                world.collected[config.rank] = message
                if self._node_ids is not None:
                    self._note_collected(world, config.rank, message)
            case Died(exit_code=exit_code, phase=node_id):
                if not collectors[0].is_ready:
                    what = f"{describe_exit(exit_code)} while it collected {node_id}".strip()
                    world.lost[config.rank] = f"{what}; see {config.log_dir}/stderr.log"
            case _:
                assert_never(message)

    def _note_collected(self, world: _World, rank: int, collected: Collected) -> None:
        """Note how the tests of a rank differ from the controller's.

        A rank that found nothing, or whose pytest did not start, is lost, with the reason.
        """
        known = self._node_ids or []
        difference = CollectionDifference()
        if not collected.is_same and not collected.node_ids and "" in collected.problems:
            world.lost[rank] = collected.problems[""]  # pytest itself did not start
        elif not collected.is_same:
            difference = compare(known, collected.node_ids, collected.problems)
            if difference.is_total(len(known)):
                world.lost[rank] = _NOTHING_FOUND
        world.differences[rank] = difference

    def _drop_late(self, size: int) -> None:
        """Request stacks of ranks that collect for too long; give up those that do not answer."""
        now = time.monotonic()
        collectors = self._collectors.of_size(size).values()
        late = [c for c in collectors if not c.is_ready and now > c.until]
        for number in {collector.number for collector in late}:
            found = [collector for collector in late if collector.number == number]
            if all(collector.is_asked for collector in found):
                none = Stacks(gang=number, stacks={}, flights={}, phases={})
                self._give_up(self._collectors.of_number(number), none)
                continue
            self._collectors.ask(number, tuple(c.config.rank for c in found))
            for collector in found:
                collector.is_asked, collector.until = True, now + _STACKS_S

    def _give_up(self, collectors: Sequence[RankCollector], stacks: Stacks) -> None:
        """Record late ranks as lost, with what they were collecting, and kill them."""
        for collector in collectors:
            if collector.is_asked and not collector.is_ready:
                rank, world = collector.config.rank, self._worlds[collector.config.world_size]
                node_id = stacks.phases.get(str(rank), "")
                stack = shorten_stack(stacks.stacks.get(str(rank), ""))
                what = f"did not end collecting {node_id or 'its tests'} in {self._limit_s:g} s"
                world.lost[rank] = f"{stack}\n{what}" if stack else what
        self._collectors.kill(collectors[0].number)


def _node_ids(items: Sequence[pytest.Item]) -> list[str]:
    """Return the tests that ranks collect as well: no workloads."""
    own = __package__.partition(".")[0]
    return [i.nodeid for i in items if type(i).__module__.partition(".")[0] != own]


def _are_same(begun: Sequence[RankConfig], wanted: Sequence[RankConfig]) -> bool:
    """Return whether ranks that have begun are those that are wanted."""
    port = {"MASTER_PORT": begun[0].env["MASTER_PORT"]}
    return [(c.device, c.log_dir, c.env) for c in begun] == [
        (c.device, c.log_dir, {**c.env, **port}) for c in wanted
    ]


def _for_collecting(rank_config: RankConfig, number: int) -> RankConfig:
    """Return a configuration with directories for collecting, before there is a gang."""
    logs = Path(rank_config.log_dir).parents[1] / f"collect_{number}"
    temp = Path(rank_config.base_temp).parents[1] / f"collect{number}"
    return replace(
        rank_config,
        log_dir=str(logs / str(rank_config.rank)),
        base_temp=str(temp / f"rank{rank_config.rank}"),
    )
