"""The page of one workload: verdict, attempts, all curves. Pure.

item_page(item, facts) -> HTML of <run-dir>/<item>/curves.html
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pytest_megatron.base.files import JsonValue
from pytest_megatron.pages.encode import MOST_BYTES, encode_charts
from pytest_megatron.pages.html import document
from pytest_megatron.pages.model import Chart, MetricFinding, PageItem, RunFacts
from pytest_megatron.trace.divergences import TensorDivergence

_MOST_TEXTS = 6  # of one chart


def item_page(
    item: PageItem,
    run: RunFacts,
    *,
    files: str | None = "",
    index: str | None = "../index.html",
    most_bytes: int = MOST_BYTES,
) -> str:
    """Return the page of a workload.

    Args:
        item: With its curves.
        run: The run of the workload.
        files: Path from the page to the item's directory; None if that cannot be reached.
        index: Path to the run's page; None if there is none.
        most_bytes: Limit for the curves.
    """
    duration = "" if item.duration_s is None else f"{item.duration_s:.1f} s"
    words = shlex.quote(item.node_id)
    return document(
        "item_page.html",
        "curves.js",
        title=f"{item.verdict}: {item.node_id}",
        item=item,
        run=run,
        files=files,
        index=index,
        facts=(
            ("in quarantine", item.quarantine),
            ("summary", item.summary),
            ("time", duration),
            ("platform", item.platform),
            ("started", run.started),
            *run.facts,
        ),
        data={"charts": _charts(item.charts, most_bytes)},
        tree=() if item.trace is None else module_tree(item.trace.divergences),
        again=f"pytest-megatron repro {shlex.quote(run.name)} {words}\npytest -p megatron {words}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """A module, or several of which each has but the next, with what differs in it.

    Attributes:
        depth: Of the row in the tree.
    """

    depth: int
    name: str
    divergences: tuple[TensorDivergence, ...]


def module_tree(divergences: Sequence[TensorDivergence]) -> tuple[ModuleRow, ...]:
    """Return divergences by module, parents first, in the order in which modules first differ."""
    root = _Module()
    for one in divergences:
        module = root
        for part in filter(None, one.module.split(".")):
            module = module.children.setdefault(part, _Module())
        module.own.append(one)
    return tuple(_rows(root, 0, ()))


@dataclass(slots=True)
class _Module:
    own: list[TensorDivergence] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)


def _rows(module: _Module, depth: int, path: tuple[str, ...]) -> Iterator[ModuleRow]:
    if module.own or len(module.children) != 1:
        if module.own or path:
            name = ".".join(path) or "the model"
            yield ModuleRow(depth=depth, name=name, divergences=tuple(module.own))
            depth += 1
        path = ()
    for name, child in module.children.items():
        yield from _rows(child, depth, (*path, name))


def _charts(charts: Sequence[Chart], most_bytes: int) -> list[JsonValue]:
    """Return the charts that have a curve, as the page's script reads them."""
    drawn = [chart for chart in charts if any(len(curve.series) for curve in chart.curves)]
    encoded: list[JsonValue] = []
    for chart, values in zip(drawn, encode_charts(drawn, most_bytes=most_bytes), strict=True):
        assert isinstance(values, dict)
        shown = next((f for f in chart.findings if not f.passed), None) or next(
            iter(chart.findings), None
        )
        layers: list[JsonValue] = [] if shown is None else [[ok, text] for ok, text in shown.layers]
        rule = "" if shown is None else shown.rule
        texts = list[JsonValue](_texts(chart.findings))
        encoded.append({**values, "t": texts, "l": layers, "rule": rule})
    return encoded


def _texts(findings: Sequence[MetricFinding]) -> Iterator[str]:
    """Yield the findings on one metric; the same of several repeats once."""
    by_text: dict[str, list[MetricFinding]] = {}
    for finding in findings:
        by_text.setdefault(finding.short_text, []).append(finding)
    several = len({(f.repeat, f.against) for f in findings}) > 1
    for number, (words, found) in enumerate(by_text.items()):
        if number == _MOST_TEXTS:
            yield f"and {len(by_text) - number} more; see comparison.json"
            return
        repeats = ", ".join(str(repeat) for repeat in dict.fromkeys(f.repeat for f in found))
        against = "" if found[0].against == "golden" else f" against the {found[0].against}"
        yield f"repeat {repeats}{against}: {words}" if several else words
