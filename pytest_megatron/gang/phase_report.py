"""One phase of a test as one rank reported it, and readers of serialised reports: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import name_ranks
from pytest_megatron.gang.spec import RankResult

Outcome: TypeAlias = Literal["passed", "failed", "skipped"]
JsonObject: TypeAlias = Mapping[str, JsonValue]
PHASES = ("setup", "call", "teardown")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """One phase as one rank reported it."""

    rank: int
    outcome: Outcome
    start: float
    stop: float
    full: JsonObject | None

    @property
    def is_xfail(self) -> bool:
        """True if it was expected to fail, regardless of its outcome."""
        return self.full is not None and "wasxfail" in self.full

    @property
    def text(self) -> str:
        """The failure as text, to compare failures and detect consequences."""
        return "" if self.full is None else longrepr_text(self.full.get("longrepr"))

    @property
    def place(self) -> tuple[str, str] | None:
        """The line that raised, `file:line`, and the exception, "" of an assertion, if known."""
        longrepr = None if self.full is None else self.full.get("longrepr")
        crash = _mapping(longrepr, "reprcrash")
        if not crash:
            return None
        kind = self.message.partition(":")[0]
        return f"{crash.get('path')}:{crash.get('lineno')}", "" if " " in kind else kind

    @property
    def message(self) -> str:
        """The line with the exception."""
        return "" if self.full is None else crash_message(self.full.get("longrepr"))


def reported(rank: RankResult, when: str) -> PhaseReport | None:
    """Return a phase of a rank, or None if the rank did not end it.

    A rank that did not end the test has passed the phases before its last.
    """
    for report in rank.early if rank.done is None else rank.done.reports:
        if isinstance(report, list):
            if report[0] == when:
                _, start, stop = cast("tuple[str, float, float]", tuple(report))
                return PhaseReport(
                    rank=rank.rank, outcome="passed", start=start, stop=stop, full=None
                )
        elif isinstance(report, Mapping) and not is_subtest(report) and report["when"] == when:
            return phase_of(rank.rank, report)
    if rank.done is None and _last_phase(rank) in PHASES[PHASES.index(when) + 1 :]:
        return PhaseReport(rank=rank.rank, outcome="passed", start=0.0, stop=0.0, full=None)
    return None


def _last_phase(rank: RankResult) -> str:
    """Return the first phase that a rank did not pass, or its current one; may be ""."""
    for report in rank.early:
        if isinstance(report, Mapping) and not is_subtest(report):
            return str(report["when"])
    return rank.phase


def phase_of(rank: int, report: JsonObject) -> PhaseReport:
    """Return a report as pytest serialised it."""
    return PhaseReport(
        rank=rank,
        outcome=cast("Outcome", report["outcome"]),
        start=cast("float", report.get("start") or 0.0),
        stop=cast("float", report.get("stop") or 0.0),
        full=report,
    )


def is_subtest(report: JsonObject) -> bool:
    """Return whether a report is of a subtest."""
    return report.get("$report_type", report.get("_report_type")) not in (None, "TestReport")


def sections_of(found: Sequence[PhaseReport]) -> tuple[tuple[str, str], ...]:
    """Return captured output, with the rank in the name where ranks differ."""
    by_name: dict[str, dict[str, list[int]]] = {}
    for phase in found:
        if phase.full is None:
            continue
        for pair in cast("list[list[str]]", phase.full.get("sections") or []):
            by_name.setdefault(pair[0], {}).setdefault(pair[1], []).append(phase.rank)
    return tuple(
        (f"{name} of {name_ranks(ranks)}", text)
        for name, texts in by_name.items()
        for text, ranks in texts.items()
    )


def properties_of(found: Sequence[PhaseReport]) -> tuple[tuple[str, JsonValue], ...]:
    """Return the recorded properties, each name and value once, of the lowest rank."""
    kept: list[tuple[str, JsonValue]] = []
    for phase in found:
        if phase.full is None:
            continue
        for name, value in cast("list[list[JsonValue]]", phase.full.get("user_properties") or []):
            if (str(name), value) not in kept:
                kept.append((str(name), value))
    return tuple(kept)


def skip_reason(phase: PhaseReport) -> str:
    """Return the reason of a skip."""
    longrepr = None if phase.full is None else phase.full.get("longrepr")
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
