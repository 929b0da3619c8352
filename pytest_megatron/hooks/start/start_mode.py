"""Where ranks come from: forked off the controller, or from processes that collect for themselves.

Forking off the controller costs least, and is right while collecting left nothing behind that tells
ranks apart or that a fork breaks. Otherwise each rank collects by itself, in a process that comes
from the warm one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import assert_never

import pytest
from typing_extensions import override

from pytest_megatron.base.text import describe_exit, name_ranks
from pytest_megatron.errors import LaunchError
from pytest_megatron.gang.collection import CollectionDifference, compare, digest_of, last_line
from pytest_megatron.gang.crash import shorten_stack
from pytest_megatron.gang.forkserver.fork_safety import find_obstacle
from pytest_megatron.gang.ipc.channel import Listener
from pytest_megatron.gang.ipc.messages import Collected, Died, RankConfig, Stacks, StoreOpened
from pytest_megatron.gang.supervisor.collectors import CollectorMessage
from pytest_megatron.gang.supervisor.supervisor import Gang, Supervisor
from pytest_megatron.gang.timers import START_LIMIT_S
from pytest_megatron.hooks.gangs.worker_contract import RankNode, configure_node, encode, node_down
from pytest_megatron.hooks.nodes.leader import DEVICES
from pytest_megatron.hooks.options import Options
from pytest_megatron.hooks.start.collector import SessionInfo
from pytest_megatron.hooks.start.environment import (
    KEY,
    StartEnvironment,
    find_rank_words,
    will_load_torch,
)
from pytest_megatron.hooks.start.preload import PreloadedProcess, PreloadMode, start_preloaded

_TORCH = "torch"
_TORCH_FIXTURES = frozenset(("device", "process_group", "model_parallel"))  # they load it
_CALL_S = 0.1
_PRELOAD_S = 120.0  # to load torch and call; file systems of clusters are slow
_OTHERS_S = 2.0  # for other ranks to fail as well, where one could collect nothing
_STACKS_S = 5.0  # for stacks of ranks that are late


def why_per_rank(config: pytest.Config, options: Options, sizes: set[int], default: int) -> str:
    """Return why ranks have to collect for themselves, or "" if they can be forked.

    Args:
        config: Of a session that has collected.
        options: What the user asked for.
        sizes: World sizes of its gangs.
        default: World size that the controller collected as; 0 if as none.
    """
    if options.gang_start == "fresh":
        return "--gang-start fresh"
    watch = config.stash[KEY].watch
    if watch is None:
        found = find_rank_words(list(sys.modules.values()), config.rootpath)
    else:
        found = (watch.rank_readers or [""])[0]
        if not found and (sizes != {default} or options.ranks_per_gpu > 1):
            found = (watch.size_readers or [""])[0]
    return found or find_obstacle()


def modules_to_load(session: pytest.Session) -> tuple[str, ...]:
    """Return what the process that ranks are forked from loads first, so that no rank has to.

    That is torch, where collecting has not loaded it but tests will.
    """
    if _TORCH in sys.modules:
        return ()
    loaded, root = list(sys.modules.values()), session.config.rootpath
    is_asked_for = any(
        not _TORCH_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())) for item in session.items
    )
    return (_TORCH,) if is_asked_for or will_load_torch(loaded, root) else ()


def ids_of_tests(session: pytest.Session) -> list[str]:
    """Return the node ids of what ranks collect as well."""
    return [item.nodeid for item in session.items if not _is_workload(item)]


def make_session_info(
    config: pytest.Config, *, address: str, key: bytes, node_ids: Sequence[str], is_single: bool
) -> SessionInfo:
    """Return what ranks have to know of a session on this node."""
    start_env = config.stash[KEY]
    arguments = [str(argument) for argument in config.invocation_params.args]
    if config.pluginmanager.has_plugin("capture"):  # the logs of a rank are that
        arguments.append("--capture=no")
    if config.pluginmanager.has_plugin("_cov"):  # it would erase the data of the controller
        arguments.append("--no-cov")
    return SessionInfo(
        address=address,
        key=key.hex(),
        node_rank=0,
        directory=str(config.invocation_params.dir),
        arguments=arguments,
        argv=start_env.argv,
        path=start_env.path,
        env=start_env.env,
        digest=digest_of(node_ids),
        is_single=is_single,
    )


def serve_preloaded(start_env: StartEnvironment, info: SessionInfo) -> PreloadedProcess:
    """Have the warm process serve; one that is not there, or of another kind, is started."""
    mode: PreloadMode = "fresh" if info.is_single else "fork"
    preloaded, start_env.preloaded = start_env.preloaded, None
    if preloaded is None or preloaded.mode != mode:
        preloaded = start_preloaded(mode, start_env.env, start_env.path)
    preloaded.send(info)
    return preloaded


@dataclass(slots=True)
class _CollectorStart:
    """What is known of the process that collects for one rank of gangs of one size."""

    number: int
    until: float
    rank_config: RankConfig
    is_ready: bool = False
    is_single: bool = False
    is_asked: bool = False

    @property
    def devices(self) -> str | None:
        return self.rank_config.env.get(DEVICES)


@dataclass(slots=True)
class _World:
    """All ranks of gangs of one size.

    Attributes:
        lost: Rank -> why it has none of its tests.
        avoided: Rank -> node id of a collector that it must not collect again -> why.
        nodes: Rank -> what plugins of the controller know it as.
        lost_at: When the first of them was missed.
        reported: Collectors that failed, with the reason, and the rank, which were told of.
    """

    collectors: dict[int, _CollectorStart] = field(default_factory=dict)
    differences: dict[int, CollectionDifference] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    avoided: dict[int, dict[str, str]] = field(default_factory=dict)
    nodes: dict[int, RankNode] = field(default_factory=dict)
    lost_at: float = 0.0
    reported: set[tuple[tuple[str, str], int]] = field(default_factory=set)


class PerRank:
    """The ranks of a session that collect for themselves."""

    def __init__(
        self,
        session: pytest.Session,
        supervisor: Supervisor,
        listener: Listener,
        options: Options,
    ) -> None:
        """Tell the warm process of the session; ranks are started when a gang is asked for."""
        config = self._config = session.config
        self._supervisor = supervisor
        self._start_env: StartEnvironment = config.stash[KEY]
        self._worlds: dict[int, _World] = {}
        self._limit_s = options.rank_timeout_s or START_LIMIT_S
        self._node_ids = ids_of_tests(session)
        self._has_nodes = any("::" in argument for argument in config.args)
        self._info = make_session_info(
            config,
            address=listener.address,
            key=listener.key,
            node_ids=self._node_ids,
            is_single=options.gang_start == "fresh",
        )
        self._preloaded = self._begin()

    def is_ready(self, rank_configs: Sequence[RankConfig]) -> bool:
        """Whether a gang of these orders can be started now; sees to it that it will be."""
        self._wait_for_preloaded()
        size = rank_configs[0].world_size
        world = self._worlds.setdefault(size, _World())
        self._drop_late(world)
        are_all_there = all(
            self._supervisor.fork_servers.has(rank_config.node_rank) for rank_config in rank_configs
        )
        if world.lost and are_all_there:
            world.lost_at = world.lost_at or time.monotonic()
            are_all_in = all(t.is_ready for t in world.collectors.values())
            return are_all_in or time.monotonic() > world.lost_at + _OTHERS_S
        if not are_all_there:
            return True
        for rank, collector in list(world.collectors.items()):
            is_gone = collector.is_ready and not self._supervisor.collectors.can_start(
                rank_configs[rank].node_rank, rank, size
            )
            devices = rank_configs[rank].env.get(DEVICES)
            if is_gone or (collector.is_single and collector.devices != devices):
                del world.collectors[rank]
        wanted = [
            rank_config for rank_config in rank_configs if rank_config.rank not in world.collectors
        ]
        if wanted:
            self._start_collectors(world, wanted)
        return not wanted and all(t.is_ready for t in world.collectors.values())

    def missing(self, size: int) -> dict[int, dict[str, str]]:
        """Return rank -> node id -> why the rank has no such test."""
        world = self._worlds[size]
        missing = {rank: dict(d.missing) for rank, d in world.differences.items()}
        for rank, reason in world.lost.items():
            missing[rank] = dict.fromkeys(self._node_ids, last_line(reason))
        return missing

    def take_failures(self, size: int) -> list[tuple[str, str]]:
        """Return what ranks could not collect, with the reason, and which ranks; each once.

        The place is a node id, or names ranks that could collect nothing.
        """
        world = self._worlds[size]
        found = [((c, t), r) for r, d in world.differences.items() for c, t in d.failures.items()]
        found += [(("", reason), rank) for rank, reason in world.lost.items()]
        ranks: dict[tuple[str, str], list[int]] = {}
        for failure, rank in found:
            if (failure, rank) not in world.reported:
                world.reported.add((failure, rank))
                ranks.setdefault(failure, []).append(rank)
        failures = []
        for (place, reason), who in ranks.items():
            story, _, line = reason.rstrip().rpartition("\n")
            where = place or name_ranks(who)
            failures.append((where, f"{name_ranks(who)} of {size} {line}\n{story}".rstrip()))
        return failures

    def is_lost(self, size: int) -> bool:
        """Whether gangs of a size cannot be: some rank has none of their tests."""
        return bool(self._worlds[size].lost)

    def take(self, size: int) -> None:
        """Take note that a gang was started: what became its ranks is used up."""
        collectors = self._worlds[size].collectors
        for rank in [rank for rank, t in collectors.items() if t.is_single]:
            del collectors[rank]

    def extra(self) -> dict[str, str]:
        """Return node id -> what to say of it, for tests that only ranks have.

        Where the user named single tests, ranks collected whole files, and nothing can be said.
        Gangs of other sizes than the widest may have other parameters by right.
        """
        if self._has_nodes or not self._worlds:
            return {}
        size = max(self._worlds)
        ranks: dict[str, list[int]] = {}
        for rank, difference in sorted(self._worlds[size].differences.items()):
            for node_id in difference.extra:
                ranks.setdefault(node_id, []).append(rank)
        return {
            node_id: f"collected by {name_ranks(found)} of {size} only"
            for node_id, found in ranks.items()
        }

    def take_outputs(self, gang: Gang) -> None:
        """Give plugins what the ranks of a gang that is gone left for them."""
        world = self._worlds.get(gang.spec.world_size, _World())  # none since a warm one was killed
        for rank, node in world.nodes.items():
            output = gang.lifecycle.outputs.get(rank)
            node_down(node, output or "", None if output else "the rank was ended")

    def close(self) -> None:
        """Wait until nothing is left, once the supervisor was stopped."""
        self._preloaded.stop()

    def _begin(self) -> PreloadedProcess:
        return serve_preloaded(self._start_env, self._info)

    def _wait_for_preloaded(self) -> None:
        """Wait until the warm process has called; one that was killed gets a successor, once."""
        deadline = time.monotonic() + _PRELOAD_S
        num_left = 1
        while not self._supervisor.fork_servers.has(0):
            problem = self._preloaded.problem()
            if problem and not num_left:
                raise LaunchError("gang", f"the process that starts ranks ended: {problem}")
            if problem:
                num_left -= 1
                self._worlds.clear()
                self._preloaded.stop()
                self._preloaded = self._begin()
            self._supervisor.pump(_CALL_S)
            if time.monotonic() > deadline:
                raise LaunchError("gang", "the process that starts ranks did not call")

    def _start_collectors(self, world: _World, rank_configs: Sequence[RankConfig]) -> None:
        """Have ranks collect."""
        until = time.monotonic() + self._limit_s
        argv = self._start_env.argv
        world.nodes |= {o.rank: configure_node(self._config, o, argv) for o in rank_configs}
        rank_configs = tuple(
            replace(
                _for_collecting(rank_config, self._supervisor.collectors.next_number),
                avoided=world.avoided.get(rank_config.rank, {}),
                workerinput=encode(world.nodes[rank_config.rank].workerinput),
            )
            for rank_config in rank_configs
        )
        number = self._supervisor.collectors.start(
            rank_configs, lambda number, word, rank: self._on_message(world, number, word, rank)
        )
        for rank_config in rank_configs:
            world.collectors[rank_config.rank] = _CollectorStart(number, until, rank_config)

    def _on_message(self, world: _World, number: int, word: CollectorMessage, rank: int) -> None:
        """Take in that a rank has collected, or died, or where those are that are late."""
        collector = world.collectors.get(rank)
        match word:
            case Stacks():
                self._give_up(world, number, word)
            case StoreOpened(problem=problem):
                world.lost[rank] = problem
            case _ if collector is None or collector.number != number:
                pass  # of one that has a successor
            case Collected():
                collector.is_ready, collector.is_single = True, bool(word.obstacle)
                difference = CollectionDifference()
                if not word.is_same and not word.node_ids and "" in word.problems:
                    world.lost[rank] = word.problems[""]  # pytest itself did not start
                elif not word.is_same:
                    difference = compare(self._node_ids, word.node_ids, word.problems)
                world.differences[rank] = difference
            case Died(exit_code=exit_code, phase=node_id):
                del world.collectors[rank]
                if not collector.is_ready:
                    what = f"{describe_exit(exit_code)} while it collected {node_id}".strip()
                    log = f"{collector.rank_config.log_dir}/stderr.log"
                    _blame(world, rank, node_id, f"{what}; see {log}")
            case _:
                assert_never(word)

    def _drop_late(self, world: _World) -> None:
        """Ask ranks that do not end collecting where they are; give up on those that are mute."""
        now = time.monotonic()
        late = {r: t for r, t in world.collectors.items() if not t.is_ready and now > t.until}
        for number in {collector.number for collector in late.values()}:
            ranks = tuple(rank for rank, collector in late.items() if collector.number == number)
            if all(late[rank].is_asked for rank in ranks):
                self._give_up(world, number, Stacks(gang=number, stacks={}, flights={}, phases={}))
                continue
            self._supervisor.collectors.ask(number, ranks)
            for rank in ranks:
                late[rank].is_asked, late[rank].until = True, now + _STACKS_S

    def _give_up(self, world: _World, number: int, stacks: Stacks) -> None:
        """Blame those that are late for what they are at, and kill them."""
        collectors = {r: t for r, t in world.collectors.items() if t.number == number}
        for rank, collector in collectors.items():
            if collector.is_asked and not collector.is_ready:
                node_id = stacks.phases.get(str(rank), "")
                stack = shorten_stack(stacks.stacks.get(str(rank), ""))
                what = f"did not end collecting {node_id or 'its tests'} in {self._limit_s:g} s"
                _blame(world, rank, node_id, f"{stack}\n{what}" if stack else what)
            del world.collectors[rank]
        self._supervisor.collectors.kill(number)


def _blame(world: _World, rank: int, node_id: str, reason: str) -> None:
    """Have a rank collect without what it died of; where that is not known, it is lost."""
    avoided = world.avoided.setdefault(rank, {})
    if not node_id or node_id in avoided:
        world.lost[rank] = reason
    avoided[node_id] = reason


class ExtraItem(pytest.Item):
    """A test that the controller does not have, but ranks do: it fails."""

    reason = ""

    @override
    def runtest(self) -> None:
        """Fail."""
        pytest.fail(self.reason, pytrace=False)

    @override
    def reportinfo(self) -> tuple[Path, None, str]:
        """Say where it is."""
        file, _, name = self.nodeid.partition("::")
        return self.config.rootpath / file, None, name.replace("::", ".")


def make_extra_item(session: pytest.Session, node_id: str, reason: str) -> ExtraItem:
    """Return the item of a test that only ranks have."""
    name = node_id.rpartition("::")[2]
    item: ExtraItem = ExtraItem.from_parent(session, name=name, nodeid=node_id)
    item.reason = reason
    return item


def _for_collecting(rank_config: RankConfig, number: int) -> RankConfig:
    """Return an order with directories of its own: no gang is there yet."""
    logs = Path(rank_config.log_dir).parents[1] / f"collect_{number}"
    temp = Path(rank_config.base_temp).parents[1] / f"collect{number}"
    return replace(
        rank_config,
        log_dir=str(logs / str(rank_config.rank)),
        base_temp=str(temp / f"rank{rank_config.rank}"),
    )


def _is_workload(item: pytest.Item) -> bool:
    return type(item).__module__.partition(".")[0] == __package__.partition(".")[0]
