"""The session of a node other than 0, which follows node 0's.

It collects as well, has an agent start ranks for node 0, and ends with the exit code of node 0. It
reports nothing: outcomes are on node 0.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pytest_megatron.base.text import counted
from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.ipc.channel import Channel, WrongKeyError, connect
from pytest_megatron.gangs.ipc.messages import Joined, Register, SessionEnded, Welcome
from pytest_megatron.gangs.nodes.leader import (
    BROKEN,
    DEVICES,
    KEY_ADVICE,
    MEETING_S,
    RETRY_S,
    address_of,
    nodes_of,
)
from pytest_megatron.gangs.rank.bootstrap import state_if_seeded
from pytest_megatron.gangs.rank.process import RankContext, temp_factory
from pytest_megatron.gangs.start.environment import KEY
from pytest_megatron.gangs.start.forkserver import SessionTemplate, load
from pytest_megatron.gangs.start.start_mode import (
    make_session_info,
    modules_to_load,
    serve_preloaded,
)
from pytest_megatron.gangs.topology import Nodes, find_key
from pytest_megatron.gpu.host import Lease, lease_gpus, this_host
from pytest_megatron.session.options import Options
from pytest_megatron.session.state import write_line

FOLLOWER_NAME = "megatron-follower"
_HOPELESS_S = 20.0  # to connect, for a node with collection errors
_END_S = 30.0  # for node 0 to print its summary


class FollowerPlugin:
    """The session of a node other than 0."""

    def __init__(self, config: pytest.Config, options: Options) -> None:
        self._config = config
        self._options = options
        self._random_before = random.getstate()
        self._exit_code: int | None = None
        self._channel: Channel | None = None

    def pytest_report_header(self) -> str:
        """Name the node and its endpoint."""
        options = self._options
        return (
            f"megatron: node {options.node_rank} of {options.num_nodes}, "
            f"follows node 0 at {options.rdzv_endpoint}"
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Start an agent for node 0, and wait until node 0 ends."""
        if session.config.option.collectonly:
            return None
        try:
            return self._join(session)
        finally:
            self._drop_reporters(session)

    def _join(self, session: pytest.Session) -> bool | None:
        """Join node 0 unless this node could not collect, which pytest's own loop reports."""
        going_on = session.config.option.continue_on_collection_errors
        num_errors = 0 if going_on else session.testsfailed
        try:
            key = find_key(os.environ, Path.home(), self._options.rdzv_step)
        except LaunchError as error:
            raise pytest.UsageError(str(error)) from None
        channel = self._channel = self._call(key, "node", _HOPELESS_S if num_errors else MEETING_S)
        welcome = self._be_welcomed(channel)
        if num_errors:
            what = f"{counted(num_errors, 'error')} while it collected"
            channel.send(Joined(problem=f"{what}; see its output"))
            return None
        if problem := _difference(session, welcome):
            channel.send(Joined(problem=problem))
            raise pytest.UsageError(problem)
        self._follow(session, channel, welcome, key)
        return True

    def _drop_reporters(self, session: pytest.Session) -> None:
        """Keep plugins from writing reports of no tests, maybe over those of node 0."""
        manager, hook = session.config.pluginmanager, session.config.hook
        others = (manager.get_plugin("terminalreporter"), session)
        found = [impl.plugin for impl in hook.pytest_runtest_logreport.get_hookimpls()]
        reporters = [plugin for plugin in found if plugin not in others]
        for name in ("pytest_sessionfinish", "pytest_terminal_summary"):
            vars(hook)[name] = manager.subset_hook_caller(name, reporters)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End with node 0's exit code."""
        if self._exit_code is not None:
            session.exitstatus = self._exit_code

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Exit after node 0, as `srun --kill-on-bad-exit` ends all tasks after one that fails."""
        if self._channel is None:
            return
        if self._exit_code is not None:
            self._channel.wait_for_end(_END_S)
        self._channel.close()

    def _call(self, key: bytes, role: str, limit_s: float) -> Channel:
        """Connect to node 0, which may start later.

        Raises:
            pytest.exit.Exception: It does not answer, or has another key.
        """
        options = self._options
        registration = Register(role=role, node_rank=options.node_rank)
        started = time.monotonic()
        host, port = address_of(options.rdzv_endpoint)
        while True:
            try:
                return connect(f"{host}:{port}", key, registration)
            except WrongKeyError:
                raise pytest.exit.Exception(
                    f"node 0 at {options.rdzv_endpoint} has another key than this node; "
                    f"{KEY_ADVICE}",
                    BROKEN,
                ) from None
            except OSError as error:
                problem = error
            if time.monotonic() - started > limit_s:
                raise pytest.exit.Exception(
                    f"node 0 at {options.rdzv_endpoint} did not answer in {limit_s:g} s "
                    f"({problem}); is its pytest running, and is the port open?",
                    BROKEN,
                )
            time.sleep(RETRY_S)

    def _be_welcomed(self, channel: Channel) -> Welcome:
        """Return the settings of node 0.

        Raises:
            pytest.UsageError: They differ from those of this node.
        """
        match channel.receive():
            case Welcome() as welcome:
                pass
            case SessionEnded(text=text):
                raise pytest.UsageError(text)
            case _:
                raise self._is_gone()
        own = nodes_of(self._options)
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
        """Offer ranks to node 0, with GPUs that are leased, until the session ends."""
        lease: Lease | None = None
        if welcome.num_gpus:
            lease = lease_gpus(
                this_host().gpus, welcome.num_gpus, partial(write_line, self._config)
            )
            os.environ[DEVICES] = ",".join(gpu.uuid for gpu in lease.gpus)
        start = self._start_preloaded if welcome.is_collecting else self._fork_template
        connection = self._call(key, "agent", MEETING_S)
        end = start(session, connection, welcome)
        try:
            channel.send(Joined())
            self._wait(session, channel)
        finally:
            with contextlib.suppress(OSError):  # the agent has ended
                connection.socket.shutdown(socket.SHUT_RDWR)
            end()
            connection.close()
            if lease is not None:
                lease.close()

    def _fork_template(
        self, session: pytest.Session, connection: Channel, welcome: Welcome
    ) -> Callable[[], object]:
        """Start the process that forks ranks; return a function that waits for its end."""
        with contextlib.suppress(Exception):  # ranks that load it report the error
            load(modules_to_load(session))
        own = {item.nodeid: item for item in session.items}
        session.items = [own[node_id] for node_id in welcome.node_ids]  # found by index
        context = RankContext(
            session=session,
            random_state=state_if_seeded(self._random_before),
            base_temp=self._base_temp,
        )
        session_end, own_end = os.pipe()

        def forget() -> None:
            os.close(own_end)
            if self._channel is not None:
                self._channel.close()

        template = SessionTemplate(
            context=context,
            coverage={},
            coverage_file="",
            session_end=session_end,
            forget=forget,
        )
        pid = template.fork(connection.socket)
        return lambda: os.waitpid(pid, 0)

    def _start_preloaded(
        self, session: pytest.Session, connection: Channel, welcome: Welcome
    ) -> Callable[[], object]:
        """Start the process for ranks that collect; return a function that waits for its end."""
        del session
        info = make_session_info(self._config)
        devices = {DEVICES: os.environ[DEVICES]} if welcome.num_gpus else {}
        info = replace(
            info,
            node_rank=self._options.node_rank,
            env={**info.env, **devices},
            base_temp=self._base_temp,
        )
        preloaded = serve_preloaded(self._config.stash[KEY], info)
        with contextlib.suppress(OSError):  # `problem` reports it
            socket.send_fds(preloaded.connection, [b"c"], [connection.fileno()])
        return preloaded.stop

    @property
    def _base_temp(self) -> str:
        factory = temp_factory(self._config)
        return "" if factory is None else str(factory.getbasetemp())

    def _wait(self, session: pytest.Session, channel: Channel) -> None:
        """Wait until node 0 ends, and end in the same way; SIGTERM is for node 0 as well."""
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ended = channel.receive()
        if not isinstance(ended, SessionEnded):
            raise self._is_gone()
        self._exit_code = ended.exit_code
        session.shouldfail = session.shouldstop = False
        write_line(
            self._config,
            f"node 0 at {self._options.rdzv_endpoint} has the outcomes, and ended with code "
            f"{ended.exit_code}{': ' * bool(ended.text)}{ended.text}",
        )

    def _is_gone(self) -> BaseException:
        """Return the exit for a session whose node 0 is gone."""
        where = self._options.rdzv_endpoint
        return pytest.exit.Exception(
            f"node 0 at {where} is gone before the session ended; see what it printed", BROKEN
        )


def _difference(session: pytest.Session, welcome: Welcome) -> str:
    """Return how the tests of this node differ from node 0's; ranks may collect for themselves."""
    own = {item.nodeid for item in session.items}
    found = sorted(own.symmetric_difference(welcome.node_ids))
    if welcome.is_collecting or not found:
        return ""
    where = "this node" if found[0] in own else "node 0"
    return (
        f"{counted(len(found), 'test')} of one node only: {found[0]} is collected by {where}; "
        f"give every node the same files and options"
    )
