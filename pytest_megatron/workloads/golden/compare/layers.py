"""Layers of the strict policy for a loss, a count, time and memory; the band of a loss. Pure.

Every layer is measured, whether or not one before it failed, so that a verdict shows all of them;
the first that failed decides. None looks at another metric.

The band is the deviation allowed at each step. It has two sources: the golden itself (deterministic
or not, its precision), and the spread of its repeats, which is in its provenance. Run-to-run noise
of a training grows over the steps, from nothing at step 1, so a learned band is narrow where bugs
show first.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from pytest_megatron.base.text import counted, none_or
from pytest_megatron.workloads.golden.compare.result import (
    Allowed,
    Comparison,
    ComparisonRule,
    Layer,
    Point,
    SeriesSummary,
    StepDifference,
    allowed_of,
    counting_layer,
    find_absent,
    find_frozen,
    find_unusable,
    relative,
    ulps_between,
)
from pytest_megatron.workloads.golden.model import (
    NOWHERE,
    Golden,
    Provenance,
    RunEnvironment,
    Series,
    Spread,
    drift_between,
)
from pytest_megatron.workloads.golden.policy import (
    FULL_PRECISION,
    FULL_ROUNDING,
    LEARNING,
    LEAST_WINDOW_STEPS,
    NEIGHBOUR_FACTOR,
    NEIGHBOUR_PART,
    NEIGHBOURS,
    NUM_WINDOWS,
    ROUNDING,
    TAIL_FRACTION,
    TIME_SPREADS,
    TRIMMED_FRACTION,
    UNTRIMMED_FACTOR,
    CostLimits,
    CountLimits,
    Learning,
    LossLimits,
    MemoryLimits,
    Worse,
)

# Two-sided quantile of Student's t at p = 1e-3, by degrees of freedom.
_T_DEGREES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 60, 1000)
_T_QUANTILES = (
    *(636.619, 31.599, 12.924, 8.610, 6.869, 5.959, 5.408, 5.041),
    *(4.781, 4.587, 4.318, 4.073, 3.850, 3.646, 3.460, 3.300),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The deviations allowed around a golden.

    Attributes:
        steps: (num_steps,) the golden's.
        allowed: (num_steps,) absolute deviation allowed at each: `widths` of the golden's
            value, and `rounding`.
        num_outside: How many steps may be outside, each by `LossLimits.outside_factor` at most.
        needs_company: True if such a step must have neighbours that are off too, since the
            noise is not known.
        bias: Absolute deviation allowed of the mean over all steps.
        tail: The same over the last steps (`TAIL_FRACTION`).
        note: Why the band is as it is, for the message.
    """

    steps: tuple[int, ...]
    allowed: tuple[float, ...]
    widths: tuple[float, ...]
    rounding: float
    num_outside: int
    needs_company: bool
    bias: float
    tail: float
    note: str

    @property
    def as_allowed(self) -> Allowed:
        """The tolerances in few numbers: a width holds for many steps."""
        return allowed_of(dict(zip(self.steps, self.widths, strict=True)), self.rounding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """The known noise of one metric.

    Attributes:
        is_deterministic: Repeats agreed bit for bit, on a platform like the run's.
        is_learned: There were repeats enough to learn it from.
        is_elsewhere: The run is on another platform, where fewer digits are the same.
        is_at_home: It is on the same one, for certain.
    """

    is_deterministic: bool
    is_learned: bool
    is_elsewhere: bool
    is_at_home: bool

    @property
    def is_narrow(self) -> bool:
        """True if the metric has a band of its own."""
        return (self.is_deterministic or self.is_learned) and not self.is_elsewhere


def knowledge_of(
    golden: Golden, metric: str, *, nondeterministic: bool, surroundings: RunEnvironment = NOWHERE
) -> Knowledge:
    """Return the noise of one metric as a golden describes it, for a run in these surroundings."""
    made = golden.provenance or Provenance()
    drift = drift_between(golden.provenance, surroundings)
    is_elsewhere = bool(drift.changes) and made.precision != FULL_PRECISION
    is_equal = made.deterministic is True and made.spread.get(metric, 0.0) == 0.0
    return Knowledge(
        is_deterministic=is_equal and not nondeterministic and not is_elsewhere,
        is_learned=metric in made.spread and (made.repeats or 1) >= LEARNING.least_repeats,
        is_elsewhere=is_elsewhere,
        is_at_home=drift.is_same_platform,
    )


def band_around(
    golden: Golden,
    metric: str,
    series: Series,
    known: Knowledge,
    limits: LossLimits,
) -> Band:
    """Return the band of one metric, whose golden values must all be finite numbers.

    The spread of repeats holds for their platform. Another one rounds differently: in fp32 by 2e-7
    at most in 50 steps, which any band forgives; in bf16 by 2e-4 (two kinds of CPU, one training),
    so that there the band is at least that of a golden without repeats.
    """
    made = golden.provenance or Provenance()
    repeats = 1 if made.repeats is None else made.repeats
    factor = prediction_factor(repeats) if known.is_learned else LEARNING.few_factor
    learned = [factor * sd for sd in growing_deviation(made.spread.get(metric), series.steps)]
    floor = limits.floor_in(made.precision, is_at_home=known.is_learned and known.is_at_home)
    fixed = [floor if known.is_narrow else limits.fixed_at(step) for step in series.steps]
    rounding = limits.absolute + (FULL_ROUNDING if series.is_full_precision else ROUNDING)
    scales = [abs(v) for v in series.values if isinstance(v, float)]
    widths = tuple(map(max, learned, fixed))
    allowed = [width * scale + rounding for width, scale in zip(widths, scales, strict=True)]
    noise = [width * scale for width, scale in zip(learned, scales, strict=True)]
    of_tail = slice(len(scales) - tail_length(len(scales)), None)
    mean, tail = (
        max(limit * math.fsum(scale), part * math.fsum(width)) / len(scale)
        for limit, part, width, scale in (
            (limits.mean, LEARNING.mean_fraction, noise, scales),
            (limits.tail_mean, LEARNING.tail_fraction, noise[of_tail], scales[of_tail]),
        )
    )
    return Band(
        steps=series.steps,
        allowed=tuple(allowed),
        widths=widths,
        rounding=rounding,
        num_outside=0 if known.is_deterministic else int(limits.outside_fraction * len(scales)),
        needs_company=not (known.is_learned or known.is_deterministic),
        bias=mean + limits.absolute + ROUNDING,
        tail=tail + limits.absolute + ROUNDING,
        note=_describe(repeats, known),
    )


def prediction_factor(repeats: int) -> float:
    """Return by how many sample standard deviations of `repeats` runs another run may be off.

    Student's t at p = 1e-3 with repeats - 1 degrees of freedom, times sqrt(1 + 1/repeats): the
    golden is the mean of the repeats or one of them, and the new run varies too.
    """
    at = bisect_right(_T_DEGREES, repeats - 1) - 1
    return _T_QUANTILES[at] * math.sqrt(1 + 1 / repeats)


def growing_deviation(
    spread: Spread | None, steps: tuple[int, ...], learning: Learning = LEARNING
) -> list[float]:
    """Return the relative standard deviation to use at each step.

    At a step it is the largest of the values around it: the estimate of one step from a few repeats
    may be near 0 by chance. Steps that the spread lacks have the last.
    """
    if spread is None:
        return [0.0] * len(steps)
    if isinstance(spread, float):
        return [spread] * len(steps)
    known = [v for v in spread.values if isinstance(v, float)]
    deviations = []
    for step in steps:
        first = max(0, bisect_right(spread.steps, step) - learning.look_back_steps)
        around = known[first : bisect_right(spread.steps, step + learning.look_ahead_steps)]
        deviations.append(max(around, default=0.0))
    return deviations


def tail_length(num_steps: int) -> int:
    """Return how many of the last steps the tail has."""
    return max(1, int(num_steps * TAIL_FRACTION))


def _describe(repeats: int, known: Knowledge) -> str:
    """Describe what is known of the golden's noise."""
    if known.is_elsewhere:
        return "golden from another platform, where fewer digits are the same"
    if known.is_deterministic:
        return "golden is deterministic"
    if known.is_learned:
        return f"band learned from {repeats} repeats"
    return "golden without repeats enough for a band of its own"


LAST_DIGITS = 1e-4  # relative; what other kernels and other instructions round otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFinding:
    """The result of one layer; `first`, `summary` and `notes` are those of `Comparison`."""

    layer: Layer
    first: StepDifference | None = None
    summary: SeriesSummary | None = None
    notes: tuple[str, ...] = ()


def decide(findings: Iterable[LayerFinding], comparison: Comparison) -> Comparison:
    """Return the answer of the first layer that failed; `comparison` where none did."""
    found = tuple(findings)
    answer = replace(comparison, layers=(*comparison.layers, *(finding.layer for finding in found)))
    failed = next((finding for finding in found if not finding.layer.passed), None)
    if failed is None:
        return answer
    return replace(
        answer,
        passed=False,
        rule=failed.layer.rule,
        first=failed.first,
        summary=failed.summary,
        notes=failed.notes,
    )


def find_hole(
    comparison: Comparison, golden: Series, observed: Series, points: Sequence[Point]
) -> Comparison:
    """Return the answer after the layer of presence; it fails if a value is missing on either side.

    Args:
        comparison: One that passes so far.
        golden: The steps that must be there.
        observed: The run's.
        points: The steps at which both have a finite number.
    """
    presence = Layer(
        rule=ComparisonRule.PRESENCE,
        passed=bool(len(golden)) and len(points) >= len(golden),
        measured=float(len(points)),
        limit=float(len(golden)),
        unit="steps",
    )
    if presence.passed:
        return replace(comparison, layers=(presence,))
    comparison = replace(comparison, passed=False, layers=(presence,))
    unusable = find_unusable(golden)
    if unusable is not None:
        return replace(comparison, rule=ComparisonRule.GOLDEN_UNUSABLE, first=unusable)
    absent = find_absent(golden, observed)
    if absent is None:
        note = "the golden has no value for it"
        return replace(comparison, rule=ComparisonRule.GOLDEN_UNUSABLE, first=None, notes=(note,))
    rule, first, notes = absent
    return replace(comparison, rule=rule, first=first, notes=notes)


def exact_layer(points: list[Point]) -> LayerFinding:
    """Count the steps that differ at all, where none may."""
    differing = [p for p in points if p.observed != p.golden]
    layer = counting_layer(ComparisonRule.EXACT, len(differing), 0, "steps differ")
    if not differing:
        return LayerFinding(layer=layer)
    first = differing[0]
    largest = max(abs(relative(p.observed, p.golden)) for p in points)
    ulps = ulps_between(first.observed, first.golden)
    steps = counted(len(points), "step")
    notes = [
        f"{len(differing)} of {steps} differ, the first by {ulps} float32 ulps",
        "the golden is deterministic and from this image, these versions and this class of host",
    ]
    if largest <= LAST_DIGITS:
        notes.insert(0, f"differs only in the last digits (largest {largest:.0e})")
    return LayerFinding(layer=layer, first=_outside(first, 0.0), notes=tuple(notes))


def loss_layers(
    golden: Series, observed: Series, points: list[Point], band: Band, limits: LossLimits
) -> Iterable[LayerFinding]:
    """Yield the layers of a loss: first step, shape, early window, every step, mean and tail."""
    if points[0].step == 1:
        yield _step_1(points[0], band.allowed[0], limits)
    yield _shape(golden, observed, limits)
    pairs = list(zip(points, band.allowed, strict=True))
    early = [pair for pair in pairs if 1 < pair[0].step <= limits.early_steps]
    if early:
        yield _every_step(ComparisonRule.EARLY, early, 0, band.note)
    yield _every_step(ComparisonRule.BAND, pairs, band.num_outside, band.note)
    yield _outlier(pairs, limits.outside_factor, band)
    if len(points) >= LEARNING.least_steps_for_means:
        yield _mean(ComparisonRule.BIAS, points, band.bias, band.note)
        yield _mean(ComparisonRule.TAIL, _tail(points), band.tail, band.note)
    if limits.window_mean is not None:
        yield from _windows(points, limits.window_mean, band)


def count_layers(points: list[Point], limits: CountLimits) -> Iterable[LayerFinding]:
    """Yield the layers of a count: mean, mean of the tail, median; single steps vary too much.

    The means leave out the steps that differ most: after a change of container a few steps may have
    many times as many zeros. Nor may all steps together be off by much more.
    """
    tail = _tail(points)
    middle, tail_middle = _trimmed(points), _trimmed(tail)
    untrimmed = UNTRIMMED_FACTOR * limits.mean
    medians = (
        statistics.median(p.observed for p in points),
        statistics.median(p.golden for p in points),
    )
    for rule, name, (observed, golden), tolerance in (
        (ComparisonRule.BIAS, named("trimmed mean", points), _means(middle), limits.mean),
        (ComparisonRule.TAIL, named("trimmed mean", tail), _means(tail_middle), limits.tail_mean),
        (ComparisonRule.MEDIAN, named("median", points), medians, limits.median),
        (ComparisonRule.OUTLIER, named("mean", points), _means(points), untrimmed),
    ):
        allowed = max(tolerance * abs(golden), limits.absolute)
        yield of_summary(
            rule,
            SeriesSummary(name=name, observed=observed, golden=golden, tolerance=tolerance),
            passed=abs(observed - golden) <= allowed,
            limit=allowed / abs(golden) if golden else math.inf,
        )


def of_summary(
    rule: ComparisonRule,
    summary: SeriesSummary,
    *,
    passed: bool,
    limit: float | None = None,
    notes: tuple[str, ...] = (),
) -> LayerFinding:
    """Return the result of a layer that compares one number made of many steps."""
    layer = Layer(
        rule=rule,
        passed=passed,
        measured=relative(summary.observed, summary.golden),
        limit=summary.tolerance if limit is None else limit,
        place=summary.name.partition(" of ")[2] or None,
    )
    return LayerFinding(layer=layer, summary=summary, notes=notes)


def is_within(summary: SeriesSummary, worse: Worse) -> bool:
    """Return True if a number is within its tolerance on the side where it is worse."""
    off = relative(summary.observed, summary.golden)
    is_too_high = off > summary.tolerance and worse is not Worse.LOWER
    is_too_low = off < -summary.tolerance and worse is not Worse.HIGHER
    return not (is_too_high or is_too_low)


def named(what: str, points: Sequence[Point]) -> str:
    """Return the name of a number made of `points`."""
    return f"{what} of steps {points[0].step} to {points[-1].step}"


def _step_1(first: Point, allowed: float, limits: LossLimits) -> LayerFinding:
    """The first step has seen no update yet: a difference there is no drift of numerics."""
    allowed = min(limits.step_1 * abs(first.golden) + limits.absolute + ROUNDING, allowed)
    passed = abs(first.signed) <= allowed
    layer = _deviation_layer(ComparisonRule.STEP_1, first, allowed, passed=passed, place=None)
    notes = ("data, initialisation or forward pass differ",)
    return LayerFinding(layer=layer, first=_outside(first, allowed), notes=notes)


def _shape(golden: Series, observed: Series, limits: LossLimits) -> LayerFinding:
    """Judge whether the curve stands still where the golden moves."""
    least = max(limits.frozen_steps, int(limits.frozen_fraction * len(golden)))
    frozen = find_frozen(golden, observed, least_steps=least)
    first, last = frozen or (0, -1)
    num_steps = sum(first <= step <= last for step in golden.steps)
    layer = counting_layer(ComparisonRule.FROZEN, num_steps, least - 1, "steps")
    if frozen is None:
        return LayerFinding(layer=layer)
    at, expected = dict(observed.items())[first], dict(golden.items())[first]
    return LayerFinding(
        layer=layer,
        first=StepDifference(step=first, observed=at, golden=expected),
        notes=(f"constant from step {first} to {last}, where the golden moves",),
    )


def _every_step(
    rule: ComparisonRule, pairs: Sequence[tuple[Point, float]], budget: int, note: str
) -> LayerFinding:
    """Count the steps outside of the band; name the one that comes nearest, or goes farthest."""
    outside = [(p, a) for p, a in pairs if not abs(p.signed) <= a]
    worst, widest = max(pairs, key=_excess)
    place = f"{_size(abs(worst.signed), worst)} of {_size(widest, worst)} at step {worst.step}"
    layer = counting_layer(rule, len(outside), budget, "steps outside", place)
    count = f"{len(outside)} of {counted(len(pairs), 'step')} outside, {none_or(budget)} may be"
    first = _outside(*outside[0]) if outside else None
    return LayerFinding(layer=layer, first=first, notes=(count, note))


def _outlier(pairs: Sequence[tuple[Point, float]], factor: float, band: Band) -> LayerFinding:
    """Check the step that is farthest outside: even one that may be outside has a limit.

    That is some bands and, where the noise is not known, some times what its neighbours are off by:
    noise comes in company, and a step that is off alone is a fault.
    """
    points = [point for point, _ in pairs]
    most = [(p, factor * a) for p, a in pairs]
    if band.needs_company:
        most = [
            (p, max(a, min(factor * a, _in_company(points, i) + band.rounding)))
            for i, (p, a) in enumerate(pairs)
        ]
    far = [(p, a) for p, a in most if not abs(p.signed) <= a]
    point, allowed = far[0] if far else max(most, key=_excess)
    count = f"{len(far)} of {counted(len(pairs), 'step')} too far outside the band for any step"
    return LayerFinding(
        layer=_deviation_layer(
            ComparisonRule.OUTLIER, point, allowed, passed=not far, place=f"step {point.step}"
        ),
        first=_outside(point, allowed),
        notes=(count, band.note),
    )


def _in_company(points: Sequence[Point], at: int) -> float:
    """Return the deviation allowed at a step, given those of the steps around it."""
    around = [*points[max(0, at - NEIGHBOURS) : at], *points[at + 1 : at + 1 + NEIGHBOURS]]
    off = sorted(abs(p.signed) for p in around)
    return NEIGHBOUR_FACTOR * off[int(NEIGHBOUR_PART * len(off))] if off else 0.0


def _windows(points: Sequence[Point], limit: float, band: Band) -> Iterable[LayerFinding]:
    """Find a shift that lasts for a part of the training; name the window farthest off."""
    size = max(LEAST_WINDOW_STEPS, len(points) // NUM_WINDOWS)
    starts = range(0, max(1, len(points) - size + 1), size)
    windows = [points[start : start + size] for start in starts]
    windows[-1] = points[starts[-1] :]

    def excess(window: Sequence[Point]) -> float:
        observed, golden = _means(window)
        return abs(observed - golden) - limit * abs(golden)

    worst = max(windows, key=excess)
    allowed = limit * abs(_means(worst)[1]) + band.rounding
    yield _mean(ComparisonRule.WINDOW, worst, allowed, band.note)


def _mean(rule: ComparisonRule, points: Sequence[Point], allowed: float, note: str) -> LayerFinding:
    """Find a small shift that lasts."""
    observed, golden = _means(points)
    tolerance = allowed / abs(golden) if golden else math.inf
    summary = SeriesSummary(
        name=named("mean", points), observed=observed, golden=golden, tolerance=tolerance
    )
    return of_summary(rule, summary, passed=abs(observed - golden) <= allowed, notes=(note,))


def _deviation_layer(
    rule: ComparisonRule, point: Point, allowed: float, *, passed: bool, place: str | None
) -> Layer:
    """Return the layer that limits a relative deviation."""
    return Layer(
        rule=rule,
        passed=passed,
        measured=abs(relative(point.observed, point.golden)),
        limit=allowed / abs(point.golden) if point.golden else math.inf,
        place=place,
    )


def _excess(pair: tuple[Point, float]) -> float:
    """Return by how many bands a step is off."""
    point, allowed = pair
    if allowed:
        return abs(point.signed) / allowed
    return math.inf if point.signed else 0.0


def _size(amount: float, point: Point) -> str:
    return f"{amount / abs(point.golden):.1e}" if point.golden else f"{amount:.1e} absolute"


def _outside(point: Point, allowed: float) -> StepDifference:
    """Return the difference at a step that is outside of its tolerance."""
    tolerance = allowed / abs(point.golden) if point.golden else math.inf
    return StepDifference(
        step=point.step, observed=point.observed, golden=point.golden, tolerance=tolerance
    )


def _means(points: Sequence[Point]) -> tuple[float, float]:
    """Return the means of what was observed and of the golden."""
    observed = math.fsum(p.observed for p in points) / len(points)
    golden = math.fsum(p.golden for p in points) / len(points)
    return observed, golden


def _trimmed(points: list[Point]) -> list[Point]:
    """Return the steps without those whose count differs most, as many on either side."""
    left_out = int(TRIMMED_FRACTION * len(points))
    by_ratio = sorted(points, key=lambda p: (p.observed + 1) / (p.golden + 1))
    return by_ratio[left_out : len(points) - left_out]


def _tail(points: list[Point]) -> list[Point]:
    return points[-tail_length(len(points)) :]


_Statistic = Callable[[Sequence[float]], float]


def cost_layers(
    points: list[Point], limits: CostLimits, spread: Spread | None = None
) -> Iterable[LayerFinding]:
    """Yield the layers of a time or a rate after the warm-up: its median and a quartile.

    Args:
        points: Values of the run and the golden.
        limits: The limit of each.
        spread: Spread of the repeats; a limit that is narrower than `TIME_SPREADS` of it in the
            median is widened to that, since so far apart are runs of the same training there.
    """
    steady = points[max(1, int(limits.warm_up * len(points))) :] or points
    noise = TIME_SPREADS * _median_of(spread, {point.step for point in steady})
    median, quartile = max(limits.median, noise), max(limits.quartile, noise)
    yield statistic_layer(
        ComparisonRule.MEDIAN, "median", steady, statistics.median, (median, limits.worse)
    )
    name, index = ("lower", 0) if limits.worse is Worse.LOWER else ("upper", 2)
    yield statistic_layer(
        ComparisonRule.QUARTILE,
        f"{name} quartile",
        steady,
        lambda values: statistics.quantiles(values, n=4)[index] if len(values) > 1 else values[0],
        (quartile, limits.worse),
    )


def memory_layers(points: list[Point], limits: MemoryLimits) -> Iterable[LayerFinding]:
    """Yield the layers of memory, its peak and median, so that neither spike nor shift hides."""
    yield statistic_layer(ComparisonRule.PEAK, "peak", points, max, (limits.peak, limits.worse))
    yield statistic_layer(
        ComparisonRule.MEDIAN, "median", points, statistics.median, (limits.median, limits.worse)
    )


def statistic_layer(
    rule: ComparisonRule,
    name: str,
    points: Sequence[Point],
    of: _Statistic,
    limit: tuple[float, Worse],
) -> LayerFinding:
    """Compare one statistic of all steps on the side where it is worse."""
    tolerance, worse = limit
    summary = SeriesSummary(
        name=named(name, points),
        observed=of([p.observed for p in points]),
        golden=of([p.golden for p in points]),
        tolerance=tolerance,
    )
    return of_summary(rule, summary, passed=is_within(summary, worse))


def _median_of(spread: Spread | None, steps: AbstractSet[int]) -> float:
    """Return the median of a spread over some steps."""
    if not isinstance(spread, Series):
        return spread or 0.0
    known = [v for step, v in spread.items() if step in steps and isinstance(v, float)]
    return statistics.median(known) if known else 0.0
