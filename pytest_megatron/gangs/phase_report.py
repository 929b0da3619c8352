"""The report of one phase of a test, or of a subtest, as a rank sends it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, TypeAlias, cast

from pytest_megatron.base.files import JsonValue

Outcome: TypeAlias = Literal["passed", "failed", "skipped"]
JsonObject: TypeAlias = Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """One phase as one rank reported it.

    Attributes:
        when: setup, call or teardown.
        start: Seconds since the epoch; 0 where it is not known.
        stop: The same.
        full: pytest's report as it serialises it; None of a phase that passed without output.
    """

    when: str
    outcome: Outcome
    start: float = 0.0
    stop: float = 0.0
    full: JsonObject | None = None

    @property
    def is_subtest(self) -> bool:
        """True if it is of a subtest."""
        full = self.full or {}
        kind = full.get("$report_type", full.get("_report_type"))
        return kind not in (None, "TestReport")

    @property
    def is_xfail(self) -> bool:
        """True if it was expected to fail, regardless of its outcome."""
        return self.full is not None and "wasxfail" in self.full

    @property
    def longrepr(self) -> JsonValue:
        """The serialised traceback, or the reason of a skip."""
        return None if self.full is None else self.full.get("longrepr")

    @property
    def text(self) -> str:
        """The failure as text, to compare failures and detect consequences."""
        return longrepr_text(self.longrepr)

    @property
    def place(self) -> tuple[str, str] | None:
        """The line that raised, `file:line`, and the exception, "" of an assertion, if known."""
        crash = _mapping(self.longrepr, "reprcrash")
        if not crash:
            return None
        kind = self.message.partition(":")[0]
        return f"{crash.get('path')}:{crash.get('lineno')}", "" if " " in kind else kind

    @property
    def where(self) -> str:
        """The line that raised, `test_moe.py:14`; empty where it is not known."""
        return "" if self.place is None else PurePath(self.place[0]).name

    @property
    def message(self) -> str:
        """The line with the exception."""
        return "" if self.full is None else crash_message(self.longrepr)


def skip_reason(report: JsonObject | None) -> str:
    """Return the reason of a skip, from the report as pytest serialised it."""
    longrepr = None if report is None else report.get("longrepr")
    if isinstance(longrepr, list) and longrepr:
        return str(longrepr[-1]).removeprefix("Skipped: ")
    return "without a reason"


def crash_message(longrepr: JsonValue) -> str:
    """Return the line with the exception."""
    if crash := _mapping(longrepr, "reprcrash"):
        return str(crash.get("message", "")).strip().split("\n")[0]
    lines = longrepr_text(longrepr).strip().splitlines()
    return lines[-1].strip() if lines else "failed"


def longrepr_text(longrepr: JsonValue) -> str:
    """Return a serialised traceback as plain text, similar to pytest's output."""
    if isinstance(longrepr, str):
        return longrepr
    if not isinstance(longrepr, Mapping):
        return "" if longrepr is None else str(longrepr)
    chain = cast("list[list[JsonValue]]", longrepr.get("chain") or [])
    trace = chain[-1][0] if chain else longrepr.get("reprtraceback")
    lines: list[str] = []
    for entry in _list(trace, "reprentries"):
        data = _mapping(entry, "data")
        lines += [str(line) for line in _list(data, "lines")]
        if place := _mapping(data, "reprfileloc"):
            lines.append(f"{place.get('path')}:{place.get('lineno')}: {place.get('message')}")
    return "\n".join(lines) or str(_mapping(longrepr, "reprcrash").get("message", ""))


def _mapping(value: object, key: str) -> JsonObject:
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _list(value: object, key: str) -> list[JsonValue]:
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, list) else []
