"""Cause of a failed item, from its run directory: headline, rank, line of a log."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_megatron.ci.summary.junit import JUnitCase
from pytest_megatron.ci.summary.model import ItemCause
from pytest_megatron.runs.layout import TRIAGE_FILE
from pytest_megatron.runs.record import (
    RecordedAttempt,
    RecordedEvidence,
    RecordedExecution,
    RecordedTest,
    RecordedTriage,
    RecordedWorkload,
    read_if_whole,
)

_RANK = re.compile(r"^(?:\[rank (\d+)\]|rank (\d+) of )")
_TELLING = re.compile(r"^Fatal Python error|^(?:\w+\.)*\w*(?:Error|Exception|Exit)\b|Traceback \(")
_TAIL_BYTES = 1 << 16
_MOST_LINES = 2  # of a headline


def cause_of_workload(record: RecordedWorkload, run_dir: Path, shown: str) -> ItemCause | None:
    """Return why a workload did not pass; None if it did.

    Args:
        record: The one in `run.json`.
        run_dir: The run directory here.
        shown: How a user would name that directory.
    """
    problem = record.problem
    bad = [attempt for attempt in record.attempts if attempt.cause]
    if problem is None and not bad:
        return None
    last = bad[-1] if bad else RecordedAttempt()
    lines = (problem or "").partition("]: ")[2] or problem or ""  # without the item's own name
    triage = _triage(record, run_dir)
    evidence = triage.evidence[0] if triage.evidence else None
    return ItemCause(
        text=last.cause or "\n".join(lines.splitlines()[:_MOST_LINES]),
        rank=last.root_rank,
        place=_place(evidence, record, run_dir, shown),
        line=None if evidence is None else evidence.text,
        signature=last.signature or triage.signature,
        advice=next((d.advice for d in (*triage.attempts[-1:], triage) if d.advice), None),
        is_transient=last.is_transient,
        fingerprint=last.fingerprint or "",
    )


def cause_of_test(
    record: RecordedTest, case: JUnitCase | None, run_dir: Path, shown: str
) -> ItemCause | None:
    """Return why a distributed test did not pass; None if it did."""
    problem = record.problem
    if problem is None:
        return None
    found = _RANK.match(problem)
    rank = None if found is None else int(found[1] or found[2])
    place, line = (None if case is None else case.location), None
    last = record.attempts[-1] if record.attempts else RecordedExecution()
    has_log = last.end != "done"  # else the rank's log is of its other tests
    if place is None and rank is not None and last.directory and has_log:
        log = Path(*Path(last.directory).parts[-2:], str(rank), "stderr.log")
        if is_within(run_dir / log, run_dir):
            number, line = telling_line(run_dir / log)
            place = f"{shown}/{log}" + (f":{number}" if number else "")
    return ItemCause(text=problem, rank=rank, place=place, line=line)


def cause_of_case(case: JUnitCase) -> ItemCause | None:
    """Return why a test that ran on no gang did not pass; None if it did."""
    if case.outcome not in ("failed", "broken"):
        return None
    return ItemCause(text=case.message or case.text or case.outcome, place=case.location)


def _triage(record: RecordedWorkload, run_dir: Path) -> RecordedTriage:
    file = run_dir / Path(record.directory or "").name / TRIAGE_FILE
    found = read_if_whole(file, RecordedTriage) if is_within(file, run_dir) else None
    return found or RecordedTriage()


def is_within(path: Path, directory: Path) -> bool:
    """Return true if a file exists and lies in a directory, links resolved."""
    return path.is_file() and path.resolve().is_relative_to(directory.resolve())


def _place(
    evidence: RecordedEvidence | None, record: RecordedWorkload, run_dir: Path, shown: str
) -> str | None:
    """Name the line as it can be found in the artifact: the run was somewhere else."""
    if not record.directory:
        return None
    item = Path(record.directory).name
    if evidence is None:
        is_compared = (run_dir / item / "comparison.json").is_file()
        return f"{shown}/{item}/comparison.json" if is_compared else None
    _, found, rest = evidence.file.partition(f"{item}/")
    number = f":{evidence.line}" if evidence.line else ""
    return (f"{shown}/{item}/{rest}" if found else evidence.file) + number


def telling_line(log: Path) -> tuple[int | None, str | None]:
    """Return number and text of the line of a log that shows the failure, if one does."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            start = file.tell()
            lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None, None
    numbers = [i for i, line in enumerate(lines) if _TELLING.match(line)]
    numbers = numbers or [i for i, line in enumerate(lines) if line.strip()][-1:]
    if not numbers:
        return None, None
    number = numbers[-1]
    return (number + 1 if start == 0 else None), lines[number]
