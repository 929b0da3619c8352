"""From paths to diagnoses: the one way through this package."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.files import JsonValue
from pytest_megatron.triage.cause import find_root
from pytest_megatron.triage.diagnosis import Diagnosis, diagnose
from pytest_megatron.triage.gather import gather, make_scanner
from pytest_megatron.triage.recorded import with_records
from pytest_megatron.triage.signature import Table, builtin_table
from pytest_megatron.triage.sources import find_units
from pytest_megatron.triage.unit import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Failures of one cause; the first of them stands for all."""

    diagnoses: tuple[Diagnosis, ...]

    @property
    def first(self) -> Diagnosis:
        """The one that stands for all."""
        return self.diagnoses[0]

    def as_json(self) -> dict[str, JsonValue]:
        """Return the first, and where the others are."""
        return {
            **self.first.as_json(),
            "count": len(self.diagnoses),
            "units": [diagnosis.unit for diagnosis in self.diagnoses],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """What was found in everything that was given.

    Attributes:
        groups: By cause, the one that is there most often first; empty if nothing failed.
        num_units: How many launches were looked at.
        notes: What could not be read.
    """

    groups: tuple[Group, ...]
    num_units: int
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, JsonValue]:
        """Return the first group's fields, and all groups under `failures`."""
        nothing: dict[str, JsonValue] = {
            "family": None,
            "transient": False,
            "root_rank": None,
            "signature": None,
            "evidence": [],
            "text": "nothing failed",
        }
        first = self.groups[0].first.as_json() if self.groups else nothing
        return {
            "schema": 1,
            "failed": bool(self.groups),
            **first,
            "num_launches": self.num_units,
            "failures": [group.as_json() for group in self.groups],
            "notes": list(self.notes),
        }


def triage(paths: Sequence[Path], table: Table | None = None) -> Triage:
    """Say why what left these logs failed.

    Args:
        paths: Files, directories, zip and tar artifacts.
        table: Signatures; None takes those of the package.

    Raises:
        TriageError: A path cannot be read, or holds no log.
    """
    table = table or builtin_table()
    with tempfile.TemporaryDirectory(prefix="pytest-megatron-triage-") as directory:
        units = find_units(paths, Path(directory))
        found = [triage_unit(unit, table) for unit in units]
    groups: dict[str, list[Diagnosis]] = {}
    for diagnosis in found:
        if diagnosis is not None:
            groups.setdefault(diagnosis.fingerprint, []).append(diagnosis)
    ordered = sorted(groups.values(), key=lambda group: -len(group))
    return Triage(
        groups=tuple(Group(diagnoses=tuple(group)) for group in ordered),
        num_units=len(units),
        notes=tuple(note for d in found if d is not None for note in d.notes),
    )


def triage_unit(unit: Unit, table: Table | None = None) -> Diagnosis | None:
    """Say why one launch failed; None if nothing did."""
    table = table or builtin_table()
    story = gather(unit, table, make_scanner(table))
    root = with_records(unit, find_root(story, table), table)
    return None if root is None else diagnose(story, root)
