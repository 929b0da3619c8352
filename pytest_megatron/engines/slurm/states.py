"""States of jobs as Slurm's commands print them, and outcomes from the files that jobs leave.

A raw state only explains what is not in the job's own record: a job that failed and left a record
is judged by that. What is read of a job's files, or removed, is at the end of the module.

Sources: squeue(1), https://slurm.schedmd.com/job_state_codes.html and
https://slurm.schedmd.com/job_reason_codes.html.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from pytest_megatron.base.text import describe_exit
from pytest_megatron.errors import LaunchError, MegatronError
from pytest_megatron.runs.environment import SessionFacts
from pytest_megatron.workloads.engine.api import (
    EngineError,
    Submission,
    SubmissionOutcome,
    SubmissionPhase,
    TroubleKind,
)
from pytest_megatron.workloads.engine.records import (
    JobRecord,
    outcome_of,
    read_record,
)
from pytest_megatron.workloads.training.run.runner import tail

# Width of each field of `squeue -O`; the sign after it ends a field, whatever its width.
_WIDTHS = {
    "JobArrayID": 24,
    "State": 16,
    "Reason": 80,
    "RestartCnt": 8,
    "exit_code": 10,
    "StartTime": 24,
    "NodeList": 400,
    "Name": 120,
}
_SIGN = "|"
SQUEUE_FORMAT = ",".join(f"{name}:{width}{_SIGN}" for name, width in _WIDTHS.items())
_WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"}
    | {"SPECIAL_EXIT", "POWER_UP_NODE"}
)
# Nobody who waits longer will see these go; a job with one is taken back.
_NEVER = re.compile(
    r"(?:AccountNotAllowed|BadConstraints|DependencyNeverSatisfied|InvalidAccount|InvalidQOS"
    r"|PartitionNodeLimit|PartitionTimeLimit|QOSNotAllowed"
    r"|(?:Assoc|QOS)Max\w*(?:PerJob|PerNode|MinutesPerJob|WallDurationPerJob)(?:Limit)?)$"
)
_TROUBLES = {
    "BOOT_FAIL": (TroubleKind.BOOT_FAIL, "its node did not boot"),
    "LAUNCH_FAILED": (TroubleKind.BOOT_FAIL, "its node could not launch it"),
    "RECONFIG_FAIL": (TroubleKind.BOOT_FAIL, "its node could not be configured for it"),
    "CANCELLED": (TroubleKind.CANCELLED, "it was cancelled"),
    "REVOKED": (TroubleKind.CANCELLED, "it was revoked: another cluster started it"),
    "DEADLINE": (TroubleKind.TIMEOUT, "it reached its deadline"),
    "TIMEOUT": (TroubleKind.TIMEOUT, "it reached the time limit that Slurm had for it"),
    "NODE_FAIL": (TroubleKind.NODE_FAIL, "a node of it failed"),
    "OUT_OF_MEMORY": (TroubleKind.OUT_OF_MEMORY, "it used more memory than Slurm allowed it"),
    "PREEMPTED": (TroubleKind.PREEMPTED, "another job took its nodes"),
}
_ENDED = frozenset({"COMPLETED", "FAILED", *_TROUBLES})
_ABSENT = frozenset({"", "(null)", "N/A", "NONE", "None", "None assigned", "Unknown", "UNLIMITED"})
_MOST_SIGNAL = 0x7F  # larger ones are Slurm's own numbers; a killed job has that reason too
_HOST_PARTS = re.compile(r"(?:\[[^\]]*\]|[^,\[\]])+")
_RANGES = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """State of one job in Slurm.

    Attributes:
        job_id: Number that sbatch printed.
        state: Slurm's word, in capitals.
        reason: Why it waits, or why it failed; "" where Slurm has none.
        num_restarts: How often it was put into the queue again after it had started.
        exit_status: Exit status in the form of `waitpid`.
        start: When it started, or is expected to; None where that is unknown.
        nodes: Slurm's list of hosts, such as `node[1-2]`; "" where it never had any.
    """

    job_id: int
    state: str
    reason: str = ""
    num_restarts: int = 0
    exit_status: int = 0
    start: datetime | None = None
    nodes: str = ""
    name: str = ""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of its nodes."""
        return expand_hosts(self.nodes)


def parse_squeue(text: str) -> tuple[SlurmJob, ...]:
    """Read what `squeue --noheader -O SQUEUE_FORMAT` printed.

    A line of another form, as of a job array that was submitted by other means, is passed over.
    """
    return tuple(job for line in text.splitlines() if (job := _squeue_line(line)) is not None)


def _squeue_line(line: str) -> SlurmJob | None:
    """Return a job from a line of squeue, None if it is none."""
    fields: dict[str, str] = {}
    rest = line
    for name, width in _WIDTHS.items():
        value, sign, rest = rest[:width], rest[width : width + 1], rest[width + 1 :]
        if sign != _SIGN:
            return None
        fields[name] = _present(value)
    if not fields["JobArrayID"].isdecimal():
        return None
    return SlurmJob(
        job_id=int(fields["JobArrayID"]),
        state=fields["State"].upper(),
        reason=fields["Reason"],
        num_restarts=_number(fields["RestartCnt"]),
        exit_status=_number(fields["exit_code"]),
        start=_time(fields["StartTime"]),
        nodes=fields["NodeList"],
        name=fields["Name"],
    )


