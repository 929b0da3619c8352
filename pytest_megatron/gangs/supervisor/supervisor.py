"""All gangs of one controller: connections, deadlines and the actions of their lifecycles.

Owned by the controller, which calls `pump` whenever it waits; there are no threads.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, assert_never

from pytest_megatron.gangs.forkserver.store import with_store
from pytest_megatron.gangs.ipc.channel import Channel, Listener
from pytest_megatron.gangs.ipc.messages import (
    Adopt,
    AskStacks,
    Broken,
    Close,
    Collected,
    Died,
    Done,
    Fork,
    Interrupt,
    Kill,
    Killed,
    Message,
    OpenStore,
    RankConfig,
    Ready,
    Register,
    Run,
    Stacks,
    StoreOpened,
    encode,
)
from pytest_megatron.gangs.lifecycle import ORPHANED, GangState, Lifecycle
from pytest_megatron.gangs.spec import (
    Action,
    AskForStacks,
    Finish,
    GangSpec,
    KillGang,
    RunEnd,
    SendClose,
    SendRuns,
)
from pytest_megatron.gangs.supervisor.connections import (
    OF_NODE,
    Calls,
    Followers,
    ForkServers,
    RankCollectors,
)
from pytest_megatron.gangs.topology import describe_node
from pytest_megatron.process.guard import UNKILLABLE_S
from pytest_megatron.process.tree import lives_on

_LOST_S = 2.0  # from the end of a rank's connection to the message of its death
FORK_SERVER_LIMIT_S = UNKILLABLE_S + 10.0  # for a fork server to kill a gang, or to report a death


@dataclass(slots=True)
class Loss:
    """A rank whose connection has ended; if it died, its fork server will report that.

    With many processes on a GPU the kernel takes seconds to clean up one that has died.

    Attributes:
        pid: Process of the rank, if it is on this host.
        since: When the connection ended, in seconds of the monotonic clock.
        next_look: When to check again, likewise.
    """

    pid: int | None
    since: float
    next_look: float = field(init=False)

    def __post_init__(self) -> None:
        self.next_look = self.since + _LOST_S

    def is_final(self, now: float) -> bool:
        """Return whether its death will not be reported any more."""
        return self.pid is None or lives_on(self.pid) or now >= self.since + FORK_SERVER_LIMIT_S


@dataclass(slots=True, kw_only=True)
class Gang:
    """The ranks that run one test together, in the controller.

    Attributes:
        number: Counted from 1 in this session.
        configs: Configurations of its ranks, by rank.
        descriptors: Descriptors of leased devices, for ranks to inherit.
        ends: Results of its tests, until the controller takes them.
        inboxes: Rank -> its messages that are not handled yet.
        fork_servers: Connections of fork servers that still have processes of it.
        silent: Connections of fork servers that have not answered the last request for stacks.
        starters: Rank -> connection of the fork server that starts it.
        keepers: Rank -> connection of the fork server that is its parent: another one where the
            first one becomes the rank; and the one that has the store.
        pids: Rank -> its process, for ranks of this host.
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
    channels: dict[int, Channel] = field(default_factory=dict)
    inboxes: dict[int, deque[Message]] = field(default_factory=dict)
    lost: dict[int, Loss] = field(default_factory=dict)
    ends: list[RunEnd] = field(default_factory=list)
    fork_servers: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    stacks: list[Stacks] = field(default_factory=list)
    starters: dict[int, Channel] = field(default_factory=dict)
    keepers: dict[int, Channel] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    missing: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    orphans: list[RankConfig] = field(default_factory=list)
    is_in_lockstep: bool = False
    killed_at: float | None = None

    @property
    def is_gone(self) -> bool:
        """True if no process of it is left."""
        return self.lifecycle.state is GangState.GONE

    def holders(self) -> list[Channel]:
        """Return the connections of fork servers that still have processes of it."""
        found = {channel.fileno(): channel for channel in self.keepers.values()}
        return [channel for number, channel in found.items() if number in self.fork_servers]


