"""Summary of a golden: a few numbers and a small curve. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pytest_megatron.base.files import JsonValue
from pytest_megatron.golden.model import Series, Value

SPARKS = "▁▂▃▄▅▆▇█"
_GAP = "·"
_SHOWN_TEXT = 16  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSummary:
    """One metric of a golden.

    Attributes:
        steps: As in `1-100`, or `1-100 by 5` where they are more than one apart.
        spark: The finite values as a curve of at most the width asked for.
    """

    name: str
    num_values: int
    num_finite: int
    steps: str
    first: Value | None
    last: Value | None
    least: float | None
    most: float | None
    precision: str
    spark: str

    def as_json(self) -> dict[str, JsonValue]:
        """Return the summary for a program; a value that is not finite is a text."""
        return {
            "metric": self.name,
            "num_values": self.num_values,
            "num_finite": self.num_finite,
            "steps": self.steps,
            "first": _json_value(self.first),
            "last": _json_value(self.last),
            "least": self.least,
            "most": self.most,
            "precision": self.precision,
        }


def summarise(name: str, series: Series, *, width: int) -> MetricSummary:
    """Return the summary of one metric; its curve has at most `width` characters."""
    finite = series.finite().values()
    return MetricSummary(
        name=name,
        num_values=len(series),
        num_finite=len(finite),
        steps=_steps(series.steps),
        first=series.values[0] if len(series) else None,
        last=series.values[-1] if len(series) else None,
        least=min(finite, default=None),
        most=max(finite, default=None),
        precision="full" if series.is_full_precision else "5 decimals",
        spark=sparkline(series.values, width=width),
    )


def sparkline(values: Sequence[Value], *, width: int) -> str:
    """Return a curve of block characters; each stands for the mean of as many values.

    A part without any finite number is a dot; where all are equal, the line is low.
    """
    num_parts = min(width, len(values))
    bounds = [len(values) * i // max(num_parts, 1) for i in range(num_parts + 1)]
    parts = [_mean(values[a:b]) for a, b in pairwise(bounds)]
    finite = [mean for mean in parts if mean is not None]
    least = min(finite, default=0.0)
    height = max(finite, default=0.0) - least
    return "".join(
        _GAP if mean is None else SPARKS[_level((mean - least) / height if height > 0 else 0.0)]
        for mean in parts
    )


def shown(value: Value | None) -> str:
    """Return a value for a cell: text quoted and cut, so that it stays on its line."""
    if value is None:
        return "-"
    return ascii(value[:_SHOWN_TEXT]) if isinstance(value, str) else f"{value:.10g}"


def _level(share: float) -> int:
    return min(int(share * len(SPARKS)), len(SPARKS) - 1)


def _mean(values: Sequence[Value]) -> float | None:
    finite = [v for v in values if isinstance(v, float) and math.isfinite(v)]
    return sum(v / len(finite) for v in finite) if finite else None


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return "-"
    if len(steps) == 1:
        return str(steps[0])
    distances = {b - a for a, b in pairwise(steps[1:])}
    every = f" by {distances.pop()}" if len(distances) == 1 and distances != {1} else ""
    return f"{steps[0]}-{steps[-1]}{every}"


def _json_value(value: Value | None) -> JsonValue:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
