"""The plugin of a rank: runs items of the controller, and sends reports as messages.

It never writes to the terminal or to reports, and decides nothing: the controller does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from gc import collect as collect_garbage
from os import getpid  # a test may put another function in its place
from pathlib import Path
from typing import TextIO
from weakref import ref

import pluggy
import pytest
from _pytest.runner import runtestprotocol

from pytest_megatron.base.files import JsonValue
from pytest_megatron.gangs.controller.other_plugins import (
    draw_same_examples,
    notes_on_failure,
    write_snapshots,
)
from pytest_megatron.gangs.controller.reports import describe_warning, failed_subtests, serialise
from pytest_megatron.gangs.controller.testmon import take_lines
from pytest_megatron.gangs.ipc.channel import Channel
from pytest_megatron.gangs.ipc.messages import (
    NOTHING,
    Done,
    Lines,
    PhaseEnded,
    PhaseReport,
    RankConfig,
    Run,
)
from pytest_megatron.gangs.rank import bootstrap
from pytest_megatron.gangs.rank import coverage as measure
from pytest_megatron.gangs.rank.collectives import count_collectives
from pytest_megatron.gangs.rank.debugger import Printed, RankDebugger
from pytest_megatron.gangs.rank.lockstep import RankPipes
from pytest_megatron.gangs.rank.logs import RankLogs, flush_streams
from pytest_megatron.gangs.rank.process_state import StateKeeper
from pytest_megatron.process.originals import traceback
from pytest_megatron.process.tree import end_if_forked

_NOT_KNOWN = SystemExit(70)  # pytest does not pass on the exception of a finalizer
_NEW = 1  # generation of objects that a garbage collection has seen once at most
_SLOW_S = 0.2  # a phase this long is reported at its end, not with the test
_OWN_ATTRIBUTES = frozenset(
    vars(pytest.TestReport("", ("", 0, ""), {}, "passed", None, "call"))  # others belong to plugins
)


class RankPlugin:
    """Hooks of one rank; created and registered before ranks are forked, once for all of them.

    Attributes:
        rank_config: Configuration of the rank.
        shared_dir: One directory for all ranks of the running test.
        captured: 1 or 2 -> the stream into which pytest captured while tests were collected.
    """

    rank_config: RankConfig
    _channel: Channel
    _logs: RankLogs
    _pipes: RankPipes
    _state: StateKeeper
    _pid: int

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.shared_dir = Path()
        self._run: Run | None = None
        self._reports: list[PhaseReport] = []  # not sent yet
        self._warnings: list[JsonValue] = []
        self._lines: Lines = {}
        self._has_failed = False
        self._has_failed_subtest = False
        self._is_clean = True
        self._is_in_phase = False
        self._last: pytest.Item | None = None
        self._failures: list[ref[pytest.ExceptionInfo[BaseException]]] = []
        self.printed = Printed()
        self._shown = ""
        self.debugger = RankDebugger(self.printed)
        self.measurement: measure.Measurement | None = None
        self.captured: dict[int, TextIO] = {}

    def begin(
        self,
        rank_config: RankConfig,
        channel: Channel,
        logs: RankLogs,
        pipes: RankPipes,
        state: StateKeeper,
    ) -> None:
        """Set the rank and its channel, in its own process."""
        self._state = state
        self.rank_config, self._channel, self._logs, self._pipes = rank_config, channel, logs, pipes
        self._pid = getpid()
        self.debugger.begin(channel)

    def is_rerun(self, item: pytest.Item) -> bool:
        """Return whether the test that just failed is to run again."""
        return item is self._last and self._has_failed

    def run_item(self, run: Run, item: pytest.Item, nextitem: pytest.Item | None) -> Done:
        """Run a test; return its message."""
        self._run = run
        if self.is_rerun(item):
            _forget_failure(item)
        self._reports, self._warnings, self._lines, self._failures = [], [], {}, []
        self._has_failed = self._has_failed_subtest = False
        self._is_clean = True
        self._last = item
        self.shared_dir = Path(run.shared_dir)
        self.printed.take()
        self._shown = ""
        draw_same_examples(self.rank_config)
        self._pipes.begin_run(run.run)
        self._pipes.note("setup")
        item.session.shouldfail = item.session.shouldstop = False
        stop: tuple[JsonValue, ...] = ()
        try:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        except pytest.exit.Exception as error:
            stop = ("exit", error.msg, error.returncode)
        except KeyboardInterrupt as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            stop = ("interrupt", f"{place.filename}:{place.lineno}", None)
        self.end_if_forked()
        self._pipes.note("")
        write_snapshots(item.config, self.rank_config)
        if self.measurement is not None:
            self.measurement.end_test(is_last=run.next_index == NOTHING)
        poison = bootstrap.find_poison() if self._has_failed else ""
        if self._has_failed:
            self._free_failure(item)
        poison = self._restore(item, is_last=run.next_index == NOTHING) or poison
        bootstrap.calm_gloo()
        counts = count_collectives(self.rank_config.world_size)
        return Done(
            run=run.run,
            reports=tuple(self._reports),
            warnings=tuple(self._warnings),
            num_collectives=counts.num_collectives,
            num_rendezvous=counts.num_rendezvous,
            num_unmatched=counts.num_unmatched,
            poison=poison,
            stop=stop,
            printed=self._shown,
            printed_late=self.printed.take(),
            is_clean=self._is_clean and not stop and not poison,
            lines=self._lines,
        )

    def _free_failure(self, item: pytest.Item) -> None:
        """Free the variables of a failed test: its tensors would fill the GPU of the next ones.

        pytest keeps the exception, for a debugger, until the next test is called; its frames refer
        to each other. As a rule they are new, and a search among all objects takes as long as the
        loaded modules are many.
        """
        for name in ("exc", "value", "traceback", "type"):
            vars(sys).pop(f"last_{name}", None)
        collect_garbage(_NEW)
        is_alive = any(failure() is not None for failure in self._failures)
        if is_alive and not any(_broken_fixtures(item)):
            collect_garbage()

    def _restore(self, item: pytest.Item, *, is_last: bool) -> str:
        """Restore the state that the test changed, with a warning that names the test.

        Returns:
            Reason why this rank cannot run another test, or "".
        """
        found, problem = ([], "") if is_last else self._state.restore()
        if problem:
            found.append(f"{problem}, and its gang is replaced")
        if found:
            self._warnings.append(
                {
                    "text": f"the test left its rank in another state: {'; '.join(found)}",
                    "module": pytest.__name__,
                    "category": pytest.PytestWarning.__name__,
                    "filename": str(item.path),
                    "lineno": (item.location[1] or 0) + 1,
                    "when": "runtest",
                    "nodeid": item.nodeid,
                    "location": None,
                }
            )
        return problem

    def may_start(self, run: Run) -> bool:
        """Wait for the other ranks; return whether the test before this one passed on all."""
        lockstep = self._pipes.lockstep
        assert lockstep is not None
        return lockstep.may_start(self.rank_config.rank, run=run.run, after=run.after)

    def publish_ending(self, done: Done) -> None:
        """Publish the end of the test to other ranks, after it was sent to the controller."""
        lockstep = self._pipes.lockstep
        if lockstep is not None and not self._channel.is_closed:
            lockstep.publish(self.rank_config.rank, done)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run the phases; plugins that would rerun the item do so in the controller."""
        runtestprotocol(item, log=False, nextitem=nextitem)
        return True

    # Old-style wrappers leave no frame of ours in tracebacks; innermost, as pytest's own capturing
    # is, so that sections come in the same order.

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_runtest_setup(
        self, item: pytest.Item
    ) -> Generator[None, pluggy.Result[object], None]:
        """Capture the output of setup."""
        with self._capturing(item, "setup"):
            outcome = yield
            self.end_if_forked(outcome.exception)

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_runtest_call(
        self, item: pytest.Item
    ) -> Generator[None, pluggy.Result[object], None]:
        """Capture the output of the test; wait for its GPU before it passes."""
        with self._capturing(item, "call"):
            outcome = yield
            self.end_if_forked(outcome.exception)
            if outcome.exception is None:
                try:
                    bootstrap.synchronize()
                except RuntimeError as error:
                    outcome.force_exception(error)

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item
    ) -> Generator[None, pluggy.Result[object], None]:
        """Capture the output of teardown."""
        self._shown = self.printed.take()
        with self._capturing(item, "teardown"):
            outcome = yield
            self.end_if_forked(outcome.exception)

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, pluggy.Result[object], None]:
        """Expect the changes of a fixture with a wider scope until it is torn down.

        A child that a fixture forked sets up no further fixtures.
        """
        before = None if fixturedef.scope == "function" else self._state.look()
        outcome = yield
        self.end_if_forked(outcome.exception)
        if before is not None:
            self._state.accept(fixturedef, before)

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[object]) -> None:
        """Expect the state before that fixture; a forked child tears nothing down."""
        self.end_if_forked(_NOT_KNOWN)
        self._state.release(fixturedef)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep the report of a phase; send it at once if it did not pass."""
        self.end_if_forked(call.excinfo and call.excinfo.value)
        report = yield
        if self._is_in_phase:  # a subtest, which is logged as well
            return report
        self._lines = take_lines(report)
        if report.failed:
            self._failures += [] if call.excinfo is None else [ref(call.excinfo)]
            report.sections += notes_on_failure(item)
        found = _reported(item.config, report)
        run = self._run
        assert run is not None
        is_failed = report.when == "call" and self._has_failed_subtest
        is_passed = report.outcome == "passed" and not is_failed
        self._is_clean = self._is_clean and is_passed
        self._reports += [found] if report.outcome == "passed" else []
        if not is_passed or report.duration > _SLOW_S:
            self._channel.send(
                PhaseEnded(
                    run=run.run,
                    when=found.when,
                    outcome="failed" if is_failed else found.outcome,
                    report=None if report.outcome == "passed" else found,
                )
            )
        if report.failed or is_failed:
            self._has_failed = True
            if run.is_last_if_failed:
                item.session.shouldfail = "the session ends here"
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None]:
        """Keep the report of a subtest; pytest itself logs no others here.

        Nothing is printed, as the controller logs it again.
        """
        with self.printed.nothing():
            yield
        self._reports.append(_reported(self._config, report))
        self._has_failed_subtest = self._has_failed_subtest or report.failed

    def pytest_warning_recorded(
        self,
        warning_message: object,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        """Keep a warning."""
        self._warnings.append(describe_warning(warning_message, when, nodeid, location))

    def end_if_forked(self, error: BaseException | None = None) -> None:
        """Exit if this process was forked by a test and returned to pytest."""
        end_if_forked(self._pid, error)

    def tear_down_late(
        self, session: pytest.Session, item: pytest.Item | None
    ) -> PhaseReport | None:
        """Tear down fixtures that `item` does not need, after the test before it was reported.

        Returns:
            A report of that test's teardown, or None if it passed.
        """
        state = session._setupstate
        previous, self._last = self._last, None
        if previous is None:
            state.teardown_exact(item)
            return None
        call = pytest.CallInfo.from_call(lambda: state.teardown_exact(item), when="teardown")
        if call.excinfo is None:
            return None
        return _reported(session.config, pytest.TestReport.from_item_and_call(previous, call))

    @contextlib.contextmanager
    def _capturing(self, item: pytest.Item, when: str) -> Generator[None]:
        """Surround a phase: note it, and take what it writes."""
        self._pipes.note(when)
        self._is_in_phase = True
        try:
            yield
        finally:
            self._is_in_phase = False
            self.debugger.close()
            flush_streams()
            if self.rank_config.is_capturing:
                for stream, text in self._logs.new_text():
                    item.add_report_section(when, stream, text)


def _reported(config: pytest.Config, report: pytest.TestReport) -> PhaseReport:
    """Return a report for the controller, without pytest's own if it has nothing besides."""
    is_bare = (
        report.outcome == "passed"
        and type(report) is pytest.TestReport
        and not (report.sections or report.user_properties)
        and vars(report).keys() <= _OWN_ATTRIBUTES
    )
    full = None if is_bare else serialise(config, report)
    return PhaseReport(str(report.when), report.outcome, report.start, report.stop, full)


def _broken_fixtures(item: pytest.Item) -> Iterator[pytest.FixtureDef[object]]:
    """Yield fixtures of a test whose exception pytest keeps, to raise it in other tests as well."""
    info = getattr(item, "_fixtureinfo", None)
    for definitions in () if info is None else info.name2fixturedefs.values():
        for definition in definitions:
            if definition.cached_result is not None and definition.cached_result[2]:
                yield definition


def _forget_failure(item: pytest.Item) -> None:
    """Clear the failure of a test, so that a rerun sets its fixtures up again.

    Source: pytest-rerunfailures 16, _remove_cached_results_from_failed_fixtures(), which does so
    if a test is rerun in its own process.
    """
    for definition in _broken_fixtures(item):
        definition.cached_result = None
        definition._finalizers.clear()  # pytest checks that it is empty
    if getattr(item, "_instance", None) is not None:
        del vars(item)["_instance"]  # a class of its own again
        vars(item)["_obj"] = None  # bound to the old instance
    if (counts := failed_subtests(item.config)) is not None:
        counts.clear()
