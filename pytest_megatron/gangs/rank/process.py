"""Process of a rank, from its set-up to its exit; `gangs.rank.plugin` runs items."""

from __future__ import annotations

import atexit
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TextIO, cast

import pytest
from _pytest.capture import MultiCapture
from _pytest.faulthandler import fault_handler_stderr_fd_key
from _pytest.logging import (
    LogCaptureHandler,
    LoggingPlugin,
    caplog_handler_key,
    caplog_records_key,
    catching_logs,
)

from pytest_megatron.features import ExtensionPoint
from pytest_megatron.gangs.controller.other_plugins import (
    WORKER_VARIABLE,
    is_of_controller,
    leave_to_controller,
)
from pytest_megatron.gangs.ipc.channel import Channel
from pytest_megatron.gangs.ipc.messages import (
    UNKNOWN,
    Broken,
    Close,
    Closed,
    PhaseReport,
    RankConfig,
    Ready,
    Run,
)
from pytest_megatron.gangs.rank import bootstrap
from pytest_megatron.gangs.rank import coverage as measure
from pytest_megatron.gangs.rank.lockstep import RankPipes
from pytest_megatron.gangs.rank.logs import RankLogs, open_standard_descriptors
from pytest_megatron.gangs.rank.plugin import RankPlugin
from pytest_megatron.gangs.rank.process_state import StateKeeper
from pytest_megatron.process.originals import os, traceback

_SILENT = 1 << 30  # above the level of any record
_MAKE_LEAK_PLUGIN: ExtensionPoint[Callable[[RankConfig], object]] = ExtensionPoint("rank_plugin")


class KeptHandlers:
    """Replaces the handlers of pytest's logging plugin, which are slow to add, with kept ones."""

    def __init__(self, plugin: LoggingPlugin) -> None:
        self._handlers: tuple[LogCaptureHandler, LogCaptureHandler] = (
            plugin.caplog_handler,
            plugin.report_handler,
        )
        self._level = plugin.log_level
        self._held: list[logging.Logger] = []
        self._levels = [handler.level for handler in self._handlers]

    @contextlib.contextmanager
    def catch(self, item: pytest.Item, when: str) -> Generator[None]:
        """Catch records in one phase of a test."""
        caplog, report = self._handlers
        root = logging.getLogger()
        self._hold()
        level = root.level
        if self._level is not None:
            self._levels = [self._level, self._level]
            if self._level < level:
                root.setLevel(self._level)
        caplog.level, report.level = self._levels
        caplog.reset()
        report.reset()
        item.stash[caplog_records_key][when] = caplog.records
        item.stash[caplog_handler_key] = caplog
        try:
            yield
        finally:
            item.add_report_section(when, "log", report.stream.getvalue().strip())
            self._levels = [caplog.level, report.level]
            caplog.level = report.level = _SILENT
            if root.level != level and self._level is not None:
                root.setLevel(level)

    def _hold(self) -> None:
        """Keep both handlers last in every logger that pytest would attach them to."""
        wanted = _ends_of_chains()
        if wanted != self._held:
            for logger in set(self._held).difference(wanted):
                self._detach(logger)
            self._held = wanted
        caplog, report = self._handlers
        for logger in wanted:
            if logger.handlers[-2:] != [caplog, report]:
                self._detach(logger)
                logger.addHandler(caplog)
                logger.addHandler(report)

    def _detach(self, logger: logging.Logger) -> None:
        for handler in self._handlers:
            logger.removeHandler(handler)


def keep_handlers(config: pytest.Config) -> None:
    """Speed up the capture of log records, in releases of pytest where it is slow."""
    plugin = config.pluginmanager.get_plugin("logging-plugin")
    if isinstance(plugin, LoggingPlugin) and "attached_loggers" in catching_logs.__slots__:
        vars(plugin)["_runtest_for"] = KeptHandlers(plugin).catch