def phase_of(job: SlurmJob) -> SubmissionPhase:
    """Return how far a job is; a state that is not known counts as running."""
    if job.state in _ENDED:
        return SubmissionPhase.ENDED
    return SubmissionPhase.WAITING if job.state in _WAITING else SubmissionPhase.RUNNING


def detail_of(job: SlurmJob) -> str:
    """Return what a person wants to know of a job that has not ended."""
    start = "" if job.start is None else f"{job.start:%H:%M}"
    if phase_of(job) is SubmissionPhase.WAITING:
        why = job.reason or ("" if job.state == "PENDING" else job.state.lower())
        expected = f", expected to start at {start}" if start else ""
        return f"job {job.job_id} waits{f': {why}' if why else ''}{expected}"
    since = f" since {start}" if start else ""
    word = "runs" if job.state == "RUNNING" else f"is {job.state.lower()}"
    return f"job {job.job_id} {word} on {job.nodes or 'no node'}{since}"


def why_never(job: SlurmJob) -> str | None:
    """Return why a job that waits will never start, None where it may."""
    if phase_of(job) is not SubmissionPhase.WAITING or not _NEVER.match(job.reason):
        return None
    return f"job {job.job_id} can never start: Slurm says {job.reason}"


def trouble_of(job: SlurmJob, *, had_record: bool) -> EngineError | None:
    """Return what went wrong with a job that ended, or was started again.

    Args:
        job: State of the job in Slurm.
        had_record: Whether it left a record of how its training ended.

    Returns:
        None where the record is enough.
    """
    if job.num_restarts:
        return EngineError(kind=TroubleKind.REQUEUED, text=_requeued(job))
    if job.state in _TROUBLES:
        kind, said = _TROUBLES[job.state]
        text = f"job {job.job_id}{_where(job)} ended as {job.state}: {said}"
        return EngineError(kind=kind, text=text)
    if had_record:
        return None
    if not job.nodes:
        text = (
            f"job {job.job_id} ended as {job.state} before it started: {job.reason or 'no reason'}"
        )
        return EngineError(kind=TroubleKind.NOT_STARTED, text=text)
    if job.reason == "JobLaunchFailure" and job.exit_status > _MOST_SIGNAL:
        text = (
            f"job {job.job_id}{_where(job)} could not be launched there ({_exit(job)}): its output "
            f"file, its directory or its container could not be made, or a prolog failed"
        )
        return EngineError(kind=TroubleKind.BOOT_FAIL, text=text)
    text = f"job {job.job_id}{_where(job)} ended as {job.state}, {_exit(job)}, and left no record"
    return EngineError(kind=TroubleKind.LOST, text=text)


def _requeued(job: SlurmJob) -> str:
    """Describe that Slurm put a job into the queue again."""
    times = "once" if job.num_restarts == 1 else f"{job.num_restarts} times"
    why = f" ({job.reason})" if job.reason else ""
    return f"job {job.job_id} was put into the queue again {times} after it had started{why}"


def _where(job: SlurmJob) -> str:
    return f" on {job.nodes}" if job.nodes else ""


def _exit(job: SlurmJob) -> str:
    """Return how a job ended, as scontrol writes it where a person may look it up."""
    code, number = job.exit_status >> 8, job.exit_status & _MOST_SIGNAL
    if number and not code:
        return describe_exit(-number)
    return f"ExitCode {code}:{number}" if number else f"exit code {code}"


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the names of a list of hosts: `gpu[08-10,12]-ib,head` are five."""
    names: list[str] = []
    for part in _HOST_PARTS.findall(text):
        # `split` with a group: what is outside of brackets, and what is inside, in turns
        pieces = _RANGES.split(part)
        turns = [[p] if n % 2 == 0 else _numbers(p.split(",")) for n, p in enumerate(pieces)]
        names += map("".join, itertools.product(*turns))
    return tuple(names)


def _numbers(ranges: Iterable[str]) -> list[str]:
    """Return the numbers of ranges, with their leading zeros."""
    found: list[str] = []
    for part in ranges:
        first, _, last = part.partition("-")
        if last:
            found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
        else:
            found.append(first)
    return found


def _present(value: str) -> str:
    value = value.strip()
    return "" if value in _ABSENT else value


def _number(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0


def _time(text: str) -> datetime | None:
    """Return a time as Slurm prints it, None if it is none."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


