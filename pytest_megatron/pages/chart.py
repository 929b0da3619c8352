"""A chart as a picture that needs no script: for pages, pull requests and documents. Pure.

Colours follow the reader's scheme where a browser draws it; elsewhere they are the light ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING

from pytest_megatron.base.templates import render
from pytest_megatron.pages.model import Chart, Curve, CurveRole
from pytest_megatron.runs.record import RecordedBand, finite

if TYPE_CHECKING:
    from pytest_megatron.workloads.golden.model import Series

_ROUND = (1, 2, 5, 10)
_LARGE, _SMALL = 1e6, 1e-4
_MOST_DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A straight line from [low, high] to [start, end], in the picture's units."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Return where a value is."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, about: int) -> list[tuple[float, str]]:
        """Return round numbers within the scale, and how to write them."""
        gap = _round_gap((self.high - self.low) / about)
        first = math.ceil(self.low / gap - 1e-9)
        last = math.floor(self.high / gap + 1e-9)
        return [(k * gap, tick_text(k * gap, gap)) for k in range(first, last + 1)]


def scale_of(values: Iterable[float], *, start: float, end: float, pad: float = 0.05) -> Scale:
    """Return a scale that holds all finite values, with some room."""
    finite = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite)
    room = (high - low) * pad if high > low else abs(high) * 1e-3 or 1.0
    if not math.isfinite(high - low + room):  # ends of what a float can hold
        low, high, room = -1.0, 1.0, 0.0
    return Scale(low=low - room, high=high + room, start=start, end=end)


def tick_text(value: float, gap: float) -> str:
    """Return a number of an axis, with enough digits to differ from its neighbours."""
    size = abs(value)
    if size < gap / 2:
        return "0"
    if size >= _LARGE or size < _SMALL:
        digits = max(0, math.floor(math.log10(size)) - math.floor(math.log10(gap)))
        if digits > _MOST_DIGITS and size >= _LARGE:
            return f"{value:.0f}"
        return f"{value:.{min(digits, _MOST_DIGITS)}e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:.{min(8, max(0, -math.floor(math.log10(gap) + 1e-9)))}f}"


def _round_gap(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in _ROUND if m * power >= raw * 0.999)


def _shown_points(heights: Sequence[float]) -> list[int]:
    """Return the points of a long line that are drawn: extremes of each part, ends and gaps."""
    gaps = [i for i, y in enumerate(heights) if math.isnan(y)][: _MOST_POINTS // 2]
    kept = {0, len(heights) - 1, *gaps}
    num_parts = _MOST_POINTS // 2
    for part in range(num_parts):
        start, end = (len(heights) * edge // num_parts for edge in (part, part + 1))
        known = [i for i in range(start, end) if not math.isnan(heights[i])]
        if known:
            kept.add(min(known, key=heights.__getitem__))
            kept.add(max(known, key=heights.__getitem__))
    return sorted(kept)


WIDTH, HEIGHT = 760, 430
_LEFT, _RIGHT, _TOP, _MAIN = 72, 16, 74, 220
_STRIP_TOP, _STRIP = _TOP + _MAIN + 14, 76
_FOOT = _STRIP_TOP + _STRIP
_MOST_POINTS = 700
_MOST_NAMES = 6
_MISSING = "no value"
_DOT = "m-2 0a2 2 0 1 0 4 0a2 2 0 1 0 -4 0"
_LETTER = 7.0  # width of one, about
_GOLDEN = "#b07d00"
_RUNS = ("#0063b2", "#00795c", "#a3428a", "#2a8fc7", "#6b4fbb", "#5a6b00")
_FAILED = ("#c4281c", "#a02c7d", "#7a5230")
_BOX = {
    "width": WIDTH,
    "height": HEIGHT,
    "left": _LEFT,
    "right": WIDTH - _RIGHT,
    "top": _TOP,
    "bottom": _TOP + _MAIN,
    "strip_top": _STRIP_TOP,
    "foot": _FOOT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrawnCurve:
    """A curve in the picture's units.

    Attributes:
        legend_x: Where its name stands; None if there is no room.
        strip: Path of its deviations.
        gaps: (kind, start, end) of each run of steps without a number.
    """

    name: str
    role: str
    paint: str
    legend_x: float | None
    path: str
    strip: str
    gaps: list[tuple[str, float, float]]


def chart_svg(chart: Chart) -> str:
    """Return a picture of one metric."""
    steps = [step for curve in chart.curves for step in curve.series.steps]
    across = scale_of(map(float, steps), start=_LEFT, end=WIDTH - _RIGHT, pad=0.0)
    if len(set(steps)) > 1:
        across = Scale(low=min(steps), high=max(steps), start=_LEFT, end=WIDTH - _RIGHT)
    up = scale_of(_values_in_view(chart), start=_TOP + _MAIN, end=_TOP)
    off = _Strip(chart)
    legend, more = _legend(chart.curves)
    first = chart.first_step
    is_seen = first is not None and across.low <= first <= across.high
    return render(
        "chart.svg",
        chart=chart,
        box=_BOX,
        curves=list(_drawn(chart, legend, across, up, off)),
        more=more,
        up_ticks=[(up.place(value), word) for value, word in up.ticks(5)],
        across_ticks=[(across.place(v), word) for v, word in across.ticks(7) if "." not in word],
        limit=off.scale.high,
        areas=[area for area in _band(chart, across, up, off) if area],
        first=across.place(first) if first is not None and is_seen else None,
    )


@cache
def chart_style() -> str:
    """Return the content of the style of every picture, for the policy of a page."""
    return chart_svg(Chart(metric="", curves=())).partition("<style>")[2].partition("</style>")[0]


class _Strip:
    """The strip of deviations: its scale, and what is drawn in it."""

    def __init__(self, chart: Chart) -> None:
        golden = chart.golden
        self.allowed: list[tuple[int, float]] = []
        self.lines: dict[int, list[tuple[int, float]]] = {}
        if golden is None:
            self.scale = scale_of([], start=_FOOT, end=_STRIP_TOP)
            return
        at = _numbers(golden.series)
        for number, curve in enumerate(chart.curves[1:], start=1):
            self.lines[number] = [
                (step, _relative(value, at.get(step, math.nan)))
                for step, value, _ in _points(curve, golden)
                if step in at
            ]
        if chart.allowed is not None:
            pairs = zip(golden.series.steps, chart.allowed, strict=True)
            self.allowed = [(s, a / abs(at[s])) for s, a in pairs if at.get(s) and math.isfinite(a)]
        largest = max(
            (abs(d) for line in self.lines.values() for _, d in line if math.isfinite(d)),
            default=0.0,
        )
        most = max((share for _, share in self.allowed), default=0.0)
        limit = max(largest * 1.15, min(most * 1.1, largest * 4) if largest else most * 1.1)
        limit = limit if 0 < limit < math.inf else 1e-6
        self.scale = Scale(low=-limit, high=limit, start=_FOOT, end=_STRIP_TOP)

    def place(self, value: float) -> float:
        """Return where a deviation is, at the strip's edge if it is beyond."""
        if math.isnan(value):
            return value
        return self.scale.place(max(self.scale.low, min(self.scale.high, value)))


