"""Data of pages: curves, findings, items, runs. Pure.

Everything here was read from files that may be anybody's (an artifact): texts are shown as texts,
and nothing is a path that was not put together by us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pytest_megatron.base.text import name_ranks
from pytest_megatron.runs.equivalence import TraceComparison
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
        rule: The rule that decided.
        first_step: The first outside of the band; None if no single one decided.
        text: For a person.
        golden_path: The file that it ends with.
        largest: The largest relative deviation.
        layers: (whether it passed, in words) of every test that the metric was put to.
    """

    metric: str
    repeat: int
    against: str
    passed: bool
    rule: str
    first_step: int | None
    text: str
    golden_path: str = ""
    largest: float | None = None
    layers: tuple[tuple[bool, str], ...] = ()

    @property
    def short_text(self) -> str:
        """The text without the file at its end and the metric at its start."""
        words = self.text.removesuffix(f"; {self.golden_path}")
        return words.removeprefix(f"{self.metric}: ").removeprefix(f"{self.metric}, ")


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
        return all(f.passed for f in self.findings) if self.findings else None

    @property
    def first_step(self) -> int | None:
        """The first bad step of the first repeat that disagrees."""
        bad = [f.first_step for f in self.findings if not f.passed and f.first_step is not None]
        return min(bad, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLink:
    """A file, by its path below the directory that its page is about."""

    text: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One attempt, as a table shows it."""

    name: str
    cause: str | None
    signature: str | None
    is_run_again: bool
    root_rank: int | None
    duration_s: float
    links: tuple[FileLink, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PageItem:
    """One workload of a run.

    Attributes:
        directory: Name of the directory in the run's directory.
        headline: The first line of `problem` of one that failed, else the summary.
        summary: One line.
        quarantine: Why its failure did not count; empty if it did.
        triage: Why attempts failed, in words.
        links: Files of the whole item.
        others: Findings without a curve: of gradients, of generated text.
        trace: How its tensors compare with those of another layout or, in an audit, of the same
            training; or None.
        is_audit: Whether it is of an audit.
    """

    node_id: str
    directory: str
    verdict: str
    platform: str
    problem: str | None
    summary: str
    duration_s: float | None
    attempts: tuple[AttemptRow, ...] = ()
    charts: tuple[Chart, ...] = ()
    others: tuple[MetricFinding, ...] = ()
    headline: str = ""
    triage: tuple[str, ...] = ()
    links: tuple[FileLink, ...] = ()
    notes: tuple[str, ...] = ()
    quarantine: str = ""
    trace: TraceComparison | None = None
    is_audit: bool = False

    @property
    def findings(self) -> tuple[MetricFinding, ...]:
        """All of them."""
        return (*(f for chart in self.charts for f in chart.findings), *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRow:
    """One distributed test.

    Attributes:
        ranks: (rank, its outcome).
        report: (title, text) of tracebacks, stacks and captured output of one that failed.
        links: Logs of its gangs, below the run's directory.
    """

    node_id: str
    verdict: str
    problem: str
    world_size: int
    duration_s: float
    num_attempts: int
    ranks: tuple[tuple[str, str], ...]
    report: tuple[tuple[str, str], ...] = ()
    links: tuple[FileLink, ...] = ()

    @property
    def is_good(self) -> bool:
        """True if there is nothing to look at."""
        return self.verdict in GOOD

    @property
    def rank_lines(self) -> list[str]:
        """Actions of ranks; ranks with the same one share a line."""
        by_text: dict[str, list[int]] = {}
        for rank, did in self.ranks:
            if rank.isdecimal() and len(rank) <= _MOST_DIGITS:
                by_text.setdefault(did, []).append(int(rank))
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