def choose_fork_server(
    gang: Gang, config: RankConfig, fork_servers: ForkServers, collectors: RankCollectors
) -> None:
    """Choose the fork server that starts a rank, and the one that is its parent."""
    collector = collectors.find(config)
    if collector is None:
        channel = fork_servers.of_node(config.node_rank)
        gang.starters[config.rank] = gang.keepers[config.rank] = channel
        return
    gang.is_in_lockstep = False
    gang.starters[config.rank] = gang.keepers[config.rank] = collector.channel
    if collector.is_single:
        node = gang.keepers[config.rank] = fork_servers.of_node(config.node_rank)
        node.send(
            Adopt(
                collector=collector.number,
                gang=gang.number,
                rank=config.rank,
                device=config.device,
                log_dir=config.log_dir,
            )
        )


def fork(gang: Gang) -> None:
    """Send the configurations of a gang's ranks to their fork servers."""
    by_fork_server: dict[int, list[RankConfig]] = {}
    channels = {}
    for config in gang.configs:
        channel = gang.starters[config.rank]
        channels[channel.fileno()] = channel
        by_fork_server.setdefault(channel.fileno(), []).append(config)
    for number, configs in by_fork_server.items():
        channels[number].send(Fork(configs=tuple(configs)), gang.descriptors)


def ask_for_stacks(gang: Gang, ranks: tuple[int, ...]) -> None:
    """Request the stacks of ranks from all fork servers of a gang."""
    gang.stacks.clear()
    for fork_server in gang.holders():
        gang.silent.add(fork_server.fileno())
        fork_server.send(AskStacks(gang=gang.number, ranks=ranks))


def send_to_ranks(gang: Gang, *messages: Message) -> None:
    """Send messages to all ranks of a gang, at once."""
    frames = [encode(message) for message in messages]
    for channel in gang.channels.values():
        channel.send_frames(frames)


def rest(gangs: Sequence[Gang], limit_s: float) -> None:
    """Sleep for a while, or until a rank has died.

    Waking up for every message would take a core from the ranks; fork servers report deaths.
    """
    poll = select.poll()
    for gang in gangs:
        for fork_server in gang.holders():
            poll.register(fork_server.fileno(), select.POLLIN)
    poll.poll(limit_s * 1000)


def join_stacks(answers: Sequence[Stacks]) -> Stacks:
    """Return the stacks of several fork servers as one message."""
    return Stacks(
        gang=answers[0].gang,
        stacks={rank: text for answer in answers for rank, text in answer.stacks.items()},
        flights={rank: text for answer in answers for rank, text in answer.flights.items()},
        phases={rank: phase for answer in answers for rank, phase in answer.phases.items()},
    )


_PAUSE_S = 0.03
_LATE_S = 1.0  # longer than a busy host delays a process
_CLOSED = "closed its connection to the controller"

OnDebugger: TypeAlias = Callable[[Gang, int, Channel, Message], None]