def _paints(curves: Sequence[Curve]) -> Iterator[str]:
    """Yield the colour of each curve."""
    runs = failed = 0
    for curve in curves:
        if curve.role is CurveRole.GOLDEN:
            yield _GOLDEN
        elif curve.role is CurveRole.FAILED:
            yield _FAILED[failed % len(_FAILED)]
            failed += 1
        else:
            yield _RUNS[runs % len(_RUNS)]
            runs += 1


def _numbers(series: Series) -> dict[int, float]:
    return {s: v for s, v in series.items() if isinstance(v, float) and math.isfinite(v)}


def _values_in_view(chart: Chart) -> list[float]:
    """Return the values that the vertical scale must cover: all curves, and the tolerance band.

    A wide band would flatten the curves: it is cut to the height of the curves above and below.
    """
    values = [v for curve in chart.curves for v in _numbers(curve.series).values()]
    if not values or chart.allowed is None or chart.golden is None:
        return values
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    pairs = zip(chart.golden.series.values, chart.allowed, strict=True)
    edges = [g + s * a for g, a in pairs if isinstance(g, float) for s in (-1, 1)]
    return values + [max(low - span, min(high + span, e)) for e in edges if math.isfinite(e)]


def _legend(curves: Sequence[Curve]) -> tuple[list[float | None], dict[str, float] | None]:
    """Return where the names of curves stand, and where and how many more there are."""
    found: list[float | None] = []
    x = float(_LEFT)
    for number, curve in enumerate(curves):
        if number == _MOST_NAMES or x > WIDTH - 160:
            left = len(curves) - number
            return found + [None] * left, {"x": x, "number": left}
        found.append(x)
        x += 46 + _LETTER * len(curve.name)
    return found, None


