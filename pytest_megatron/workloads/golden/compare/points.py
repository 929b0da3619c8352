"""The steps at which a run and its golden are compared, and those that one of them lacks. Pure.

Needs numpy, so it is imported only where something is compared.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytest_megatron.base.text import counted
from pytest_megatron.runs.record import Deviation, RecordedLayer
from pytest_megatron.workloads.golden.compare.result import (
    Comparison,
    ComparisonRule,
    StepDifference,
    part_of,
    relative,
)
from pytest_megatron.workloads.golden.model import (
    Series,
    Value,
    is_finite,
    is_same,
    step_interval,
    to_float32,
)

Numbers: TypeAlias = NDArray[np.float64]
_Kept: TypeAlias = "slice[int | None, int | None, None] | NDArray[np.bool_] | NDArray[np.intp]"
_NUM_DECIMALS = 5  # Megatron-LM's extraction, and so its goldens
LEAST_COVERED = 0.9  # of a run, by its golden


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """The steps at which golden and run both have a finite number, ascending.

    Attributes:
        steps: (num_points,) as the values of both are; whole numbers of any size.
    """

    steps: NDArray[np.object_]
    observed: Numbers
    golden: Numbers

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, kept: _Kept) -> Points:
        return Points(self.steps[kept], self.observed[kept], self.golden[kept])

    @property
    def off(self) -> Numbers:
        """The |observed - golden| of each step."""
        with np.errstate(over="ignore"):
            return abs(self.observed - self.golden)

    @property
    def is_equal(self) -> bool:
        """True if both have the same number at every step."""
        return bool((self.observed == self.golden).all())

    @property
    def means(self) -> tuple[float, float]:
        """The means of what was observed and of the golden."""
        return math.fsum(self.observed) / len(self), math.fsum(self.golden) / len(self)

    @property
    def mean_signed(self) -> float:
        """Sum of (observed - golden) / sum of |golden|: no single step near 0 dominates."""
        scale = math.fsum(abs(self.golden))
        return relative(scale + math.fsum(self.observed - self.golden), scale)

    def named(self, what: str) -> str:
        """Return the name of a number that is made of the steps."""
        return f"{what} of steps {self.steps[0]} to {self.steps[-1]}"

    def at(self, index: int, allowed: float) -> StepDifference:
        """Return the difference at one step, of which so much is allowed."""
        golden = float(self.golden[index])
        return StepDifference(
            step=int(self.steps[index]),
            observed=float(self.observed[index]),
            golden=golden,
            tolerance=part_of(float(allowed), golden),
        )


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


def _as_float32(series: Series) -> Series:
    """Return a series rounded to float32."""
    values = tuple(
        to_float32(v) if isinstance(v, float) and is_finite(v) and not v.is_integer() else v
        for v in series.values
    )
    return replace(series, values=values)


def shared_points(golden: Series, observed: Series) -> Points:
    """Return the steps at which both have a finite number."""
    expected, got = golden.finite(), observed.finite()
    steps = [step for step in expected if step in got]
    return Points(
        np.array(steps, object),
        np.array([got[step] for step in steps], np.float64),
        np.array([expected[step] for step in steps], np.float64),
    )


def measure(points: Points) -> Deviation:
    """Return the largest and the mean deviation over `points`."""
    if not len(points):
        return Deviation()
    with np.errstate(all="ignore"):
        shares = np.where(points.off == 0, 0.0, points.off / abs(points.golden))
    worst = int(shares.argmax())
    return Deviation(
        num_compared=len(points),
        worst_step=int(points.steps[worst]) if shares[worst] > 0 else None,
        largest_relative=float(shares[worst]),
        largest_absolute=float(points.off.max()),
        mean_signed_relative=points.mean_signed,
    )


def first_difference(golden: Series, observed: Series) -> StepDifference | None:
    """Return the first golden step at which the run has not the very same value."""
    at = dict(observed.items())
    for step, value in golden.items():
        if not is_same(at.get(step), value):
            return StepDifference(step=step, observed=at.get(step), golden=value)
    return None


def find_hole(
    comparison: Comparison, golden: Series, observed: Series, points: Points
) -> Comparison:
    """Return the answer after the layer of presence; it fails if a value is missing on either side.

    The rule is that of the first such step of the run, or `truncated` if nothing is wrong but that
    it ends too early. The notes count the steps of each kind.

    Args:
        comparison: One that passes so far.
        golden: The steps that must be there.
        observed: The run's.
        points: The steps at which both have a finite number.
    """
    presence = RecordedLayer(
        layer=ComparisonRule.PRESENCE.value,
        passed=bool(len(golden)) and len(points) >= len(golden),
        measured=float(len(points)),
        limit=float(len(golden)),
        unit="steps",
    )
    if presence.passed:
        return replace(comparison, layers=(presence,))
    comparison = replace(
        comparison, passed=False, layers=(presence,), rule=ComparisonRule.GOLDEN_UNUSABLE
    )
    if not len(golden):
        return replace(comparison, first=None, notes=("the golden has no value for it",))
    at = dict(observed.items())
    unusable = [
        StepDifference(step=s, observed=None, golden=v)
        for s, v in golden.items()
        if not is_finite(v)
    ]
    if unusable:
        return replace(comparison, first=unusable[0])
    absent = [
        StepDifference(step=s, observed=at.get(s), golden=v)
        for s, v in golden.items()
        if not is_finite(at.get(s))
    ]
    rules = [_rule_of(difference.observed) for difference in absent]
    notes = [
        f"{n} of {counted(len(golden), 'step')} {'is' if n == 1 else 'are'} {kind} in the run"
        for kind, n in sorted(Counter(rule.value for rule in rules).items())
    ]
    last = observed.steps[-1] if observed.steps else 0
    if set(rules) == {ComparisonRule.MISSING} and absent[0].step > last:
        rules[0] = ComparisonRule.TRUNCATED
        notes.append(f"the run ends at step {last}, the golden at step {golden.steps[-1]}")
    return replace(comparison, rule=rules[0], first=absent[0], notes=tuple(notes))


def _rule_of(value: Value | None) -> ComparisonRule:
    """Return the rule that a value breaks which is no finite number."""
    if value is None:
        return ComparisonRule.MISSING
    if isinstance(value, str):
        return ComparisonRule.TEXT
    return ComparisonRule.NAN if math.isnan(value) else ComparisonRule.INF


def describe_uncovered(golden: Series, observed: Series) -> str | None:
    """Return a note on a golden that holds too few of the steps of a run, or None.

    Steps outside the golden are counted in its interval between steps. One or two at an end are
    allowed, since goldens are cut at half-open ranges.
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
