"""How far a run is from its golden, as numbers. Pure; allows and refuses nothing."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

from pytest_megatron.golden.comparison import Deviation, StepDifference, relative
from pytest_megatron.golden.document import to_float32
from pytest_megatron.golden.model import Series, Value, is_finite

_NUM_DECIMALS = 5  # Megatron-LM's extraction, and so its goldens


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step at which golden and run both have a finite number."""

    step: int
    observed: float
    golden: float

    @property
    def signed(self) -> float:
        """Return observed - golden."""
        return self.observed - self.golden


def align(golden: Series, observed: Series) -> tuple[Series, Series]:
    """Return both series in the precision that they share, so that equal means equal.

    TensorBoard holds float32. A golden of full precision has the shortest decimal of each, so both
    sides become float32. One of five decimals is compared with a run of full precision only after
    the run is rounded in the same way. Whole numbers stay as they are.

    Source: Megatron-LM tests/functional_tests/python_test_utils/common.py, d98e8a64dd (round).
    """
    if golden.is_full_precision:
        return _as_float32(golden), _as_float32(observed)
    if observed.is_full_precision:
        values = tuple(
            round(v, _NUM_DECIMALS) if isinstance(v, float) and math.isfinite(v) else v
            for v in observed.values
        )
        return golden, replace(observed, values=values)
    return golden, observed


def shared_points(golden: Series, observed: Series) -> list[Point]:
    """Return the steps at which both have a finite number, ascending."""
    at = dict(observed.items())
    return [
        Point(step=step, observed=o, golden=g)
        for step, g in golden.items()
        if isinstance(g, float) and isinstance(o := at.get(step), float)
        if math.isfinite(g) and math.isfinite(o)
    ]


def measure(points: list[Point]) -> Deviation:
    """Return the largest and the mean deviation over `points`."""
    if not points:
        return Deviation()
    worst = max(points, key=lambda p: abs(relative(p.observed, p.golden)))
    largest = abs(relative(worst.observed, worst.golden))
    return Deviation(
        num_compared=len(points),
        worst_step=worst.step if largest > 0 else None,
        largest_relative=largest,
        largest_absolute=max(abs(p.signed) for p in points),
        mean_signed_relative=mean_signed(points),
    )


def mean_signed(points: list[Point]) -> float:
    """Return sum of (observed - golden) / sum of |golden|: no single step near 0 dominates."""
    scale = math.fsum(abs(p.golden) for p in points)
    return relative(scale + math.fsum(p.signed for p in points), scale)


def first_difference(golden: Series, observed: Series) -> StepDifference | None:
    """Return the first golden step at which the run has not the very same value."""
    at = dict(observed.items())
    for step, value in golden.items():
        if not _is_same(at.get(step), value):
            return StepDifference(step=step, observed=at.get(step), golden=value)
    return None


def ulps_between(observed: float, golden: float) -> int:
    """Return how many float32 numbers lie between two of them, counted from one to the other."""
    first, second = (_position(value) for value in (observed, golden))
    return abs(first - second)


def _position(value: float) -> int:
    """Return the index of a float32 in the order of all of them."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    index: int = bits if bits >= 0 else -(bits & 0x7FFFFFFF)
    return index


def _is_same(observed: Value | None, golden: Value) -> bool:
    if observed is None or isinstance(observed, str) or isinstance(golden, str):
        return observed == golden
    return observed == golden or (math.isnan(observed) and math.isnan(golden))


def _as_float32(series: Series) -> Series:
    values = tuple(
        to_float32(v) if isinstance(v, float) and is_finite(v) and not v.is_integer() else v
        for v in series.values
    )
    return replace(series, values=values)
