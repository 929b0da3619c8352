"""Charts in the form that a page's script reads: as small as they can be. Pure.

    {"m": "lm loss", "s": {"n": 100, "first": 1, "every": 1}, "c": [{"n": "golden", "r": "golden",
     "v": {"f4": "<base64>"}}, {"n": "repeat 1", "r": "run", "v": {"as": 0}}], "b": ..., "f": 6}

Values are float32, as TensorBoard's are and as the comparison sees them; whole numbers beyond what
a float32 can hold are float64. What is not a finite number is nan there, and named in `o`: runs of
steps, each (index, how many, `missing`, `before` a resumed run, `nan`, `inf`, `-inf` or
`text`).
"""

from __future__ import annotations

import base64
import math
import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pytest_megatron.base.files import JsonValue
from pytest_megatron.golden.model import Value
from pytest_megatron.pages.chart import choose, deviations, shares
from pytest_megatron.pages.model import Chart

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
