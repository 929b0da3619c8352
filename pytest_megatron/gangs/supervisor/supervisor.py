"""All gangs of one controller: connections, deadlines and the actions of their lifecycles.

Owned by the controller, which calls `pump` whenever it waits; there are no threads.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, assert_never

from pytest_megatron.base.text import name_ranks
from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.forkserver.store import with_store
from pytest_megatron.gangs.ipc.channel import OWN, Channel, Frame
from pytest_megatron.gangs.ipc.messages import (
    AskStacks,
    Broken,
    Close,
    Collected,
    Died,
    Hello,
    Interrupt,
    Kill,
    Killed,
    Message,
    RankConfig,
    Ready,
    Run,
    Stacks,
    Start,
    decode,
    encode,
)
from pytest_megatron.gangs.lifecycle import (
    ORPHANED,
    Action,
    AskForStacks,
    Finish,
    GangState,
    KillGang,
    Lifecycle,
    SendClose,
    SendRuns,
)
from pytest_megatron.gangs.merge import RunEnd
from pytest_megatron.gangs.supervisor.connections import Agents, Calls, Peer, RankCollectors
from pytest_megatron.gangs.topology import GangSpec
from pytest_megatron.process.guard import UNKILLABLE_S

AGENT_LIMIT_S = UNKILLABLE_S + 10.0  # for an agent to kill a gang


@dataclass(slots=True, kw_only=True)
class Gang:
    """The ranks that run one test together, in the controller.

    Attributes:
        number: Counted from 1 in this session.
        configs: Configurations of its ranks, by rank.
        descriptors: Descriptors of leased devices, for ranks to inherit.
        ends: Results of its tests, until the controller takes them.
        inboxes: Rank -> its messages that are not handled yet.
        holders: Agents that still have processes of it.
        silent: Agents that have not answered the last request for stacks.
        keepers: Rank -> agent that starts it and is its parent; and the one that has the store.
        adopted: Rank -> number of the collector that becomes it.
        missing: Rank -> node id -> reason why the rank lacks the test.
        orphans: Configurations of ranks that cannot be started, as their node is gone.
        is_in_lockstep: Whether its ranks agree among themselves that a test passed.
        killed_at: When it was killed, in seconds of the monotonic clock.
    """

    number: int
    spec: GangSpec
    configs: tuple[RankConfig, ...]
    lifecycle: Lifecycle
    descriptors: tuple[int, ...] = ()
    inboxes: dict[int, deque[Message]] = field(default_factory=lambda: defaultdict(deque))
    ends: list[RunEnd] = field(default_factory=list)
    holders: set[Peer] = field(default_factory=set)
    silent: set[Peer] = field(default_factory=set)
    stacks: list[Stacks] = field(default_factory=list)
    keepers: dict[int, Peer] = field(default_factory=dict)
    adopted: dict[int, int] = field(default_factory=dict)
    missing: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    orphans: list[RankConfig] = field(default_factory=list)
    is_in_lockstep: bool = False
    killed_at: float | None = None

    @property
    def is_gone(self) -> bool:
        """True if no process of it is left."""
        return self.lifecycle.state is GangState.GONE

    def peer(self, rank: int) -> Peer:
        """Return a rank, to send to."""
        return Peer(self.keepers[rank].node, (self.number, rank))


def choose_agent(
    gang: Gang, config: RankConfig, agents: Agents, collectors: RankCollectors
) -> None:
    """Choose the agent that starts a rank."""
    gang.keepers[config.rank] = Peer(agents.of_node(config.node_rank))
    collector = collectors.find(config)
    if collector is not None:
        gang.is_in_lockstep = False
        if collector.is_single:
            gang.adopted[config.rank] = collector.number
        else:
            gang.keepers[config.rank] = collector.peer


def start_ranks(gang: Gang) -> None:
    """Open the store of a gang, and send the configurations of its ranks to their agents.

    Raises:
        LaunchError: There is no port for the store.
    """
    store, gang.configs = with_store(gang.configs)
    first = gang.keepers[OF_STORE], 0
    starts: dict[tuple[Peer, int], list[RankConfig]] = {first: []}
    for config in gang.configs:
        start = gang.keepers[config.rank], gang.adopted.get(config.rank, 0)
        starts.setdefault(start, []).append(config)
    with store:
        for (agent, adopted), configs in starts.items():
            has_store = (agent, adopted) == first
            agent.send(
                Start(
                    gang=gang.number, configs=tuple(configs), has_store=has_store, adopted=adopted
                ),
                [store.fileno()] * has_store + list(gang.descriptors),
            )


def ask_for_stacks(gang: Gang, ranks: tuple[int, ...]) -> None:
    """Request the stacks of ranks from all agents of a gang."""
    gang.stacks.clear()
    gang.silent = set(gang.holders)
    for agent in gang.holders:
        agent.send(AskStacks(gang=gang.number, ranks=ranks))


def send_to_ranks(gang: Gang, *messages: Message) -> None:
    """Send messages to all ranks of a gang, at once."""
    contents = [encode(message) for message in messages]
    by_node: dict[Channel, list[Frame]] = {}
    for rank in gang.keepers.keys() - {OF_STORE}:
        node, place = gang.peer(rank).node, gang.peer(rank).place
        by_node.setdefault(node, []).extend(Frame(place, content) for content in contents)
    for node, frames in by_node.items():
        node.send_frames(frames)


def join_stacks(answers: Sequence[Stacks]) -> Stacks:
    """Return the stacks of several agents as one message."""
    return Stacks(
        gang=answers[0].gang,
        stacks={rank: text for answer in answers for rank, text in answer.stacks.items()},
        flights={rank: text for answer in answers for rank, text in answer.flights.items()},
        phases={rank: phase for answer in answers for rank, phase in answer.phases.items()},
    )


_LATE_S = 1.0  # longer than a busy host delays a process
_NO_MESSAGE = "closed its connection to the controller"

OnDebugger: TypeAlias = Callable[[Gang, int, Message], None]
NodeMessage: TypeAlias = Died | Stacks | Killed
OF_STORE = -1  # in place of a rank


class Supervisor:
    """Starts gangs on agents and carries out what their lifecycles decide.

    Attributes:
        calls: All connections.
        agents: Agents of nodes.
        collectors: Agents of single ranks.
    """

    def __init__(self, *, on_debugger: OnDebugger) -> None:
        """Begin without agents.

        Args:
            on_debugger: Called with messages of a rank's debugger.
        """
        self.calls = Calls()
        self._on_debugger = on_debugger
        self.agents = Agents()
        self.collectors = RankCollectors(self.agents)
        self._channels: list[Channel] = []
        self._gangs: dict[int, Gang] = {}
        self._has_news = False
        self._stopped_s = 0.0

    def connect(self, channel: Channel, node_rank: int = 0, frames: Sequence[Frame] = ()) -> None:
        """Read from now on what the agent of a node sends, also before it is ready.

        Args:
            channel: To the agent.
            node_rank: Index of its host.
            frames: What it has sent.
        """
        self._channels.append(channel)
        self.agents.connect(node_rank, channel)
        self.calls.read(channel, lambda: self._on_agent(channel, channel.drain_frames()))
        self._on_agent(channel, frames)

    def start(self, gang: Gang) -> None:
        """Open the store of a gang, then start its ranks."""
        self._gangs[gang.number] = gang
        # Over TCP messages of other ranks may still be in flight.
        gang.is_in_lockstep = all(config.node_rank == 0 for config in gang.configs)
        for config in gang.configs:
            if self.agents.has(config.node_rank):
                choose_agent(gang, config, self.agents, self.collectors)
            else:
                gang.orphans.append(config)
        gang.keepers[OF_STORE] = Peer(self.agents.of_node(gang.configs[0].node_rank))
        gang.holders = set(gang.keepers.values())
        if not gang.orphans:
            try:
                start_ranks(gang)
            except LaunchError as error:
                self._handle(gang, 0, Broken(problem=str(error)))

    def assign(self, gang: Gang, run: Run, *, limit_s: float) -> None:
        """Run a test on a gang, as soon as its ranks are ready."""
        is_isolated, now = gang.spec.is_isolated, self._now()
        self._carry_out(
            gang, gang.lifecycle.assign(run, limit_s=limit_s, is_isolated=is_isolated, now=now)
        )
        self._lose(gang, gang.orphans)

    def send_ahead(self, gang: Gang, runs: Sequence[tuple[Run, float]]) -> None:
        """Queue tests, with their time limits, which run as long as those before them pass."""
        self._carry_out(gang, gang.lifecycle.send_ahead(runs))

    def close(self, gang: Gang) -> None:
        """Close a gang: with teardown if it is idle, else by killing it."""
        if not gang.holders:
            self.kill(gang)
            return
        self._carry_out(gang, gang.lifecycle.close(self._now()))

    def kill(self, gang: Gang) -> None:
        """Kill a gang; its running test is not reported."""
        self._carry_out(gang, gang.lifecycle.kill())

    def interrupt(self, gang: Gang) -> None:
        """Send SIGINT to every rank of a gang."""
        for agent in gang.holders:
            agent.send(Interrupt(gang=gang.number))

    def pump(self, timeout_s: float) -> None:
        """Handle messages until there is news or `timeout_s` has passed."""
        self._has_news = False
        until = self._now() + timeout_s
        while not self._has_news:
            wait_s = min([until, *self._deadlines()]) - self._now()
            has_read = self.calls.take(wait_s)
            if self.calls.late_s > _LATE_S:
                self._stopped_s += self.calls.late_s
            if not has_read or wait_s <= 0:
                self._look_at_clock()
                if self._now() >= until:
                    return

    def _now(self) -> float:
        """Return the monotonic time without that in which this process was stopped (Ctrl-Z)."""
        return time.monotonic() - self._stopped_s

    def _deadlines(self) -> Iterator[float]:
        """Yield the times at which something has to be looked at."""
        for gang in self._gangs.values():
            deadline = gang.lifecycle.deadline
            if deadline is not None:
                yield deadline
            if gang.killed_at is not None:
                yield gang.killed_at + AGENT_LIMIT_S

    def _look_at_clock(self) -> None:
        """Do what gangs have to do at this time."""
        now = self._now()
        for gang in list(self._gangs.values()):
            self._carry_out(gang, gang.lifecycle.tick(now))
            if gang.killed_at is not None and now >= gang.killed_at + AGENT_LIMIT_S:
                self._give_up(gang)

    def stop(self) -> None:
        """Close all connections; agents kill the processes that are left."""
        self._gangs.clear()
        for channel in self._channels:
            self.calls.drop(channel)
        self.calls.stop()

    def start_without_ranks(self, gang: Gang) -> None:
        """Add a gang that has no processes, and take all its ranks for ready.

        It is for tests that some rank could not collect: they fail for that rank (`gang.missing`),
        and no process is needed to say so.
        """
        self._gangs[gang.number] = gang
        for config in gang.configs:
            self._handle(gang, config.rank, Ready())

    def _on_agent(self, source: Channel, frames: Sequence[Frame]) -> None:
        """Take what an agent has sent, and its loss."""
        for frame in frames:
            number, rank = frame.place
            gang = self._gangs.get(number)
            try:
                message = decode(frame.content)
            except ValueError:  # a test may write to any descriptor
                message = Broken(problem=_NO_MESSAGE)
            if gang is not None:
                gang.inboxes[rank].append(message)
                self._deliver(gang)
            elif number <= 0:
                self._on_agent_message(Peer(source, frame.place), message)
        if source.is_closed:
            self._lose_agent(source)

    def _lose_agent(self, source: Channel) -> None:
        """Record that the agent of a node is gone, and its ranks with it."""
        self.calls.drop(source)
        self._channels.remove(source)
        self.agents.lose(source)
        self._lose_holders(lambda agent: agent.node is source)

    def _lose_holders(self, is_lost: Callable[[Peer], bool]) -> None:
        """Record that some agents are gone, and their ranks with them."""
        self._has_news = True
        self.collectors.lose(is_lost)
        for gang in list(self._gangs.values()):
            for agent in filter(is_lost, list(gang.holders)):
                self._lose(gang, [c for c in gang.configs if gang.keepers.get(c.rank) == agent])
                self._on_killed(gang, agent)

    def _give_up(self, gang: Gang) -> None:
        """Kill agents that did not kill a gang in time."""
        gang.killed_at = None
        for agent in list(gang.holders):
            if agent.place == OWN:
                self.agents.kill(agent.node)
                self._lose_agent(agent.node)
            else:  # that of its node kills it
                self.collectors.kill(agent.place[0])
                self._on_killed(gang, agent)

    def _lose(self, gang: Gang, configs: Sequence[RankConfig]) -> None:
        """Report ranks whose agent, or whole node, is gone."""
        for config in configs:
            problem = ORPHANED
            if config.node_rank > 0 and not self.agents.has(config.node_rank):
                ranks = [c.rank for c in gang.configs if c.node_rank == config.node_rank]
                problem = f"node {config.node_rank} ({name_ranks(ranks)}) is gone"
                if gang.lifecycle.state is not GangState.STARTING:
                    problem = f"is lost: {problem}"
            self._handle(gang, config.rank, Broken(problem=problem))

    def _on_agent_message(self, source: Peer, message: Message) -> None:
        """Take a message of an agent, which is about one of its gangs or about itself."""
        match message:
            case Hello(pid=pid) if source.place == OWN:
                self._has_news = True
                self.agents.add(source.node, pid)
            case Collected():
                self._has_news = True
                self.collectors.take(message, source.place)
            case Died() | Stacks() | Killed() if message.gang < 0:
                self._on_collectors(source, message)
            case Died() | Stacks() | Killed():
                if (gang := self._gangs.get(message.gang)) is not None:
                    self._on_gang(gang, source, message)
            case _:
                pass

    def _on_collectors(self, source: Peer, message: NodeMessage) -> None:
        """Take a message of a node's agent about rank collectors."""
        if isinstance(message, Killed):
            return
        self._has_news = True
        place = message.gang, message.rank if isinstance(message, Died) else -1
        self.collectors.take(message, place)
        if isinstance(message, Died):
            self._lose_holders(lambda agent: agent == Peer(source.node, place))

    def _on_gang(self, gang: Gang, source: Peer, message: NodeMessage) -> None:
        """Take a message of an agent about a gang."""
        match message:
            case Died(rank=rank):
                gang.inboxes[rank].append(message)
                self._deliver(gang)
            case Stacks():
                gang.stacks.append(message)
                gang.silent.discard(source)
                if not gang.silent:
                    self._handle(gang, 0, join_stacks(gang.stacks))
            case Killed():
                self._on_killed(gang, source)
            case _:
                assert_never(message)

    def _on_killed(self, gang: Gang, agent: Peer) -> None:
        """Note that an agent has nothing left of a gang."""
        gang.holders.discard(agent)
        if not gang.holders:
            self._handle(gang, 0, Killed(gang=gang.number))

    def _deliver(self, gang: Gang) -> None:
        """Handle messages of ranks, those about a test that was sent ahead when it is its turn.

        A rank that has ended a test may have started the next one before the others' ends arrive.
        """
        is_early = gang.lifecycle.is_early
        while ready := [r for r, box in gang.inboxes.items() if box and not is_early(box[0])]:
            for rank in ready:
                self._handle(gang, rank, gang.inboxes[rank].popleft())

    def _handle(self, gang: Gang, rank: int, message: Message) -> None:
        """Pass a message of a rank to the gang's state machine, and do what that asks."""
        if isinstance(message, Ready) and rank in gang.missing:
            message = replace(message, missing={**gang.missing[rank], **message.missing})
        self._carry_out(gang, gang.lifecycle.handle(rank, message, self._now()))
        if gang.is_gone:
            self._has_news = True
            self._gangs.pop(gang.number, None)
        if type(message).__name__.startswith("Debugger"):
            self._on_debugger(gang, rank, message)

    def _carry_out(self, gang: Gang, actions: Sequence[Action]) -> None:
        """Do what a gang's state machine asks for."""
        for action in actions:
            match action:
                case SendRuns(runs=runs):
                    send_to_ranks(gang, *runs)
                case SendClose():
                    send_to_ranks(gang, Close())
                case AskForStacks(ranks=ranks):
                    ask_for_stacks(gang, ranks)
                case KillGang():
                    self._kill(gang)
                case Finish(end=end):
                    self._has_news = True
                    gang.ends.append(end)
                case _:
                    assert_never(action)

    def _kill(self, gang: Gang) -> None:
        """Have all processes of a gang killed."""
        gang.killed_at = self._now()
        for agent in gang.holders:
            agent.send(Kill(gang=gang.number))
        if not gang.holders:  # it has no processes
            self._handle(gang, 0, Killed(gang=gang.number))
