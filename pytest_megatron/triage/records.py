"""Read records of a launch in our run directory: exit code, and how it was ended.

Everything here may be missing or of another version; then nothing is known.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from pytest_megatron.runs.layout import (
    COMPARISON_FILE,
    HEALTH_FILE,
    PLAN_FILE,
    RUN_FILE,
    TRIAGE_FILE,
)
from pytest_megatron.runs.record import (
    RecordedComparison,
    RecordedFailure,
    RecordedHealthFile,
    RecordedMetric,
    RecordedPlan,
    RecordedRun,
    RecordedTriage,
    RecordedWorkload,
    read_if_whole,
)
from pytest_megatron.triage.launch import Known, LaunchEnd, LogFile, Stream, Unit
from pytest_megatron.triage.rank_log import LogLine, Root
from pytest_megatron.triage.signatures import Table

_MOST_UP = 6


def with_records(unit: Unit, root: Root | None, table: Table) -> Root | None:
    """Return the root cause as the records see it, which know more than logs.

    A failure that NVML or the kernel reported on the attempt's own GPUs is why it failed, if it
    failed. A golden that disagrees is a failure of its own, of a training that ended well.
    """
    record = unit.known.record
    if record is None:
        return root
    if record.path.name == COMPARISON_FILE:
        return _mismatch(record, table)
    return None if root is None else _with_fault(record, root, table)


def is_mismatch(path: Path) -> bool:
    """Return true if a file is a comparison with a golden that failed."""
    if path.name != COMPARISON_FILE:
        return False
    found = read_if_whole(path, RecordedComparison)
    return found is not None and found.passed is False


def _mismatch(record: LogFile, table: Table) -> Root | None:
    """Return the cause of metrics that disagree, None if none do."""
    found = read_if_whole(record.path, RecordedComparison) or RecordedComparison()
    metrics = (metric for repeat in found.repeats for metric in repeat.comparisons)
    failed = [_text(metric) for metric in metrics if not metric.passed]
    if not failed:
        return None
    return Root(
        signature=table["golden_mismatch"],
        ranks=(),
        what=f"trained to the end, but its metrics disagree: {'; '.join(dict.fromkeys(failed))}",
        places=(_place(record, b'"passed": false', failed[0]),),
    )


def _text(found: RecordedMetric) -> str:
    step = "" if found.first_step is None else f" from step {found.first_step} on"
    return f"{found.metric}{step}"


def _with_fault(record: LogFile, root: Root, table: Table) -> Root:
    """Return a root cause with the first failure of the hardware in its place."""
    found = read_if_whole(record.path, RecordedHealthFile)
    if found is None or not found.faults:
        return root
    first = found.faults[0]
    row = next((row for row in table.signatures if row.id == first.signature), None)
    if row is None:
        return root
    place = _place(record, b'"faults"', first.text)
    return replace(root, signature=row, places=(place, *root.places), also=(first.text, *root.also))


def _place(record: LogFile, mark: bytes, text: str) -> LogLine:
    """Return the line of a record where a mark is."""
    try:
        offset = record.path.read_bytes().find(mark)
    except OSError:
        offset = 0
    return LogLine(log=record, offset=max(0, offset), text=text)


def record_of(path: Path, shown: str) -> LogFile:
    """Return a record as something that evidence can point to."""
    return LogFile(path=path, shown=shown, stream=Stream.LAUNCHER)


def known_of(unit: Unit) -> Known:
    """Return what `plan.json`, `triage.json` and `run.json` at or above a launch say of it."""
    plan_file = _above(unit.root, PLAN_FILE)
    if plan_file is None:
        return unit.known
    attempt = plan_file.parent
    known = unit.known
    plan = read_if_whole(plan_file, RecordedPlan)
    if plan is not None:
        command = f"pytest -p megatron {shlex.quote(plan.node_id)}"
        known = replace(
            known, world_size=plan.world_size, command=command, limit_s=plan.time_limit_s
        )
    health = attempt / HEALTH_FILE
    if health.is_file():
        known = replace(known, record=record_of(health, str(health)))
    number = _phase_number(unit.root, attempt)
    diagnosed = _diagnosed(attempt, number)
    if diagnosed is not None:
        ended = next((end for end in LaunchEnd if end.value == diagnosed.ended), None)
        return replace(known, returncode=diagnosed.returncode, ended=ended)
    run = _above(attempt, RUN_FILE)
    return known if run is None else replace(known, returncode=_exit_code(run, attempt, number))


def _phase_number(directory: Path, attempt: Path) -> int:
    """Return the number of the phase that a directory is of."""
    parts = directory.resolve().relative_to(attempt.resolve()).parts
    name = parts[0] if parts else ""
    number = name.removeprefix("phase_")
    return int(number) if number.isdigit() else 1


def _diagnosed(attempt: Path, number: int) -> RecordedFailure | None:
    """Return the entry of the item's `triage.json` for one phase of an attempt."""
    where = f"{attempt.parent.name}/{attempt.name}"
    found = read_if_whole(attempt.parent.parent / TRIAGE_FILE, RecordedTriage)
    rows = () if found is None else found.attempts
    return next((r for r in rows if (r.attempt, r.phase_number) == (where, number)), None)


def _exit_code(run_file: Path, attempt: Path, number: int) -> int | None:
    """Return the exit code that `run.json` has of a phase; the run may have moved since."""
    run = read_if_whole(run_file, RecordedRun)
    items = () if run is None else run.items.values()
    for item in items:
        for row in item.attempts if isinstance(item, RecordedWorkload) else ():
            if Path(row.directory).parts[-3:] == attempt.parts[-3:]:
                return row.exit_codes[number - 1] if len(row.exit_codes) >= number else None
    return None


def _above(start: Path, name: str) -> Path | None:
    """Return a file in a directory or above it: a part of a run directory may be what was given."""
    directory = start.resolve()  # the parent of `..` is not what is before it
    for _ in range(_MOST_UP):
        if (directory / name).is_file():
            return directory / name
        directory = directory.parent
    return None
