"""The page of a run, or of several: every workload, failures first, and tests that failed. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pytest_megatron.base.text import name_ranks
from pytest_megatron.golden.model import Series
from pytest_megatron.pages.html import document, link, links, text
from pytest_megatron.pages.model import (
    VERDICTS,
    Chart,
    CurveRole,
    MetricFinding,
    PageItem,
    RunFacts,
    TestRow,
)

WIDTH, HEIGHT = 120, 24
_NUM_POINTS = 24


def sparkline(chart: Chart) -> str:
    """Return an SVG of the golden and of the longest curve beside it; empty without a number."""
    runs = [curve for curve in chart.curves if curve.role is not CurveRole.GOLDEN]
    shown = [("g", chart.golden.series)] if chart.golden is not None else []
    longest = max(runs, key=lambda curve: len(curve.series), default=None)
    shown += [] if longest is None else [("o", longest.series)]
    picked = [(name, _pick(series)) for name, series in shown]
    values = [v for _, points in picked for _, v in points]
    if not values:
        return ""
    steps = [s for _, points in picked for s, _ in points]
    box = (min(steps), max(steps), min(values), max(values))
    paths = "".join(
        f'<path class={name} d="{_path(points, box)}"/>' for name, points in picked if points
    )
    return f'<svg class=spark viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden=true>{paths}</svg>'


def _pick(series: Series) -> list[tuple[int, float]]:
    """Return some finite points of a series, its ends and its extremes among them."""
    points = [(s, v) for s, v in series.items() if isinstance(v, float) and math.isfinite(v)]
    if len(points) <= _NUM_POINTS:
        return points
    last = len(points) - 1
    at = {last * i // (_NUM_POINTS - 1) for i in range(_NUM_POINTS)}
    at |= {min(range(len(points)), key=lambda i: points[i][1])}
    at |= {max(range(len(points)), key=lambda i: points[i][1])}
    return [points[i] for i in sorted(at)]


def _path(points: list[tuple[int, float]], box: tuple[int, int, float, float]) -> str:
    """Return a path in whole units, each point relative to the one before."""
    x0, x1, low, high = box
    places = [
        (
            round(WIDTH * (step - x0) / ((x1 - x0) or 1)),
            round((HEIGHT - 2) * (1 - _share(value, low, high))) + 1,
        )
        for step, value in points
    ]
    parts = [f"M{places[0][0]} {places[0][1]}"]
    for (ax, ay), (bx, by) in pairwise(places):
        dy = by - ay
        parts.append(f"h{bx - ax}" if dy == 0 else f"l{bx - ax}{dy if dy < 0 else f' {dy}'}")
    return "".join(parts) if len(parts) > 1 else f"{parts[0]}h1"


def _share(value: float, low: float, high: float) -> float:
    span = high - low
    return (value - low) / span if 0 < span < math.inf else 0.5


_MOST_TEXT = 220
_MOST_TESTS = 2000
_MOST_RANKS = 16
_MOST_DIGITS = 7  # of a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRow:
    """A workload in the table; small, so that those of a large run fit into memory.

    Attributes:
        page: What leads from the index to the workload's page; None if it has none.
        run: Name of its run, where the index is of several.
    """

    node_id: str
    verdict: str
    headline: str
    duration_s: float | None
    num_attempts: int
    largest: float | None
    spark: str
    page: str | None
    run: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRun:
    """One run on an index.

    Attributes:
        num_tests: Verdict -> how many distributed tests have it.
        files: What leads from the index to the run's directory; None if that cannot be reached.
    """

    facts: RunFacts
    rows: tuple[IndexRow, ...]
    num_tests: Mapping[str, int]
    tests: tuple[TestRow, ...]
    files: str | None


def index_row(item: PageItem, page: str | None, run: str | None = None) -> IndexRow:
    """Return the row of a workload."""
    judged = [chart for chart in item.charts if chart.findings] or list(item.charts)
    measured = [f.largest for f in item.findings if f.largest is not None and _is_worst(f, item)]
    return IndexRow(
        node_id=item.node_id,
        verdict=item.verdict,
        headline=_with_quarantine(item, _headline(item)),
        duration_s=item.duration_s,
        num_attempts=len(item.attempts),
        largest=max(measured, default=None),
        spark=sparkline(_chosen(judged)) if judged else "",
        page=page,
        run=run,
    )


def index_page(runs: Sequence[IndexRun], title: str) -> str:
    """Return the page of one run or of several."""
    rows = [row for run in runs for row in run.rows]
    rows.sort(key=lambda row: _order(row.verdict))
    body = [
        f"<h1>{text(title)}</h1>",
        *(_head(run, is_one=len(runs) == 1) for run in runs),
        _table(rows, has_runs=len(runs) > 1) if rows else "",
        *(_tests(run, is_one=len(runs) == 1) for run in runs),
    ]
    if not rows and not any(run.num_tests for run in runs):
        body.append("<p class=quiet>Nothing ran.</p>")
    counts = Counter(row.verdict for row in rows) + Counter(
        {v: n for run in runs for v, n in run.num_tests.items()}
    )
    return document(f"{_counted(counts)}: {title}", "\n".join(filter(None, body)), "index.js")


def _with_quarantine(item: PageItem, headline: str) -> str:
    return f"in quarantine, {item.quarantine}: {headline}" if item.quarantine else headline


def _headline(item: PageItem) -> str:
    failed = [f for f in item.findings if not f.passed]
    if item.verdict == "failed" and failed:
        number = len({f.metric for f in failed})
        more = f" (and {number - 1} more)" if number > 1 else ""
        found = failed[0].text.split("; ")[0]
        return _cut(found, _MOST_TEXT - len(more)) + more
    if item.verdict in ("failed", "broken") and item.problem is not None:
        first = item.problem.removeprefix(f"{item.node_id}: ").split("\n")[0]
        return _cut(first.partition("; see ")[0], _MOST_TEXT)
    return _cut(item.summary, _MOST_TEXT)


def _is_worst(finding: MetricFinding, item: PageItem) -> bool:
    """Whether a finding says how far off an item is: one that failed, or any if all passed."""
    return not finding.passed or all(f.passed for f in item.findings)


def _chosen(charts: Sequence[Chart]) -> Chart:
    """Return the chart that stands for an item: one that failed, else the loss, else the first."""
    return (
        next((c for c in charts if c.metric == "lm loss"), charts[0])
        if (charts[0].passed is not False)
        else charts[0]
    )


def _order(verdict: str) -> int:
    return VERDICTS.index(verdict) if verdict in VERDICTS else 0


def _counted(counts: Mapping[str, int]) -> str:
    found = sorted((v for v in counts if counts[v]), key=_order)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in found) or "nothing ran"


def _head(run: IndexRun, *, is_one: bool) -> str:
    counts = Counter(row.verdict for row in run.rows)
    workloads = f"{len(run.rows)} workloads: {_counted(counts)}" if run.rows else ""
    tests = f"{sum(run.num_tests.values())} distributed tests: {_counted(run.num_tests)}"
    parts = [workloads, tests if run.num_tests else ""]
    command = " ".join(run.facts.arguments)
    facts = (("started", run.facts.started), ("pytest", command), *run.facts.facts)
    shown = "".join(f"<span><b>{text(k)}</b> {text(v)}</span>" for k, v in facts if v)
    name = "" if is_one else f"<h2>{text(run.facts.name)}</h2>"
    return f"{name}<p>{text('; '.join(filter(None, parts)))}</p><div class=facts>{shown}</div>"


def _table(rows: Sequence[IndexRow], *, has_runs: bool) -> str:
    verdicts = sorted({row.verdict for row in rows}, key=_order)
    boxes = "".join(
        f'<label class=toggle><input type=checkbox checked data-verdict="{text(v)}">'
        f"<span class={_class(v)}>{text(v)}</span></label>"
        for v in verdicts
    )
    columns = ["verdict", "item", *(["run"] if has_runs else []), "off by", "time", "attempts"]
    heads = "".join(
        f"<th{' class=n' if c in ('off by', 'time', 'attempts') else ''}>"
        f"<button type=button>{c}</button>"
        for c in columns
    )
    return (
        '<div class=bar><input id=filter type=search placeholder="filter" aria-label="filter">'
        f"{boxes}<span id=count class=hint></span></div>"
        f"<div class=wide><table id=items><thead><tr>{heads}<th>curve</thead><tbody>\n"
        + "\n".join(_row(row, has_runs=has_runs) for row in rows)
        + "</tbody></table></div>"
    )


def _row(row: IndexRow, *, has_runs: bool) -> str:
    name = text(row.node_id) if row.page is None else link(row.page, row.node_id)
    duration = row.duration_s
    cells = [
        f"<td data-s={_order(row.verdict)}>{_badge(row.verdict)}",
        f"<td>{name}<small>{text(row.headline)}</small>",
        f"<td>{text(row.run or '')}" if has_runs else "",
        f"<td class=n data-s={row.largest or 0}>{_amount(row.largest)}",
        f"<td class=n data-s={duration or 0}>{'' if duration is None else f'{duration:.1f} s'}",
        f"<td class=n data-s={row.num_attempts}>{row.num_attempts}",
        f"<td>{row.spark}",
    ]
    return f'<tr class="{text(row.verdict)}">{"".join(cells)}'


def _amount(largest: float | None) -> str:
    return "" if largest is None else "0" if largest == 0 else f"{largest:.1e}"


def _badge(verdict: str) -> str:
    return f'<span class="verdict {_class(verdict)}">{text(verdict)}</span>'


def _class(verdict: str) -> str:
    return verdict if verdict in VERDICTS else "unknown"


def _tests(run: IndexRun, *, is_one: bool) -> str:
    if not run.num_tests:
        return ""
    title = "Distributed tests" if is_one else f"Distributed tests of {run.facts.name}"
    head = f"<h2>{text(title)}</h2>"
    if not run.tests:
        return f"{head}<p>{text(_counted(run.num_tests))}</p>"
    shown = sorted(run.tests, key=lambda row: _order(row.verdict))[:_MOST_TESTS]
    rows = "\n".join(_test_row(row, run.files) for row in shown)
    left = len(run.tests) - len(shown)
    more = f"<p>{left} more are in run.json</p>" if left else ""
    return (
        f"{head}<div class=wide><table><thead><tr><th>verdict<th>test<th>ranks<th class=n>time"
        f"<th>logs</thead><tbody>\n{rows}</tbody></table></div>{more}"
    )


def _test_row(row: TestRow, files: str | None) -> str:
    return (
        f"<tr><td>{_badge(row.verdict)}<td>{text(row.node_id)}<small>{text(_cut(row.problem, 400))}"
        f"</small><td>{_ranks(row)}<td class=n>{row.duration_s:.2f} s<td>{links(row.links, files)}"
    )


def _ranks(row: TestRow) -> str:
    """Return which ranks did what; those that did the same together."""
    by_text: dict[str, list[int]] = {}
    for rank, did in row.ranks:
        if rank.isdecimal() and len(rank) <= _MOST_DIGITS:
            by_text.setdefault(did, []).append(int(rank))
    groups = [f"{name_ranks(ranks)}: {_cut(did, 120)}" for did, ranks in by_text.items()]
    if len(groups) > _MOST_RANKS:
        groups = [*groups[:_MOST_RANKS], "..."]
    return "<br>".join(map(text, groups)) or f"{row.world_size} ranks"


def _cut(words: str, most: int) -> str:
    line = " ".join(words.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def titles(runs: Iterable[IndexRun]) -> str:
    """Return what to call an index of these runs."""
    names = [run.facts.name for run in runs]
    return names[0] if len(names) == 1 else f"{len(names)} runs"
