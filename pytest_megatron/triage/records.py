"""What our own run directory says about a launch beside its logs: exit code, how it was ended.

Everything here may be missing or of another version; then nothing is known.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from pytest_megatron.files import JsonValue
from pytest_megatron.triage.recorded import HEALTH_FILE, read_record, record_of
from pytest_megatron.triage.unit import Known, LaunchEnd, Unit

TRIAGE_FILE = "triage.json"
_MOST_UP = 6


def known_of(unit: Unit) -> Known:
    """Return what `plan.json`, `triage.json` and `run.json` at or above a launch say of it."""
    plan_file = _above(unit.root, "plan.json")
    if plan_file is None:
        return unit.known
    attempt = plan_file.parent
    plan = read_record(plan_file)
    node_id, size = plan.get("node_id"), plan.get("world_size")
    known = replace(
        unit.known,
        world_size=size if isinstance(size, int) else None,
        command=f"pytest -p megatron {shlex.quote(node_id)}" if isinstance(node_id, str) else None,
    )
    health = attempt / HEALTH_FILE
    if health.is_file():
        known = replace(known, record=record_of(health, str(health)))
    number = _phase_number(unit.root, attempt)
    told = _told(read_record(attempt.parent.parent / TRIAGE_FILE), attempt, number)
    if told is not None:
        return replace(known, returncode=told.returncode, ended=told.ended)
    run = _above(attempt, "run.json")
    return known if run is None else replace(known, returncode=_exit_code(run, attempt, number))


def _phase_number(directory: Path, attempt: Path) -> int:
    parts = directory.resolve().relative_to(attempt.resolve()).parts
    name = parts[0] if parts else ""
    number = name.removeprefix("phase_")
    return int(number) if number.isdigit() else 1


def _told(record: dict[str, JsonValue], attempt: Path, number: int) -> Known | None:
    """Return what the item's `triage.json` says of one phase of an attempt."""
    where = f"{attempt.parent.name}/{attempt.name}"
    attempts = record.get("attempts")
    for row in attempts if isinstance(attempts, list) else []:
        if not isinstance(row, dict) or row.get("attempt") != where:
            continue
        if row.get("phase_number") != number:
            continue
        code, ended = row.get("returncode"), row.get("ended")
        kinds = {end.value: end for end in LaunchEnd}
        return Known(
            returncode=code if isinstance(code, int) else None, ended=kinds.get(str(ended))
        )
    return None


def _exit_code(run: Path, attempt: Path, number: int) -> int | None:
    """Return the exit code that `run.json` has of a phase; the run may have moved since."""
    tail = attempt.parts[-3:]
    items = read_record(run).get("items")
    for item in items.values() if isinstance(items, dict) else []:
        rows = item.get("attempts") if isinstance(item, dict) else None
        for row in rows if isinstance(rows, list) else []:
            if not isinstance(row, dict) or Path(str(row.get("directory"))).parts[-3:] != tail:
                continue
            codes = row.get("exit_codes")
            if isinstance(codes, list) and len(codes) >= number:
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
