"""The engine that hands attempts to Slurm as jobs, and watches all of them with one query.

Retries are the harness's: no job may be put into the queue again. The record of a job has
how its training ended; Slurm's state explains what is missing. A controller of Slurm that does not
answer is waited for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pytest_megatron.base.text import counted
from pytest_megatron.engines.config import read_slurm_config
from pytest_megatron.engines.slurm.checks import SlurmChecks
from pytest_megatron.engines.slurm.journal import JobEnd, Journal
from pytest_megatron.engines.slurm.script import ScriptWriter
from pytest_megatron.engines.slurm.shape import ShapePaths
from pytest_megatron.engines.slurm.states import (
    JobFiles,
    SlurmJob,
    detail_of,
    find_record,
    outcome_with,
    phase_of,
    remove_spec,
    why_never,
)
from pytest_megatron.engines.slurm.submit import (
    RealSlurm,
    RefusedSubmission,
    Scripts,
    SlurmAwayError,
    SlurmCommands,
    SlurmSettings,
    Submitted,
    Submitter,
)
from pytest_megatron.errors import LaunchError
from pytest_megatron.workloads.engine.api import (
    EngineContext,
    EngineError,
    Resources,
    Submission,
    SubmissionOutcome,
    SubmissionPhase,
    TroubleKind,
    Update,
)
from pytest_megatron.workloads.recipe.model import Workload, project_words
from pytest_megatron.workloads.training.checks.rules import CheckFinding
from pytest_megatron.workloads.training.plan.plan import AttemptPlan, Setting
from pytest_megatron.workloads.training.run.runner import (
    AttemptListener,
    ForwardingListener,
    LiveLog,
)

_CANCEL_S = 60.0  # for jobs to end; Slurm waits 30 s by itself between TERM and KILL
_CANCEL_POLL_S = 0.5
_HASTY = 6.0  # a job that did not end well is waited for by so much less than one that did
_MOST_FOLLOWED = 16  # running jobs whose logs are read: a shared file system has others to serve
_Clock = tuple[Callable[[], float], Callable[[float], None]]


@dataclass(slots=True)
class _Tracked:
    """A submission that has not ended.

    Attributes:
        queued: Batch that it was submitted with; None while it waits to be.
        told: The last update about it.
        absent_since: Since when it is known to have ended, or to be unknown, without a record.
        note: To be shown beside Slurm's own words.
        is_cancelled: By us.
        live: Logs of the job, while it runs and is one of those that are followed.
    """

    submission: Submission
    queued: int | None = None
    told: tuple[SubmissionPhase, str] = (SubmissionPhase.WAITING, "")
    absent_since: float | None = None
    note: str = ""
    is_cancelled: bool = False
    live: LiveLog | None = None


class SlurmEngine:
    """Jobs of Slurm."""

    name = "slurm"
    is_queue = True

    def __init__(
        self,
        context: EngineContext,
        commands: SlurmCommands,
        scripts: Scripts,
        settings: SlurmSettings,
        journal: Journal,
        clock: _Clock = (time.monotonic, time.sleep),
    ) -> None:
        """Begin; nothing is asked yet.

        Args:
            context: Context of the run.
            commands: The cluster.
            scripts: Writes what is submitted.
            settings: Settings of the run.
            journal: Closed by `close`.
            clock: Seconds that only grow, and what waits for some of them.
        """
        self.interval_s = settings.interval_s
        self._context = context
        self._commands = commands
        self._scripts = scripts
        self._settings = settings
        self._journal = journal
        self._now, self._pause = clock
        self._intake = Submitter(context, commands, scripts, settings, journal, self._now)
        self._tracked: dict[str, _Tracked] = {}
        self._news: list[Update] = []
        self._unwanted: set[int] = set()  # jobs to be cancelled
        self._described: set[Resources] = set()

    def settle(self, setting: Setting, workload: Workload) -> Setting:
        """Return the setting as plans for jobs need it."""
        return self._scripts.settle(setting, workload)

    def lacks(self, _needed: Resources) -> str | None:
        """Return nothing: Slurm itself refuses what it cannot run."""
        return None

    def findings(
        self, workload: Workload, setting: Setting, resources: Resources
    ) -> Sequence[CheckFinding]:
        """Return why Slurm would not take the job of a workload now."""
        checks = self._settings.checks
        return () if checks is None else checks.findings(workload, setting, resources)

    def describe(self, _plan: AttemptPlan, resources: Resources) -> Sequence[str]:
        """Return image, mounts and script of a job for `--plan`; a script once.

        Raises:
            LaunchError: No script can be written.
        """
        if resources in self._described:
            return ["script: that of an earlier workload"]
        self._described.add(resources)
        return self._scripts.describe(resources)

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Submit attempts.

        Raises:
            LaunchError: No script can be written.
        """
        for submission in submissions:
            self._intake.add(submission)
            self._tracked[submission.key] = _Tracked(submission)
        try:
            self._submit_ready()
        except LaunchError:
            for submission in submissions:
                self._intake.drop(submission.key)
                self._tracked.pop(submission.key, None)
            raise

    def poll(self) -> Sequence[Update]:
        """Ask Slurm once for all jobs, and submit what was held back."""
        try:
            if self._tracked:
                self._look_at_all()
                self._submit_ready()
        except SlurmAwayError as error:
            for tracked in self._tracked.values():
                self._tell(tracked, tracked.told[0], f"Slurm does not answer: {error}")
        except LaunchError as error:
            for tracked in [t for t in self._tracked.values() if t.queued is None]:
                self._intake.drop(tracked.submission.key)
                self._refuse(tracked, str(error))
        news, self._news = self._news, []
        return news

    def cancel(self, keys: Sequence[str]) -> None:
        """End jobs of ours, and wait until they are gone, or a minute.

        Raises:
            KeyboardInterrupt: Ctrl-C while it waits; jobs may be left then, with a warning.
        """
        wanted = [self._tracked[key] for key in keys if key in self._tracked]
        for tracked in wanted:
            key, tracked.is_cancelled = tracked.submission.key, True
            self._intake.drop(key)
            if key in self._journal.places:  # also where sbatch itself was interrupted
                tracked.queued = self._journal.places[key]
            else:
                self._finish(
                    tracked, SubmissionOutcome(trouble=_cancelled("before it was submitted"))
                )
        try:
            self._cancel_until(self._now() + _CANCEL_S)
        finally:
            if left := self._cancelled_ones():
                said = f"jobs may be left in Slurm's queue; to end them: {self._how_to_end(left)}"
                left[0].submission.listener.on_lines([said])

    def _cancel_until(self, until: float) -> None:
        """Cancel and look, until all that is to be cancelled is gone."""
        told: list[int] = []
        was_away = False
        while (left := self._cancelled_ones()) and self._now() < until:
            try:
                if not told and (found := self._ids(left)):
                    self._commands.cancel(found)
                    said = f"waiting for {counted(len(left), 'cancelled job')} to end"
                    left[0].submission.listener.on_lines([f"{said}; Ctrl-C leaves at once"])
                    told = found
                self._look_at_all()
            except SlurmAwayError as error:
                if not (told or was_away):  # CI may kill this process before it answers
                    how = f"jobs go on until it is back; to end them then: {self._how_to_end(left)}"
                    left[0].submission.listener.on_lines([f"Slurm does not answer: {error}; {how}"])
                was_away = True
            if self._cancelled_ones():
                self._pause(_CANCEL_POLL_S)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _cancelled_ones(self) -> list[_Tracked]:
        return [tracked for tracked in self._tracked.values() if tracked.is_cancelled]

    def _how_to_end(self, wanted: Iterable[_Tracked]) -> str:
        ids = " ".join(map(str, self._ids(wanted)))
        return f"scancel {ids}" if ids else f"those named .{self._journal.run_id}-N"

    def _ids(self, wanted: Iterable[_Tracked]) -> list[int]:
        """Return the jobs of these, as far as they are known."""
        return [job_id for tracked in wanted if (job_id := self._job_id(tracked)) is not None]

    def _submit_ready(self) -> None:
        """Submit what there is room for."""
        num_live = sum(tracked.queued is not None for tracked in self._tracked.values())
        for done in self._intake.submit(num_live):
            tracked = self._tracked[done.submission.key]
            match done:
                case RefusedSubmission(text=text):
                    self._refuse(tracked, text)
                case Submitted(batch=batch, note=note, job_id=job_id):
                    tracked.queued, tracked.note = batch, note
                    what = "Slurm has not answered yet"
                    if job_id is not None:
                        what = f"job {job_id} is submitted"
                    self._tell(tracked, SubmissionPhase.WAITING, what)

    def _look_at_all(self) -> None:
        """Learn from one query what became of all submissions that are in the queue.

        Raises:
            SlurmAwayError: Nobody answered.
        """
        seen, strays = self._intake.recognise(self._commands.jobs())
        self._unwanted |= strays
        self._give_up_unanswered()
        if any(tracked.absent_since is not None for tracked in self._tracked.values()):
            with contextlib.suppress(OSError):  # a network file system looks again
                any((self._context.engine_dir / "outcomes").iterdir())
        missing: list[_Tracked] = []
        for tracked in list(self._tracked.values()):
            job_id = self._job_id(tracked)
            if job_id is None:
                continue
            job = seen.get(job_id)
            if job is None:
                missing.append(tracked)
            else:
                self._look(tracked, job)
        self._look_for(missing)
        if self._unwanted:
            self._commands.cancel(sorted(self._unwanted))
            self._unwanted.clear()

    def _give_up_unanswered(self) -> None:
        """Submit once more what did not arrive."""
        late = self._intake.give_up()
        for tracked in [t for t in self._tracked.values() if t.queued in late]:
            tracked.queued = None
            if tracked.is_cancelled:
                self._finish(
                    tracked, SubmissionOutcome(trouble=_cancelled("before it was submitted"))
                )
            else:
                self._intake.add(replace(tracked.submission, delay_s=0.0))

    def _look(self, tracked: _Tracked, job: SlurmJob) -> None:
        """Update a submission from the state of its job in Slurm."""
        never = why_never(job)
        if phase_of(job) is SubmissionPhase.ENDED:
            self._look_at_end(tracked, job)
        elif job.num_restarts:
            self._unwanted.add(job.job_id)
            self._end(tracked, job)
        elif never is not None:
            self._unwanted.add(job.job_id)
            self._refuse(tracked, never)
        else:
            tracked.absent_since = None
            self._tell(tracked, phase_of(job), detail_of(job))
            if phase_of(job) is SubmissionPhase.RUNNING:
                self._follow(tracked)

    def _follow(self, tracked: _Tracked) -> None:
        """Show what is new in the logs of a job that runs."""
        if tracked.live is None:
            if sum(t.live is not None for t in self._tracked.values()) >= _MOST_FOLLOWED:
                return
            submission = tracked.submission
            copies = self._context.copies_lines
            only = ForwardingListener(on_progress=submission.listener.on_progress)
            listener: AttemptListener = submission.listener if copies else only
            tracked.live = LiveLog(submission.planned(None).plan, listener)
        tracked.live.poll()

    def _look_for(self, missing: Sequence[_Tracked]) -> None:
        """End those whose jobs the controller of Slurm has forgotten, or wait for their records."""
        for tracked in missing:
            has_record = find_record(self._files_of(tracked)) is not None
            if has_record or not self._may_come(tracked, 1.0):
                self._end(tracked, None)

    def _look_at_end(self, tracked: _Tracked, job: SlurmJob) -> None:
        """Take the record of a job that has ended, or wait a while for it."""
        haste = 1.0 if job.state == "COMPLETED" else _HASTY
        has_run = bool(job.nodes) and not tracked.is_cancelled
        is_there = find_record(self._files_of(tracked)) is not None
        if is_there or not has_run or not self._may_come(tracked, haste):
            self._end(tracked, job)

    def _may_come(self, tracked: _Tracked, haste: float) -> bool:
        """Return if a record that is missing may still be written."""
        if tracked.absent_since is None:
            tracked.absent_since = self._now()
        return self._now() - tracked.absent_since < self._settings.timers_s / haste

    def _end(self, tracked: _Tracked, job: SlurmJob | None) -> None:
        """End a submission whose job is over."""
        if tracked.live is not None:
            tracked.live.poll(is_ended=True)
        files = self._files_of(tracked)
        found = find_record(files)
        outcome = outcome_with(tracked.submission, found, job, self._context.facts, files.log)
        trouble = outcome.trouble
        if trouble is not None and tracked.is_cancelled:
            which = "" if job is None else f" (job {job.job_id})"
            outcome = replace(outcome, trouble=_cancelled(f"by this run{which}"))
        elif trouble is not None and job is not None and job.state == "CANCELLED":
            outcome = replace(outcome, trouble=replace(trouble, is_transient=False))
        self._finish(tracked, outcome)

    def _refuse(self, tracked: _Tracked, text: str) -> None:
        """End a submission that cannot run."""
        trouble = EngineError(kind=TroubleKind.NOT_STARTED, text=text)
        self._finish(tracked, SubmissionOutcome(trouble=trouble))

    def _finish(self, tracked: _Tracked, outcome: SubmissionOutcome) -> None:
        """Note an outcome, and have the next poll return it."""
        submission = tracked.submission
        with contextlib.suppress(OSError):  # a full disk; the record is there, or was never to be
            end = JobEnd(key=submission.key, trouble=outcome.trouble, hosts=outcome.hosts)
            self._journal.ended(end)
        if tracked.queued is not None:
            remove_spec(self._files_of(tracked))
        del self._tracked[submission.key]
        self._news.append(Update(key=submission.key, phase=SubmissionPhase.ENDED, outcome=outcome))

    def _tell(self, tracked: _Tracked, phase: SubmissionPhase, detail: str) -> None:
        """Have the next poll return what is new of a submission."""
        text = f"{detail} ({tracked.note})" if tracked.note else detail
        if tracked.told != (phase, text):
            tracked.told = (phase, text)
            self._news.append(Update(key=tracked.submission.key, phase=phase, detail=text))

    def _job_id(self, tracked: _Tracked) -> int | None:
        """Return which job of Slurm's a submission is; None where that is not known."""
        return None if tracked.queued is None else self._journal.batches[tracked.queued].job_id

    def _files_of(self, tracked: _Tracked) -> JobFiles:
        assert tracked.queued is not None
        return JobFiles.of(self._context.engine_dir, tracked.queued)


def _cancelled(text: str) -> EngineError:
    return EngineError(kind=TroubleKind.CANCELLED, text=f"it was cancelled {text}")


def open_slurm(context: EngineContext) -> SlurmEngine:
    """Return the engine of a run.

    Raises:
        ConfigError: The settings are wrong.
        LaunchError: The journal cannot be written.
    """
    config = read_slurm_config(context.config_file, project_words(context.root).platforms)
    journal = Journal.open(context.engine_dir)
    paths = ShapePaths(root=context.root, run_dir=context.run_dir, logs=context.engine_dir / "logs")
    slurm = RealSlurm(context.env, context.root)
    return SlurmEngine(
        context,
        slurm,
        ScriptWriter(config, paths, context.engine_dir),
        SlurmSettings(
            interval_s=config.interval,
            max_jobs=config.max_jobs,
            checks=SlurmChecks(config, context, slurm.refusal),
        ),
        journal,
    )
