"""From numbers to places on a picture, and round numbers for its axes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

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
