"""Asks triage why a phase failed, from that phase's own files, and keeps the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pytest_megatron.errors import TriageError
from pytest_megatron.files import JsonValue, write_json_atomically
from pytest_megatron.launch.layout import ItemDirs
from pytest_megatron.launch.local import End, PhaseEnd
from pytest_megatron.triage.diagnosis import Diagnosis
from pytest_megatron.triage.recorded import read_record
from pytest_megatron.triage.signature import Table
from pytest_megatron.triage.sources import find_units
from pytest_megatron.triage.triage import triage_unit
from pytest_megatron.triage.unit import Known, LaunchEnd, Unit

_ENDED = {
    End.EXITED: LaunchEnd.EXITED,
    End.TIME_LIMIT: LaunchEnd.TIME_LIMIT,
    End.HUNG_COLLECTIVE: LaunchEnd.HUNG_COLLECTIVE,
}


def diagnose_phase(end: PhaseEnd, table: Table | None = None) -> Diagnosis | None:
    """Return what the files of a phase say of its failure; None if they say nothing.

    Reads nothing outside of the phase's own directory.
    """
    root = end.plan.dirs.root
    try:
        units, _ = find_units([root], root)  # holds no archive, so that nothing is unpacked
    except TriageError:
        return None
    places = (root, end.plan.dirs.logs)  # the latter where the launcher left no log
    mine = next((unit for unit in units if unit.root in places), None)
    return None if mine is None else triage_unit(_with_known(mine, end), table)


def _with_known(unit: Unit, end: PhaseEnd) -> Unit:
    known = Known(
        returncode=end.returncode,
        ended=_ENDED.get(end.end),
        world_size=None if end.plan.is_script else end.plan.world_size,
        command=unit.known.command,
    )
    return replace(unit, known=known)


def note_triage(
    dirs: ItemDirs, attempt: Path, end: PhaseEnd, found: Diagnosis | None, *, problem: str
) -> None:
    """Add an attempt that failed to the item's `triage.json`; a full disk loses it, no more.

    Args:
        dirs: Of the item.
        attempt: Directory of the attempt.
        end: Its last phase.
        found: What triage says of it, or None.
        problem: The cause as it is printed.
    """
    row: dict[str, JsonValue] = {
        "attempt": attempt.relative_to(dirs.root).as_posix(),
        "phase_number": end.plan.number,
        "ended": end.end.value,
        "returncode": end.returncode,
        "problem": problem,
        **({} if found is None else found.as_json()),
    }
    try:
        rows = [*_rows(dirs.triage), row]
        content: dict[str, JsonValue] = {"schema": 1, **_last(row), "attempts": rows}
        write_json_atomically(dirs.triage, content)
    except OSError:
        return


def _last(row: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the fields that everybody asks for, of the latest attempt that failed."""
    keys = ("family", "transient", "root_rank", "signature", "evidence", "text")
    return {key: row[key] for key in keys if key in row}


def _rows(path: Path) -> list[JsonValue]:
    rows = read_record(path).get("attempts")
    return rows if isinstance(rows, list) else []
