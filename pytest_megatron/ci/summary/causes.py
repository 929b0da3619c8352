"""Cause of a failed item, from its run directory: headline, rank, line of a log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pytest_megatron.base.files import JsonValue
from pytest_megatron.ci.summary.junit import JUnitCase
from pytest_megatron.ci.summary.model import ItemCause, number_of, rows_of, text_of
from pytest_megatron.triage.records import TRIAGE_FILE, read_record

_RANK = re.compile(r"^(?:\[rank (\d+)\]|rank (\d+) of )")
_TELLING = re.compile(r"^Fatal Python error|^(?:\w+\.)*\w*(?:Error|Exception|Exit)\b|Traceback \(")
_TAIL_BYTES = 1 << 16
_MOST_LINES = 2  # of a headline


def cause_of_workload(
    record: Mapping[str, JsonValue], run_dir: Path, shown: str
) -> ItemCause | None:
    """Return why a workload did not pass; None if it did.

    Args:
        record: The one in `run.json`.
        run_dir: The run directory here.
        shown: How a user would name that directory.
    """
    problem = text_of(record, "problem")
    attempts = rows_of(record, "attempts")
    bad = [row for row in attempts if text_of(row, "cause") is not None]
    if problem is None and not bad:
        return None
    last = bad[-1] if bad else {}
    lines = (problem or "").partition("]: ")[2] or problem or ""  # without the item's own name
    text = text_of(last, "cause") or "\n".join(lines.splitlines()[:_MOST_LINES])
    told = _triage(record, run_dir)
    evidence = next(iter(rows_of(told, "evidence")), {})
    place, line = _place(evidence, record, run_dir, shown), text_of(evidence, "text")
    rank = number_of(last, "root_rank")
    return ItemCause(
        text=text,
        rank=None if rank is None else int(rank),
        place=place,
        line=line,
        signature=text_of(last, "signature") or text_of(told, "signature"),
        advice=text_of(told, "advice"),
        is_transient=last.get("is_transient") is True,
        fingerprint=text_of(last, "fingerprint") or "",
    )


def cause_of_test(
    record: Mapping[str, JsonValue], case: JUnitCase | None, run_dir: Path, shown: str
) -> ItemCause | None:
    """Return why a distributed test did not pass; None if it did."""
    problem = text_of(record, "problem")
    if problem is None:
        return None
    found = _RANK.match(problem)
    rank = None if found is None else int(found[1] or found[2])
    place, line = (None if case is None else case.location), None
    attempts = rows_of(record, "attempts")
    last = attempts[-1] if attempts else {}
    directory = text_of(last, "directory")
    has_log = text_of(last, "end") != "done"  # else the rank's log is of its other tests
    if place is None and rank is not None and directory is not None and has_log:
        log = Path(*Path(directory).parts[-2:], str(rank), "stderr.log")
        if is_within(run_dir / log, run_dir):
            number, line = telling_line(run_dir / log)
            place = f"{shown}/{log}" + (f":{number}" if number else "")
    return ItemCause(text=problem, rank=rank, place=place, line=line)


def cause_of_case(case: JUnitCase) -> ItemCause | None:
    """Return why a test that ran on no gang did not pass; None if it did."""
    if case.outcome not in ("failed", "broken"):
        return None
    return ItemCause(text=case.message or case.text or case.outcome, place=case.location)


def _triage(record: Mapping[str, JsonValue], run_dir: Path) -> dict[str, JsonValue]:
    directory = text_of(record, "directory")
    file = run_dir / Path(directory or "").name / TRIAGE_FILE
    return read_record(file) if directory and is_within(file, run_dir) else {}


def is_within(path: Path, directory: Path) -> bool:
    """Return true if a file exists and lies in a directory, links resolved."""
    return path.is_file() and path.resolve().is_relative_to(directory.resolve())


def _place(
    evidence: Mapping[str, JsonValue],
    record: Mapping[str, JsonValue],
    run_dir: Path,
    shown: str,
) -> str | None:
    """Name the line as it can be found in the artifact: the run was somewhere else."""
    directory, file = text_of(record, "directory"), text_of(evidence, "file")
    if directory is None:
        return None
    item = Path(directory).name
    if file is None:
        is_compared = (run_dir / item / "comparison.json").is_file()
        return f"{shown}/{item}/comparison.json" if is_compared else None
    _, found, rest = file.partition(f"{item}/")
    number = number_of(evidence, "line")
    return (f"{shown}/{item}/{rest}" if found else file) + (f":{number:.0f}" if number else "")


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
