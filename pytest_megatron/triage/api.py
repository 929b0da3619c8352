"""From paths to diagnoses: the one way through this package."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import grouped
from pytest_megatron.runs.record import RecordedDiagnosis, RecordedEvidence
from pytest_megatron.triage.diagnosis import Diagnosis, diagnose, evidence_of
from pytest_megatron.triage.find import find_units, with_records
from pytest_megatron.triage.gather import gather, make_scanner
from pytest_megatron.triage.logs.unwrap import unwrap
from pytest_megatron.triage.rank_log import RankLog, Unit
from pytest_megatron.triage.root_cause import find_root
from pytest_megatron.triage.signatures import Table, builtin_table

_MOST_WORDS = 3  # lines that are shown of a launch that shows nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Failures of one cause; the first of them stands for all."""

    diagnoses: tuple[RecordedDiagnosis, ...]

    @property
    def first(self) -> RecordedDiagnosis:
        """The one that stands for all."""
        return self.diagnoses[0]

    def as_json(self) -> dict[str, JsonValue]:
        """Return the first, and where the others are."""
        return {
            **asdict(self.first),
            "count": len(self.diagnoses),
            "units": [diagnosis.unit for diagnosis in self.diagnoses],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclear:
    """A launch whose logs show neither a failure nor a good end.

    Attributes:
        unit: Where its logs are.
        num_logs: How many of them were read, and `num_bytes` of them.
        last_words: The end of them.
    """

    unit: str
    num_logs: int
    num_bytes: int
    last_words: tuple[RecordedEvidence, ...]

    @property
    def text(self) -> str:
        """A launch whose logs show neither a failure nor a good end."""
        logs = f"{self.num_logs} {'log' if self.num_logs == 1 else 'logs'}"
        return (
            f"Nothing in {logs} of {self.num_bytes} bytes shows a failure, and nothing shows that "
            "it came to a good end."
        )

    def as_json(self) -> dict[str, JsonValue]:
        """Return the launch as `triage --format json` prints it."""
        return {
            "unit": self.unit,
            "text": self.text,
            "num_logs": self.num_logs,
            "num_bytes": self.num_bytes,
            "evidence": [asdict(evidence) for evidence in self.last_words],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """Causes of all failures in the given files.

    Attributes:
        groups: By cause, the one that is there most often first; empty if nothing failed.
        num_units: How many launches were looked at.
        unclear: Those that show neither a failure nor a good end.
        notes: What could not be read.
    """

    groups: tuple[FailureGroup, ...]
    num_units: int
    unclear: tuple[Unclear, ...] = ()
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
        first = asdict(self.groups[0].first) if self.groups else nothing
        if not self.groups and self.unclear:
            first = {**nothing, "family": "unknown", "signature": "unknown"}
            first |= self.unclear[0].as_json()
        return {
            "schema": 1,
            "failed": True if self.groups else None if self.unclear else False,
            **first,
            "num_launches": self.num_units,
            "failures": [group.as_json() for group in self.groups],
            "unclear": [unclear.as_json() for unclear in self.unclear],
            "notes": list(self.notes),
        }


def triage(paths: Sequence[Path], table: Table | None = None) -> Triage:
    """Return the causes of the failures that left these logs.

    Args:
        paths: Files, directories, zip and tar artifacts.
        table: Signatures; None takes those of the package.

    Raises:
        TriageError: A path cannot be read, or holds no log.
    """
    table = table or builtin_table()
    with tempfile.TemporaryDirectory(prefix="pytest-megatron-triage-") as directory:
        units, notes = find_units(paths, Path(directory))
        found = [_examine(unit, table) for unit in units]
    groups = grouped(
        (result.record.fingerprint, result.record)
        for _, result in found
        if isinstance(result, Diagnosis)
    )
    ordered = sorted(groups.values(), key=lambda group: -len(group))
    return Triage(
        groups=tuple(FailureGroup(diagnoses=tuple(group)) for group in ordered),
        num_units=len(units),
        unclear=tuple(result for _, result in found if isinstance(result, Unclear)),
        notes=(*notes, *(note for rank_log, _ in found for note in rank_log.notes)),
    )


def triage_unit(unit: Unit, table: Table | None = None) -> Diagnosis | None:
    """Return why one launch failed; None if nothing shows that it did."""
    _, result = _examine(unit, table or builtin_table())
    return result if isinstance(result, Diagnosis) else None


def _examine(unit: Unit, table: Table) -> tuple[RankLog, Diagnosis | Unclear | None]:
    """Return what was read of a launch, and its failure; None is a good end."""
    with tempfile.TemporaryDirectory(prefix="pytest-megatron-triage-") as directory:
        logs = tuple(unwrap(log, Path(directory)) for log in unit.logs)
        rank_log = gather(replace(unit, logs=logs), table, make_scanner(table))
        root = with_records(unit, find_root(rank_log, table), table)
        if root is not None:
            return rank_log, diagnose(rank_log, root)
        if unit.known.returncode == 0 or rank_log.success is not None:
            return rank_log, None
        told = [rank_log.launcher, *rank_log.ranks.values()]
        words = [place for one in told for place in one.last_words[-_MOST_WORDS:]][:_MOST_WORDS]
        return rank_log, Unclear(
            unit=unit.name,
            num_logs=len(unit.logs),
            num_bytes=sum(log.path.stat().st_size for log in unit.logs if log.path.exists()),
            last_words=tuple(evidence_of(place, None) for place in words),
        )
