"""Submits attempts as jobs: how many at a time, and what was not answered.

The engine needs no more of a cluster than `SlurmCommands`: a simulated one is as good.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pytest_megatron.engines.slurm.journal import Batch, Journal
from pytest_megatron.engines.slurm.states import (
    SQUEUE_FORMAT,
    JobFiles,
    SlurmJob,
    parse_squeue,
    phase_of,
    remove_spec,
)
from pytest_megatron.errors import LaunchError, MegatronError
from pytest_megatron.workloads.engine.api import (
    Checking,
    EngineContext,
    Planned,
    Resources,
    Submission,
    SubmissionPhase,
)
from pytest_megatron.workloads.engine.records import JobSpec, write_spec
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import Setting

_TIMEOUT_S = 120.0  # sbatch itself tries again for about a minute where the queue is full
_MOST_TEXT = 400  # characters of what a command said
# What the commands say of a controller that is away, and of an identity service that is.
_AWAY = re.compile(
    r"(?i)Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted"
    r"|Connection (?:refused|timed out|reset)|standby mode|Transport endpoint is not connected"
    r"|Slurm backup controller|Insane message length|temporarily unable to accept job"
    r"|Resource temporarily unavailable|Unexpected message received|connect failure"
    r"|Munge encode failed|Protocol authentication error|Unable to resolve"
)
# What an account's or a partition's limit on the number of jobs says: there is room again later.
_FULL = re.compile(r"(?i)MaxSubmit|GrpSubmit|job submit limit")
# Variables that would change what our commands print, or how long they take.
_MISLEADING = re.compile(
    r"(?:SQUEUE|SACCT|SCANCEL|SINFO|SCONTROL)_|SBATCH_WAIT$|SLURM_(?!CONF$|CLUSTERS$)"
)


class SlurmAwayError(Exception):
    """Slurm's controller did not answer; whether it did what it was asked is not known."""


class SlurmRefusedError(Exception):
    """Slurm will not do it.

    Attributes:
        is_full: Whether that is for the number of jobs, and so may go by.
    """

    def __init__(self, text: str, *, is_full: bool = False) -> None:
        super().__init__(text)
        self.is_full = is_full


class SlurmCommands(Protocol):
    """Queries and orders of the engine to a cluster.

    All methods may raise `SlurmAwayError`, and `LaunchError` where there is no cluster at all.
    """

    def submit(self, words: Sequence[str]) -> int:
        """Submit a job with the arguments of sbatch; return its id.

        Raises:
            SlurmRefusedError: With Slurm's own words.
        """

    def jobs(self) -> tuple[SlurmJob, ...]:
        """Return the user's jobs that the controller remembers, ended ones too: one query."""

    def cancel(self, ids: Sequence[int]) -> None:
        """End jobs; those that have ended do not matter."""


