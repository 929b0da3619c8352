"""Plugin that runs python tests on gangs: the controller's run loop.

Active in the controller, and under pytest-xdist in each worker, where xdist has the loop and only
the phases of an item are replaced. Items always run through pytest's own protocol, so that plugins
which rerun or time items work as usual.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import os
import signal
from collections.abc import Generator, Sequence
from dataclasses import replace
from os import getpid  # a test may put another function in its place
from pathlib import Path
from typing import cast

import pluggy
import pytest

from pytest_megatron.errors import LaunchError
from pytest_megatron.gangs.controller.dispatcher import Dispatcher
from pytest_megatron.gangs.controller.gang_pool import GangPool
from pytest_megatron.gangs.controller.other_plugins import (
    is_of_controller,
    is_of_phases,
    keep_unused_snapshots,
    lines_on_limits,
    module_of,
)
from pytest_megatron.gangs.controller.reports import (
    build_report,
    count_failed_subtest,
    excinfo_of,
    warn_again,
)
from pytest_megatron.gangs.controller.testmon import add_lines, recorded_by_ranks
from pytest_megatron.gangs.markers import limit_of, spec_of
from pytest_megatron.gangs.merge import RankResult, RunEnd, reported
from pytest_megatron.gangs.nodes.leader import first_gang, nodes_of, room_on_gpus
from pytest_megatron.gangs.rank.logs import file_size, read_piece
from pytest_megatron.gangs.record import (
    plan_lines,
    test_record,
    transient_cause,
    why_not_again,
)
from pytest_megatron.gangs.start.environment import KEY
from pytest_megatron.gangs.topology import GangSpec, count_gpus
from pytest_megatron.gpu.host import this_host
from pytest_megatron.process.tree import end_if_forked
from pytest_megatron.runs.headline import reproduce_line
from pytest_megatron.session.options import WORKLOADS_PLUGIN, Options, has_workers
from pytest_megatron.session.run_file import RecordCarrier, put_record
from pytest_megatron.session.state import IS_WORKLOAD, RunSession, show_no_stacks, write_line
from pytest_megatron.triage.signatures import Signature

_LOG = logging.getLogger("pytest_megatron.gangs")


class PhaseHooks:
    """Pytest's hooks, with the phases of items of gangs replaced."""

    def __init__(self, hooks: pluggy.HookRelay, gang_plugin: GangPlugin) -> None:
        self._hooks = hooks
        self._gangs = gang_plugin

    def __getattr__(self, name: str) -> object:
        return getattr(self._hooks, name)

    def pytest_runtest_setup(self, *, item: pytest.Item) -> object:
        """Set up on the gang."""
        if self._gangs.is_ours(item):
            self._gangs.set_up(item)
            return None
        return self._hooks.pytest_runtest_setup(item=item)

    def pytest_runtest_call(self, *, item: pytest.Item) -> object:
        """Raise what the gang reported of the call."""
        if self._gangs.is_ours(item):
            self._gangs.call(item)
            return None
        return self._hooks.pytest_runtest_call(item=item)

    def pytest_runtest_teardown(self, *, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        """Tear down on the gang."""
        if self._gangs.is_ours(item):
            self._gangs.tear_down(item, nextitem)
            return None
        return self._hooks.pytest_runtest_teardown(item=item, nextitem=nextitem)

    def pytest_runtest_makereport(
        self, *, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> pytest.TestReport:
        """Return the merged report of the ranks."""
        if self._gangs.is_ours(item) and call.excinfo is None:
            return self._gangs.report_phase(item, call)
        found: pytest.TestReport = self._hooks.pytest_runtest_makereport(item=item, call=call)
        return found


PLUGIN_NAME = "megatron-gangs"
_NUM_LAST_LINES = 40  # of stderr: room for a traceback, or the stacks of an aborted process


class GangPlugin(RecordCarrier):
    """Runs items on gangs."""

    def __init__(self, config: pytest.Config, run: RunSession) -> None:
        self._config = config
        self._pid = getpid()
        self._run = run
        self._options: Options = run.options
        self._specs: dict[pytest.Item, GangSpec] = {}
        self._limits: dict[pytest.Item, float] = {}
        self._pool: GangPool | None = None
        self._dispatcher: Dispatcher | None = None
        self._current: pytest.Item | None = None
        self._nextitem: pytest.Item | None = None
        self._reruns: dict[pytest.Item, list[Signature]] = {}
        self._not_again: dict[pytest.Item, str | None] = {}  # why an item is not run again
        self._is_replaying = False
        self._broken: Exception | None = None
        self._limits_of_others: list[str] = []

    # Collection

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Determine the gangs of items; skip items that this host has too few GPUs for."""
        room, size = room_on_gpus(self._options), nodes_of(self._options).num_ranks
        for item in items:
            spec = spec_of(item, self._options, default_size=size, room=room)
            if spec is None:
                continue
            self._limits[item] = limit_of(item, self._options)
            if spec.device == "cuda" and spec.world_size > room * self._options.num_nodes:
                num_gpus = count_gpus(spec.world_size, self._options.ranks_per_gpu)
                reason = f"needs {num_gpus} GPUs, this host has {len(this_host().gpus)}"
                item.add_marker(pytest.mark.skip(reason=reason))
                continue
            self._specs[item] = spec
        self._refuse_pdb_rank()
        if not self._config.option.collectonly:
            self._limits_of_others = lines_on_limits(self._config, self._specs)

    def spec_of(self, item: pytest.Item) -> GangSpec | None:
        """Return the gang of an item, None for one that runs elsewhere."""
        return self._specs.get(item)

    def _refuse_pdb_rank(self) -> None:
        """Make sure that some gang has the rank to debug.

        Raises:
            pytest.UsageError: No gang has it.
        """
        rank = self._options.pdb_rank
        widest = max((spec.world_size for spec in self._specs.values()), default=0)
        if rank is not None and 0 < widest <= rank:
            raise pytest.UsageError(
                f"--pdb-rank: {rank} is no rank of a gang, expected 0 to {widest - 1}; lower it"
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Have ranks begin to collect, where they are to do so beside the controller."""
        if not session.config.stash[KEY].is_collecting or self._options.is_plan:
            return
        self._pool = GangPool(self._config, self._run)
        try:
            self._run.refuse_used_run_dir()
            self._pool.begin_ahead(first_gang(self._options))
        except (LaunchError, pytest.UsageError):  # reported when tests are about to run
            self._pool.drop_ahead()

    def pytest_report_collectionfinish(self) -> str | None:
        """Propose the setting that fits a project whose files read the rank."""
        start_env = self._config.stash[KEY]
        late = [] if start_env.watch is None else start_env.watch.rank_readers
        readers = [start_env.reader] if start_env.reader else late
        start, option = self._options.gang_start, self._config.option
        is_unasked = start == "collect" or option.collectonly or option.verbose < 0
        if not self._specs or not readers or is_unasked:
            return None
        reader = self._run.shorten(readers[0])
        if start == "fork":
            return f"megatron: ranks are forked, and have what was read for rank 0: {reader}"
        return (
            f"megatron: every rank collects for itself, for {reader}; if that is always so, write "
            f"megatron_gang_start = collect into the ini file"
        )

    # The loop

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all items, those of gangs on gangs; under pytest-xdist only start the gangs.

        Raises:
            pytest.UsageError: Ranks cannot be started here, or the run directory cannot be made.
        """
        end_if_forked(self._pid)  # while tests were collected
        if has_workers(session.config) and not self._run.is_worker:
            return None  # it has no items, before pytest 8.0 not even an empty list
        # Plugins may have reordered and deselected items meanwhile.
        self._specs = {item: self._specs[item] for item in session.items if self.is_ours(item)}
        has_work = bool(self._specs) or self._options.num_nodes > 1  # others show its output
        if not has_work or session.config.option.collectonly:
            return None
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            return None  # pytest's own loop reports that
        if self._options.is_plan:
            return self._print_plan(session)
        if not self._run.is_worker:
            self._run.refuse_used_run_dir()
        dispatcher = self._open(session)
        for line in self._limits_of_others:
            write_line(self._config, line)
        if self._run.is_worker:
            return None
        self._run.open_run_dir()
        try:
            self._loop(session)
        except KeyboardInterrupt:
            dispatcher.interrupt()
            raise
        except LaunchError as error:
            raise pytest.UsageError(str(error)) from None
        return True

    @pytest.hookimpl(specname="pytest_runtestloop", wrapper=True, trylast=True)
    def pytest_megatron_finish_loop(self) -> Generator[None, object, object]:
        """Close gangs before wrappers of the loop (pytest-cov) read the measured data."""
        try:
            return (yield)
        finally:
            self._shut_down()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """End all processes, however the session ends."""
        self._shut_down()
        keep_unused_snapshots(self._config, self._specs)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Wait for the end of the process that starts ranks."""
        if self._pool is not None:
            self._pool.wait_for_end()

    def _print_plan(self, session: pytest.Session) -> bool | None:
        """Print the planned gangs and their numbers of tests; workloads print theirs."""
        items = [item for item in session.items if IS_WORKLOAD not in item.stash]
        for line in plan_lines(self._specs.get(item) for item in items):
            write_line(self._config, line)
        return None if self._config.pluginmanager.has_plugin(WORKLOADS_PLUGIN) else True

    def _open(self, session: pytest.Session) -> Dispatcher:
        """Open the pool of gangs, and replace the phases of items of gangs."""
        if self._pool is None:
            self._pool = GangPool(self._config, self._run)
        pool = self._pool
        pool.plan(self._specs.values())
        dispatcher = self._dispatcher = Dispatcher(
            session,
            pool,
            specs=self._specs,
            limits=self._limits,
            options=self._options,
            is_by_hand=self._run.is_worker or getattr(session.config.option, "stepwise", False),
        )
        pool.open(session)
        original = session.gethookproxy

        def get_hooks(fspath: os.PathLike[str]) -> pluggy.HookRelay:
            return cast("pluggy.HookRelay", PhaseHooks(original(fspath), self))

        vars(session)["gethookproxy"] = get_hooks
        dispatcher.let_go_for_others()
        return dispatcher

    def _loop(self, session: pytest.Session) -> None:
        """Run items of the controller, then items of gangs, at the same time if they are small."""
        dispatcher, items = self._open_dispatcher, session.items
        if self._open_pool.leader is not None:
            self._open_pool.leader.wait()
        own = items if dispatcher.is_in_order else [i for i in items if not self.is_ours(i)]
        for item, following in itertools.zip_longest(own, own[1:]):
            self._protocol(session, item, following)
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if not (dispatcher.is_in_order or dispatcher.is_serial) and reporter is not None:
            reporter.showfspath = False  # the file changes with every test, as in pytest-xdist
            if self._open_pool.leader is None:  # other nodes show the reports in their own lines
                reporter.ensure_newline()  # not beside the last file of the controller's tests
        while not dispatcher.is_done:
            with dispatcher.lock:
                dispatcher.dispatch()
                ready = dispatcher.next_to_report()
                if ready is None:
                    dispatcher.pump()
                    ready = dispatcher.next_to_report()
            self._report_late()
            if ready is not None:
                index = dispatcher.index(ready)
                self._protocol(session, ready, items[index + 1] if ready != items[-1] else None)

    def _protocol(
        self, session: pytest.Session, item: pytest.Item, nextitem: pytest.Item | None
    ) -> None:
        """Run pytest's protocol for an item, and end the session where it has to."""
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        end_if_forked(self._pid, SystemExit(bool(session.testsfailed)))
        dispatcher = self._open_dispatcher
        if self._broken is not None:
            raise self._broken
        dispatcher.ended.pop(item, None)
        self._report_late()
        if session.shouldfail:
            dispatcher.is_stopping = True
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            dispatcher.is_stopping = True
            raise session.Interrupted(session.shouldstop)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Record the next item; rank 0 shows fixtures of items of gangs, not the controller."""
        self._current, self._nextitem = item, nextitem
        if not self.is_ours(item):
            return (yield)
        option = item.config.option
        shown, option.setupshow = getattr(option, "setupshow", False), False
        try:
            dispatcher = self._open_dispatcher
            with dispatcher.lock, recorded_by_ranks(item, lambda: dispatcher.ended.get(item)):
                return (yield)
        finally:
            option.setupshow = shown
            if self._run.is_worker:
                self._report_late()

    def _report_late(self) -> None:
        """Report late teardowns as errors of the tests that they belong to."""
        for item, merged in self._open_dispatcher.take_late():
            # In a worker pytest-xdist takes reports of the current item only.
            owner = (self._run.is_worker and self._current) or item
            report = build_report(owner, merged)
            add_lines(report, item, owner)
            self._config.hook.pytest_runtest_logreport(report=report)

    def _shut_down(self) -> None:
        """Close every gang, and report errors of the last teardowns."""
        dispatcher = self._dispatcher
        if dispatcher is not None:
            dispatcher.shut_down()
            self._report_late()
        elif self._pool is not None:  # tests were collected, and none runs
            self._pool.close_ahead()

    # Phases of one item

    def is_ours(self, item: pytest.Item) -> bool:
        """Return whether an item runs on a gang."""
        return item in self._specs

    def set_up(self, item: pytest.Item) -> None:
        """Wait until the item has run on its gang, with all of its phases."""
        dispatcher = self._open_dispatcher
        show_no_stacks()  # ranks have `faulthandler_timeout`
        self._reruns[item], self._not_again[item] = [], None
        try:
            dispatcher.wait_for(item, self._nextitem)
            while (cause := self._cause_to_rerun(item)) is not None:
                self._reruns[item].append(cause)
                dispatcher.rerun(item, cause, self._nextitem)
                dispatcher.wait_for(item, self._nextitem)
        except KeyboardInterrupt:
            if not self._config.getoption("usepdb", default=False):
                raise
            dispatcher.interrupt()  # pytest would debug the controller now
            raise pytest.exit.Exception("KeyboardInterrupt") from None
        except Exception as error:
            self._broken = error  # pytest would report it, and retry the item forever
            raise
        end = dispatcher.ended[item]
        warn_again(self._config, end)
        self._print(end)
        _stop_like_rank(end, item, "setup")

    def _cause_to_rerun(self, item: pytest.Item) -> Signature | None:
        """Return the transient cause for which a test that failed may run again, or None."""
        if len(self._reruns[item]) >= self._options.num_transient_reruns:
            return None
        end = self._open_dispatcher.ended[item]
        # Of a rank that was killed by SIGKILL there is nothing about it.
        dead = [rank for rank in end.ranks if rank.exit_code not in (None, -signal.SIGKILL)]
        cause = transient_cause(
            end.merged,
            [line for rank in end.ranks for line in _stderr_lines(rank)],
            [line for rank in dead for line in _stderr_lines(rank)[-_NUM_LAST_LINES:]],
            self._run.table,
        )
        if cause is None:
            self._not_again[item] = why_not_again(end.merged, self._run.table)
            _LOG.info("%s: not run again, its cause is not known to be transient", item.nodeid)
            return None
        refusal = self._not_again[item] = self._run.retries.claim()
        _LOG.info("%s: run again for %s: %s", item.nodeid, cause.id, refusal or "yes")
        return cause if refusal is None else None

    def call(self, item: pytest.Item) -> None:
        """Report the subtests, which precede the report of the test."""
        end = self._open_dispatcher.ended[item]
        _stop_like_rank(end, item, "call")
        for merged in [m for m in end.merged if m.when == "call"][:-1]:  # the last is its own
            report = build_report(item, merged)
            if report.failed:
                count_failed_subtest(item)
            self._config.hook.pytest_runtest_logreport(report=report)

    def tear_down(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Tear down fixtures of the controller's own tests, as this item would have."""
        end = self._open_dispatcher.ended[item]
        _stop_like_rank(end, item, "teardown")
        self._print(end, is_late=True)
        item.session._setupstate.teardown_exact(nextitem)

    def report_phase(self, item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport:
        """Pass the report of a phase to plugins that did not see it in the ranks."""
        end = self._open_dispatcher.ended[item]
        merged, seen = end.phase(call.when), call
        if merged.outcome == "failed":
            seen = copy.copy(call)
            seen.excinfo = excinfo_of(merged)
        self._is_replaying = True
        try:
            report: pytest.TestReport = self._make_report(item=item, call=seen)
        finally:
            self._is_replaying = False
        causes = self._reruns[item]
        if causes:
            report.user_properties.append(("megatron.reruns", len(causes)))
            report.user_properties.append(("megatron.signature", causes[-1].id))
        if report.failed and (why := self._not_again[item]) is not None:
            report.sections.append(("not run again", why))
        if report.failed:
            command = reproduce_line(self._run.where, report.nodeid)
            report.sections.append(("again", command))
        if call.when == "teardown":
            history = self._open_dispatcher.history[item]
            spec = self._specs[item]
            per_device = self._options.ranks_per_gpu if spec.device == "cuda" else 1
            record = replace(
                test_record(end.merged, spec, history),
                num_devices=count_gpus(spec.world_size, per_device),
            )
            put_record(report, record)
            del self._open_dispatcher.ended[item]  # a rerun of it runs again
        return report

    def _had_part(self, plugin: object) -> bool:
        """Return whether a plugin contributed to a report in the ranks, where it saw the phases."""
        is_ours = module_of(plugin).startswith(("_pytest.", "pytest_megatron."))
        return not (is_ours or is_of_controller(plugin)) and is_of_phases(plugin)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> pytest.TestReport | None:
        """Return the report of a phase that ran on a gang."""
        if not self._is_replaying:
            return None
        return build_report(item, self._open_dispatcher.ended[item].phase(call.when))

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item) -> bool | None:
        """Disable pytest-timeout in the controller: the gang has the limit."""
        return True if self.is_ours(item) else None

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool | None:
        """Skip the cancellation, as there is no timer."""
        return True if self.is_ours(item) else None

    # Helpers

    @functools.cached_property
    def _make_report(self) -> pluggy.HookCaller:
        """Return `pytest_runtest_makereport` of plugins that have not had their part in the ranks.

        Conftest files, and plugins that saw the phases of the test there, would count it twice.
        """
        manager = self._config.pluginmanager
        conftests = manager._conftest_plugins  # not distinguishable otherwise
        others = [p for p in manager.get_plugins() if p in conftests or self._had_part(p)]
        return manager.subset_hook_caller("pytest_runtest_makereport", others)

    @property
    def _open_pool(self) -> GangPool:
        assert self._pool is not None
        return self._pool

    @property
    def _open_dispatcher(self) -> Dispatcher:
        assert self._dispatcher is not None
        return self._dispatcher

    def _print(self, end: RunEnd, *, is_late: bool = False) -> None:
        """Write the terminal output of rank 0, up to the teardown or from it on."""
        done = end.ranks[0].done
        printed = "" if done is None else done.printed_late if is_late else done.printed
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if printed.strip() and reporter is not None:
            self._config.get_terminal_writer().write(printed)


def _stderr_lines(rank: RankResult) -> list[str]:
    """Return what a rank wrote to stderr during a test that may be rerun."""
    assert rank.log_start is not None
    path = Path(rank.log_dir, "stderr.log")
    return read_piece(path, rank.log_start, file_size(path)).splitlines()


def _stop_like_rank(end: RunEnd, item: pytest.Item, when: str) -> None:
    """End the session as the test asked pytest to, by `pytest.exit` or KeyboardInterrupt.

    It ends in the first phase that the rank did not report; those before it count.
    """
    for rank in end.ranks:
        stop: Sequence[object] = () if rank.done is None else rank.done.stop
        if not stop or reported(rank, when) is not None:
            continue
        where = f"rank {rank.rank} of {len(end.ranks)} in {item.nodeid}"
        if stop[0] == "exit":
            code = stop[2] if isinstance(stop[2], int) else None
            raise pytest.exit.Exception(f"{stop[1]} ({where})", code)
        raise KeyboardInterrupt(where)
