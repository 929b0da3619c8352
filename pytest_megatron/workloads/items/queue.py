"""The engine of a session, and the plugin that runs workloads where it has a queue.

All are submitted before any is waited for. That plugin lives in the controller alone. Items are
reported by pytest's own protocol, in the order in which they end.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

import pytest
from _pytest.skipping import evaluate_skip_marks

from pytest_megatron.base.text import counted
from pytest_megatron.runs.history import typical_durations
from pytest_megatron.session.options import LOCAL, has_workers, usage_errors
from pytest_megatron.session.run_file import run_file_of
from pytest_megatron.session.state import RunSession
from pytest_megatron.workloads.engine.api import Engine, EngineContext, open_engine
from pytest_megatron.workloads.items.collect import WorkloadItem, runner_of
from pytest_megatron.workloads.items.report import (
    ItemRetries,
    TrainingListener,
    show_findings,
    uncaptured,
)
from pytest_megatron.workloads.verdict.driver import Repeat, begin
from pytest_megatron.workloads.verdict.job import Training, WorkloadJob
from pytest_megatron.workloads.verdict.scheduler import (
    QueuedWorkload,
    QueueProgress,
    WorkEnd,
    WorkloadScheduler,
)

_ENGINE = pytest.StashKey[Engine]()


def engine_of(session: RunSession) -> Engine:
    """Return the engine that `--executor` names; the first call opens it.

    Raises:
        pytest.UsageError: There is no such engine, or it cannot be used as it is set up.
    """
    if _ENGINE not in session.stash:
        file = session.options.executor_config
        context = EngineContext(
            root=session.root,
            run_dir=session.run_dir,
            facts=session.facts,
            env=os.environ,
            config_file=None if file is None else Path(session.directory, file),
            copies_lines="tee-ranks" in session.options.typed,
        )
        with usage_errors(session.shorten):
            session.stash[_ENGINE] = open_engine(session.options.executor, context)
    return session.stash[_ENGINE]


def close_engine(session: RunSession) -> None:
    """Close an engine without a queue, if one was made; one with a queue is closed by its loop."""
    engine = session.stash.get(_ENGINE, None)
    if engine is not None and not engine.is_queue:
        engine.close()


_EVERY_S, _HEARTBEAT_S = 20.0, 300.0  # CI systems end what is silent for 10 minutes
_MOST_SHOWN = 8  # trainings that run at once; a screen has 24 rows


class QueueTerminal:
    """Shows the state of the queue below pytest's own output."""

    def __init__(self, config: pytest.Config, engine: str) -> None:
        self._config = config
        self._engine = engine
        self._printed: list[str] = []
        self._printed_at = float("-inf")
        self._progress: dict[str, str] = {}

    @property
    def _reporter(self) -> pytest.TerminalReporter | None:
        """Return pytest's terminal reporter."""
        reporter: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin(
            "terminalreporter"
        )
        return reporter

    def listener(self, name: str) -> TrainingListener:
        """Return a listener that prints the lines of one workload under its name.

        How far it is becomes a line of the state, until it ends.
        """
        return TrainingListener(
            self._config,
            name,
            lambda lines: self.write([f"{name}: {line}" for line in lines]),
            functools.partial(self._progress.__setitem__, name),
        )

    def show(self, progress: QueueProgress) -> None:
        """Show the state of the queue, if it is new."""
        reporter = self._reporter
        if reporter is None:
            return
        now = time.monotonic()
        rows = [queue_text(self._engine, progress)]
        texts = [f"  {text}" for text in self._progress.values()]
        rows += texts[:_MOST_SHOWN]
        if len(texts) > _MOST_SHOWN:
            rows.append(f"  and {len(texts) - _MOST_SHOWN} more")
        limit_s = _HEARTBEAT_S if rows == self._printed else _EVERY_S
        if now - self._printed_at >= limit_s:
            self._printed, self._printed_at = rows, now
            self.write(rows)

    def note_end(self, name: str) -> None:
        """Remove the line of a workload."""
        self._progress.pop(name, None)

    def write(self, lines: Sequence[str]) -> None:
        """Print whole lines."""
        reporter = self._reporter
        if reporter is None:
            return
        writer = reporter._tw  # pytest's own plugins reach it this way
        with uncaptured(self._config):
            reporter.ensure_newline()
            if writer.width_of_current_line:
                writer.line()
            for line in lines:
                writer.line(line)


NAME = "megatron-queue"


