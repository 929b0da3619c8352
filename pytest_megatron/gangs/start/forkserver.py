"""The template process: a fork of the collected session, from which ranks are forked."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.forkserver.server import Agent, fork_rank
from pytest_megatron.gangs.forkserver.store import StoreKeeper
from pytest_megatron.gangs.ipc.channel import BufferedChannel, Channel
from pytest_megatron.gangs.rank import coverage as measure
from pytest_megatron.gangs.rank.process import RankContext, prepare, run_rank
from pytest_megatron.gangs.supervisor.supervisor import Supervisor
from pytest_megatron.process.tree import fork, import_installed, run_guarded

_READY_S = 120.0  # to load torch
_CALL_S = 0.02  # between checks whether it has registered


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTemplate:
    """Data of the template process.

    Attributes:
        context: Data that ranks inherit.
        coverage: What the template itself measures, see `RankConfig`.
        coverage_file: Data file of the coverage.
        forget: Closes descriptors of the session.
        session_end: Descriptor that is readable when the session of this node has ended; on node 0
            the connection closes instead.
        loads: Modules that it loads first; if one cannot be loaded, it exits.
    """

    context: RankContext
    coverage: Mapping[str, JsonValue]
    coverage_file: str
    forget: Callable[[], None]
    session_end: int | None = None
    loads: tuple[str, ...] = ()

    def fork(self, connection: socket.socket) -> int:
        """Fork the template; return the process that ends after all of its descendants.

        Args:
            connection: To the controller.
        """
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = fork()
        if pid:
            return pid
        try:
            self.forget()
            os.setsid()
            run_guarded(partial(self._serve, connection), connection)
        except BaseException:  # noqa: BLE001 - must never go on as a second controller
            traceback.print_exc()
        finally:
            os._exit(0)

    def _serve(self, connection: socket.socket) -> None:
        """Import what ranks need, then fork ranks until the controller is gone."""
        context = self.context
        measurement = measure.start(self.coverage, self.coverage_file)
        try:
            load(self.loads)
        except Exception:  # noqa: BLE001 - ranks that load it report the error
            return
        plugin = prepare(context.session)
        channel = BufferedChannel(connection)
        keeper = StoreKeeper()
        start_rank = fork_rank(channel, keeper, partial(run_rank, context, plugin))
        Agent(channel, start_rank, keeper, self.session_end).serve()
        if measurement is not None:
            measurement.save()


def load(modules: Sequence[str]) -> None:
    """Import modules that every rank would import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_installed(modules)


def wait_for_agent(
    supervisor: Supervisor,
    limit_s: float,
    problem: Callable[[], str],
    restart: Callable[[], None],
) -> None:
    """Wait until the agent of this node is ready; restart it once if it ended.

    Args:
        supervisor: The connections of ranks.
        limit_s: Time limit.
        problem: Returns the reason of its end, or "" while it runs.
        restart: Starts another one.

    Raises:
        LaunchError: It ended twice, or was not ready in time.
    """
    deadline = time.monotonic() + limit_s
    is_restarted = False
    while not supervisor.agents.has(0):
        if reason := problem():
            if is_restarted:
                raise LaunchError("gang", f"the process that starts ranks ended: {reason}")
            is_restarted = True
            restart()
        supervisor.pump(_CALL_S)
        if time.monotonic() > deadline:
            what = f"the process that starts ranks did not connect in {limit_s:g} s"
            raise LaunchError("gang", what)


class TemplateProcess:
    """The template process of this node, restarted once if it dies before it is ready."""

    def __init__(self, template: SessionTemplate, supervisor: Supervisor) -> None:
        """Fork the template process from the session."""
        self._template = template
        self._supervisor = supervisor
        self._pid: int | None = None
        self._fork(template)

    def _fork(self, template: SessionTemplate) -> None:
        """Fork a template, with a connection to the supervisor."""
        ours, theirs = socket.socketpair()
        self._supervisor.connect(Channel(ours))
        with theirs:
            self._pid = template.fork(theirs)

    def wait(self) -> None:
        """Wait until the template is ready; one that was killed is restarted once.

        The second one preloads nothing, as that may have killed the first.

        Raises:
            LaunchError: Neither gets ready.
        """

        def restart() -> None:
            self._fork(replace(self._template, loads=()))

        def problem() -> str:
            return "it was killed" if self._has_ended() else ""

        wait_for_agent(self._supervisor, _READY_S, problem, restart)

    def close(self) -> None:
        """Wait until the template has ended, once the supervisor was stopped."""
        if self._pid is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)

    def _has_ended(self) -> bool:
        """Return whether the template process has ended."""
        if self._pid is None:
            return True
        try:
            pid, _ = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:  # other code has waited for it
            pid = self._pid
        if pid:
            self._pid = None
        return bool(pid)
