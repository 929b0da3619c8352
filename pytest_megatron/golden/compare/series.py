"""Deviations of a run from its golden, as numbers. Pure; decides nothing."""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby

from pytest_megatron.golden.compare.result import (
    ComparisonRule,
    Deviation,
    StepDifference,
    relative,
)
from pytest_megatron.golden.formats.metric_map import step_interval, to_float32
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


LEAST_COVERED = 0.9  # of a run, by its golden


def without_unmeasured_end(series: Series) -> Series:
    """Return a series up to its last number, where only text follows; whole if there is no number.

    Megatron-LM writes "nan" for every step up to the end of the schedule that a training did not
    get to, as in the goldens of its releases, which a time limit ends.
    """
    end = len(series)
    while end and isinstance(series.values[end - 1], str):
        end -= 1
    if end in (0, len(series)):
        return series
    return replace(series, steps=series.steps[:end], values=series.values[:end])


def describe_uncovered(golden: Series, observed: Series) -> str | None:
    """Return a note on a golden that holds too few of the steps of a run, or None.

    Steps are counted at the golden's distance. Single ones at an end are no matter, since goldens
    are cut at half-open ranges.
    """
    steps = list(observed.finite())
    if not len(golden) or not steps:
        return None
    first, last, interval = golden.steps[0], golden.steps[-1], step_interval(golden.steps)
    num_outside = max(0, steps[-1] - last) // interval + max(0, first - steps[0]) // interval
    if len(golden) >= LEAST_COVERED * (len(golden) + num_outside):
        return None
    return (
        f"it has steps {first} to {last}, the run {steps[0]} to {steps[-1]}, whose rest would pass "
        "unseen; record it again"
    )


def find_unusable(golden: Series) -> StepDifference | None:
    """Return the first golden step without a finite number."""
    for step, value in golden.items():
        if not is_finite(value):
            return StepDifference(step=step, observed=None, golden=value)
    return None


def find_absent(
    golden: Series, observed: Series
) -> tuple[ComparisonRule, StepDifference, tuple[str, ...]] | None:
    """Return the missing steps of a run, or None if it has a finite number at every golden step.

    The rule is that of the first such step, or `truncated` if nothing is wrong but that the run
    ends too early. The notes count the steps of each kind.
    """
    at = dict(observed.items())
    absent = [
        StepDifference(step=step, observed=at.get(step), golden=value)
        for step, value in golden.items()
        if not is_finite(at.get(step))
    ]
    if not absent:
        return None
    rules = [_rule_of(difference.observed) for difference in absent]
    rule = rules[0]
    counts = Counter(r.value for r in rules)
    notes = [f"{n} of {len(golden)} golden steps {kind}" for kind, n in sorted(counts.items())]
    last = observed.steps[-1] if observed.steps else 0
    if set(rules) == {ComparisonRule.MISSING} and absent[0].step > last:
        rule = ComparisonRule.TRUNCATED
        notes.append(f"the run ends at step {last}, the golden at step {golden.steps[-1]}")
    return rule, absent[0], tuple(notes)


def describe_extra(golden: Series, observed: Series) -> tuple[str, ...]:
    """Return a note on steps that only the run has, if the golden ends before it."""
    if not len(golden):
        return ()
    extra = [step for step in observed.steps if step > golden.steps[-1]]
    if not extra:
        return ()
    return (f"{len(extra)} steps after the golden's last, {golden.steps[-1]}, not compared",)


def describe_skipped(num_steps: int) -> tuple[str, ...]:
    """Return a note on golden steps that were left out because nothing was measured there."""
    return (f"{num_steps} steps not measured, not compared",) if num_steps else ()


def find_frozen(
    golden: Series | None, observed: Series, *, least_steps: int
) -> tuple[int, int] | None:
    """Return first and last step of a constant stretch of the run where the golden moves.

    A stretch counts from `least_steps` golden steps on, and only if the golden's longest constant
    stretch within it is less than half as long. Without a golden every such stretch counts.
    """
    at = dict(observed.items())
    expected = at if golden is None else dict(golden.items())
    steps = [step for step in expected if step in at]
    for _, group in groupby(steps, key=at.__getitem__):
        stretch = list(group)
        if len(stretch) < least_steps:
            continue
        if golden is None or 2 * _longest_constant([expected[s] for s in stretch]) < len(stretch):
            return stretch[0], stretch[-1]
    return None


def _rule_of(value: Value | None) -> ComparisonRule:
    if value is None:
        return ComparisonRule.MISSING
    if isinstance(value, str):
        return ComparisonRule.TEXT
    return ComparisonRule.NAN if math.isnan(value) else ComparisonRule.INF


def _longest_constant(values: list[Value]) -> int:
    return max(len(list(group)) for _, group in groupby(values))
