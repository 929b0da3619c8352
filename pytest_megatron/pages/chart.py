"""A chart as a picture that needs no script: for pull requests and documents. Pure.

Colours follow the reader's scheme where a browser draws it; elsewhere they are the light ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from pytest_megatron.base.text import visible
from pytest_megatron.golden.model import Series
from pytest_megatron.pages.model import Chart, Curve, CurveRole
from pytest_megatron.runs.record import RecordedBand, finite

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
        """Return round numbers within it, and how to write them."""
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
    """Return a number of an axis, with as many digits as tell it from its neighbours."""
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


# What a step without a finite number has.
Column = Sequence[float]


def deviations(golden: Column, other: Column) -> list[float]:
    """Return |other - golden| relative to the golden at each step; nan where one has no number."""
    return [
        abs(o - g) / (abs(g) or 1.0) if math.isfinite(o - g) else math.nan
        for g, o in zip(golden, other, strict=True)
    ]


def choose(columns: Sequence[Column], *, most: int, keep: Iterable[int] = ()) -> list[int]:
    """Return which of the steps to keep, ascending.

    Args:
        columns: (num_columns, num_steps) curves and deviations, each with extremes to keep.
        most: How many steps may be left, about.
        keep: Those that must be.
    """
    num_steps = len(columns[0])
    if num_steps <= most:
        return list(range(num_steps))
    num_buckets = max(1, most // 2)
    while True:
        kept = _extremes(columns, num_steps, num_buckets)
        if len(kept) <= most or num_buckets == 1:
            kept.update((0, num_steps - 1), (k for k in keep if 0 <= k < num_steps))
            return sorted(kept)
        num_buckets = max(1, min(num_buckets - 1, int(num_buckets * most / len(kept))))


def _extremes(columns: Sequence[Column], num_steps: int, num_buckets: int) -> set[int]:
    """Return where the smallest and the largest number of each column in each bucket are."""
    kept: set[int] = set()
    for bucket in range(num_buckets):
        start, end = (num_steps * b // num_buckets for b in (bucket, bucket + 1))
        for column in columns:
            part = column[start:end]
            # A nan compares false with everything, which would hide the numbers after it.
            if any(map(math.isnan, part)):
                part = [v for v in part if not math.isnan(v)]
                if not part:
                    continue
            kept.add(column.index(min(part), start, end))
            kept.add(column.index(max(part), start, end))
    return kept


def shares(needs: Sequence[int], total: int) -> list[int]:
    """Return what each gets of `total`: what it needs, or an equal part of what is left."""
    given = [0] * len(needs)
    left, open_needs = total, len(needs)
    for at in sorted(range(len(needs)), key=needs.__getitem__):
        given[at] = min(needs[at], left // open_needs)
        left, open_needs = left - given[at], open_needs - 1
    return given


WIDTH, HEIGHT = 760, 430
_LEFT, _RIGHT, _TOP, _MAIN = 72, 16, 74, 220
_STRIP_TOP, _STRIP = _TOP + _MAIN + 14, 76
_FOOT = _STRIP_TOP + _STRIP
_MOST_POINTS = 700
_MOST_NAMES = 6
_ROOM = 90  # that a word needs
_MISSING = "no value"
_DOT = "m-2 0a2 2 0 1 0 4 0a2 2 0 1 0 -4 0"
_LETTER = 7.0  # width of one, about
_GOLDEN, _BACK, _TEXT, _SOFT, _GRID = "#b07d00", "#ffffff", "#1b1f24", "#57606a", "#e2e7ec"
_BAD, _GOOD = "#c62f2f", "#1a7f37"
_RUNS = ("#0063b2", "#00795c", "#a3428a", "#2a8fc7", "#6b4fbb", "#5a6b00")
_FAILED = ("#c4281c", "#a02c7d", "#7a5230")
_DARK = {
    _BACK: "#0d1117",
    _TEXT: "#e6edf3",
    _SOFT: "#9aa5b1",
    _GRID: "#262d36",
    _GOLDEN: "#f0b429",
    _BAD: "#ff7b72",
    _GOOD: "#4cc26a",
    **dict(
        zip(_RUNS, ("#58a6ff", "#3ecfa4", "#e08bc9", "#7fd0ff", "#b39dff", "#b9cc4d"), strict=True)
    ),
    **dict(zip(_FAILED, ("#ff7b72", "#ff9bd2", "#cfa27a"), strict=True)),
}
_FONT = "font-family=\"system-ui, 'DejaVu Sans', 'Liberation Sans', Arial, sans-serif\""


def chart_svg(chart: Chart, title: str) -> str:
    """Return a picture of one metric.

    Args:
        chart: With its curves.
        title: Of what; the metric's name stands beneath it.
    """
    paints = list(_paints(chart.curves))
    steps = [step for curve in chart.curves for step in curve.series.steps]
    across = scale_of(map(float, steps), start=_LEFT, end=WIDTH - _RIGHT, pad=0.0)
    if len(set(steps)) > 1:
        across = Scale(low=min(steps), high=max(steps), start=_LEFT, end=WIDTH - _RIGHT)
    up = scale_of(_seen(chart), start=_TOP + _MAIN, end=_TOP)
    off = _Strip(chart)
    parts = [
        *_head(chart, title, paints),
        *_axes(across, up, off),
        *_band(chart, across, up, off),
        *_lines(chart, paints, across, up, off),
        *_first(chart, across),
    ]
    return (
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" font-size="12" {_FONT} role="img">'
            f"<title>{_text(title)}, {_text(chart.metric)}</title><style>{_dark_style()}</style>\n"
            f'<rect width="100%" height="100%" {_fill(_BACK)}/>\n' + "\n".join(parts) + "\n</svg>\n"
        )
        .encode("utf-8", "replace")
        .decode()
    )


class _Strip:
    """The strip of deviations: its scale, and what is drawn in it."""

    def __init__(self, chart: Chart) -> None:
        golden = chart.golden
        self.allowed: list[tuple[int, float]] = []
        self.lines: dict[int, list[tuple[int, float]]] = {}
        self.has_golden = golden is not None
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


def _seen(chart: Chart) -> list[float]:
    """Return what the main picture has to hold: curves, and the band as far as it is no wider."""
    values = [v for curve in chart.curves for v in _numbers(curve.series).values()]
    if not values or chart.allowed is None or chart.golden is None:
        return values
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    pairs = zip(chart.golden.series.values, chart.allowed, strict=True)
    edges = [g + s * a for g, a in pairs if isinstance(g, float) for s in (-1, 1)]
    return values + [max(low - span, min(high + span, e)) for e in edges if math.isfinite(e)]


def _head(chart: Chart, title: str, paints: Sequence[str]) -> Iterator[str]:
    big = f'font-size="14" font-weight="600" {_fill(_TEXT)}'
    yield f'<text x="16" y="24" {big}>{_text(title)}</text>'
    yield f'<text x="16" y="44" {_fill(_TEXT)}>{_text(chart.metric)}</text>'
    if chart.passed is not None:
        word, colour = ("passed", _GOOD) if chart.passed else ("failed", _BAD)
        yield (
            f'<text x="{WIDTH - _RIGHT}" y="24" text-anchor="end" font-weight="600" '
            f"{_fill(colour)}>{word}</text>"
        )
    x = float(_LEFT)
    for number, (curve, paint) in enumerate(zip(chart.curves, paints, strict=True)):
        if number == _MOST_NAMES or x > WIDTH - 160:
            left = len(chart.curves) - number
            yield f'<text x="{x:.0f}" y="64" {_fill(_SOFT)}>and {left} more</text>'
            return
        yield f'<path d="M{x:.0f} 60h22" {_stroke(paint, curve.role)}/>'
        yield f'<text x="{x + 28:.0f}" y="64" {_fill(_SOFT)}>{_text(curve.name)}</text>'
        x += 46 + _LETTER * len(curve.name)


def _axes(across: Scale, up: Scale, off: _Strip) -> Iterator[str]:
    right, bottom = WIDTH - _RIGHT, _TOP + _MAIN
    for value, word in up.ticks(5):
        y = up.place(value)
        yield f'<path d="M{_LEFT} {y:.1f}H{right}" {_thin()}/>'
        yield _label(_LEFT - 6, y + 4, word, "end")
    for value, word in across.ticks(7):
        if "." in word:
            continue
        x = across.place(value)
        yield f'<path d="M{x:.1f} {_TOP}V{bottom}M{x:.1f} {_STRIP_TOP}V{_FOOT}" {_thin()}/>'
        yield _label(x, _FOOT + 16, word, "middle")
    yield f'<path d="M{_LEFT} {_TOP}H{right}V{bottom}H{_LEFT}Z" {_thin()}/>'
    yield f'<path d="M{_LEFT} {_STRIP_TOP}H{right}V{_FOOT}H{_LEFT}Z" {_thin()}/>'
    yield _label(right, _FOOT + 34, "step", "end")
    if not off.has_golden:
        yield _label(_LEFT + 8, _STRIP_TOP + _STRIP / 2 + 4, "no golden to compare with", "start")
        return
    limit = off.scale.high
    for value, y in ((limit, _STRIP_TOP + 10), (0.0, _STRIP_TOP + _STRIP / 2 + 4), (-limit, _FOOT)):
        yield _label(_LEFT - 6, y, f"{value:+.1e}" if value else "0", "end")
    yield _label(_LEFT, _FOOT + 34, "below: deviation from the golden, relative", "start")


def _band(chart: Chart, across: Scale, up: Scale, off: _Strip) -> Iterator[str]:
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
    edges = edges[:: max(1, len(edges) // _MOST_POINTS)]
    if not edges:
        return ""
    upper = "L".join(f"{x:.1f} {high:.1f}" for x, _, high in edges)
    lower = "L".join(f"{x:.1f} {low:.1f}" for x, low, _ in reversed(edges))
    return f'<path d="M{upper}L{lower}Z" {_fill(_GOLDEN)} fill-opacity="0.18"/>'


def _lines(
    chart: Chart, paints: Sequence[str], across: Scale, up: Scale, off: _Strip
) -> Iterator[str]:
    for number, (curve, paint) in enumerate(zip(chart.curves, paints, strict=True)):
        style = _stroke(paint, curve.role)
        found = _points(curve, chart.golden)
        yield f'<path d="{_path([(across.place(s), up.place(v)) for s, v, _ in found])}" {style}/>'
        strip = [(across.place(s), off.place(d)) for s, d in off.lines.get(number, [])]
        if strip:
            yield f'<path d="{_path(strip)}" {style}/>'
        yield from _odd(found, paint, across)


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
    if observed == golden:
        return 0.0
    return (observed - golden) / abs(golden) if golden else math.nan


def _odd(
    points: Sequence[tuple[int, float, str | None]], paint: str, across: Scale
) -> Iterator[str]:
    """Yield a bar for each run of steps without a number: at the bottom where there is no step."""
    for kind, found in groupby(points, key=lambda point: point[2]):
        steps = [step for step, _, _ in found]
        if kind is None:
            continue
        x0 = across.place(steps[0]) - 3
        x1 = max(across.place(steps[-1]) + 3, x0 + 6)
        y, text_y = (_TOP + _MAIN - 3, -6) if kind == _MISSING else (_TOP + 3, 15)
        yield f'<path d="M{x0:.1f} {y}H{x1:.1f}" {_stroke_plain(paint, 4)}/>'
        is_late = x0 > WIDTH - _ROOM
        yield _label(x1 if is_late else x0, y + text_y, kind, "end" if is_late else "start", _BAD)


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Return a line through points; a gap where one is nan, a dot where one stands alone."""
    if len(points) > _MOST_POINTS:
        heights = [y for _, y in points]
        gaps = [i for i, y in enumerate(heights) if math.isnan(y)][: _MOST_POINTS // 2]
        points = [points[i] for i in choose([heights], most=_MOST_POINTS, keep=gaps)]
    parts: list[str] = []
    for is_gap, run in groupby(points, key=lambda point: math.isnan(point[1])):
        if is_gap:
            continue
        places = [f"{x:.1f} {y:.1f}" for x, y in run]
        parts.append(f"M{'L'.join(places)}{_DOT if len(places) == 1 else ''}")
    return "".join(parts)


def _first(chart: Chart, across: Scale) -> Iterator[str]:
    step = chart.first_step
    if step is None or not across.low <= step <= across.high:
        return
    x = across.place(step)
    is_late = x > WIDTH - 140
    yield f'<path d="M{x:.1f} {_TOP}V{_FOOT}" {_stroke_plain(_BAD, 1)} stroke-dasharray="3 3"/>'
    word = f"first off: step {step}"
    yield _label(
        x - 5 if is_late else x + 5, _STRIP_TOP - 3, word, "end" if is_late else "start", _BAD
    )


def _label(x: float, y: float, word: str, anchor: str, colour: str = _SOFT) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {_fill(colour)}>{_text(word)}</text>'
    )


def _stroke(colour: str, role: CurveRole) -> str:
    width = 3 if role is CurveRole.GOLDEN else 1.5
    dashed = ' stroke-dasharray="5 3"' if role is CurveRole.FAILED else ""
    return f'{_stroke_plain(colour, width)} stroke-linejoin="round" stroke-linecap="round"{dashed}'


def _stroke_plain(colour: str, width: float) -> str:
    return f'class="s{colour[1:]}" fill="none" stroke="{colour}" stroke-width="{width}"'


def _thin() -> str:
    return _stroke_plain(_GRID, 1)


def _fill(colour: str) -> str:
    return f'class="f{colour[1:]}" fill="{colour}"'


def _dark_style() -> str:
    rules = "".join(f".s{k[1:]}{{stroke:{v}}}.f{k[1:]}{{fill:{v}}}" for k, v in _DARK.items())
    return f"@media (prefers-color-scheme:dark){{{rules}}}"


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


def _text(text: str) -> str:
    return escape(visible(text))
