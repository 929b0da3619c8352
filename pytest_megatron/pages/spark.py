"""A curve as a few dozen bytes: the path of a small picture in a table. Pure."""

from __future__ import annotations

import math
from itertools import pairwise

from pytest_megatron.golden.model import Series
from pytest_megatron.pages.model import Chart, CurveRole

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