class QueuePlugin:
    """The loop over workloads of an engine that has a queue."""

    def __init__(self, config: pytest.Config, session: RunSession) -> None:
        self._config = config
        self._session = session
        self._items: dict[str, WorkloadItem] = {}
        self._begun: dict[str, WorkloadJob] = {}
        self._took_s: dict[str, float] = {}
        self._has_begun = False
        self._terminal = QueueTerminal(config, session.options.executor)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Submit all workloads, have the other items run meanwhile, then report each workload.

        Raises:
            pytest.UsageError: The run directory holds an earlier run, or there is no such engine.
        """
        runs_nothing = self._config.option.collectonly or self._session.options.is_plan
        if runs_nothing or not engine_of(self._session).is_queue:
            return (yield)
        self._session.refuse_used_run_dir()
        items = session.items
        mine = [item for item in items if isinstance(item, WorkloadItem) and not _is_skipped(item)]
        self._items = {item.nodeid: item for item in mine}
        if not mine:
            return (yield)
        self._has_begun = True
        self._session.open_run_dir()
        run_file_of(self._config, self._session).write()
        # A cluster that does not answer fails only after minutes.
        self._terminal.write(
            [f"{self._session.options.executor}: submitting {counted(len(mine), 'workload')}"]
        )
        scheduler = WorkloadScheduler(
            engine_of(self._session), queue_timeout_s=self._session.options.queue_timeout_s
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
            scheduler.cancel()
            raise
        return True

    def pytest_unconfigure(self) -> None:
        """Close the engine, once `run.json` records the end of the run."""
        if self._has_begun:
            engine_of(self._session).close()

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
            self._report(session, end, following)

    def _report(self, session: pytest.Session, end: WorkEnd, nextitem: WorkloadItem | None) -> None:
        """Run pytest's protocol for a workload that ended.

        Raises:
            pytest.Session.Failed: `--maxfail` is reached, or a plugin wants to stop.
            pytest.Session.Interrupted: A plugin wants to stop.
        """
        item = self._items[end.name]
        self._terminal.note_end(item.name)
        job = self._begun.pop(end.name, None)
        item.finish = functools.partial(self._finish, end, job)
        # Without a next item, pytest tears everything down: no fixture of it is a workload's.
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        item.finish = None
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _finish(self, end: WorkEnd, job: WorkloadJob | None) -> Training:
        """Return the training of a workload, within its setup.

        Raises:
            Exception: It could not be run or judged.
        """
        if end.error is not None:
            raise end.error
        assert job is not None
        training = Training(job=job, attempts=end.attempts)
        self._took_s[end.name] = training.duration_s
        return training

    def _works(self, items: Sequence[WorkloadItem]) -> Iterable[QueuedWorkload]:
        """Yield the workloads to submit, with their earlier durations."""
        took = typical_durations(self._session.history_file)
        for item in items:
            workload = item.workload
            yield QueuedWorkload(
                name=item.nodeid,
                begin=functools.partial(self._begin, item),
                expected_s=took.get(item.nodeid),
                num_gpus=workload.nodes * workload.gpus,
            )

    def _begin(self, item: WorkloadItem) -> Sequence[Repeat]:
        """Plan a workload; its lines go to the terminal under its name."""
        runner = runner_of(self._config)
        checked = runner.prepare(item)
        live = self._terminal.listener(item.name)
        show_findings(self._session, checked, live)
        retries = ItemRetries(self._session, live)
        self._begun[item.nodeid] = checked.job
        return begin(checked, self._session.facts, live, retries)


def register_queue(config: pytest.Config, session: RunSession) -> None:
    """Register the plugin, where an engine may have a queue.

    Raises:
        pytest.UsageError: pytest-xdist is to share out what the engine shares out itself.
    """
    executor = session.options.executor
    if session.is_worker or executor == LOCAL:
        return
    # Elsewhere it is opened when it has something to do.
    if has_workers(config) and engine_of(session).is_queue:
        raise pytest.UsageError(
            f"--executor {executor}: has a queue, which takes all workloads at once; drop -n, "
            f"which starts workers that would wait for one each"
        )
    config.pluginmanager.register(QueuePlugin(config, session), NAME)


def _is_skipped(item: WorkloadItem) -> bool:
    """Return true if marks skip an item: pytest then never runs its setup."""
    return evaluate_skip_marks(item) is not None


def queue_text(engine: str, progress: QueueProgress) -> str:
    """Describe the queue of an engine: how many ended, run and wait."""
    counts = [
        f"{progress.num_ended} of {progress.num_works} ended",
        f"{progress.num_running} running",
        f"{progress.num_waiting} waiting",
    ]
    if progress.num_held:
        counts.append(f"{progress.num_held} to be submitted")
    parts = [", ".join(counts)]
    if progress.detail:
        parts.append(progress.detail)
    return f"{engine}: {'; '.join(parts)}"
