"""Quarantine: an item that is known to fail runs, and its failure does not fail the run. Pure.

Marks, rows of recipes and the project's settings all have the same two keys: a reason and a day.
Must not decide on goldens of quarantined items; `workloads/refresh/` does.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_megatron.base.text import one_of

_KEYS = ("reason", "until")
_MOST_DAYS = 366
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}").fullmatch


class QuarantineError(Exception):
    """A quarantine lacks a key, or has a wrong one; the text has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """The reason that an item may fail, and the last day of that.

    Attributes:
        until: The last day on which it holds, UTC.
    """

    reason: str
    until: dt.date

    def holds_on(self, day: dt.date) -> bool:
        """Return whether a failure on that day does not count."""
        return day <= self.until


def parse_quarantine(given: object) -> Quarantine:
    """Read `{reason: ..., until: 2026-12-31}`.

    Raises:
        QuarantineError: A key is missing, unknown or of the wrong kind.
    """
    if not isinstance(given, Mapping):
        raise QuarantineError(
            f'found {given!r}, expected reason and until: {{reason: "...", until: "2026-12-31"}}'
        )
    for key in given:
        if key not in _KEYS:
            raise QuarantineError(f"unknown key {key!r}, expected {one_of(key, _KEYS)}")
    reason = given.get("reason")
    if not isinstance(reason, str) or not reason.strip():
        raise QuarantineError(
            f"reason: {_found(given, 'reason')}, expected why it may fail; "
            f"name the issue that ends it"
        )
    until = _date(given)
    if until > today() + dt.timedelta(days=_MOST_DAYS):
        raise QuarantineError(
            f"until: found {until}, expected a day within a year; a quarantine without an end is "
            f"forgotten"
        )
    return Quarantine(reason=" ".join(reason.split()), until=until)


def today() -> dt.date:
    """Return the day, UTC, so that a run's machines agree on it."""
    return dt.datetime.now(dt.UTC).date()


def _date(given: Mapping[object, object]) -> dt.date:
    """Return the last day that a quarantine holds."""
    until = given.get("until")
    if isinstance(until, dt.date):
        return until
    if isinstance(until, str) and _DATE(until):
        try:
            return dt.date.fromisoformat(until)
        except ValueError:
            pass  # the 31st of February
    raise QuarantineError(
        f"until: {_found(given, 'until')}, expected the last day that it holds, "
        f"such as 2026-12-31; a quarantine without an end is forgotten"
    )


def _found(given: Mapping[object, object], key: str) -> str:
    return f"found {given[key]!r}" if key in given else "is missing"