class RealSlurm:
    """The commands of the Slurm client that is installed here."""

    def __init__(self, env: Mapping[str, str], cwd: Path) -> None:
        """Keep environment and directory of Slurm's commands.

        Args:
            env: The controller's environment.
            cwd: Where jobs start.
        """
        kept = {name: value for name, value in env.items() if not _MISLEADING.match(name)}
        self._env = {**kept, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C.UTF-8"}
        self._submit_env = kept
        self._cwd = cwd

    def submit(self, words: Sequence[str]) -> int:
        """Run sbatch; return the id of the job.

        Raises:
            SlurmRefusedError: It refuses.
            SlurmAwayError: The controller is away; the job may be there all the same.
        """
        done = self._run(["sbatch", "--parsable", *words], self._submit_env)
        said = done.stdout.strip().splitlines()
        first = said[-1].partition(";")[0] if said else ""  # `41;cluster` in a federation
        if done.returncode == 0 and first.isdigit():
            return int(first)
        text = _error_line(done)
        raise SlurmRefusedError(text, is_full=_FULL.search(text) is not None)

    def jobs(self) -> tuple[SlurmJob, ...]:
        """Return the user's jobs in the queue, by one squeue.

        Raises:
            SlurmAwayError: It got no answer, or could not ask.
        """
        done = self._run(["squeue", "--me", "--states=all", "-h", "-O", SQUEUE_FORMAT])
        if done.returncode != 0:
            raise SlurmAwayError(_error_line(done))
        return parse_squeue(done.stdout)

    def cancel(self, ids: Sequence[int]) -> None:
        """Cancel jobs by scancel.

        Raises:
            SlurmAwayError: The controller is away.
        """
        if ids:
            self._run(["scancel", "--quiet", *map(str, ids)])

    def refusal(self, words: Sequence[str]) -> str | None:
        """Return why sbatch would not take a job of these flags now, None if it would.

        Raises:
            SlurmAwayError: The controller is away.
            LaunchError: There is no sbatch.
        """
        done = self._run(["sbatch", "--test-only", *words, "--wrap=true"], self._submit_env)
        return None if done.returncode == 0 else _error_line(done)

    def _run(
        self, words: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm's.

        Raises:
            SlurmAwayError: Slurm's controller is away, or the command did not end.
            LaunchError: There is no such command.
        """
        try:
            done = subprocess.run(
                words,
                env=env or self._env,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
                start_new_session=True,  # Ctrl-C at the terminal is the controller's
            )
        except subprocess.TimeoutExpired as error:
            raise SlurmAwayError(f"{words[0]} did not end within {_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise LaunchError(
                "--executor slurm",
                f"{words[0]} cannot be run: {error.strerror}, expected Slurm's client on PATH; "
                f"start pytest on a login node",
            ) from error
        if done.returncode != 0 and _AWAY.search(done.stderr):
            raise SlurmAwayError(_error_line(done))
        return done


def _error_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error of a command in one line."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    text = "; ".join(lines) or f"exit code {done.returncode} without a word"
    return text[:_MOST_TEXT]


_MOST_TITLE = 40  # characters of an item's name in a job's
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.-]+")
_NAME = re.compile(r"\.([0-9a-f]{8})-(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScript:
    """Script of one shape of job, and settings for the specs of such jobs.

    Attributes:
        path: The script; its only argument is a spec.
        exclude: Hosts that its own `--exclude` names; ours would take the place of that.
        env: Variables of the training, over those of the job.
        options: For the programs that run in the job.
    """

    path: Path
    exclude: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)


class Scripts(Protocol):
    """Writer of the scripts of jobs."""

    def settle(self, setting: Setting, workload: Workload) -> Setting:
        """Return the setting of plans for jobs of a workload."""

    def describe(self, needed: Resources, /) -> list[str]:
        """Return lines on a job for a person: image, mounts, script; nothing is written.

        Raises:
            LaunchError: It cannot be made.
        """

    def write(self, wanted: Sequence[Resources]) -> dict[Resources, JobScript]:
        """Return a script for each.

        Raises:
            LaunchError: None can be written.
        """


def job_name(submission: Submission, run_id: str, number: int) -> str:
    """Return a name for people that also has the run and the batch of a job."""
    plain = _NOT_PLAIN.sub("_", submission.key.split("/")[0])[:_MOST_TITLE]
    return f"{plain}.{run_id}-{number}"


def parse_name(name: str) -> tuple[str, int] | None:
    """Return run and batch of a job's name; None if it is none of ours."""
    found = _NAME.search(name)
    return None if found is None else (found[1], int(found[2]))


def sbatch_words(script: JobScript, *, name: str, avoid: Iterable[str], log: Path) -> list[str]:
    """Return the arguments of sbatch that are not in the script; the spec follows them.

    Args:
        script: That of the job's shape.
        name: Name from `job_name`.
        avoid: Hosts that failed.
        log: Where the job's output goes.
    """
    words = [f"--job-name={name}", "--no-requeue", f"--output={log}", f"--error={log}"]
    hosts = sorted({*avoid})
    if hosts:
        words.append(f"--exclude={','.join([*script.exclude, *hosts])}")
    return [*words, str(script.path)]


SETTLE_S = 15.0  # for a submission that was not answered to show in the queue


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """Settings of the engine.

    Attributes:
        max_jobs: Most jobs of this run in the queue at a time; None is all.
        timers_s: How long a record may come after the job ended well in Slurm: shared
            file systems are late.
        checks: Checks of a workload before it is submitted, or None.
    """

    interval_s: float = 10.0
    max_jobs: int | None = None
    timers_s: float = 60.0
    checks: Checking | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A submission that is, or may be, in the queue.

    Attributes:
        batch: Number of it in the journal.
        job_id: None where it is not known yet.
        note: To be shown about it, or "".
    """

    submission: Submission
    batch: int
    job_id: int | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSubmission:
    """A submission that is refused."""

    submission: Submission
    text: str


@dataclass(slots=True)
class _WaitingSubmission:
    submission: Submission
    not_before: float


class Submitter:
    """Orders on their way to Slurm.

    Attributes:
        unsure: Batches of which it is not known whether they arrived -> when to give them up.
    """

    def __init__(
        self,
        context: EngineContext,
        commands: SlurmCommands,
        scripts: Scripts,
        settings: SlurmSettings,
        journal: Journal,
        now: Callable[[], float],
    ) -> None:
        self._context = context
        self._commands = commands
        self._scripts = scripts
        self._settings = settings
        self._journal = journal
        self._now = now
        self._waiting: dict[str, _WaitingSubmission] = {}
        self._known: dict[Resources, JobScript] = {}
        self._full_at: int | None = None
        self.unsure: dict[int, float] = {}

    def add(self, submission: Submission) -> None:
        """Take a submission; `submit` submits it when its pause is over."""
        self._waiting[submission.key] = _WaitingSubmission(
            submission, self._now() + submission.delay_s
        )

    def drop(self, key: str) -> None:
        """Forget a submission that was not submitted."""
        self._waiting.pop(key, None)

    def submit(self, num_live: int) -> list[Submitted | RefusedSubmission]:
        """Submit what is ready and has room.

        Args:
            num_live: Jobs of the run that are in the queue.

        Raises:
            LaunchError: No script can be written, or there is no sbatch.
        """
        ready = self._ready(num_live)
        if not ready:
            return []
        found: list[Submitted | RefusedSubmission] = []
        wanted = dict.fromkeys(submission.resources for submission in ready)
        if unknown := [resources for resources in wanted if resources not in self._known]:
            self._known |= self._scripts.write(unknown)
        for submission in ready:
            done = self._submit_one(submission, num_live)
            if done is None:  # no room: the others wait with it
                break
            found.append(done)
            if isinstance(done, Submitted):
                num_live += 1
                if done.batch in self.unsure:  # nobody there
                    break
        return found

    def _ready(self, num_live: int) -> list[Submission]:
        """Return the submissions that may be submitted now, in the order in which they came."""
        if self._full_at is not None and num_live >= self._full_at > 0:
            return []
        self._full_at = None
        most = self._settings.max_jobs
        room = None if most is None else max(0, most - num_live)
        now = self._now()
        return [w.submission for w in self._waiting.values() if w.not_before <= now][:room]

    def _submit_one(
        self, submission: Submission, num_live: int
    ) -> Submitted | RefusedSubmission | None:
        """Submit a job; None where there is no room for it."""
        try:
            planned = submission.planned(None)
        except MegatronError as error:
            return self._refuse(submission, str(error))
        try:
            batch = self._journal.intend(submission.key)
        except OSError as error:
            return self._refuse(submission, _cannot_write(error))
        try:
            self._write_spec(batch, submission, planned)
            note = self._sbatch(batch, submission)
        except OSError as error:
            self._withdraw(batch)
            return self._refuse(submission, _cannot_write(error))
        except LaunchError:
            self._withdraw(batch)
            raise
        except SlurmRefusedError as error:
            self._withdraw(batch)
            if error.is_full and num_live > 0:  # there is room again when one of them has ended
                self._full_at = num_live
                return None
            return self._refuse(submission, f"Slurm refused it: {error}")
        del self._waiting[submission.key]
        job_id = self._journal.batches[batch.number].job_id
        return Submitted(submission=submission, batch=batch.number, job_id=job_id, note=note)

    def _sbatch(self, batch: Batch, submission: Submission) -> str:
        """Submit a batch; return a note about it.

        Raises:
            SlurmRefusedError: Slurm does not have the batch.
            LaunchError: There is no sbatch.
            OSError: The journal cannot be written before anything was submitted.
        """
        number, avoid, note = batch.number, submission.avoid_hosts, ""
        script = self._known[submission.resources]
        files = JobFiles.of(self._context.engine_dir, number)
        files.log.parent.mkdir(parents=True, exist_ok=True)
        name = job_name(submission, self._journal.run_id, number)

        def words(hosts: frozenset[str]) -> list[str]:
            found = sbatch_words(script, name=name, avoid=hosts, log=files.log)
            return [*found, str(files.spec)]

        self.unsure[number] = self._now() + SETTLE_S  # also where Ctrl-C ends this
        try:
            try:
                job_id = self._commands.submit(words(avoid))
            except SlurmRefusedError as error:
                if not avoid or error.is_full:
                    raise
                job_id = self._commands.submit(words(frozenset()))
                note = f"on any node, also on {', '.join(sorted(avoid))}, since Slurm said: {error}"
        except (SlurmRefusedError, LaunchError):
            del self.unsure[number]
            raise
        except SlurmAwayError:
            self.unsure[number] = self._now() + SETTLE_S
            return ""
        self._arrived(number, job_id)
        return note

    def recognise(self, jobs: Iterable[SlurmJob]) -> tuple[dict[int, SlurmJob], set[int]]:
        """Return this run's jobs, and the ids of those that should not be there.

        Learns the ids of jobs whose submission was not answered. One that came after it had been
        given up was submitted again, and is one too many.
        """
        found: dict[int, SlurmJob] = {}
        strays: set[int] = set()
        for job in jobs:
            run_id, number = parse_name(job.name) or ("", 0)
            batch = self._journal.batches.get(number)
            if run_id != self._journal.run_id or batch is None:
                continue
            if batch.key is not None and batch.job_id is None:
                self._arrived(number, job.job_id)
            elif batch.job_id != job.job_id:
                if phase_of(job) is not SubmissionPhase.ENDED:
                    strays.add(job.job_id)
                continue
            found[job.job_id] = job
        return found, strays

    def give_up(self) -> set[int]:
        """Return the batches that have not arrived, and never will: they may be submitted again.

        Call it when the queue has just been looked at.
        """
        late = {number for number, until in self.unsure.items() if until <= self._now()}
        for number in late:
            del self.unsure[number]
            remove_spec(JobFiles.of(self._context.engine_dir, number))
            self._withdraw(self._journal.batches[number])
        return late

    def _arrived(self, number: int, job_id: int) -> None:
        """Note the job of a submission that is known to have arrived."""
        self.unsure.pop(number, None)
        with contextlib.suppress(OSError):  # a job is found again by its name
            self._journal.submitted(number, job_id)

    def _write_spec(self, batch: Batch, submission: Submission, planned: Planned) -> None:
        """Write the spec of the job of a batch.

        Raises:
            OSError: It cannot be written.
        """
        script = self._known[submission.resources]
        files = JobFiles.of(self._context.engine_dir, batch.number)
        files.spec.parent.mkdir(parents=True, exist_ok=True)
        files.record.parent.mkdir(parents=True, exist_ok=True)
        spec = JobSpec(
            key=submission.key,
            plan=planned.plan,
            outcome=files.record,
            root=self._context.root,
            description=json.dumps(planned.description),
            env=dict(script.env),
            watches_gpus=submission.resources.gpus_per_node > 0,
            losses=() if submission.losses is None else submission.losses.names,
            options=dict(script.options),
        )
        write_spec(files.spec, spec)

    def _withdraw(self, batch: Batch) -> None:
        with contextlib.suppress(OSError):
            self._journal.withdrawn(batch.number)

    def _refuse(self, submission: Submission, text: str) -> RefusedSubmission:
        """Let go of a submission that is never submitted."""
        self.drop(submission.key)
        return RefusedSubmission(submission=submission, text=text)


def _cannot_write(error: OSError) -> str:
    return f"{error.filename or 'the run directory'}: cannot be written: {error.strerror}"
