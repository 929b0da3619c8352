"""Data of pages: curves, findings, items, runs. Pure.

Everything here was read from files that may be anybody's (an artifact): texts are shown as texts,
and nothing is a path that was not put together by us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from pytest_megatron.base.text import counted, grouped, name_ranks
from pytest_megatron.runs.record import (
    RecordedAttempt,
    RecordedMetric,
    RecordedTest,
    RecordedWorkload,
    finite,
)

if TYPE_CHECKING:
    from pytest_megatron.workloads.golden.model import Series

# In the order in which an index lists them.
VERDICTS = ("broken", "failed", "flaky", "skipped", "passed")
GOOD = ("passed", "skipped")
_MOST_RANKS = 16
_MOST_DIGITS = 7  # of a rank


class CurveRole(Enum):
    """Role of a curve; the value is its name in a page's data."""

    GOLDEN = "golden"
    RUN = "run"
    FAILED = "failed"  # of an attempt that is no good


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric of one source.

    Attributes:
        name: Name in the legend: `golden`, `repeat 1`, `repeat 1, attempt 2, phase 2`.
        is_resumed: Whether it may start later than others.
    """

    name: str
    role: CurveRole
    series: Series
    is_resumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFinding:
    """Finding of a comparison on one metric of one repeat.

    Attributes:
        record: The finding as it was recorded; its text ends with the file of the golden.
    """

    repeat: int
    against: str
    record: RecordedMetric

    @property
    def largest(self) -> float | None:
        """The largest relative deviation."""
        return finite(self.record.largest_relative)

    @property
    def short_text(self) -> str:
        """The text without the file at its end and the metric at its start."""
        metric = self.record.metric
        words = self.record.text.removesuffix(f"; {self.record.golden_path}")
        return words.removeprefix(f"{metric}: ").removeprefix(f"{metric}, ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """All curves of one metric.

    Attributes:
        curves: The golden first, if there is one.
        allowed: (num_steps of the golden,) how far from it a value may be; None without a band.
        findings: Findings about this metric, in the order of repeats.
    """

    metric: str
    curves: tuple[Curve, ...]
    allowed: tuple[float, ...] | None = None
    findings: tuple[MetricFinding, ...] = ()

    @property
    def golden(self) -> Curve | None:
        """The curve that the others are compared with."""
        first = self.curves[0] if self.curves else None
        return first if first is not None and first.role is CurveRole.GOLDEN else None

    @property
    def passed(self) -> bool | None:
        """True if every comparison of it passed; None if there was none."""
        return all(f.record.passed for f in self.findings) if self.findings else None

    @property
    def first_step(self) -> int | None:
        """The first bad step of the first repeat that disagrees."""
        bad = (f.record.first_step for f in self.findings if not f.record.passed)
        return min((step for step in bad if step is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLink:
    """A file, by its path below the directory that its page is about."""

    text: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One attempt, with its logs."""

    record: RecordedAttempt
    is_run_again: bool
    links: tuple[FileLink, ...] = ()

    @property
    def name(self) -> str:
        """Repeat and number of the attempt."""
        return f"repeat {self.record.repeat or 1}, attempt {self.record.attempt or 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageItem:
    """One workload of a run.

    Attributes:
        directory: Name of the directory in the run's directory.
        triage: Why attempts failed, in words.
        links: Files of the whole item.
        others: Findings without a curve: of gradients, of generated text.
    """

    node_id: str
    directory: str
    record: RecordedWorkload
    attempts: tuple[AttemptRow, ...] = ()
    charts: tuple[Chart, ...] = ()
    others: tuple[MetricFinding, ...] = ()
    triage: tuple[str, ...] = ()
    links: tuple[FileLink, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The first line of the problem of one that failed, else the summary."""
        record = self.record
        return record.headline if record.verdict in ("failed", "broken") else record.summary

    @property
    def quarantine(self) -> str:
        """Why the workload's failure did not count; empty if it did."""
        held = self.record.quarantine
        return held.reason if held is not None and held.holds else ""

    @property
    def findings(self) -> tuple[MetricFinding, ...]:
        """All of them."""
        return (*(f for chart in self.charts for f in chart.findings), *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRow:
    """One distributed test.

    Attributes:
        links: Logs of its gangs, below the run's directory.
    """

    node_id: str
    record: RecordedTest
    links: tuple[FileLink, ...] = ()

    @property
    def problem(self) -> str:
        """Why the test did not pass, or not at once."""
        causes = self.record.causes
        reruns = f"passed at rerun {len(causes)}, after {', '.join(causes)}" if causes else ""
        return self.record.problem or reruns

    @property
    def is_good(self) -> bool:
        """True if there is nothing to look at."""
        return self.record.verdict in GOOD

    @property
    def ranks(self) -> str:
        """The size of its gang."""
        return counted(self.record.world_size, "rank")

    @property
    def rank_lines(self) -> list[str]:
        """Actions of ranks; ranks with the same one share a line."""
        by_text = grouped(
            (did, int(rank))
            for rank, did in self.record.ranks.items()
            if rank.isdecimal() and len(rank) <= _MOST_DIGITS
        )
        lines = [f"{name_ranks(ranks)}: {did}" for did, ranks in by_text.items()]
        return lines if len(lines) <= _MOST_RANKS else [*lines[:_MOST_RANKS], "..."]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about a run.

    Attributes:
        facts: (word, text), for the head of a page.
    """

    name: str
    started: str
    arguments: Sequence[str]
    facts: tuple[tuple[str, str], ...]
