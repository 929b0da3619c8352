"""The page of one workload: verdict, attempts, all curves. Pure.

item_page(item, facts) -> HTML of <run-dir>/<item>/curves.html
"""

from __future__ import annotations

import base64
import math
import shlex
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import grouped
from pytest_megatron.pages.chart import choose, deviations, shares
from pytest_megatron.pages.index_page import document
from pytest_megatron.pages.model import Chart, MetricFinding, PageItem, RunFacts
from pytest_megatron.rooms import ExtensionPoint
from pytest_megatron.runs.equivalence import TensorDivergence
from pytest_megatron.runs.record import RecordedLayer, RecordedWorkload

if TYPE_CHECKING:
    from pytest_megatron.workloads.golden.model import Value

MOST_BYTES = 220_000  # of base64 in a page: 8 charts of 10,000 steps stay below 300 kB
_LARGEST_WHOLE_FLOAT32 = 1 << 24
_BYTES_A_VALUE = 4 / 3 * 4
_LEAST_STEPS = 100
_MISSING = "missing"
_FIRST_STEPS, _AROUND = 20, 60  # steps that are kept: at the start, to each side of a bad one
_DELTAS = ((1 << 8, "d1", "B"), (1 << 16, "d2", "H"), (1 << 32, "d4", "I"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Aligned:
    """The curves of a chart over the same steps.

    Attributes:
        steps: (num_steps,) at which any curve has a value.
        values: (num_curves, num_steps) None where a curve has no such step.
        columns: The same as numbers; nan where there is no finite one.
        allowed: (num_steps,) nan where the golden has no value; None without a band.
    """

    steps: list[int]
    values: list[list[Value | None]]
    columns: list[list[float]]
    allowed: list[float] | None

    @property
    def num_different(self) -> int:
        """Number of distinct curves."""
        return len({tuple(map(repr, values)) for values in self.values})


def encode_charts(charts: Sequence[Chart], *, most_bytes: int = MOST_BYTES) -> list[JsonValue]:
    """Return the charts of one page.

    Args:
        charts: In the order in which they are shown.
        most_bytes: What the values of all of them may take, about.
    """
    aligned = [_align(chart) for chart in charts]
    widths = [_BYTES_A_VALUE * (a.num_different + (a.allowed is not None)) for a in aligned]
    needs = [math.ceil(len(a.steps) * width) for a, width in zip(aligned, widths, strict=True)]
    encoded: list[JsonValue] = []
    for chart, all_steps, width, share in zip(
        charts, aligned, widths, shares(needs, most_bytes), strict=True
    ):
        most = max(_LEAST_STEPS, math.ceil(share / width)) if all_steps.steps else 0
        encoded.append(_encode(chart, all_steps, _kept(chart, all_steps, most)))
    return encoded


def _align(chart: Chart) -> _Aligned:
    """Return the curves of a chart over the same steps."""
    maps = [dict(curve.series.items()) for curve in chart.curves]
    steps = sorted(set().union(*maps))
    values = [[one.get(step) for step in steps] for one in maps]
    allowed = None
    if chart.allowed is not None and chart.golden is not None:
        at = dict(zip(chart.golden.series.steps, chart.allowed, strict=True))
        allowed = [at.get(step, math.nan) for step in steps]
    columns = [[_finite(value) for value in one] for one in values]
    return _Aligned(steps=steps, values=values, columns=columns, allowed=allowed)


def _kept(chart: Chart, aligned: _Aligned, most: int) -> list[int]:
    """Return the indices of the steps that are drawn."""
    if len(aligned.steps) <= most:
        return list(range(len(aligned.steps)))
    columns = [c for at, c in enumerate(aligned.columns) if c not in aligned.columns[:at]]
    if chart.golden is not None:
        columns += [deviations(columns[0], other) for other in columns[1:]]
    keep = list(range(_FIRST_STEPS))  # where most mistakes show first
    if chart.first_step is not None:
        at = bisect_left(aligned.steps, chart.first_step)
        keep = [*range(at - _AROUND, at + _AROUND + 1), *keep]
    for one in aligned.values:
        for start, count, kind in _odd(one):
            keep += [] if kind == _MISSING else [start]
            keep += [i for i in (start - 1, start + count) if kind == _MISSING]
    return choose(columns, most=most, keep=keep[: most // 2])


def _encode(chart: Chart, aligned: _Aligned, kept: list[int]) -> JsonValue:
    """Return a chart in the short form that the page's script reads."""
    seen: dict[str, int] = {}
    curves: list[JsonValue] = []
    for number, curve in enumerate(chart.curves):
        values = [aligned.values[number][at] for at in kept]
        same_as = seen.setdefault(repr(values), number)
        encoded: dict[str, JsonValue] = {"n": curve.name, "r": curve.role.value}
        if same_as != number:
            encoded["v"] = {"as": same_as}
        else:
            encoded["v"] = _numbers([aligned.columns[number][at] for at in kept])
        odd = _odd(values)
        if curve.is_resumed and odd and odd[0][0] == 0 and odd[0][2] == _MISSING:
            odd[0] = (0, odd[0][1], "before")  # it has nothing there, and nobody expects it
        if odd:
            encoded["o"] = [list[JsonValue](run) for run in odd]
        curves.append(encoded)
    result: dict[str, JsonValue] = {
        "m": chart.metric,
        "s": _steps([aligned.steps[at] for at in kept]),
        "c": curves,
    }
    if len(kept) < len(aligned.steps):
        result["of"] = len(aligned.steps)
    if aligned.allowed is not None:
        result["b"] = _numbers([aligned.allowed[at] for at in kept])
    if chart.first_step is not None:
        result["f"] = chart.first_step
    if chart.passed is not None:
        result["ok"] = chart.passed
    return result


def _steps(steps: list[int]) -> JsonValue:
    """Return steps in a short form: a distance, packed distances, or a list."""
    if not steps:
        return {"n": 0, "first": 0, "every": 1}
    gaps = [after - before for before, after in pairwise(steps)]
    result: dict[str, JsonValue] = {"n": len(steps), "first": steps[0]}
    if len(set(gaps)) <= 1:
        return {**result, "every": gaps[0] if gaps else 1}
    for above, name, kind in _DELTAS:
        if max(gaps) < above:
            return {**result, name: _packed(kind, gaps)}
    return {**result, "list": list[JsonValue](steps)}


def _numbers(values: list[float]) -> JsonValue:
    """Return values in a short form: one for all, packed floats, or a list."""
    if values and all(value == values[0] for value in values):
        return {"all": values[0]}
    is_large = any(
        abs(v) > _LARGEST_WHOLE_FLOAT32 and v.is_integer() for v in values if math.isfinite(v)
    )
    if not is_large:
        try:
            return {"f4": _packed("f", values)}
        except OverflowError:  # beyond what a float32 can hold
            pass
    return {"f8": _packed("d", values)}


def _packed(kind: str, values: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}{kind}", *values)).decode()


def _odd(values: Sequence[Value | None]) -> list[tuple[int, int, str]]:
    """Return the runs of steps without a finite number: index, how many, which kind."""
    runs: list[tuple[int, int, str]] = []
    for at, value in enumerate(values):
        if isinstance(value, float) and math.isfinite(value):
            continue
        kind = _MISSING if value is None else "text" if isinstance(value, str) else str(value)
        if runs and runs[-1][2] == kind and runs[-1][0] + runs[-1][1] == at:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, kind)
        else:
            runs.append((at, 1, kind))
    return runs


def _finite(value: Value | None) -> float:
    return value if isinstance(value, float) and math.isfinite(value) else math.nan


_MOST_TEXTS = 6  # of one chart
_SECTIONS: ExtensionPoint[Callable[[RecordedWorkload], str]] = ExtensionPoint("item_section")


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
    record = item.record
    duration = "" if record.duration_s is None else f"{record.duration_s:.1f} s"
    words = shlex.quote(item.node_id)
    return document(
        "item_page.html",
        "curves.js",
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
        data={"charts": _charts(item.charts, most_bytes)},
        tree=() if item.trace is None else module_tree(item.trace.divergences),
        again=f"pytest-megatron repro {shlex.quote(run.name)} {words}\npytest -p megatron {words}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """A module, or several of which each has but the next, with what differs in it.

    Attributes:
        depth: Depth of the row in the tree.
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
    """Yield modules with differing tensors, as rows of a tree."""
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
        shown = next((f for f in chart.findings if not f.record.passed), None) or next(
            iter(chart.findings), None
        )
        layers: list[JsonValue] = [] if shown is None else list(map(_layer, shown.record.layers))
        rule = "" if shown is None else shown.record.rule
        texts = list[JsonValue](_texts(chart.findings))
        encoded.append({**values, "t": texts, "l": layers, "rule": rule})
    return encoded


def _layer(row: RecordedLayer) -> JsonValue:
    """Return result and text of a layer of a comparison."""
    from pytest_megatron.workloads.golden.compare.result import (  # noqa: PLC0415 - see `read`
        layer_text,
    )

    return [row.passed, layer_text(row.layer, row)]


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
