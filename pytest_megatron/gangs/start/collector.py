"""Process that collects for one rank, and how its tests differ from the controller's.

A child of the preloaded process, with the environment of its rank. After collecting it is the agent
of that rank, for each new gang. If it cannot be forked (CUDA, threads), it becomes the rank.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import io
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import _pytest
import pluggy
import pytest
from _pytest._code.code import TracebackEntry
from _pytest.assertion.rewrite import AssertionRewritingHook
from _pytest.config import ConftestImportFailure, _prepareconfig

import pytest_megatron
from pytest_megatron.gangs.controller.other_plugins import decode
from pytest_megatron.gangs.forkserver.server import Agent, fork_rank
from pytest_megatron.gangs.forkserver.store import StoreKeeper
from pytest_megatron.gangs.ipc.channel import BufferedChannel, Channel
from pytest_megatron.gangs.ipc.messages import AskToCollect, Collected, RankConfig, Start
from pytest_megatron.gangs.rank import bootstrap
from pytest_megatron.gangs.rank.lockstep import RankPipes
from pytest_megatron.gangs.rank.logs import RankLogs
from pytest_megatron.gangs.rank.process import RankContext, prepare, run_rank, with_own_temp
from pytest_megatron.process.fork_safety import HARMLESS_ENV, find_obstacle, reseed
from pytest_megatron.process.tree import end_if_forked
from pytest_megatron.session.options import COLLECTING_PLUGIN

SKIPPED = "skipped "  # prefix of the problem of a collector that skipped
_NO_SUCH_TEST = "collected no such test"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionDifference:
    """Difference between the tests of a rank and those of the controller.

    Attributes:
        missing: Node id -> reason why the rank lacks the test, in one line.
        failures: Node id of a collector -> its error, if tests are missing because of it;
            one that skipped did not fail.
        extra: Node ids that the controller does not have.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()

    def is_total(self, num_tests: int) -> bool:
        """Return whether the rank lacks all tests of a session, without a reason for any."""
        return 1 < num_tests == len(self.missing) and {*self.missing.values()} == {_NO_SUCH_TEST}


def digest_of(node_ids: Iterable[str]) -> str:
    """Return a digest of node ids that is independent of their order."""
    return hashlib.sha256("\n".join(sorted(node_ids)).encode()).hexdigest()


def compare(
    known: Iterable[str], found: Iterable[str], problems: Mapping[str, str]
) -> CollectionDifference:
    """Compare the tests of a rank with those of the controller.

    Args:
        known: Node ids of the controller, in order.
        found: Node ids of the rank, in order.
        problems: Node id of a collector of the rank -> reason why it could not be collected.
    """
    known, found = list(known), list(found)
    has, wanted = set(found), set(known)
    causes = {node_id: _cause(node_id, problems) for node_id in known if node_id not in has}
    failed = [c for c in dict.fromkeys(causes.values()) if c is not None]
    return CollectionDifference(
        missing={node_id: _why(cause, problems) for node_id, cause in causes.items()},
        failures={c: problems[c] for c in failed if not problems[c].startswith(SKIPPED)},
        extra=tuple(dict.fromkeys(node_id for node_id in found if node_id not in wanted)),
    )


def last_line(problem: str) -> str:
    """Return the last line of a problem, which may follow a traceback."""
    return problem.rstrip().rpartition("\n")[2]


def _why(cause: str | None, problems: Mapping[str, str]) -> str:
    return _NO_SUCH_TEST if cause is None else last_line(problems[cause])


def _cause(node_id: str, problems: Mapping[str, str]) -> str | None:
    """Return the innermost collector with a problem that a test is below, or None."""
    above = [
        c for c in problems if not c or node_id == c or node_id.startswith((f"{c}::", f"{c}/"))
    ]
    return max(above, key=len) if above else None


_RECIPES = (".yaml", ".yml")
_PACKAGES_OF_PYTEST = [
    Path(module.__file__ or "").parent for module in (_pytest, pluggy, importlib, pytest_megatron)
]
_WARN_IMPORTED = "_warn_already_imported"  # a method of pytest's import hook


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """Data of the session for ranks that collect for themselves.

    Attributes:
        arguments: Arguments of pytest as typed, and those that ranks add.
        argv: `sys.argv` of the controller.
        path: `sys.path` before any import of the user's code.
        env: The environment at that time.
        base_temp: Directory for temporary files, see `SessionTemplate`.
    """

    node_rank: int
    directory: str
    arguments: list[str]
    argv: list[str]
    path: list[str]
    env: Mapping[str, str]
    base_temp: str = ""


