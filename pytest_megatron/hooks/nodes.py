"""Sessions that span nodes: the leader on node 0 tells the others what to show.

Node 0 collects, decides and reports as ever. The session of any other node collects as well, gives
node 0 a template to fork ranks from, and shows what node 0 shows, so that terminal, JUnit XML and
exit code agree on every node.
"""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.errors import LaunchError
from pytest_megatron.gang.bootstrap import state_if_seeded
from pytest_megatron.gang.channel import Channel, WrongKeyError, connect, listen_on
from pytest_megatron.gang.fleet import Fleet
from pytest_megatron.gang.followers import Followers
from pytest_megatron.gang.messages import Ended, Hello, Joined, Mirrored, RankOrder, Welcome
from pytest_megatron.gang.nodes import KEY_VARIABLE, Nodes, find_key
from pytest_megatron.hooks.beginning import KEY
from pytest_megatron.hooks.mirror import mirror_log, mirror_report, mirror_warning, replay
from pytest_megatron.hooks.options import Options
from pytest_megatron.hooks.origins import make_brief, tell_warm
from pytest_megatron.hooks.template import Template
from pytest_megatron.host import this_host
from pytest_megatron.lease import Lease, lease_gpus

FOLLOWER_NAME = "megatron-follower"
MEETING_S = 300.0  # for every node to come up and collect
_HOPELESS_S = 20.0  # of that, for a node that has nothing to bring but its collection errors
_RETRY_S = 0.2
_DEVICES = "CUDA_VISIBLE_DEVICES"
_BROKEN = 3  # exit code: not a test's fault
_KEY_ADVICE = f"set {KEY_VARIABLE} to the same text on every node, or share ~/.pytest_megatron/key"


def nodes_of(options: Options, num_gpus: int) -> Nodes:
    """Return how many ranks this session has room for, and where."""
    room = options.num_ranks or 0
    if options.num_gpus is not None:
        room = options.num_gpus or num_gpus
    return Nodes(num_nodes=options.num_nodes, ranks_per_node=room)


