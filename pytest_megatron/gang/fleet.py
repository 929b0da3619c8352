"""All gangs of one controller: connections, deadlines, effects (nothing else here decides).

Owned by the controller, which calls `pump` whenever it waits; there are no threads.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias, assert_never

from pytest_megatron.errors import LaunchError
from pytest_megatron.gang.actions import (
    Action,
    AskForStacks,
    Finish,
    KillGang,
    SendClose,
    SendRuns,
)
from pytest_megatron.gang.channel import Channel, Listener, WrongKeyError
from pytest_megatron.gang.followers import Followers
from pytest_megatron.gang.gangs import Gang, Template, join_stacks, send_to_ranks, with_store
from pytest_megatron.gang.lifecycle import MOST_AHEAD, State
from pytest_megatron.gang.messages import (
    Adopt,
    AskStacks,
    Broken,
    Close,
    Collected,
    Died,
    Done,
    Fork,
    Hello,
    Interrupt,
    Kill,
    Killed,
    Message,
    OpenStore,
    RankOrder,
    Ready,
    Run,
    Stacks,
    StoreOpened,
)
from pytest_megatron.gang.nodes import describe_node

_OF_NODE = -1  # in the place of a rank
_ENOUGH_AHEAD = MOST_AHEAD // 2
_PAUSE_S = 0.005
_LOST_S = 2.0  # between the end of a rank's connection and the news of its death
_ORPHANED = "ended, as the process that starts ranks was killed"


OnDebugger: TypeAlias = Callable[[Gang, int, Channel, Message], None]
TemplateWord: TypeAlias = Collected | Died | Stacks | StoreOpened
OnTemplate: TypeAlias = Callable[[int, TemplateWord, int], None]


class Fleet:
    """Starts gangs on nurseries and carries out what their lifecycles decide."""

    def __init__(self, listener: Listener, *, grace_s: float, on_debugger: OnDebugger) -> None:
        """Begin to listen.

        Args:
            listener: Where nurseries and ranks call.
            grace_s: How long ranks may take after the first sign of trouble.
            on_debugger: Told of messages of a rank's debugger.
        """
        self._listeners = [listener]
        self._followers: Followers | None = None
        self._grace_s = grace_s
        self._on_debugger = on_debugger
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._on_call)
        self._nurseries: dict[tuple[int, int], Channel] = {}
        self._templates: dict[tuple[int, int, int], Template] = {}
        self._raised: dict[int, tuple[tuple[RankOrder, ...], OnTemplate]] = {}
        self._gangs: dict[int, Gang] = {}
        self._num_gangs = 0
        self._has_news = False

    def listen(self, listener: Listener, followers: Followers) -> None:
        """Take calls of other nodes as well: of their sessions, nurseries and ranks."""
        self._listeners.append(listener)
        self._followers = followers
        self._selector.register(listener, selectors.EVENT_READ, self._on_call)

    def new_number(self) -> int:
        """Return the number of the next gang."""
        self._num_gangs += 1
        return self._num_gangs

    def has_nursery(self, node_rank: int, rank: int) -> bool:
        """Whether the nursery of a rank, or of a whole node where `rank` is -1, has called."""
        channel = self._nurseries.get((node_rank, rank))
        return channel is not None and not channel.is_closed

    def raise_templates(self, orders: tuple[RankOrder, ...], on_template: OnTemplate) -> int:
        """Have nurseries of single ranks started; return their number, which is below 0.

        Args:
            orders: What they have to know, as for ranks of a gang of number 0.
            on_template: Told their number, what is new, and of which rank; stacks are of several.
        """
        number = -self.next_template
        orders = tuple(replace(order, gang=number) for order in orders)
        self._raised[number] = orders, on_template
        self._nursery_of_node(orders[0].node_rank).send(
            OpenStore(gang=number, host=orders[0].env["MASTER_ADDR"])
        )
        return number

    @property
    def next_template(self) -> int:
        """What `raise_templates` will return, without its sign."""
        return len(self._raised) + 1

    def has_template(self, node_rank: int, rank: int, world_size: int) -> bool:
        """Whether a nursery of one rank can start it."""
        return (node_rank, rank, world_size) in self._templates

    def ask_templates(self, number: int, ranks: tuple[int, ...]) -> None:
        """Ask what `raise_templates` started for stacks."""
        for nursery in self._nurseries_of_raised(number):
            nursery.send(AskStacks(gang=number, ranks=ranks))

    def kill_templates(self, number: int) -> None:
        """Kill what `raise_templates` started."""
        for key in [k for k, t in self._templates.items() if t.number == number]:
            del self._templates[key]
        for nursery in self._nurseries_of_raised(number):
            nursery.send(Kill(gang=number))

    def _nurseries_of_raised(self, number: int) -> list[Channel]:
        nodes = {order.node_rank for order in self._raised[number][0]}
        return [self._nursery_of_node(node) for node in nodes if self.has_nursery(node, -1)]

    def start(self, gang: Gang) -> None:
        """Start the ranks of a gang; first its store, then they are forked."""
        self._gangs[gang.number] = gang
        # Of ranks that call over TCP nobody knows whose words are still underway.
        gang.is_in_lockstep = all(order.node_rank == 0 for order in gang.orders)
        for order in gang.orders:
            if self.has_nursery(order.node_rank, _OF_NODE):
                self._choose_nursery(gang, order)
            else:
                gang.orphans.append(order)
        node = gang.keepers[_OF_NODE] = self._nursery_of_node(gang.orders[0].node_rank)
        gang.nurseries = {channel.fileno() for channel in gang.keepers.values()}
        if not gang.orphans:
            node.send(OpenStore(gang=gang.number, host=gang.orders[0].env["MASTER_ADDR"]))

    def assign(self, gang: Gang, run: Run, *, limit_s: float) -> None:
        """Have a gang run a test, as soon as it can."""
        is_isolated = gang.spec.is_isolated
        now = time.monotonic()
        self._carry_out(
            gang, gang.lifecycle.assign(run, limit_s=limit_s, is_isolated=is_isolated, now=now)
        )
        self._lose(gang, gang.orphans)

    def count_room_ahead(self, gang: Gang) -> int:
        """Return how many tests a gang should take beside what it has: many or none.

        Its ranks have to come from one nursery, so that they can agree among themselves.
        """
        room = gang.lifecycle.room_ahead if gang.is_in_lockstep else 0
        return room if room >= MOST_AHEAD - _ENOUGH_AHEAD else 0

    def send_ahead(self, gang: Gang, runs: Sequence[tuple[Run, float]]) -> None:
        """Have a gang run tests right after what it has, as long as all ranks end all well.

        Args:
            gang: One with room for them.
            runs: Each with the limit of its phases in seconds.
        """
        self._carry_out(gang, gang.lifecycle.send_ahead(runs))

    def close(self, gang: Gang) -> None:
        """End a gang: politely if it is idle, and has processes."""
        if not gang.nurseries:
            self.kill(gang)
            return
        self._carry_out(gang, gang.lifecycle.close(time.monotonic()))

    def kill(self, gang: Gang) -> None:
        """Kill a gang; what it runs is not reported."""
        self._carry_out(gang, gang.lifecycle.kill())

    def interrupt(self, gang: Gang) -> None:
        """Press Ctrl-C in every rank of a gang."""
        for nursery in self._nurseries_of(gang).values():
            nursery.send(Interrupt(gang=gang.number))

    def pump(self, timeout_s: float) -> None:
        """Take in what ranks and nurseries say, until there is news or `timeout_s` has passed."""
        self._has_news = False
        if any(gang.lifecycle.num_ahead > _ENOUGH_AHEAD for gang in self._gangs.values()):
            time.sleep(_PAUSE_S)  # to wake up for each of its words takes a core from its ranks
        until = time.monotonic() + timeout_s
        while not self._has_news:
            wait_s = min([until, *self._deadlines()]) - time.monotonic()
            ready = self._selector.select(max(0.0, wait_s))
            for key, _ in ready:
                handler: Callable[[object], None] = key.data
                handler(key.fileobj)
            if not ready or wait_s <= 0:
                self._look_at_clock()
                if time.monotonic() >= until:
                    return

    def _deadlines(self) -> Iterator[float]:
        for gang in self._gangs.values():
            deadline = gang.lifecycle.deadline
            if deadline is not None:
                yield deadline
            for at in gang.lost.values():
                yield at + _LOST_S

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        for gang in list(self._gangs.values()):
            self._carry_out(gang, gang.lifecycle.tick(now))
            for rank, at in list(gang.lost.items()):
                if now >= at + _LOST_S:
                    del gang.lost[rank]
                    problem = "closed its connection to the controller"
                    self._tell(gang, rank, Broken(problem=problem))

    def stop(self) -> None:
        """Let go of everything; nurseries kill what is left."""
        for gang in list(self._gangs.values()):
            self._forget(gang)
        for channel in (*self._nurseries.values(), *(t.channel for t in self._templates.values())):
            channel.close()
        self._nurseries.clear()
        self._templates.clear()
        self._selector.close()
        for listener in self._listeners:
            listener.close()

    def forget(self) -> None:
        """Let go of descriptors in a forked child; what they belong to lives on."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, Channel | socket.socket):
                key.fileobj.close()
        self._selector.close()
        for listener in self._listeners:
            listener.forget()

    def pretend(self, gang: Gang) -> None:
        """Have a gang without processes, as some rank of it has none of its tests."""
        self._gangs[gang.number] = gang
        for order in gang.orders:
            self._tell(gang, order.rank, Ready())

    def _choose_nursery(self, gang: Gang, order: RankOrder) -> None:
        """Choose who starts a rank, and who has it then."""
        key = order.node_rank, order.rank, order.world_size
        template = self._templates.get(key)
        if template is None:
            channel = self._nursery_of_node(order.node_rank)
            gang.starters[order.rank] = gang.keepers[order.rank] = channel
            return
        gang.is_in_lockstep = False
        gang.starters[order.rank] = gang.keepers[order.rank] = template.channel
        if template.is_single:
            del self._templates[key]
            node = gang.keepers[order.rank] = self._nursery_of_node(order.node_rank)
            node.send(
                Adopt(
                    template=template.number,
                    gang=gang.number,
                    rank=order.rank,
                    device=order.device,
                    log_dir=order.log_dir,
                )
            )

    def _nursery_of_node(self, node_rank: int) -> Channel:
        channel = self._nurseries.get((node_rank, -1))
        if channel is None or channel.is_closed:
            raise LaunchError(
                f"node {node_rank}", "the process that starts ranks is gone; was it killed?"
            )
        return channel

    def _nurseries_of(self, gang: Gang) -> dict[int, Channel]:
        """Return the connections of nurseries that still hold something of a gang."""
        found = {channel.fileno(): channel for channel in gang.keepers.values()}
        return {number: channel for number, channel in found.items() if number in gang.nurseries}

    def _on_call(self, source: object) -> None:
        assert isinstance(source, Listener)
        connection = source.accept()
        on_proof = functools.partial(self._on_proof, source)
        self._selector.register(connection, selectors.EVENT_READ, on_proof)

    def _on_proof(self, listener: Listener, source: object) -> None:
        assert isinstance(source, socket.socket)
        descriptor = source.fileno()
        try:
            channel = listener.prove(source)
        except PermissionError as error:
            self._selector.unregister(descriptor)
            if self._followers is not None and isinstance(error, WrongKeyError):
                self._followers.num_strangers += 1
                self._has_news = True
            return
        if channel is not None:
            self._selector.unregister(descriptor)
            self._selector.register(channel, selectors.EVENT_READ, self._on_hello)

    def _on_hello(self, source: object) -> None:
        assert isinstance(source, Channel)
        messages = source.drain()
        if not messages:
            if source.is_closed:
                self._drop(source)
            return
        hello, *rest = messages
        if not isinstance(hello, Hello):
            self._drop(source)
            return
        if hello.role == "node" and self._followers is not None:
            self._selector.modify(source, selectors.EVENT_READ, self._on_follower)
            self._followers.greet(hello.node_rank, source)
            return
        if hello.role == "nursery":
            self._on_hello_of_nursery(source, hello, rest)
            return
        gang = self._gangs.get(hello.gang)
        if gang is None:
            self._drop(source)
            return
        gang.channels[hello.rank] = source

        def on_rank(_: object) -> None:
            self._drain_rank(gang, hello.rank)

        self._selector.modify(source, selectors.EVENT_READ, on_rank)
        gang.inboxes[hello.rank] = deque(rest)
        self._deliver(gang)

    def _on_follower(self, source: object) -> None:
        assert isinstance(source, Channel)
        assert self._followers is not None
        self._followers.read(source)
        self._has_news = True
        if source.is_closed:
            self._drop(source)

    def _on_hello_of_nursery(self, source: Channel, hello: Hello, rest: Sequence[Message]) -> None:
        self._has_news = True
        if not hello.world_size:
            self._nurseries[hello.node_rank, hello.rank] = source

        def on_nursery(_: object) -> None:
            take(source.drain())
            if source.is_closed:
                self._lose_nursery(source)

        def take(messages: Sequence[Message]) -> None:
            for message in messages:
                if isinstance(message, Collected):
                    self._on_collected(source, hello, message)
                else:
                    self._on_nursery_word(source, message)

        self._selector.modify(source, selectors.EVENT_READ, on_nursery)
        take(rest)

    def _on_collected(self, source: Channel, hello: Hello, collected: Collected) -> None:
        self._has_news = True
        self._templates[hello.node_rank, hello.rank, hello.world_size] = Template(
            number=hello.gang, channel=source, is_single=bool(collected.obstacle)
        )
        self._raised[hello.gang][1](hello.gang, collected, hello.rank)

    def _lose_nursery(self, source: Channel) -> None:
        """Take note that a nursery is gone, and its ranks with it."""
        descriptor = source.fileno()
        self._drop(source)
        for key in [k for k, c in self._nurseries.items() if c is source]:
            del self._nurseries[key]
        for place in [k for k, t in self._templates.items() if t.channel is source]:
            del self._templates[place]
        for gang in [g for g in self._gangs.values() if descriptor in g.nurseries]:
            self._lose(gang, [o for o in gang.orders if gang.keepers.get(o.rank) is source])
            self._on_killed(gang, descriptor)

    def _lose(self, gang: Gang, orders: Sequence[RankOrder]) -> None:
        """Tell of ranks whose nursery is gone, and maybe with all of another node."""
        for order in orders:
            self._drain_rank(gang, order.rank)
            problem = _ORPHANED
            if order.node_rank > 0 and not self.has_nursery(order.node_rank, -1):
                ranks = [o.rank for o in gang.orders if o.node_rank == order.node_rank]
                problem = f"{describe_node(order.node_rank, ranks)} is gone"
                if gang.lifecycle.state is not State.STARTING:
                    problem = f"is lost: {problem}"
            self._tell(gang, order.rank, Broken(problem=problem))

    def _on_nursery_word(self, source: Channel, message: Message) -> None:
        assert isinstance(message, StoreOpened | Died | Stacks | Killed), message
        if message.gang in self._raised:
            self._on_raised(message)
            return
        gang = self._gangs.get(message.gang)
        if gang is None:
            return
        match message:
            case StoreOpened(port=port, problem=problem):
                self._fork(gang, port, problem)
            case Died(rank=rank):
                self._drain_rank(gang, rank)
                gang.lost.pop(rank, None)
                self._tell(gang, rank, message)
            case Stacks():
                gang.stacks.append(message)
                gang.silent.discard(source.fileno())
                if not gang.silent:
                    self._tell(gang, 0, join_stacks(gang.stacks))
            case Killed():
                self._on_killed(gang, source.fileno())
            case _:
                assert_never(message)

    def _on_raised(self, message: Message) -> None:
        """Take in what a node's nursery says of those of single ranks."""
        match message:
            case StoreOpened(gang=number, port=port, problem=""):
                orders = with_store(self._raised[number][0], port)
                for node_rank in {order.node_rank for order in orders}:
                    here = tuple(order for order in orders if order.node_rank == node_rank)
                    if self.has_nursery(node_rank, -1):
                        self._nursery_of_node(node_rank).send(Fork(orders=here))
            case StoreOpened(gang=number):
                self._has_news = True
                self._raised[number][1](number, message, 0)
            case Died(gang=number, rank=rank):
                self._has_news = True
                self._raised[number][1](number, message, rank)
            case Stacks(gang=number):
                self._has_news = True
                self._raised[number][1](number, message, -1)
            case _:
                pass

    def _on_killed(self, gang: Gang, nursery: int) -> None:
        gang.nurseries.discard(nursery)
        if not gang.nurseries:
            self._tell(gang, 0, Killed(gang=gang.number))

    def _fork(self, gang: Gang, port: int, problem: str) -> None:
        if gang.lifecycle.state is not State.STARTING:
            return
        if problem:
            self._tell(gang, 0, Broken(problem=problem))
            return
        gang.orders = with_store(gang.orders, port)
        by_nursery: dict[int, list[RankOrder]] = {}
        channels = {}
        for order in gang.orders:
            channel = gang.starters[order.rank]
            channels[channel.fileno()] = channel
            by_nursery.setdefault(channel.fileno(), []).append(order)
        for number, orders in by_nursery.items():
            channels[number].send(Fork(orders=tuple(orders)), gang.descriptors)

    def _drain_rank(self, gang: Gang, rank: int) -> None:
        """Take what a rank said; before its death is told, also its last words."""
        if rank in gang.channels:
            self._read(gang, rank)
            self._deliver(gang)

    def _read(self, gang: Gang, rank: int) -> bool:
        """Read what a rank has said by now; return whether there was anything."""
        channel = gang.channels[rank]
        found = channel.drain()
        gang.inboxes.setdefault(rank, deque()).extend(found)
        if channel.is_closed:
            self._drop(channel)
            del gang.channels[rank]
            gang.lost[rank] = time.monotonic()
            gang.lifecycle.lose(rank)
        return bool(found)

    def _read_all(self, gang: Gang) -> bool:
        """Read what all ranks of a gang have said by now; return whether there was anything."""
        found = [self._read(gang, rank) for rank in list(gang.channels)]
        return any(found)

    def _deliver(self, gang: Gang) -> None:
        """Look at what ranks said, what they said of the running test first.

        A rank that has ended it may have gone on; what it says then comes after the last words of
        all others on the running test, which are underway at the least. Before the last rank ends
        it, those that died earlier are seen to be gone.
        """
        while ranks := [rank for rank, inbox in gang.inboxes.items() if inbox]:
            present = [rank for rank in ranks if not gang.lifecycle.is_past(rank)]
            if not present and self._read_all(gang):
                continue
            rank = (present or ranks)[0]
            if gang.lifecycle.is_awaited(rank) and isinstance(gang.inboxes[rank][0], Done):
                self._read_all(gang)
            self._tell(gang, rank, gang.inboxes[rank].popleft())

    def _tell(self, gang: Gang, rank: int, message: Message) -> None:
        if isinstance(message, Ready) and rank in gang.missing:
            message = replace(message, missing={**gang.missing[rank], **message.missing})
        self._carry_out(gang, gang.lifecycle.handle(rank, message, time.monotonic()))
        if gang.is_gone:
            self._has_news = True
            self._forget(gang)
        channel = gang.channels.get(rank)
        if type(message).__name__.startswith("Debugger") and channel is not None:
            self._on_debugger(gang, rank, channel, message)

    def _carry_out(self, gang: Gang, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendRuns(runs=runs):
                    send_to_ranks(gang, *runs)
                case SendClose():
                    send_to_ranks(gang, Close())
                case AskForStacks(ranks=ranks):
                    self._ask_for_stacks(gang, ranks)
                case KillGang():
                    self._kill(gang)
                case Finish(end=end):
                    self._has_news = True
                    gang.ends.append(end)
                case _:
                    assert_never(action)

    def _ask_for_stacks(self, gang: Gang, ranks: tuple[int, ...]) -> None:
        gang.stacks.clear()
        for nursery in self._nurseries_of(gang).values():
            gang.silent.add(nursery.fileno())
            nursery.send(AskStacks(gang=gang.number, ranks=ranks))

    def _kill(self, gang: Gang) -> None:
        for nursery in self._nurseries_of(gang).values():
            nursery.send(Kill(gang=gang.number))
        if not gang.nurseries:  # nobody has anything of it
            self._tell(gang, 0, Killed(gang=gang.number))

    def _forget(self, gang: Gang) -> None:
        for channel in gang.channels.values():
            self._drop(channel)
        gang.channels.clear()
        self._gangs.pop(gang.number, None)

    def _drop(self, channel: Channel) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel)
        channel.close()
