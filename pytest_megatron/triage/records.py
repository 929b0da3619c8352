"""Read records of a launch in our run directory: exit code, and how it was ended.

Everything here may be missing or of another version; then nothing is known.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from pytest_megatron.base.files import JsonValue, parse_json, read_bytes
from pytest_megatron.errors import TriageError
from pytest_megatron.runs.fields import Fields, read_if_there
from pytest_megatron.triage.launch import Known, LaunchEnd, LogFile, Stream, Unit
from pytest_megatron.triage.rank_log import LogLine, Root
from pytest_megatron.triage.signatures import Table

COMPARISON_FILE = "comparison.json"
HEALTH_FILE = "health.json"


def with_records(unit: Unit, root: Root | None, table: Table) -> Root | None:
    """Return the root cause as the records see it, which know more than logs.

    What NVML and the kernel saw on the attempt's own GPUs is why it failed, if it failed. A golden
    that disagrees is a failure of its own, of a training that ended well.
    """
    record = unit.known.record
    if record is None:
        return root
    if record.path.name == COMPARISON_FILE:
        return _mismatch(record, table)
    return None if root is None else _with_fault(record, root, table)


def is_mismatch(path: Path) -> bool:
    """Return true if a file is a comparison with a golden that failed."""
    return path.name == COMPARISON_FILE and _has_failed(read_if_there(path))


def _has_failed(found: Fields) -> bool:
    return found.values.get("passed") is False


def _mismatch(record: LogFile, table: Table) -> Root | None:
    repeats = read_if_there(record.path).rows("repeats")
    rows = [row for repeat in repeats for row in repeat.rows("comparisons") if _has_failed(row)]
    failed = [_describe(row) for row in rows]
    if not failed:
        return None
    return Root(
        signature=table["golden_mismatch"],
        ranks=(),
        what=f"trained to the end, but its metrics disagree: {'; '.join(dict.fromkeys(failed))}",
        places=(_place(record, b'"passed": false', failed[0]),),
    )


def _describe(row: Fields) -> str:
    step = row.whole("first_step")
    return row.text("metric") + ("" if step is None else f" from step {step} on")


def _with_fault(record: LogFile, root: Root, table: Table) -> Root:
    """Return a root cause with the first failure of the hardware in its place."""
    first = next(iter(read_if_there(record.path).rows("faults")), Fields({}))
    row = next((row for row in table.signatures if row.id == first.text("signature")), None)
    if row is None:
        return root
    text = first.text("text")
    place = _place(record, b'"faults"', text)
    return replace(root, signature=row, places=(place, *root.places), also=(text, *root.also))


def _place(record: LogFile, mark: bytes, text: str) -> LogLine:
    try:
        offset = record.path.read_bytes().find(mark)
    except OSError:
        offset = 0
    return LogLine(log=record, offset=max(0, offset), text=text)


def read_json(path: Path, most_bytes: int) -> JsonValue:
    """Return the content of a JSON file of anybody's; a number that is none is None.

    Raises:
        OSError: The file cannot be read, is no regular one, or is longer than expected.
        TriageError: It is no JSON of a sensible depth.
    """
    text = read_bytes(path, most_bytes).decode("utf-8", errors="replace")
    try:
        return parse_json(text, is_lenient=True)
    except ValueError as error:
        raise TriageError(str(path), f"is no JSON that can be read: {error}") from None


def record_of(path: Path, shown: str) -> LogFile:
    """Return a record as something that evidence can point to."""
    return LogFile(path=path, shown=shown, stream=Stream.LAUNCHER)


TRIAGE_FILE = "triage.json"
_MOST_UP = 6


def known_of(unit: Unit) -> Known:
    """Read `plan.json`, `triage.json` and `run.json` at or above a launch."""
    plan_file = _above(unit.root, "plan.json")
    if plan_file is None:
        return unit.known
    attempt = plan_file.parent
    plan = read_if_there(plan_file)
    node_id = plan.text("node_id")
    known = replace(
        unit.known,
        world_size=plan.whole("world_size"),
        command=f"pytest -p megatron {shlex.quote(node_id)}" if node_id else None,
    )
    health = attempt / HEALTH_FILE
    if health.is_file():
        known = replace(known, record=record_of(health, str(health)))
    number = _phase_number(unit.root, attempt)
    phase = _recorded_phase(attempt, number)
    if phase is not None:
        ends = {end.value: end for end in LaunchEnd}
        return replace(known, returncode=_code(phase), ended=ends.get(phase.text("ended")))
    run = _above(attempt, "run.json")
    return known if run is None else replace(known, returncode=_exit_code(run, attempt, number))


def _phase_number(directory: Path, attempt: Path) -> int:
    parts = directory.resolve().relative_to(attempt.resolve()).parts
    name = parts[0] if parts else ""
    number = name.removeprefix("phase_")
    return int(number) if number.isdigit() else 1


def _recorded_phase(attempt: Path, number: int) -> Fields | None:
    """Return the row of the item's `triage.json` for one phase of an attempt."""
    rows = read_if_there(attempt.parent.parent / TRIAGE_FILE).rows("attempts")
    key = (f"{attempt.parent.name}/{attempt.name}", number)
    return next(
        (row for row in rows if (row.text("attempt"), row.whole("phase_number")) == key), None
    )


def _code(row: Fields) -> int | None:
    code = row.values.get("returncode")
    return code if isinstance(code, int) else None


def _exit_code(run: Path, attempt: Path, number: int) -> int | None:
    """Return the exit code that `run.json` has of a phase; the run may have moved since."""
    items = read_if_there(run).inner("items")
    for row in (row for name in items.values for row in items.inner(name).rows("attempts")):
        codes = row.values.get("exit_codes")
        is_of_attempt = Path(row.text("directory")).parts[-3:] == attempt.parts[-3:]
        if is_of_attempt and isinstance(codes, list) and len(codes) >= number:
            code = codes[number - 1]
            return code if isinstance(code, int) else None
    return None


def _above(start: Path, name: str) -> Path | None:
    """Return a file in a directory or above it: a part of a run directory may be what was given."""
    directory = start.absolute()
    for _ in range(_MOST_UP):
        if (directory / name).is_file():
            return directory / name
        directory = directory.parent
    return None