def collect_and_serve(info: SessionInfo, rank_config: RankConfig, pipes: RankPipes) -> NoReturn:
    """Collect as a rank, and serve as its agent."""
    harmless = {name: value for name, value in HARMLESS_ENV.items() if name not in info.env}
    os.environ.clear()
    os.environ.update({**info.env, **harmless, **rank_config.env})
    os.chdir(info.directory)
    sys.path[:] = info.path
    sys.argv[:] = info.argv
    reseed()
    RankLogs(Path(rank_config.log_dir)).redirect()
    bootstrap.write_stacks_on_signal(Path(rank_config.log_dir))
    CollectingPlugin(info, rank_config, pipes, list(harmless)).serve()


def describe_error(error: BaseException) -> str:
    """Return an error as pytest shows it, with the frames of the user's code alone.

    The last line is the error with its place.
    """
    if isinstance(error, pytest.UsageError | pytest.exit.Exception):  # for which it has no frames
        return f"could not collect: {type(error).__name__}: {error}"
    cause = error.__cause__ or error if isinstance(error, ConftestImportFailure) else error
    assert cause.__traceback__ is not None
    found = pytest.ExceptionInfo.from_exc_info((type(cause), cause, cause.__traceback__))
    found.traceback = found.traceback.filter(_is_of_user) or found.traceback
    entry = found.traceback[-1]
    place = f"{os.path.relpath(entry.path)}:{entry.lineno + 1}"
    what = f"{type(cause).__name__}: {cause}".partition("\n")[0]
    return f"{found.getrepr(style='short')}\ncould not collect: {what} ({place})"


def _is_of_user(entry: TracebackEntry) -> bool:
    path = Path(entry.path)
    return "<frozen" not in path.name and not any(map(path.is_relative_to, _PACKAGES_OF_PYTEST))


def _expect_early_imports() -> None:
    """Disable pytest's warning about plugins that were imported before it started.

    If warnings are errors, no rank could collect.
    """
    setattr(AssertionRewritingHook, _WARN_IMPORTED, lambda *_: None)


def _put_away_reruns(config: pytest.Config) -> None:
    """Leave reruns to the controller: in a worker, pytest-rerunfailures needs its socket."""
    manager = config.pluginmanager
    names = ("rerunfailures", "pytest_rerunfailures")  # the second one if `-p` loads it
    plugin = next(filter(None, map(manager.get_plugin, names)), None)
    if plugin is not None:
        manager.unregister(plugin)
        config.addinivalue_line("markers", "flaky: of pytest-rerunfailures")