class Supervisor:
    """Starts gangs on fork servers and carries out what their lifecycles decide.

    Attributes:
        fork_servers: Fork servers of nodes.
        collectors: Fork servers of single ranks.
    """

    def __init__(self, listener: Listener, *, on_debugger: OnDebugger) -> None:
        """Start listening for fork servers and ranks.

        Args:
            listener: Socket to which fork servers and ranks connect.
            on_debugger: Called with messages of a rank's debugger.
        """
        self._calls = Calls(listener, self._on_register)
        self._followers: Followers | None = None
        self._on_debugger = on_debugger
        self.fork_servers = ForkServers()
        self.collectors = RankCollectors(self.fork_servers)
        self._gangs: dict[int, Gang] = {}
        self._has_news = False
        self._stopped_s = 0.0

    def listen(self, listener: Listener, followers: Followers) -> None:
        """Accept connections of other nodes: of their sessions, fork servers and ranks."""
        self._followers = followers
        self._calls.listen(listener, self._on_wrong_key)

    def start(self, gang: Gang) -> None:
        """Open the store of a gang, then start its ranks."""
        self._gangs[gang.number] = gang
        # Over TCP messages of other ranks may still be in flight.
        gang.is_in_lockstep = all(config.node_rank == 0 for config in gang.configs)
        for config in gang.configs:
            if self.fork_servers.has(config.node_rank):
                choose_fork_server(gang, config, self.fork_servers, self.collectors)
            else:
                gang.orphans.append(config)
        node = gang.keepers[OF_NODE] = self.fork_servers.of_node(gang.configs[0].node_rank)
        gang.fork_servers = {channel.fileno() for channel in gang.keepers.values()}
        if not gang.orphans:
            node.send(OpenStore(gang=gang.number, host=gang.configs[0].env["MASTER_ADDR"]))

    def assign(self, gang: Gang, run: Run, *, limit_s: float) -> None:
        """Run a test on a gang, as soon as its ranks are ready."""
        is_isolated, now = gang.spec.is_isolated, self._now()
        self._carry_out(
            gang, gang.lifecycle.assign(run, limit_s=limit_s, is_isolated=is_isolated, now=now)
        )
        self._lose(gang, gang.orphans)

    def count_room_ahead(self, gang: Gang) -> int:
        """Return the number of tests to send ahead to a gang: many or none.

        Its ranks need a common fork server, so that they can agree among themselves.
        """
        lifecycle = gang.lifecycle
        is_wanting = gang.is_in_lockstep and not lifecycle.queue.has_enough
        return lifecycle.room_ahead if is_wanting else 0

    def send_ahead(self, gang: Gang, runs: Sequence[tuple[Run, float]]) -> None:
        """Queue tests, with their time limits, which run as long as those before them pass."""
        self._carry_out(gang, gang.lifecycle.send_ahead(runs))

    def close(self, gang: Gang) -> None:
        """Close a gang: with teardown if it is idle, else by killing it."""
        if not gang.fork_servers:
            self.kill(gang)
            return
        self._carry_out(gang, gang.lifecycle.close(self._now()))

    def kill(self, gang: Gang) -> None:
        """Kill a gang; its running test is not reported."""
        self._carry_out(gang, gang.lifecycle.kill())

    def interrupt(self, gang: Gang) -> None:
        """Send SIGINT to every rank of a gang."""
        for fork_server in gang.holders():
            fork_server.send(Interrupt(gang=gang.number))

    def pump(self, timeout_s: float) -> None:
        """Handle messages until there is news or `timeout_s` has passed."""
        self._has_news = False
        if calm := [gang for gang in self._gangs.values() if gang.lifecycle.queue.has_enough]:
            rest(calm, _PAUSE_S)
        until = self._now() + timeout_s
        while not self._has_news:
            wait_s = min([until, *self._deadlines()]) - self._now()
            has_read = self._calls.take(wait_s)
            if self._calls.late_s > _LATE_S:
                self._stopped_s += self._calls.late_s
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
            yield from (loss.next_look for loss in gang.lost.values())
            if gang.killed_at is not None:
                yield gang.killed_at + FORK_SERVER_LIMIT_S

    def _look_at_clock(self) -> None:
        """Do what gangs have to do at this time."""
        now = self._now()
        for gang in list(self._gangs.values()):
            self._carry_out(gang, gang.lifecycle.tick(now))
            for rank, loss in [pair for pair in gang.lost.items() if now >= pair[1].next_look]:
                loss.next_look = now + _LOST_S
                if loss.is_final(now):
                    self._handle_end(gang, rank, Broken(problem=_CLOSED))
            if gang.killed_at is not None and now >= gang.killed_at + FORK_SERVER_LIMIT_S:
                self._give_up(gang)

    def stop(self) -> None:
        """Close all connections; fork servers kill the processes that are left."""
        for gang in list(self._gangs.values()):
            self._forget(gang)
        self.fork_servers.close()
        self.collectors.close()
        self._calls.stop()

    def forget(self) -> None:
        """Close the descriptors in a forked child; the parent keeps its own."""
        self._calls.forget()

    def start_without_ranks(self, gang: Gang) -> None:
        """Add a gang that has no processes, and take all its ranks for ready.

        It is for tests that some rank could not collect: they fail for that rank (`gang.missing`),
        and no process is needed to say so.
        """
        self._gangs[gang.number] = gang
        for config in gang.configs:
            self._handle(gang, config.rank, Ready())

    def _on_register(self, source: Channel, register: Register, rest: Sequence[Message]) -> None:
        """Take a new connection: a node, a fork server or a rank."""
        if register.role == "node" and self._followers is not None:
            self._calls.read(source, lambda: self._on_follower(source))
            self._followers.accept(register.node_rank, source)
            return
        if register.role == "fork_server":
            self._on_fork_server(source, register, rest)
            return
        gang = self._gangs.get(register.gang)
        if gang is None:
            self._calls.drop(source)
            return
        gang.channels[register.rank] = source
        if register.node_rank == 0:
            gang.pids[register.rank] = register.pid
        self._calls.read(source, lambda: self._drain_rank(gang, register.rank))
        gang.inboxes[register.rank] = deque(rest)
        self._deliver(gang)

    def _on_wrong_key(self) -> None:
        """Count a connection with another key."""
        assert self._followers is not None
        self._followers.num_wrong_keys += 1
        self._has_news = True

    def _on_follower(self, source: Channel) -> None:
        """Take messages of another node's session."""
        assert self._followers is not None
        self._followers.read(source)
        self._has_news = True
        if source.is_closed:
            self._calls.drop(source)

    def _on_fork_server(
        self, source: Channel, register: Register, messages: Sequence[Message]
    ) -> None:
        """Take the connection of a fork server."""
        self._has_news = True
        self.fork_servers.add(register, source)

        def take(messages: Sequence[Message]) -> None:
            """Take messages of a fork server, and its loss."""
            for message in messages:
                if isinstance(message, Collected):
                    self._has_news = True
                    self.collectors.take_collected(source, register, message)
                else:
                    self._on_fork_server_message(source, message)
            if source.is_closed:
                self._lose_fork_server(source)

        self._calls.read(source, lambda: take(source.drain()))
        take(messages)

    def _lose_fork_server(self, source: Channel) -> None:
        """Record that a fork server is gone, and its ranks with it."""
        descriptor = source.fileno()
        self._calls.drop(source)
        self.fork_servers.lose(source)
        self.collectors.lose(source)
        for gang in [g for g in self._gangs.values() if descriptor in g.fork_servers]:
            self._lose(gang, [c for c in gang.configs if gang.keepers.get(c.rank) is source])
            self._on_killed(gang, descriptor)

    def _give_up(self, gang: Gang) -> None:
        """Kill fork servers that did not kill a gang in time."""
        gang.killed_at = None
        for fork_server in gang.holders():
            self.fork_servers.kill(fork_server)
            self._lose_fork_server(fork_server)

    def _lose(self, gang: Gang, configs: Sequence[RankConfig]) -> None:
        """Report ranks whose fork server, or whole node, is gone."""
        for config in configs:
            self._drain_rank(gang, config.rank)
            problem = ORPHANED
            if config.node_rank > 0 and not self.fork_servers.has(config.node_rank):
                ranks = [c.rank for c in gang.configs if c.node_rank == config.node_rank]
                problem = f"{describe_node(config.node_rank, ranks)} is gone"
                if gang.lifecycle.state is not GangState.STARTING:
                    problem = f"is lost: {problem}"
            self._handle(gang, config.rank, Broken(problem=problem))

    def _on_fork_server_message(self, source: Channel, message: Message) -> None:
        """Pass a message of a fork server to its gang."""
        assert isinstance(message, StoreOpened | Died | Stacks | Killed), message
        if self.collectors.has(message.gang):
            self._has_news = self.collectors.take(message) or self._has_news
            return
        gang = self._gangs.get(message.gang)
        if gang is None:
            return
        match message:
            case StoreOpened(port=port, problem=problem):
                self._fork(gang, port, problem)
            case Died(rank=rank):
                self._drain_rank(gang, rank)
                self._handle_end(gang, rank, message)
            case Stacks():
                gang.stacks.append(message)
                gang.silent.discard(source.fileno())
                if not gang.silent:
                    self._handle(gang, 0, join_stacks(gang.stacks))
            case Killed():
                self._on_killed(gang, source.fileno())
            case _:
                assert_never(message)

    def _handle_end(self, gang: Gang, rank: int, message: Died | Broken) -> None:
        """Handle the end of a rank, then the messages that had to wait for it."""
        gang.lost.pop(rank, None)
        self._handle(gang, rank, message)
        self._deliver(gang)

    def _on_killed(self, gang: Gang, fork_server: int) -> None:
        """Note that a fork server has nothing left of a gang."""
        gang.fork_servers.discard(fork_server)
        if not gang.fork_servers:
            self._handle(gang, 0, Killed(gang=gang.number))

    def _fork(self, gang: Gang, port: int, problem: str) -> None:
        """Have a gang's ranks forked, now that its store has a port."""
        if gang.lifecycle.state is not GangState.STARTING:
            return
        if problem:
            self._handle(gang, 0, Broken(problem=problem))
            return
        gang.configs = with_store(gang.configs, port)
        fork(gang)

    def _drain_rank(self, gang: Gang, rank: int) -> None:
        """Handle the messages of a rank, up to the last before its death."""
        if rank in gang.channels:
            self._read(gang, rank)
            self._deliver(gang)

    def _read(self, gang: Gang, rank: int) -> bool:
        """Read the messages of a rank so far; return whether there were any."""
        channel = gang.channels[rank]
        found = channel.drain()
        gang.inboxes.setdefault(rank, deque()).extend(found)
        if channel.is_closed:
            self._calls.drop(channel)
            del gang.channels[rank]
            gang.lost[rank] = Loss(gang.pids.get(rank), self._now())
            gang.lifecycle.lose(rank)
        return bool(found)

    def _read_all(self, gang: Gang) -> bool:
        """Read the messages of all ranks of a gang so far; return whether there were any."""
        has_read = [self._read(gang, rank) for rank in list(gang.channels)]
        return any(has_read)

    def _deliver(self, gang: Gang) -> None:
        """Handle messages of ranks, those about the running test first.

        A rank that has ended it may have started the next one; its later messages are handled after
        the last messages of all other ranks about the running test, which are at least in flight.
        Before the last rank ends it, ranks that died are detected by their closed connections;
        messages about later tests wait until those deaths are reported.
        """
        while ranks := [rank for rank, inbox in gang.inboxes.items() if inbox]:
            present = [rank for rank in ranks if not gang.lifecycle.is_past(rank)]
            if not present and self._read_all(gang):
                continue
            if not present and gang.lost:
                break
            rank = (present or ranks)[0]
            if gang.lifecycle.is_awaited(rank) and isinstance(gang.inboxes[rank][0], Done):
                self._read_all(gang)
            self._handle(gang, rank, gang.inboxes[rank].popleft())

    def _handle(self, gang: Gang, rank: int, message: Message) -> None:
        """Pass a message of a rank to the gang's state machine, and do what that asks."""
        if isinstance(message, Ready) and rank in gang.missing:
            message = replace(message, missing={**gang.missing[rank], **message.missing})
        self._carry_out(gang, gang.lifecycle.handle(rank, message, self._now()))
        if gang.is_gone:
            self._has_news = True
            self._forget(gang)
        channel = gang.channels.get(rank)
        if type(message).__name__.startswith("Debugger") and channel is not None:
            self._on_debugger(gang, rank, channel, message)

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
        for fork_server in gang.holders():
            fork_server.send(Kill(gang=gang.number))
        if not gang.fork_servers:  # it has no processes
            self._handle(gang, 0, Killed(gang=gang.number))

    def _forget(self, gang: Gang) -> None:
        """Close the connections of a gang that is gone."""
        for channel in gang.channels.values():
            self._calls.drop(channel)
        gang.channels.clear()
        self._gangs.pop(gang.number, None)