def _band(chart: Chart, across: Scale, up: Scale, off: _Strip) -> Iterator[str]:
    """Yield the shapes of the values that the comparison allowed."""
    if chart.golden is None or chart.allowed is None:
        return
    at = _numbers(chart.golden.series)
    pairs = zip(chart.golden.series.steps, chart.allowed, strict=True)
    edges = [(s, at[s] - a, at[s] + a) for s, a in pairs if s in at and math.isfinite(a)]
    yield _area([(across.place(s), _within(up, low), _within(up, high)) for s, low, high in edges])
    yield _area([(across.place(s), off.place(-a), off.place(a)) for s, a in off.allowed])


def _within(scale: Scale, value: float) -> float:
    return scale.place(max(scale.low, min(scale.high, value)))


def _area(edges: Sequence[tuple[float, float, float]]) -> str:
    """Return the SVG path of an area between two edges."""
    edges = edges[:: max(1, len(edges) // _MOST_POINTS)]
    if not edges:
        return ""
    upper = "L".join(f"{x:.1f} {high:.1f}" for x, _, high in edges)
    lower = "L".join(f"{x:.1f} {low:.1f}" for x, low, _ in reversed(edges))
    return f"M{upper}L{lower}Z"


def _drawn(
    chart: Chart, legend: Sequence[float | None], across: Scale, up: Scale, off: _Strip
) -> Iterator[_DrawnCurve]:
    """Yield the curves of a chart as the template draws them."""
    paints = _paints(chart.curves)
    for number, (curve, paint) in enumerate(zip(chart.curves, paints, strict=True)):
        found = _points(curve, chart.golden)
        yield _DrawnCurve(
            name=curve.name,
            role=curve.role.value,
            paint=paint,
            legend_x=legend[number],
            path=_path([(across.place(s), up.place(v)) for s, v, _ in found]),
            strip=_path([(across.place(s), off.place(d)) for s, d in off.lines.get(number, [])]),
            gaps=list(_gaps(found, across)),
        )


def _points(curve: Curve, golden: Curve | None) -> list[tuple[int, float, str | None]]:
    """Return step, value and what stands in place of a number; the golden's steps included."""
    at = dict(curve.series.items())
    expected = () if golden is None else golden.series.steps
    steps = sorted({*at, *expected})
    points = []
    for step in steps[bisect_left(steps, min(at, default=0)) :] if curve.is_resumed else steps:
        value = at.get(step)
        is_number = isinstance(value, float) and math.isfinite(value)
        kind = None if is_number else _MISSING if value is None else _kind(value)
        points.append((step, value if isinstance(value, float) and is_number else math.nan, kind))
    return points


def _kind(value: float | str) -> str:
    return "text" if isinstance(value, str) else str(value)


def _relative(observed: float, golden: float) -> float:
    """Return the deviation from the golden, relative to it."""
    if observed == golden:
        return 0.0
    return (observed - golden) / abs(golden) if golden else math.nan


def _gaps(
    points: Sequence[tuple[int, float, str | None]], across: Scale
) -> Iterator[tuple[str, float, float]]:
    """Yield the spans of steps at which a curve has no number, with the kind."""
    for kind, found in groupby(points, key=lambda point: point[2]):
        steps = [step for step, _, _ in found]
        if kind is not None:
            start = across.place(steps[0]) - 3
            yield kind, start, max(across.place(steps[-1]) + 3, start + 6)


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Return a line through points; a gap where one is nan, a dot where one stands alone."""
    if len(points) > _MOST_POINTS:
        points = [points[i] for i in _shown_points([y for _, y in points])]
    parts: list[str] = []
    for is_gap, run in groupby(points, key=lambda point: math.isnan(point[1])):
        if is_gap:
            continue
        places = [f"{x:.1f} {y:.1f}" for x, y in run]
        parts.append(f"M{'L'.join(places)}{_DOT if len(places) == 1 else ''}")
    return "".join(parts)


def allowed_around(golden: Series, allowed: RecordedBand) -> tuple[float, ...] | None:
    """Return how far from each value of a golden a run may be; None where no step has a limit.

    Args:
        golden: Whatever of it is no number has no limit (nan).
        allowed: The key of that name of a comparison in `comparison.json`.
    """
    shares = sorted((int(step), finite(share) or 0.0) for step, share in allowed.relative.items())
    if not shares:
        return None
    steps, parts = zip(*shares, strict=True)
    absolute = finite(allowed.absolute) or 0.0
    return tuple(
        parts[max(0, bisect_right(steps, step) - 1)] * abs(value) + absolute
        if isinstance(value, float)
        else float("nan")
        for step, value in golden.items()
    )