def _ends_of_chains() -> list[logging.Logger]:
    """Return the root logger, and those whose records do not reach it."""
    root = logging.getLogger()
    return [root] + [
        logger
        for logger in root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger) and not logger.propagate and logger is not root
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Data that all ranks share that are forked from one process.

    Attributes:
        session: The collected session.
        random_state: State of `random`, if collecting seeded it.
        base_temp: On other nodes than 0, the directory for temporary files of ranks.
        is_own_session: Whether it collected for one rank alone, and not the controller for all.
    """

    session: pytest.Session
    random_state: bootstrap.RandomState | None
    base_temp: str = ""
    is_own_session: bool = False


def prepare(session: pytest.Session) -> RankPlugin:
    """Prepare a session before ranks are forked, which saves each rank 2 ms.

    Returns:
        The plugin of all ranks.
    """
    config = session.config
    plugin = RankPlugin(config)
    session.__dict__.pop("gethookproxy", None)
    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:  # the log of a rank replaces capturing
        with contextlib.suppress(OSError, ValueError):
            plugin.captured = _keep_open(vars(capture)["_global_capturing"])
            capture.stop_global_capturing()
        capture._method = "no"
        capture.start_global_capturing()
    open_standard_descriptors()  # pytest does not open closed ones
    leave_to_controller(config)
    _drop_controller_plugins(config)
    manager = config.pluginmanager
    config.option.maxfail = 0
    reporter = manager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter._tw._file = plugin.printed
    manager.register(plugin, "megatron-rank")
    manager.register(plugin.debugger, "megatron-rank-debugger")
    plugin.debugger.install(config)
    keep_handlers(config)
    return plugin


def run_rank(
    context: RankContext, plugin: RankPlugin, rank_config: RankConfig, pipes: RankPipes
) -> NoReturn:
    """Run this process as a rank until it ends."""
    config = context.session.config
    rank_config = with_own_temp(rank_config, context.base_temp)
    if not context.is_own_session:
        atexit._clear()  # functions of the controller
    measurement = measure.start(rank_config.coverage, rank_config.coverage_file)
    logs = _take_streams(config, rank_config, plugin.captured)
    bootstrap.become_rank(rank_config, pipes, random_state=context.random_state)
    channel = Channel(socket.socket(fileno=pipes.connection))
    _take_temp(config, rank_config)
    state = StateKeeper(rank_config.world_size, logs, rank_config.env)
    plugin.begin(rank_config, channel, logs, pipes, state)
    make_leak_plugin = _MAKE_LEAK_PLUGIN.first() if rank_config.finds_leaks else None
    if make_leak_plugin is not None:
        config.pluginmanager.register(make_leak_plugin(rank_config), "megatron-leaks")
    os.register_at_fork(after_in_child=channel.close)
    plugin.measurement = measurement
    serve(context.session, plugin, channel, is_own_session=context.is_own_session)


def with_own_temp(rank_config: RankConfig, base_temp: str) -> RankConfig:
    """Return a configuration with a temporary directory of another node.

    Args:
        rank_config: Configuration that node 0 sent.
        base_temp: Temporary directory of that node's session; "" on node 0.
    """
    if not base_temp:
        return rank_config
    gang, rank = Path(rank_config.base_temp).parts[-2:]
    return replace(rank_config, base_temp=str(Path(base_temp, gang, rank)))


def serve(
    session: pytest.Session,
    plugin: RankPlugin,
    channel: Channel,
    *,
    is_own_session: bool,
) -> NoReturn:
    """Run tests of the controller until it sends `Close` or disconnects; then exit."""
    find = _finder(session.items, is_own_session=is_own_session)
    channel.send(Ready())
    planned: pytest.Item | None = None
    exit_code = 0
    try:
        while True:
            match channel.receive():
                case Run() as run:
                    if run.after and not plugin.may_start(run):
                        continue
                    item = find(run.index, run.node_id)
                    assert item is not None
                    late: PhaseReport | None = None
                    if planned is not item and not plugin.is_rerun(item):
                        late = plugin.tear_down_late(session, item)
                        plugin.end_if_forked()
                    planned = find(run.next_index, run.next_node_id)
                    is_unknown = run.next_index == UNKNOWN
                    # A collector in the place of the next item keeps all but the test set up.
                    nextitem = cast("pytest.Item | None", item.parent if is_unknown else planned)
                    done = plugin.run_item(run, item, nextitem)
                    channel.send(done if late is None else replace(done, late=late))
                    plugin.publish_ending(done)
                case Close():
                    late = plugin.tear_down_late(session, None)
                    plugin.end_if_forked()
                    problem = _finish_session(session) if is_own_session else ""
                    channel.send(Closed(problem=problem, late=late))
                    break
                case _:
                    break
    except KeyboardInterrupt as error:
        plugin.end_if_forked(error)
        channel.send(Closed(problem=_close(session)))
        exit_code = 130
    except BaseException as error:  # noqa: BLE001 - the controller has to know of it
        plugin.end_if_forked(error)
        channel.send(Broken(problem=traceback.format_exc()))
        exit_code = 70
    plugin.end_if_forked()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()  # functions of tests
    if plugin.measurement is not None:
        plugin.measurement.save()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)  # of the module os


def _finder(
    items: list[pytest.Item], *, is_own_session: bool
) -> Callable[[int, str], pytest.Item | None]:
    """Return a function that finds items of the controller by index, or else by node id."""
    if not is_own_session:
        return lambda index, _: items[index] if index >= 0 else None
    by_id = {item.nodeid: item for item in items}
    return lambda _, node_id: by_id.get(node_id)


def _finish_session(session: pytest.Session) -> str:
    """Finish the session as a worker of pytest-xdist does; return the traceback of an error."""
    config = session.config
    # Some plugins detect a worker by this variable. Tests do not see it: some derive ports from it.
    os.environ.setdefault(WORKER_VARIABLE, str(vars(config)["workerinput"]["workerid"]))
    try:
        config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
        config._ensure_unconfigure()
    except BaseException:  # noqa: BLE001 - hooks of a user
        return traceback.format_exc()
    return ""


def _close(session: pytest.Session) -> str:
    """Tear down every fixture; return the traceback of an error, or ""."""
    problem = ""
    try:
        session._setupstate.teardown_exact(None)
    except BaseException:  # noqa: BLE001 - a fixture of a user
        problem = traceback.format_exc()
    return problem


def _keep_open(capturing: MultiCapture[str] | None) -> dict[int, TextIO]:
    """Keep the streams open that pytest put in the place of the standard ones.

    A module that is imported may keep one, as `logging.basicConfig` does.

    Returns:
        1 or 2 -> the stream.
    """
    found: dict[int, TextIO] = {}
    for number, name in enumerate(("out", "err"), start=1):
        stream = getattr(getattr(capturing, name, None), "tmpfile", None)
        if stream is not None:
            vars(stream)["close"] = lambda: None
            found[number] = stream
    return found


def _take_streams(
    config: pytest.Config, rank_config: RankConfig, captured: Mapping[int, TextIO]
) -> RankLogs:
    """Redirect the output of this process to its log files."""
    logs = RankLogs(Path(rank_config.log_dir))
    logs.redirect()
    for number, stream in captured.items():
        with contextlib.suppress(OSError):  # of --capture=sys, which has no descriptor
            os.dup2(number, stream.fileno())
    stderr = config.stash.get(fault_handler_stderr_fd_key, None)
    if stderr is not None:  # pytest's own copy of the controller's stderr, for its time limit
        if stderr > 2:  # noqa: PLR2004 - stderr
            os.dup2(2, stderr)
        else:  # it has the number of a stream that the session lacked
            config.stash[fault_handler_stderr_fd_key] = os.dup(2)
    return logs


def _drop_controller_plugins(config: pytest.Config) -> None:
    """Unregister plugins that act for the whole session."""
    manager = config.pluginmanager
    for name, other in list(manager.list_name_plugin()):
        if name.startswith("megatron-") or is_of_controller(other):
            manager.unregister(name=name)


def temp_factory(config: pytest.Config) -> pytest.TempPathFactory | None:
    """Return the factory of temporary directories, or None without pytest's plugin."""
    return getattr(config, "_tmp_path_factory", None)


def _take_temp(config: pytest.Config, rank_config: RankConfig) -> None:
    """Set the parent directory of `tmp_path` to the rank's own."""
    factory = temp_factory(config)
    if factory is None:
        return
    Path(rank_config.base_temp).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    factory._given_basetemp = Path(rank_config.base_temp)  # xdist's way
    factory._basetemp = None
