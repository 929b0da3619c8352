"""The page of a run, or of several: every workload and test, failures first. Pure.

A page is one HTML file that needs nothing else. It may load nothing and run nothing but its own
script: its policy (CSP) allows the digests of our own style and script and no more. So a text that
got out of its quotes would still be inert.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pytest_megatron.base.templates import render
from pytest_megatron.base.text import counted, shorten
from pytest_megatron.errors import RunError
from pytest_megatron.pages.model import (
    VERDICTS,
    MetricFinding,
    PageItem,
    RunFacts,
    TestRow,
)

_INDENT = re.compile(r"^\s+", re.MULTILINE)
_COMMENT_LINE = re.compile(r"^\s*//.*\n", re.MULTILINE)


def document(
    template: str, script: str | None = None, *, styles: Sequence[str] = (), **values: object
) -> str:
    """Return a whole page from a template that extends `page.html`.

    Args:
        template: Name of the template.
        script: Name of our script; None for a page without one.
        styles: Contents of further `<style>` elements of the template.
        values: Values of the template; `title` is the page's.
    """
    style, code = _asset("page.css"), "" if script is None else _asset(script)
    allowed = " ".join(f"'sha256-{_digest(one)}'" for one in (style, *styles))
    policy = (
        f"default-src 'none'; style-src {allowed}; "
        f"script-src 'sha256-{_digest(code)}'; base-uri 'none'; form-action 'none'"
    )
    return render(template, policy=policy, style=style, script=code, **values)


@cache
def _asset(name: str) -> str:
    """Return a file of ours without indentation and comments."""
    content = (files("pytest_megatron.pages") / "assets" / name).read_text(encoding="utf-8")
    return _INDENT.sub("", _COMMENT_LINE.sub("", content)).strip()


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


_MOST_TEXT = 600
_MOST_TESTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRow:
    """A workload in the table; small, so that those of a large run fit into memory.

    Attributes:
        page: Path from the index to the workload's page; None if it has none.
        run: Name of its run, where the index is of several.
    """

    node_id: str
    verdict: str
    headline: str
    duration_s: float | None
    num_attempts: int
    largest: float | None
    page: str | None
    run: str | None = None

    @property
    def order(self) -> int:
        """Place in the table, by the verdict."""
        return _order(self.verdict)

    @property
    def amount(self) -> str:
        """The largest deviation as text."""
        return "" if self.largest is None else "0" if self.largest == 0 else f"{self.largest:.1e}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRun:
    """One run on an index.

    Attributes:
        num_tests: Verdict -> how many distributed tests have it.
        files: Path from the index to the run's directory; None if that cannot be reached.
    """

    facts: RunFacts
    rows: tuple[IndexRow, ...]
    num_tests: Mapping[str, int]
    tests: tuple[TestRow, ...]
    files: str | None

    @property
    def counts(self) -> str:
        """Numbers of workloads and distributed tests by verdict."""
        verdicts = Counter(row.verdict for row in self.rows)
        workloads = (
            f"{counted(len(self.rows), 'workload')}: {_counted(verdicts)}" if self.rows else ""
        )
        num_tests = counted(sum(self.num_tests.values()), "distributed test")
        tests = f"{num_tests}: {self.test_counts}"
        return "; ".join(filter(None, (workloads, tests if self.num_tests else "")))

    @property
    def test_counts(self) -> str:
        """Numbers of distributed tests by verdict."""
        return _counted(self.num_tests)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Facts about the run for the head of an index."""
        facts = self.facts
        return (("started", facts.started), ("pytest", " ".join(facts.arguments)), *facts.facts)

    @property
    def shown_tests(self) -> list[TestRow]:
        """The tests that an index lists."""
        return sorted(self.tests, key=lambda row: _order(row.record.verdict))[:_MOST_TESTS]


def index_row(item: PageItem, page: str | None, run: str | None = None) -> IndexRow:
    """Return the row of a workload."""
    measured = [f.largest for f in item.findings if f.largest is not None and _is_worst(f, item)]
    return IndexRow(
        node_id=item.node_id,
        verdict=item.record.verdict,
        headline=_with_quarantine(item, shorten(item.headline, _MOST_TEXT)),
        duration_s=item.record.duration_s,
        num_attempts=len(item.attempts),
        largest=max(measured, default=None),
        page=page,
        run=run,
    )


def damaged_run(error: RunError) -> IndexRun:
    """Return a run that cannot be read, which is one broken row."""
    row = IndexRow(
        node_id=error.where,
        verdict="broken",
        headline=error.problem,
        duration_s=None,
        num_attempts=0,
        largest=None,
        page=None,
        run=error.where,
    )
    facts = RunFacts(name=error.where, started="", arguments=(), facts=())
    return IndexRun(facts=facts, rows=(row,), num_tests={}, tests=(), files=None)


def index_page(runs: Sequence[IndexRun]) -> str:
    """Return the page of one run or of several."""
    heading = runs[0].facts.name if len(runs) == 1 else f"{len(runs)} runs"
    rows = sorted((row for run in runs for row in run.rows), key=lambda row: row.order)
    counts = Counter(row.verdict for row in rows)
    for run in runs:
        counts.update(run.num_tests)
    return document(
        "index_page.html",
        "index.js",
        title=f"{_counted(counts)}: {heading}",
        heading=heading,
        runs=runs,
        rows=rows,
        verdicts=sorted({row.verdict for row in rows}, key=_order),
    )


def _with_quarantine(item: PageItem, headline: str) -> str:
    return f"in quarantine, {item.quarantine}: {headline}" if item.quarantine else headline


def _is_worst(finding: MetricFinding, item: PageItem) -> bool:
    """Return true if a finding failed, or if none did."""
    return not finding.record.passed or all(f.record.passed for f in item.findings)


def _order(verdict: str) -> int:
    return VERDICTS.index(verdict) if verdict in VERDICTS else 0


def _counted(counts: Mapping[str, int]) -> str:
    found = sorted((v for v in counts if counts[v]), key=_order)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in found) or "nothing ran"
