"""The page of one workload: verdict, attempts, all curves. Pure.

item_page(item, facts) -> HTML of <run-dir>/<item>/curves.html
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pytest_megatron.base.text import grouped
from pytest_megatron.features import ExtensionPoint
from pytest_megatron.pages.chart import chart_style, chart_svg
from pytest_megatron.pages.index_page import document
from pytest_megatron.pages.model import Chart, MetricFinding, PageItem, RunFacts
from pytest_megatron.runs.record import RecordedLayer, RecordedWorkload

_MOST_TEXTS = 6  # of one chart
_SECTIONS: ExtensionPoint[Callable[[RecordedWorkload], str]] = ExtensionPoint("item_section")


def item_page(
    item: PageItem,
    run: RunFacts,
    *,
    files: str | None = "",
    index: str | None = "../index.html",
) -> str:
    """Return the page of a workload.

    Args:
        item: With its curves.
        run: The run of the workload.
        files: Path from the page to the item's directory; None if that cannot be reached.
        index: Path to the run's page; None if there is none.
    """
    record = item.record
    duration = "" if record.duration_s is None else f"{record.duration_s:.1f} s"
    words = shlex.quote(item.node_id)
    return document(
        "item_page.html",
        styles=(chart_style(),),
        title=f"{record.verdict}: {item.node_id}",
        item=item,
        run=run,
        files=files,
        index=index,
        facts=(
            ("in quarantine", item.quarantine),
            ("summary", record.summary),
            ("time", duration),
            ("platform", record.platform),
            ("started", run.started),
            *run.facts,
        ),
        sections=[section for make in _SECTIONS.all() if (section := make(record))],
        charts=list(_charts(item)),
        again=f"pytest-megatron repro {shlex.quote(run.name)} {words}\npytest -p megatron {words}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShownChart:
    """A chart as the page shows it.

    Attributes:
        svg: The picture.
        texts: Findings about its metric.
        rule: The rule that decided, "" where there was none.
        layers: (passed, text) of each layer of the comparison.
    """

    chart: Chart
    svg: str
    texts: tuple[str, ...]
    rule: str
    layers: tuple[tuple[bool, str], ...]


def _charts(item: PageItem) -> Iterator[_ShownChart]:
    """Yield the charts that have a curve."""
    for chart in item.charts:
        if not any(len(curve.series) for curve in chart.curves):
            continue
        shown = next((f for f in chart.findings if not f.record.passed), None) or next(
            iter(chart.findings), None
        )
        yield _ShownChart(
            chart=chart,
            svg=chart_svg(chart),
            texts=tuple(_texts(chart.findings)),
            rule="" if shown is None else shown.record.rule,
            layers=() if shown is None else tuple(map(_layer, shown.record.layers)),
        )


def _layer(row: RecordedLayer) -> tuple[bool, str]:
    """Return result and text of a layer of a comparison."""
    from pytest_megatron.workloads.golden.compare.result import (  # noqa: PLC0415 - see `read`
        layer_text,
    )

    return row.passed, layer_text(row)


def _texts(findings: Sequence[MetricFinding]) -> Iterator[str]:
    """Yield the findings on one metric; the same of several repeats once."""
    by_text = grouped((finding.short_text, finding) for finding in findings)
    several = len({(f.repeat, f.against) for f in findings}) > 1
    for number, (words, found) in enumerate(by_text.items()):
        if number == _MOST_TEXTS:
            yield f"and {len(by_text) - number} more; see comparison.json"
            return
        repeats = ", ".join(str(repeat) for repeat in dict.fromkeys(f.repeat for f in found))
        against = "" if found[0].against == "golden" else f" against the {found[0].against}"
        yield f"repeat {repeats}{against}: {words}" if several else words
