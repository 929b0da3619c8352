"""The role that runs workloads where there is a queue: all are submitted before any is waited for.

Lives in the controller alone, and only with an engine that has a queue. Items are reported by
pytest's own protocol, in the order in which they end.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

import pytest
from _pytest.skipping import evaluate_skip_marks

from pytest_megatron.history import FILE_NAME, typical_durations
from pytest_megatron.hooks.checks import refuse_or_warn
from pytest_megatron.hooks.item import WorkloadItem, plugin_of
from pytest_megatron.hooks.option_values import has_workers
from pytest_megatron.hooks.options import LOCAL
from pytest_megatron.hooks.queue_terminal import QueueTerminal
from pytest_megatron.hooks.retries import ItemRetries
from pytest_megatron.hooks.run_file import run_file_of
from pytest_megatron.hooks.session import RunSession
from pytest_megatron.launch.own_dir import OWN_DIR
from pytest_megatron.verdict.campaign import QueuedWorkload, WorkEnd, WorkloadScheduler
from pytest_megatron.verdict.job import Training, WorkloadJob
from pytest_megatron.verdict.training import Repeat, begin, conclude
from pytest_megatron.wording import counted

NAME = "megatron-queue"


class QueuePlugin:
    """The loop over workloads of an engine that has a queue."""

    def __init__(self, config: pytest.Config, session: RunSession) -> None:
        self._config = config
        self._session = session
        self._items: dict[str, WorkloadItem] = {}
        self._begun: dict[str, tuple[WorkloadJob, ItemRetries]] = {}
        self._took_s: dict[str, float] = {}
        self._has_begun = False
        self._terminal = QueueTerminal(config, session.options.executor)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Submit all workloads, have the other items run meanwhile, then report what ends.

        Raises:
            pytest.UsageError: The run directory holds an earlier run, or there is no such engine.
        """
        runs_nothing = self._config.option.collectonly or self._session.options.is_plan
        if runs_nothing or not self._session.engine.is_queue:
            return (yield)
        self._session.refuse_used_run_dir()
        items = session.items
        mine = [item for item in items if isinstance(item, WorkloadItem) and not _is_skipped(item)]
        self._items = {item.nodeid: item for item in mine}
        if not mine:
            return (yield)
        self._has_begun = True
        self._session.open_run_dir()
        run_file_of(self._config, self._session).write()  # who takes over reads there what to do
        verb = "taking up" if self._session.options.is_attached else "submitting"
        # A cluster that does not answer takes minutes to say so.
        self._terminal.write(
            [f"{self._session.options.executor}: {verb} {counted(len(mine), 'workload')}"]
        )
        scheduler = WorkloadScheduler(
            self._session.engine, queue_timeout_s=self._session.options.queue_timeout_s
        )
        scheduler.add(self._works(mine))
        try:
            ended = scheduler.step()
            session.items = [item for item in items if item.nodeid not in self._items]
            try:
                yield
            finally:
                session.items = items
            self._loop(session, scheduler, ended)
        except BaseException:
            self._terminal.close()
            scheduler.cancel()
            raise
        finally:
            self._terminal.close()
        return True

    def pytest_unconfigure(self) -> None:
        """Let others follow the jobs of this run, once `run.json` says that it has ended."""
        if self._has_begun:
            self._session.engine.close()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Give the setup of a workload the time that its training took, wherever that was."""
        report = yield
        if call.when == "setup" and item.nodeid in self._took_s:
            report.duration += self._took_s.pop(item.nodeid)
        return report

    def _loop(
        self, session: pytest.Session, scheduler: WorkloadScheduler, ended: list[WorkEnd]
    ) -> None:
        """Report workloads until all have ended."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False  # the file changes with every item, as in pytest-xdist
            self._terminal.write([])  # letters begin in a line of their own
        ready = deque(ended)
        while ready or not scheduler.is_done:
            if not ready:
                self._terminal.show(scheduler.standing)
                time.sleep(scheduler.pause_s())
                ready += scheduler.step()
            if not ready:
                continue
            end = ready.popleft()
            following = self._items[ready[0].name] if ready else None
            self._terminal.close()
            self._report(session, end, following)

    def _report(self, session: pytest.Session, end: WorkEnd, nextitem: WorkloadItem | None) -> None:
        """Run pytest's protocol for a workload that ended.

        Raises:
            pytest.Session.Failed: `--maxfail` is reached, or a plugin wants to stop.
            pytest.Session.Interrupted: A plugin wants to stop.
        """
        item = self._items[end.name]
        self._terminal.note_end(item.name)
        begun = self._begun.pop(end.name, None)
        item.finish = functools.partial(self._finish, end, begun)
        # Without a next item, pytest tears everything down: no fixture of it is a workload's.
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        item.finish = None
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _finish(self, end: WorkEnd, begun: tuple[WorkloadJob, ItemRetries] | None) -> Training:
        """Return what came of a workload, within its setup.

        Raises:
            Exception: It could not be run or judged.
        """
        if end.error is not None:
            raise end.error
        assert begun is not None
        job, retries = begun
        training = conclude(job, end.ends)
        retries.note_end(training)
        self._took_s[end.name] = training.duration_s
        return training

    def _works(self, items: Sequence[WorkloadItem]) -> Iterable[QueuedWorkload]:
        """Return what there is to do, with how long it took before."""
        took = typical_durations(self._history())
        for item in items:
            workload = item.workload
            yield QueuedWorkload(
                name=item.nodeid,
                begin=functools.partial(self._begin, item),
                expected_s=took.get(item.nodeid),
                num_gpus=workload.nodes * workload.gpus,
            )

    def _begin(self, item: WorkloadItem) -> Sequence[Repeat]:
        """Plan a workload; what it says goes to the terminal under its name."""
        job = plugin_of(self._config).prepare(item)
        live = self._terminal.listener(item.name)
        refuse_or_warn(self._session, job, live)
        retries = ItemRetries(self._session, item.nodeid, live)
        self._begun[item.nodeid] = (job, retries)
        return begin(job, self._session.facts, live, retries)

    def _history(self) -> Path:
        chosen = self._session.options.history
        named = chosen if chosen and chosen != "off" else f"{OWN_DIR}/{FILE_NAME}"
        return self._session.root / named


def register_queue(config: pytest.Config, session: RunSession) -> None:
    """Register the role, where an engine may have a queue.

    Raises:
        pytest.UsageError: pytest-xdist is to share out what the engine shares out itself, or there
            is nothing that could be taken over.
    """
    executor, is_attached = session.options.executor, session.options.is_attached
    is_shared_out = has_workers(config)
    if session.is_worker or (executor == LOCAL and not is_attached):
        return
    # Elsewhere it is opened when it has something to do.
    has_queue = (is_attached or is_shared_out) and session.engine.is_queue
    if is_attached and not has_queue:
        raise pytest.UsageError(
            f"--attach: the executor {executor} has no queue that jobs could be left in; "
            f"start a new run"
        )
    if is_shared_out and has_queue:
        raise pytest.UsageError(
            f"--executor {executor}: has a queue, which takes all workloads at once; drop -n, "
            f"which starts workers that would wait for one each"
        )
    config.pluginmanager.register(QueuePlugin(config, session), NAME)


def _is_skipped(item: WorkloadItem) -> bool:
    """Whether marks skip an item; pytest then never comes to its setup."""
    return evaluate_skip_marks(item) is not None
