"""The rules of the strict policy, one function for each kind of metric. Pure.

Each gets the steps at which golden and run have a finite number, all steps of the golden, and
says what decided; none looks at another metric.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_megatron.golden.band import THRESHOLDS, Band, tail_length
from pytest_megatron.golden.comparison import Difference, Rule, Summary, relative
from pytest_megatron.golden.deviation import Point
from pytest_megatron.golden.model import Series
from pytest_megatron.golden.presence import find_frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one rule says of one metric; the attributes are those of `Comparison`."""

    passed: bool
    rule: Rule
    first: Difference | None = None
    summary: Summary | None = None
    notes: tuple[str, ...] = ()


def judge_loss(golden: Series, observed: Series, points: list[Point], band: Band) -> Judgement:
    """Judge a loss: its first step, its shape, every step, its mean and its tail."""
    failure = (
        _judge_step_1(points[0], band.allowed[0])
        or _judge_shape(golden, observed)
        or _judge_band(points, band)
        or _judge_means(points, band)
    )
    if failure is not None:
        return failure
    largest = max(abs(relative(p.observed, p.golden)) for p in points)
    notes: tuple[str, ...] = (f"within the band (largest {largest:.1e})", band.note)
    if largest <= THRESHOLDS.deterministic_band:
        notes = (f"differs only in the last digits (largest {largest:.0e})",)
    return Judgement(passed=True, rule=Rule.BAND, notes=notes)


def judge_zeros(points: list[Point]) -> Judgement:
    """Judge a count of zeros: mean, mean of the tail, median; single steps vary too much."""
    limits = THRESHOLDS
    tail = _tail(points)
    medians = (
        statistics.median(p.observed for p in points),
        statistics.median(p.golden for p in points),
    )
    for rule, name, (observed, golden), tolerance in (
        (Rule.BIAS, _named("mean", points), _means(points), limits.zeros_mean),
        (Rule.TAIL, _named("mean", tail), _means(tail), limits.zeros_tail),
        (Rule.MEDIAN, _named("median", points), medians, limits.zeros_median),
    ):
        if abs(observed - golden) > max(tolerance * abs(golden), limits.zeros_absolute):
            summary = Summary(name=name, observed=observed, golden=golden, tolerance=tolerance)
            return Judgement(passed=False, rule=rule, summary=summary)
    return Judgement(passed=True, rule=Rule.BIAS)


def judge_time(points: list[Point]) -> Judgement:
    """Judge a time by its median after the warm-up, a tenth of the steps; faster is fine."""
    warm_up = max(1, int(THRESHOLDS.warm_up_fraction * len(points)))
    steady = points[warm_up:] or points
    summary = Summary(
        name=_named("median", steady),
        observed=statistics.median(p.observed for p in steady),
        golden=statistics.median(p.golden for p in steady),
        tolerance=THRESHOLDS.time_median,
    )
    if summary.observed > (1 + summary.tolerance) * summary.golden:
        return Judgement(passed=False, rule=Rule.MEDIAN, summary=summary)
    note = f"{summary.name} {relative(summary.observed, summary.golden):+.1%}"
    return Judgement(passed=True, rule=Rule.MEDIAN, notes=(note,))


def judge_memory(points: list[Point]) -> Judgement:
    """Judge memory by its peak and by its median, so that neither a spike nor a shift hides."""
    observed, golden = [p.observed for p in points], [p.golden for p in points]
    for rule, what, o, g in (
        (Rule.PEAK, "peak", max(observed), max(golden)),
        (Rule.MEDIAN, "median", statistics.median(observed), statistics.median(golden)),
    ):
        if o > (1 + THRESHOLDS.memory) * g:
            name, tolerance = _named(what, points), THRESHOLDS.memory
            summary = Summary(name=name, observed=o, golden=g, tolerance=tolerance)
            return Judgement(passed=False, rule=rule, summary=summary)
    note = f"peak {relative(max(observed), max(golden)):+.1%}"
    return Judgement(passed=True, rule=Rule.PEAK, notes=(note,))


def _judge_step_1(first: Point, allowed: float) -> Judgement | None:
    """The first step has seen no update yet: a difference there is no drift of numerics."""
    allowed = min(THRESHOLDS.step_1 * abs(first.golden) + THRESHOLDS.rounding, allowed)
    if first.step != 1 or abs(first.signed) <= allowed:
        return None
    note = "data, initialisation or forward pass differ"
    return Judgement(passed=False, rule=Rule.STEP_1, first=_outside(first, allowed), notes=(note,))


def _judge_shape(golden: Series, observed: Series) -> Judgement | None:
    least = max(THRESHOLDS.least_frozen_steps, int(THRESHOLDS.frozen_fraction * len(golden)))
    frozen = find_frozen(golden, observed, least_steps=least)
    if frozen is None:
        return None
    note = f"constant from step {frozen[0]} to {frozen[1]}, where the golden moves"
    return Judgement(passed=False, rule=Rule.FROZEN, notes=(note,))


def _judge_band(points: list[Point], band: Band) -> Judgement | None:
    pairs = list(zip(points, band.allowed, strict=True))
    outside = [(p, a) for p, a in pairs if abs(p.signed) > a]
    far = [(p, a) for p, a in outside if abs(p.signed) > THRESHOLDS.outside_factor * a]
    if len(outside) > band.num_outside:
        point, allowed = outside[0]
        note = f"{len(outside)} of {len(points)} steps outside, {band.num_outside} may be"
    elif far:
        point, allowed = far[0][0], THRESHOLDS.outside_factor * far[0][1]
        note = f"{len(far)} of {len(points)} steps too far outside the band for any step"
    else:
        return None
    return Judgement(
        passed=False, rule=Rule.BAND, first=_outside(point, allowed), notes=(note, band.note)
    )


def _judge_means(points: list[Point], band: Band) -> Judgement | None:
    """Look for a small shift that lasts."""
    if len(points) < THRESHOLDS.least_steps_for_means:
        return None
    for rule, part, allowed in (
        (Rule.BIAS, points, band.bias),
        (Rule.TAIL, _tail(points), band.tail),
    ):
        observed, golden = _means(part)
        if abs(observed - golden) > allowed:
            tolerance = allowed / abs(golden) if golden else math.inf
            summary = Summary(
                name=_named("mean", part), observed=observed, golden=golden, tolerance=tolerance
            )
            return Judgement(passed=False, rule=rule, summary=summary, notes=(band.note,))
    return None


def _outside(point: Point, allowed: float) -> Difference:
    tolerance = allowed / abs(point.golden) if point.golden else math.inf
    return Difference(
        step=point.step, observed=point.observed, golden=point.golden, tolerance=tolerance
    )


def _means(points: Sequence[Point]) -> tuple[float, float]:
    observed = math.fsum(p.observed for p in points) / len(points)
    golden = math.fsum(p.golden for p in points) / len(points)
    return observed, golden


def _named(what: str, points: Sequence[Point]) -> str:
    return f"{what} of steps {points[0].step} to {points[-1].step}"


def _tail(points: list[Point]) -> list[Point]:
    return points[-tail_length(len(points)) :]
