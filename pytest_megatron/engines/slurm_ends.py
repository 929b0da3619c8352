"""What came of a job: its own record, and what Slurm says where that is not enough."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_megatron.engines.base import EngineError, Submission, SubmissionOutcome, TroubleKind
from pytest_megatron.engines.journal import JobEnd
from pytest_megatron.engines.records import JobRecord, outcome_of, read_record
from pytest_megatron.engines.slurm_states import SlurmJob, trouble_of
from pytest_megatron.errors import LaunchError, MegatronError
from pytest_megatron.launch.facts import SessionFacts
from pytest_megatron.launch.failure import tail

_OF_BASH = ("+", "job exited with code ")  # what nemo-run's scripts trace, and say at their end
_OF_WORKER = "pytest-megatron: "
_FAILED_NODE = re.compile(r"^srun: error: Node failure on (\S+?)$").findall


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFiles:
    """The files of one job; every machine sees them under the same path."""

    spec: Path
    record: Path
    log: Path

    @classmethod
    def of(cls, engine_dir: Path, batch: int, index: int) -> JobFiles:
        """Return the files of an element of a batch."""
        return cls(
            spec=engine_dir / "specs" / str(batch) / f"{index}.json",
            record=engine_dir / "outcomes" / f"{batch}_{index}.json",
            log=engine_dir / "logs" / f"{batch}_{index}.log",
        )


def find_record(files: JobFiles) -> JobRecord | EngineError | None:
    """Return what a job left: its record, or what is wrong with that; None if it left none."""
    try:
        return read_record(files.record)
    except LaunchError as error:
        return EngineError(kind=TroubleKind.LOST, text=str(error))


def outcome_with(
    order: Submission,
    found: JobRecord | EngineError | None,
    job: SlurmJob | None,
    facts: SessionFacts,
    log: Path,
) -> SubmissionOutcome:
    """Return what came of an order whose job has ended.

    Args:
        order: The order.
        found: As from `find_record`.
        job: What Slurm says; None where it has forgotten the job, or never knew it.
        facts: Of the controller.
        log: The job's output.
    """
    record = found if isinstance(found, JobRecord) else None
    said = None if job is None else trouble_of(job, had_record=record is not None)
    hosts = () if job is None else job.hosts
    if record is None:
        what = found if isinstance(found, EngineError) else said or _forgotten(job)
        return SubmissionOutcome(hosts=hosts, trouble=_with_evidence(what, log))
    outcome = rebuilt(order, record, facts)
    is_whole = bool(outcome.ends) and all(end.is_clean for end in outcome.ends)
    trouble = outcome.trouble
    if said is not None and (not is_whole or said.kind is TroubleKind.REQUEUED):
        trouble = said if trouble is None else replace(said, hosts=trouble.hosts)
    if trouble is not None:
        trouble = _with_evidence(trouble, log)
    return replace(outcome, trouble=trouble, hosts=hosts or outcome.hosts)


def rebuilt(order: Submission, record: JobRecord, facts: SessionFacts) -> SubmissionOutcome:
    """Return the outcome that a record is."""
    try:
        return outcome_of(record, order.planned(None), facts)
    except (MegatronError, KeyError) as error:
        text = f"the job's record does not fit its plan: {error}"
        return SubmissionOutcome(
            hosts=record.hosts, trouble=EngineError(kind=TroubleKind.LOST, text=text)
        )


def taken_up(
    order: Submission, end: JobEnd, files: JobFiles | None, facts: SessionFacts
) -> SubmissionOutcome:
    """Return the outcome that an earlier controller saw.

    Args:
        order: The order.
        end: What that wrote.
        files: None where the order never became a job.
        facts: Of this controller.
    """
    found = None if files is None else find_record(files)
    if isinstance(found, JobRecord):
        return replace(rebuilt(order, found, facts), trouble=end.trouble, hosts=end.hosts)
    return SubmissionOutcome(trouble=end.trouble or _forgotten(None), hosts=end.hosts)


def remove_spec(files: JobFiles) -> None:
    """Remove what a job was told; a job that is started again does not find it."""
    with contextlib.suppress(OSError):
        files.spec.unlink()


def narrowed(outcome: SubmissionOutcome, bad: Iterable[str]) -> SubmissionOutcome:
    """Return an outcome whose trouble names the bad ones of its hosts, if anybody knows them.

    Args:
        outcome: With trouble of a node.
        bad: Hosts that Slurm does not use now; one that failed may be back.
    """
    trouble = outcome.trouble
    if trouble is None:
        return outcome
    named = {name for line in trouble.evidence for name in _FAILED_NODE(line)}
    failed = sorted({*bad, *named, *trouble.hosts} & {*outcome.hosts})
    if not failed:
        return outcome
    text = f"{trouble.text}; out of service: {', '.join(failed)}"
    return replace(outcome, trouble=replace(trouble, text=text, hosts=tuple(failed)))


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
    text = f"{trouble.text}; see {log}" if log.exists() else trouble.text
    return replace(trouble, text=text, evidence=(*trouble.evidence, *lines))