class CollectingPlugin:
    """Hooks of a rank that collects for itself.

    Attributes:
        end: Exception that ended pytest before it had collected.
    """

    _asked: AskToCollect

    def __init__(
        self, info: SessionInfo, rank_config: RankConfig, pipes: RankPipes, harmless: list[str]
    ) -> None:
        """Begin to collect.

        Args:
            info: Data of the session.
            rank_config: Configuration of the rank.
            pipes: What it shares with its agent.
            harmless: Variables that are set while it collects alone.
        """
        self._info, self._rank_config, self._pipes = info, rank_config, pipes
        self._channel = Channel(socket.socket(fileno=pipes.connection))
        self._pid = os.getpid()
        self._harmless = harmless
        self._random_before = random.getstate()
        self._random_state: bootstrap.RandomState | None = None
        self._problems: dict[str, str] = {}
        self.end: BaseException | None = None

    def serve(self) -> NoReturn:
        """Load what the session has, collect when that is asked for, and serve the controller."""
        _expect_early_imports()
        config: pytest.Config | None = None
        try:
            config = _prepareconfig(list(self._info.arguments), [_Named(self)])
        except BaseException as error:  # noqa: BLE001 - report every error to the controller
            self.end = error
        message = self._channel.receive()
        if not isinstance(message, AskToCollect):
            os._exit(0)
        self._asked = message
        try:
            if config is not None:
                self._collect(config)
        except BaseException as error:  # noqa: BLE001 - report every error to the controller
            self.end = error
        problem = "pytest ended before it had collected"
        if self.end is not None:
            sys.stderr.write("".join(traceback.format_exception(self.end)))
            problem = describe_error(self.end)
        found = Collected(is_same=False, problems={"": problem}, obstacle="it has nothing")
        self._channel.send(found)
        self._channel.receive()
        os._exit(0)

    def _collect(self, config: pytest.Config) -> None:
        """Run a session as far as its loop, as a worker of pytest-xdist does."""
        _put_away_reruns(config)
        option = config.option
        settings: dict[str, object] = {
            "numprocesses": None,
            "tx": [],
            "dist": "no",
            "looponfail": False,
            "clean_alluredir": False,
        }
        vars(option).update({k: v for k, v in settings.items() if hasattr(option, k)})
        option.maxfail = 0
        option.cacheclear = False
        own = replace(self._rank_config, base_temp=self._asked.base_temp)
        option.basetemp = with_own_temp(own, self._info.base_temp).base_temp
        vars(config)["workerinput"] = decode(self._asked.workerinput)
        vars(config)["workeroutput"] = {}
        files = [argument.partition("::")[0] for argument in config.args]
        config.args = [f for f in dict.fromkeys(files) if not f.endswith(_RECIPES)]
        Path(option.basetemp).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        config.hook.pytest_cmdline_main(config=config)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Discard terminal output, as the controller reports."""
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter._tw._file = io.StringIO()

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Keep the exception of a hook, as terminal output is discarded."""
        self.end = excinfo.value

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Keep `pytest.exit` and similar exceptions."""
        self.end = excinfo.value

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Unregister plugins of the controller."""
        manager = session.config.pluginmanager
        if manager.has_plugin("_cov"):
            manager.unregister(name="_cov")
        if manager.has_plugin("pdbinvoke"):  # there is no terminal
            self._debugger = manager.unregister(name="pdbinvoke")

    _debugger: object = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> None:
        """Write the current collector, in case the process dies."""
        self._pipes.note(collector.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep errors and skips of collectors."""
        place = report.nodeid or "."
        if report.failed:
            text = str(report.longreprtext).strip()
            reason = text.splitlines()[-1].removeprefix("E").strip() if text else "no reason"
            self._problems[report.nodeid] = f"{text}\ncould not collect {place}: {reason}"
        elif report.skipped and isinstance(report.longrepr, tuple):
            self._problems[report.nodeid] = f"{SKIPPED}{place}: {report.longrepr[2]}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> NoReturn:
        """Send the collected tests, and serve: forked ranks run tests from here."""
        end_if_forked(self._pid)
        gc.freeze()  # a failed test collects garbage: 0.25 s in Megatron-LM's modules
        manager = session.config.pluginmanager
        if self._debugger is not None:
            manager.register(self._debugger, "pdbinvoke")
        self._random_state = bootstrap.state_if_seeded(self._random_before)
        for name in self._harmless:
            os.environ.pop(name, None)
        os.environ.update(self._rank_config.env)
        node_ids = tuple(item.nodeid for item in session.items)
        is_same = digest_of(node_ids) == self._asked.digest
        self._pipes.note("")
        obstacle = find_obstacle()
        self._channel.send(
            Collected(
                is_same=is_same,
                node_ids=() if is_same else node_ids,
                problems={} if is_same else self._problems,
                obstacle=obstacle,
            )
        )
        context = RankContext(
            session=session,
            random_state=self._random_state,
            base_temp=self._info.base_temp,
            is_own_session=True,
        )
        run = partial(run_rank, context, prepare(session))
        if obstacle:
            self._become_rank(run)
        self._channel.leave()
        channel = BufferedChannel(socket.socket(fileno=self._pipes.connection))
        keeper = StoreKeeper()
        Agent(channel, fork_rank(channel, keeper, run), keeper).serve()
        os._exit(0)

    def _become_rank(self, run: Callable[[RankConfig, RankPipes], NoReturn]) -> NoReturn:
        """Wait for the configuration of a rank, and run it in this process."""
        message = self._channel.receive()  # descriptors of locks that came along stay open
        if not isinstance(message, Start):
            os._exit(0)
        self._channel.leave()
        run(message.configs[0], self._pipes)


class _Named:
    """Registers the plugin under its name, as early as pytest accepts plugins."""

    def __init__(self, plugin: CollectingPlugin) -> None:
        self._plugin = plugin

    def pytest_plugin_registered(self, plugin: object, manager: pytest.PytestPluginManager) -> None:
        """Register the plugin with this one."""
        if plugin is self:
            manager.register(self._plugin, COLLECTING_PLUGIN)