def address_of(endpoint: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


class Leader:
    """Node 0's side: has the other nodes come, and tells them what happens."""

    def __init__(
        self, config: pytest.Config, fleet: Fleet, *, welcome: Welcome, endpoint: str
    ) -> None:
        """Listen.

        Raises:
            pytest.UsageError: There is no key, or the port is taken.
        """
        self._config = config
        self._fleet = fleet
        self._endpoint = endpoint
        self._nodes = range(1, welcome.num_nodes)
        self._stop: tuple[str, str] | None = None
        self._followers = Followers(welcome)
        host, port = address_of(endpoint)
        try:
            listener = listen_on(host, port, find_key(os.environ, Path.home()))
        except LaunchError as error:
            raise pytest.UsageError(str(error)) from None
        except OSError as error:
            raise pytest.UsageError(
                f"--rdzv-endpoint: {endpoint} cannot be listened on ({error.strerror}); "
                f"give another port"
            ) from None
        fleet.listen(listener, self._followers)

    def wait(self) -> None:
        """Wait until every node is there.

        Raises:
            pytest.exit.Exception: One did not come, or cannot take part.
        """
        deadline = time.monotonic() + MEETING_S
        told: set[str] = set()
        while missing := [n for n in self._nodes if not self._is_there(n)]:
            names = ", ".join(map(str, missing))
            self._tell(f"node 0 waits at {self._endpoint} for node {names}", told)
            if self._followers.num_strangers:
                self._tell(f"somebody called with another key; {_KEY_ADVICE}", told)
            if self._followers.refused:
                raise pytest.exit.Exception("; ".join(self._followers.refused), _BROKEN)
            if time.monotonic() > deadline:
                raise pytest.exit.Exception(
                    f"node {names} did not come to {self._endpoint} in {MEETING_S:g} s; is its "
                    f"pytest running, with the same --nnodes and --rdzv-endpoint?",
                    _BROKEN,
                )
            self._fleet.pump(_RETRY_S)

    def missing(self, orders: Sequence[RankOrder]) -> dict[int, dict[str, str]]:
        """Return rank -> node id -> why the rank has no such test."""
        joined = self._followers.joined
        return {
            order.rank: dict.fromkeys(
                joined[order.node_rank].missing,
                f"has no such test: node {order.node_rank} did not collect it",
            )
            for order in orders
            if order.node_rank in joined and joined[order.node_rank].missing
        }

    def extra(self) -> dict[str, str]:
        """Return node id -> what to say of it, for tests that node 0 did not collect."""
        return {
            node_id: f"collected by node {node_rank}, not by node 0"
            for node_rank, joined in self._followers.joined.items()
            for node_id in joined.extra
        }

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Mirror."""
        self._followers.tell(mirror_log("pytest_runtest_logstart", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Mirror."""
        self._followers.tell(mirror_report(self._config, report))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Mirror."""
        self._followers.tell(mirror_log("pytest_runtest_logfinish", nodeid, location))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        """Mirror what tests warn of; each node collects by itself."""
        if when == "runtest":
            self._followers.tell(mirror_warning(warning_message, when, nodeid, location))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note why the session ends."""
        match excinfo.value:
            case pytest.exit.Exception() as error:
                self._stop = ("exit", error.msg)
            case pytest.Session.Interrupted() as interrupted:
                self._stop = ("interrupted", str(interrupted))
            case _:
                self._stop = ("interrupted", "Ctrl-C on node 0")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Let the others go."""
        kind, text = self._stop or ("", "")
        if not kind and session.shouldfail:
            kind, text = "failed", str(session.shouldfail)
        elif not kind and session.shouldstop:
            kind, text = "interrupted", str(session.shouldstop)
        self._followers.dismiss(Ended(exit_code=int(exitstatus), kind=kind, text=text))

    def _is_there(self, node_rank: int) -> bool:
        return node_rank in self._followers.joined and self._fleet.has_nursery(node_rank, -1)

    def _tell(self, line: str, told: set[str]) -> None:
        if line not in told:
            told.add(line)
            write_line(self._config, line)


class FollowerPlugin:
    """The session of a node other than 0."""

    def __init__(self, config: pytest.Config, options: Options) -> None:
        self._config = config
        self._options = options
        self._random_before = random.getstate()
        self._exit_code: int | None = None

    def pytest_report_header(self) -> str:
        """Say which node this is."""
        options = self._options
        return (
            f"megatron: node {options.node_rank} of {options.num_nodes}, "
            f"follows node 0 at {options.rdzv_endpoint}"
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Lend node 0 a template, and show what it shows."""
        option = session.config.option
        if option.collectonly:
            return None
        num_errors = 0 if option.continue_on_collection_errors else session.testsfailed
        try:
            key = find_key(os.environ, Path.home())
        except LaunchError as error:
            raise pytest.UsageError(str(error)) from None
        channel = self._call(key, _HOPELESS_S if num_errors else MEETING_S)
        try:
            welcome = self._be_welcomed(channel)
            if num_errors:
                channel.send(Joined(problem=f"{num_errors} errors while it collected"))
                return None  # pytest's own loop says so
            self._follow(session, channel, welcome, key)
        finally:
            channel.close()
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End with node 0's exit code."""
        if self._exit_code is not None:
            session.exitstatus = self._exit_code

    def _call(self, key: bytes, limit_s: float) -> Channel:
        """Call node 0 until it answers; it may come up later.

        Raises:
            pytest.exit.Exception: It does not answer, or has another key.
        """
        options = self._options
        hello = Hello(role="node", gang=0, rank=-1, node_rank=options.node_rank, pid=os.getpid())
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return connect(self._address, key, hello)
            except WrongKeyError:
                raise pytest.exit.Exception(
                    f"node 0 at {options.rdzv_endpoint} has another key than this node; "
                    f"{_KEY_ADVICE}",
                    _BROKEN,
                ) from None
            except OSError as error:
                if time.monotonic() > deadline:
                    raise pytest.exit.Exception(
                        f"node 0 at {options.rdzv_endpoint} did not answer in {limit_s:g} s "
                        f"({error}); is its pytest running, and is the port open?",
                        _BROKEN,
                    ) from None
            time.sleep(_RETRY_S)

    def _be_welcomed(self, channel: Channel) -> Welcome:
        """Return what node 0 expects of this node.

        Raises:
            pytest.UsageError: It was started otherwise than this one.
        """
        match channel.receive():
            case Welcome() as welcome:
                pass
            case Ended(text=text):
                raise pytest.UsageError(text)
            case _:
                raise self._is_gone()
        own = nodes_of(self._options, len(this_host().gpus))
        theirs = Nodes(num_nodes=welcome.num_nodes, ranks_per_node=welcome.ranks_per_node)
        if own != theirs:
            problem = (
                f"--nnodes {own.num_nodes} with {own.ranks_per_node} ranks each, node 0 has "
                f"--nnodes {theirs.num_nodes} with {theirs.ranks_per_node}; give both the same"
            )
            channel.send(Joined(problem=problem))
            raise pytest.UsageError(problem)
        return welcome

    def _follow(
        self, session: pytest.Session, channel: Channel, welcome: Welcome, key: bytes
    ) -> None:
        lease: Lease | None = None
        if welcome.num_gpus:
            lease = lease_gpus(this_host().gpus, welcome.num_gpus, self._write_line)
            os.environ[_DEVICES] = ",".join(gpu.uuid for gpu in lease.gpus)
        start = self._start_warm if welcome.collecting else self._fork_template
        end = start(session, channel, welcome, key)
        try:
            channel.send(_compare(session, welcome))
            self._show(session, channel)
        finally:
            end()
            if lease is not None:
                lease.close()

    def _fork_template(
        self, session: pytest.Session, channel: Channel, welcome: Welcome, key: bytes
    ) -> Callable[[], None]:
        """Start what ranks are forked from; return what ends it."""
        leash, held = os.pipe()

        def forget() -> None:
            os.close(held)
            channel.close()

        own = {item.nodeid: item for item in session.items}
        template = Template(
            session=session,
            address=self._address,
            key=key,
            random_state=state_if_seeded(self._random_before),
            coverage={},
            coverage_file="",
            node_rank=self._options.node_rank,
            items=tuple(own.get(node_id) for node_id in welcome.node_ids),
            base_temp=self._base_temp,
            leash=leash,
            forget=forget,
        )
        pid = template.fork()
        os.close(leash)

        def end() -> None:
            os.close(held)
            os.waitpid(pid, 0)

        return end

    def _start_warm(
        self, session: pytest.Session, channel: Channel, welcome: Welcome, key: bytes
    ) -> Callable[[], None]:
        """Start what ranks come from that collect for themselves; return what ends it."""
        del session, channel
        brief = make_brief(
            self._config,
            address=self._address,
            key=key,
            node_ids=welcome.node_ids,
            is_single=welcome.collecting == "fresh",
        )
        devices = {_DEVICES: os.environ[_DEVICES]} if welcome.num_gpus else {}
        brief = replace(
            brief,
            node_rank=self._options.node_rank,
            env={**brief.env, **devices},
            is_leashed=True,
            base_temp=self._base_temp,
        )
        return tell_warm(self._config.stash[KEY], brief).stop

    @property
    def _address(self) -> str:
        host, port = address_of(self._options.rdzv_endpoint)
        return f"tcp:{host}:{port}"

    @property
    def _base_temp(self) -> str:
        factory = self._config._tmp_path_factory  # type: ignore[attr-defined]  # noqa: SLF001
        return str(factory.getbasetemp())

    def _show(self, session: pytest.Session, channel: Channel) -> None:
        """Show what node 0 shows, until it ends, and end like it."""
        while True:
            match channel.receive():
                case Mirrored() as mirrored:
                    replay(self._config, mirrored)
                case Ended() as ended:
                    break
                case _:
                    raise self._is_gone()
        self._exit_code = ended.exit_code
        match ended.kind:
            case "failed":
                session.shouldfail = ended.text  # where pytest's terminal has it from
                raise session.Failed(ended.text)
            case "interrupted":
                raise session.Interrupted(ended.text)
            case "exit":
                raise pytest.exit.Exception(ended.text, ended.exit_code)
            case _:
                session.shouldfail = session.shouldstop = False

    def _is_gone(self) -> BaseException:
        where = self._options.rdzv_endpoint
        return pytest.exit.Exception(
            f"node 0 at {where} is gone before the session ended; see what it printed", _BROKEN
        )

    def _write_line(self, line: str) -> None:
        write_line(self._config, line)


def write_line(config: pytest.Config, line: str) -> None:
    """Tell the user, where there is a terminal."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(line)


def _compare(session: pytest.Session, welcome: Welcome) -> Joined:
    """Return in what this node's collection differs; ranks that collect do so by themselves."""
    if welcome.collecting:
        return Joined()
    own = [item.nodeid for item in session.items]
    theirs, known = set(welcome.node_ids), set(own)
    return Joined(
        missing=tuple(node_id for node_id in welcome.node_ids if node_id not in known),
        extra=tuple(node_id for node_id in own if node_id not in theirs),
    )
