"""The pytest side of a rank: runs items when told to, and turns reports into messages.

Never prints to the terminal, writes no report and decides nothing: that is the controller's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import NoReturn, cast

import pytest
from _pytest.runner import runtestprotocol

from pytest_megatron.files import JsonValue
from pytest_megatron.gang import bootstrap
from pytest_megatron.gang.channel import Channel
from pytest_megatron.gang.logs import RankLogs
from pytest_megatron.gang.messages import (
    Broken,
    Close,
    Closed,
    Done,
    Hello,
    PhaseEnded,
    RankOrder,
    Ready,
    Run,
)
from pytest_megatron.gang.nursery import RankEnds
from pytest_megatron.hooks.mirror import describe_warning, plain

_SLOW_S = 0.2  # a phase this long is told of at its end, not with the test
# Plugins that act for the whole session; in a rank the controller does what they do.
_CONTROLLER_PLUGINS = ("pytest_timeout", "pytest_rerunfailures", "pytest_cov.plugin")


class RankPlugin:
    """Hooks of one rank.

    Attributes:
        shared_dir: One directory for all ranks of the running test.
    """

    def __init__(self, order: RankOrder, channel: Channel, logs: RankLogs, ends: RankEnds) -> None:
        self.order = order
        self._ends = ends
        self.shared_dir = Path()
        self._channel = channel
        self._logs = logs
        self._run: Run | None = None
        self._reports: list[JsonValue] = []
        self._warnings: list[JsonValue] = []
        self._has_failed = False
        self.printed = _Printed()

    def run_item(self, run: Run, item: pytest.Item, nextitem: pytest.Item | None) -> Done:
        """Run a test; return what to tell."""
        self._run = run
        self._reports, self._warnings, self._has_failed = [], [], False
        self.shared_dir = Path(run.shared_dir)
        self.printed.take()
        item.session.shouldfail = item.session.shouldstop = False
        stop: tuple[JsonValue, ...] = ()
        try:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        except pytest.exit.Exception as error:
            stop = ("exit", error.msg, error.returncode)
        except KeyboardInterrupt:
            stop = ("interrupt", "KeyboardInterrupt", None)
        self._ends.note("")
        bootstrap.wrap_rendezvous()
        num_collectives, num_rendezvous = bootstrap.count_collectives()
        return Done(
            run=run.run,
            reports=tuple(self._reports),
            warnings=tuple(self._warnings),
            num_collectives=num_collectives,
            num_rendezvous=num_rendezvous,
            poison=bootstrap.find_poison() if self._has_failed else "",
            stop=stop,
            printed=self.printed.take(),
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run the phases; plugins that would rerun the item do so in the controller."""
        runtestprotocol(item, log=False, nextitem=nextitem)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Keep what setup prints."""
        with self._capturing(item, "setup"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Keep what the test prints; wait for its GPU before it may pass."""
        with self._capturing(item, "call"):
            result = yield
            bootstrap.synchronize()
            return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """Keep what teardown prints."""
        with self._capturing(item, "teardown"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Take the report of a phase; trouble is told at once."""
        report = yield
        self._take(item.config, report)
        run = self._run
        assert run is not None
        if report.outcome != "passed" or report.duration > _SLOW_S:
            self._channel.send(
                PhaseEnded(
                    run=run.run,
                    when=report.when,
                    outcome=report.outcome,
                    at=time.time(),
                )
            )
        if report.failed:
            self._has_failed = True
            if run.is_last_if_failed:
                item.session.shouldfail = "the session ends here"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the report of a subtest; pytest itself logs no others here."""
        if self._config is not None:
            self._take(self._config, report)

    def pytest_warning_recorded(
        self,
        warning_message: object,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        """Take a warning."""
        self._warnings.append(describe_warning(warning_message, when, nodeid, location))

    _config: pytest.Config | None = None

    def pytest_configure(self, config: pytest.Config) -> None:
        """Remember the configuration; called at registration as well."""
        self._config = config

    def _take(self, config: pytest.Config, report: pytest.TestReport) -> None:
        if (
            report.outcome == "passed"
            and type(report) is pytest.TestReport
            and not (report.sections or report.user_properties or hasattr(report, "wasxfail"))
        ):
            self._reports.append([report.when, report.start, report.stop])
            return
        found = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._reports.append(cast("JsonValue", plain(found)))

    @contextlib.contextmanager
    def _capturing(self, item: pytest.Item, when: str) -> Generator[None]:
        self._ends.note(when)
        if not self.order.is_capturing:
            yield
            return
        try:
            yield
        finally:
            for stream, text in self._logs.new_text():
                item.add_report_section(when, stream, text)


class _Printed:
    """Takes the place of pytest's terminal in a rank: keeps the text, and writes it to the log."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def write(self, text: str) -> int:
        self._parts.append(text)
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""

    def isatty(self) -> bool:
        return False

    def take(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        return text


def run_forked_rank(
    session: pytest.Session,
    order: RankOrder,
    ends: RankEnds,
    *,
    call: Callable[[Hello], Channel],
    random_before: object,
    missing: Mapping[str, str],
) -> NoReturn:
    """Be a rank that was forked with the collected session in it; never returns.

    Args:
        session: What was collected.
        order: Which rank to be.
        ends: What is shared with the nursery.
        call: Connects to the controller.
        random_before: State of `random` before collection.
        missing: Node id -> why this node has no such test.
    """
    config = session.config
    atexit._clear()  # noqa: SLF001 - what the controller wants to do at its end is not ours
    logs = _take_streams(config, order)
    bootstrap.become_rank(order, ends, random_before=random_before)
    channel = call(
        Hello(
            role="rank",
            gang=order.gang,
            rank=order.rank,
            node_rank=order.node_rank,
            pid=os.getpid(),
        ),
    )
    plugin = RankPlugin(order, channel, logs, ends)
    _make_rank_of(config, plugin)
    for name in ("gethookproxy",):
        session.__dict__.pop(name, None)
    ready = Ready(missing=missing, extra=(), clock=time.time())
    serve(session, plugin, channel, ready, session.items)


def serve(
    session: pytest.Session,
    plugin: RankPlugin,
    channel: Channel,
    ready: Ready,
    items: list[pytest.Item],
) -> NoReturn:
    """Run what the controller sends until it says close, or is gone."""
    channel.send(ready)
    planned: pytest.Item | None = None
    exit_code = 0
    try:
        while True:
            match channel.receive():
                case Run() as run:
                    item = items[run.index]
                    nextitem = items[run.next_index] if run.next_index >= 0 else None
                    if planned is not item:
                        session._setupstate.teardown_exact(item)  # noqa: SLF001 - pytest's own way
                    planned = nextitem
                    done = plugin.run_item(run, item, nextitem)
                    channel.send(done)
                case Close():
                    channel.send(Closed(problem=_close(session)))
                    break
                case _:
                    break
    except KeyboardInterrupt:
        channel.send(Closed(problem=_close(session)))
        exit_code = 130
    except BaseException:  # noqa: BLE001 - the controller has to know of it, whatever it is
        channel.send(Broken(problem=traceback.format_exc()))
        exit_code = 70
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()  # noqa: SLF001 - what tests registered
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _close(session: pytest.Session) -> str:
    """Tear down every fixture; return what went wrong, or ""."""
    problem = ""
    try:
        session._setupstate.teardown_exact(None)  # noqa: SLF001 - pytest's own way
    except BaseException:  # noqa: BLE001 - a fixture of a user
        problem = traceback.format_exc()
    return problem


def _take_streams(config: pytest.Config, order: RankOrder) -> RankLogs:
    """Send this process's output to its own files; pytest captures nothing any longer."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:
        with contextlib.suppress(OSError, ValueError):
            capture.stop_global_capturing()
    logs = RankLogs(Path(order.log_dir))
    logs.redirect()
    if capture is not None:
        capture._method = "no"  # noqa: SLF001 - a rank's log is its capture
        capture.start_global_capturing()
    return logs


def _make_rank_of(config: pytest.Config, plugin: RankPlugin) -> None:
    """Turn the controller's configuration into a rank's."""
    manager = config.pluginmanager
    for name, other in list(manager.list_name_plugin()):
        module = getattr(other, "__name__", type(other).__module__)
        if (
            name.startswith("megatron-")
            or module in _CONTROLLER_PLUGINS
            or module.startswith("xdist")
        ):
            manager.unregister(name=name)
    config.option.maxfail = 0
    reporter = manager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter._tw._file = plugin.printed  # noqa: SLF001 - its only way
    factory = config._tmp_path_factory  # type: ignore[attr-defined]  # noqa: SLF001 - xdist's way
    base_temp = Path(plugin.order.base_temp)
    base_temp.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    factory._given_basetemp = base_temp  # noqa: SLF001 - see above
    factory._basetemp = None  # noqa: SLF001 - see above
    manager.register(plugin, "megatron-rank")