_OF_BASH = ("+", "job exited with code ")  # what nemo-run's scripts trace, and say at their end
_OF_WORKER = "pytest-megatron: "
_OF_NODES = (TroubleKind.NODE_FAIL, TroubleKind.LOST)
_LOST_HOST = re.compile(
    r"^srun: error: (?:Node failure on )?(?P<host>[^\s:]+)(?:: tasks? [\d,-]+: Killed)?$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFiles:
    """The files of one job; every machine sees them under the same path."""

    spec: Path
    record: Path
    log: Path

    @classmethod
    def of(cls, engine_dir: Path, batch: int) -> JobFiles:
        """Return the files of a batch."""
        return cls(
            spec=engine_dir / "specs" / f"{batch}.json",
            record=engine_dir / "outcomes" / f"{batch}.json",
            log=engine_dir / "logs" / f"{batch}.log",
        )


def find_record(files: JobFiles) -> JobRecord | EngineError | None:
    """Return what a job left: its record, or what is wrong with that; None if it left none."""
    try:
        return read_record(files.record)
    except LaunchError as error:
        return EngineError(kind=TroubleKind.LOST, text=str(error))


def outcome_with(
    submission: Submission,
    found: JobRecord | EngineError | None,
    job: SlurmJob | None,
    facts: SessionFacts,
    log: Path,
) -> SubmissionOutcome:
    """Return the outcome of a submission whose job has ended.

    Args:
        submission: The attempt that was submitted.
        found: Record from `find_record`.
        job: In Slurm; None where it has forgotten the job, or never knew it.
        facts: Facts of the controller.
        log: The job's output.
    """
    record = found if isinstance(found, JobRecord) else None
    said = None if job is None else trouble_of(job, had_record=record is not None)
    hosts = () if job is None else job.hosts
    if job is not None and said is None and _was_told(record):
        text = (
            f"job {job.job_id}{_where(job)}: srun ended its tasks, as one was killed or a node was "
            f"lost"
        )
        said = EngineError(kind=TroubleKind.LOST, text=text)
    if record is None:
        what = found if isinstance(found, EngineError) else said or _forgotten(job)
        return _narrowed(SubmissionOutcome(hosts=hosts, trouble=_with_evidence(what, log)))
    outcome = rebuilt(submission, record, facts)
    is_whole = bool(outcome.ends) and all(end.is_clean for end in outcome.ends)
    trouble = outcome.trouble
    if said is not None and (not is_whole or said.kind is TroubleKind.REQUEUED):
        trouble = said if trouble is None else replace(said, hosts=trouble.hosts)
    if trouble is not None:
        trouble = _with_evidence(trouble, log)
    return _narrowed(replace(outcome, trouble=trouble, hosts=hosts or outcome.hosts))


def _was_told(record: JobRecord | None) -> bool:
    """Return if a job's tasks were told to end."""
    trouble = None if record is None else record.trouble
    return trouble is not None and trouble.kind is TroubleKind.CANCELLED


def rebuilt(submission: Submission, record: JobRecord, facts: SessionFacts) -> SubmissionOutcome:
    """Return the outcome that a job recorded; LOST if the record does not fit the plan."""
    try:
        return outcome_of(record, submission.planned(None), facts)
    except (MegatronError, KeyError) as error:
        text = f"the job's record does not fit its plan: {error}"
        return SubmissionOutcome(
            hosts=record.hosts, trouble=EngineError(kind=TroubleKind.LOST, text=text)
        )


def remove_spec(files: JobFiles) -> None:
    """Remove what a job read; a job that is started again does not find its spec."""
    with contextlib.suppress(OSError):
        files.spec.unlink()


def _narrowed(outcome: SubmissionOutcome) -> SubmissionOutcome:
    """Return an outcome whose error names the one of its hosts that srun says was lost first."""
    trouble = outcome.trouble
    if trouble is None or trouble.kind not in _OF_NODES or len(outcome.hosts) == 1:
        return outcome
    for found in filter(None, map(_LOST_HOST.match, trouble.evidence)):
        if found["host"] in outcome.hosts:
            text = f"{trouble.text}: {found['host']}"
            return replace(outcome, trouble=replace(trouble, text=text, hosts=(found["host"],)))
    return outcome


def _forgotten(job: SlurmJob | None) -> EngineError:
    text = "the job left no record" if job is not None else "Slurm knows nothing of the job"
    return EngineError(kind=TroubleKind.LOST, text=f"{text}, and nothing says how it ended")


def _with_evidence(trouble: EngineError, log: Path) -> EngineError:
    """Return trouble with the end of the job's output, but for what bash prints of its script."""
    script_lines: set[str] = set()
    with contextlib.suppress(OSError):
        for script in (log.parents[1] / "scripts").glob("*.sh"):
            script_lines |= {
                line.rstrip() for line in script.read_text(encoding="utf-8").splitlines()
            }

    def is_noise(line: str) -> bool:
        is_said = line.startswith(_OF_WORKER) and line.removeprefix(_OF_WORKER) in trouble.text
        return line in script_lines or line.startswith(_OF_BASH) or is_said

    lines = tail(log, is_noise)
    see = str(log) if log.exists() else ""
    return replace(trouble, see=see, evidence=(*trouble.evidence, *lines))
