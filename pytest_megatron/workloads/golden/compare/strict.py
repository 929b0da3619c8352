"""The strict policy: the layers by kind of metric, and the band of a loss. Pure.

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from pytest_megatron.base.text import counted, none_or
from pytest_megatron.runs.record import RecordedBand, RecordedLayer
from pytest_megatron.workloads.golden.compare.points import (
    Numbers,
    Points,
    align,
    describe_uncovered,
    find_hole,
    first_difference,
    measure,
    shared_points,
)
from pytest_megatron.workloads.golden.compare.result import (
    Comparison,
    ComparisonRule,
    SeriesSummary,
    StepDifference,
    band_of,
    counting_layer,
    is_within,
    part_of,
    relative,
    summary_layer,
    unjudged,
)
from pytest_megatron.workloads.golden.model import (
    NOWHERE,
    Golden,
    Provenance,
    RunEnvironment,
    Series,
    Spread,
    drift_between,
    find_frozen,
    is_finite,
    why_not_timed,
    without_unmeasured_end,
)
from pytest_megatron.workloads.golden.policy import (
    FULL_PRECISION,
    ComparisonPolicy,
    CostLimits,
    CountLimits,
    Exact,
    Limits,
    LossLimits,
    MemoryLimits,
    Worse,
    tail_length,
)

# Absolute: the rounding of a golden of five decimals, and of one of full precision.
_ROUNDING, _FULL_ROUNDING = 5e-6, 1e-9
# Of a time's repeats; a shared machine has many, a quiet one hardly any.
_TIME_SPREADS = 3.0
# More steps than that of a golden without a band of its own are judged by windows.
LONG_STEPS = 200
_NUM_WINDOWS, _LEAST_WINDOW_STEPS = 20, 20
# A step outside the band is off by so many times what most of its neighbours are off by, at most.
_NEIGHBOURS, _NEIGHBOUR_PART, _NEIGHBOUR_FACTOR = 8, 0.75, 8.0
# Of a count, the part of the steps at either end that its mean leaves out, by how far they are off;
# the mean of all steps may be off by so many times as much.
_TRIMMED_FRACTION, _UNTRIMMED_FACTOR = 0.2, 3.0
# Of a band that is learned: fewer repeats give none of its own, and so many of their standard
# deviations only widen the fixed one.
_LEAST_REPEATS, _FEW_FACTOR = 3, 4.0
# The limit of the mean, and of that of the last quarter, as a part of that of single steps; fewer
# steps have no mean worth judging.
_MEAN_FRACTION, _TAIL_MEAN_FRACTION, _LEAST_STEPS_FOR_MEANS = 0.3, 0.4, 8
_TIME = "iteration-time"
_LEAST_TIMED, _MOST_UNTIMED = 10, 0.02  # steps, and the part of them that may have no time
_WITH_PLACEHOLDERS = (_TIME, "num-zeros", "grad-norm")
# Two-sided quantile of Student's t at p = 1e-3, by degrees of freedom.
_T_DEGREES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 60, 1000)
_T_QUANTILES = (
    *(636.619, 31.599, 12.924, 8.610, 6.869, 5.959, 5.408, 5.041),
    *(4.781, 4.587, 4.318, 4.073, 3.850, 3.646, 3.460, 3.300),
)


@dataclass(frozen=True, slots=True)
class StrictCase:
    """The arguments of `compare` that all metrics share under `strict`."""

    golden: Golden
    policy: ComparisonPolicy
    nondeterministic: bool
    surroundings: RunEnvironment
    is_metric_asked_for: bool


@np.errstate(all="ignore")
def compare_strictly(case: StrictCase, metric: str, observed: Series | None) -> Comparison:
    """Compare one metric; None where the run does not have it."""
    golden = case.golden.metrics.get(metric)
    answer = Comparison(
        metric=metric, passed=False, rule=ComparisonRule.NO_GOLDEN, golden_path=case.golden.path
    )
    if not case.policy.is_judged(metric):
        return unjudged(answer, "the policy leaves it out")
    if golden is None:
        return answer
    if not (case.is_metric_asked_for or any(map(is_finite, golden.values))):
        return unjudged(answer, "the golden has no number for it")
    if observed is None:
        return replace(answer, rule=ComparisonRule.NO_METRIC)
    return _compare(case, replace(answer, passed=True), *align(golden, observed))


def _compare(case: StrictCase, answer: Comparison, whole: Series, observed: Series) -> Comparison:
    """Compare two series: whether they are whole, then by the kind of the metric."""
    golden = _measured_part(case, answer.metric, whole, observed)
    points = shared_points(golden, observed)
    known = knowledge_of(
        case.golden,
        answer.metric,
        nondeterministic=case.nondeterministic,
        surroundings=case.surroundings,
    )
    is_long = len(golden) > LONG_STEPS and not known.is_narrow  # which has other limits
    limits = case.policy.limits(answer.metric, is_long=is_long)
    band = None
    if isinstance(limits, LossLimits) and len(golden) and all(map(is_finite, golden.values)):
        band = band_around(case.golden, answer.metric, golden, known, limits)
        answer = replace(answer, allowed=band.as_allowed)
    answer = replace(answer, deviation=measure(points))
    answer = find_hole(answer, golden, observed, points)
    uncovered = None if answer.metric == _TIME else describe_uncovered(golden, observed)
    if answer.passed and uncovered is not None:
        answer = replace(
            answer,
            passed=False,
            rule=ComparisonRule.GOLDEN_UNUSABLE,
            notes=(uncovered,),
            layers=(replace(answer.layers[0], passed=False),),
        )
    if answer.passed:
        answer = _judge(case, answer, (golden, observed), points, known, band or limits)
    if answer.passed and answer.is_judged:
        answer = _name_pass(case, answer, golden, points)
    first = answer.first
    if first is None and answer.rule is not ComparisonRule.GOLDEN_UNUSABLE:
        first = first_difference(golden, observed)
    notes = list(answer.notes)
    if skipped := len(whole) - len(golden):
        notes.append(f"{counted(skipped, 'step')} not measured, not compared")
    if len(golden) and (extra := sum(step > golden.steps[-1] for step in observed.steps)):
        last = golden.steps[-1]
        notes.append(f"{counted(extra, 'step')} after the golden's last, {last}, not compared")
    return replace(answer, first=first, notes=tuple(notes))


def _judge(
    case: StrictCase,
    answer: Comparison,
    series: tuple[Series, Series],
    points: Points,
    known: Knowledge,
    rules: Band | Limits,
) -> Comparison:
    """Compare golden and run, both whole, by the kind of the metric; a loss by its band."""
    limits = rules.limits if isinstance(rules, Band) else rules
    if isinstance(limits, CostLimits | MemoryLimits):
        return _judge_cost(case, answer, limits, points)
    is_expected = known.is_deterministic and known.is_at_home
    is_demanded = limits.exact is Exact.ALWAYS or (limits.exact is Exact.AUTO and is_expected)
    findings = [_exact_layer(points)] if is_demanded else []
    if isinstance(limits, CountLimits):
        findings += _count_layers(points, limits)
        return decide(findings, replace(answer, rule=ComparisonRule.BIAS))
    assert isinstance(rules, Band)
    findings += _loss_layers(series, points, rules)
    notes = (f"within the band (largest {answer.deviation.largest_relative:.1e})", rules.note)
    return decide(findings, replace(answer, rule=ComparisonRule.BAND, notes=notes))


def _judge_cost(
    case: StrictCase, answer: Comparison, limits: CostLimits | MemoryLimits, points: Points
) -> Comparison:
    """Compare time or memory, if the golden is from a host like this one."""
    if points.is_equal:
        return replace(answer, rule=ComparisonRule.BITWISE)
    reason = why_not_timed(case.golden, case.surroundings.host_class)
    if case.surroundings.is_traced:
        reason = "tensors were traced, which costs time and memory"
    if reason is not None:
        return unjudged(answer, reason)
    if isinstance(limits, MemoryLimits):
        findings = list(_memory_layers(points, limits))
    else:
        made = case.golden.provenance
        is_typed = case.policy.settings(answer.metric).keys() & {"median", "quartile"}
        spread = None if made is None or is_typed else made.spread.get(answer.metric)
        findings = list(_cost_layers(points, limits, spread))
    (layer, summary), *_ = [(finding.layer, finding.summary) for finding in findings]
    assert summary is not None
    assert layer.measured is not None
    what = "peak" if isinstance(limits, MemoryLimits) else summary.name
    note = f"{what} {layer.measured:+.1%}"
    return decide(findings, replace(answer, rule=ComparisonRule(layer.layer), notes=(note,)))


def _name_pass(
    case: StrictCase, comparison: Comparison, golden: Series, points: Points
) -> Comparison:
    """Name the rule of a run that passed: equal, drifted with its platform, or within its band."""
    if points.is_equal:
        equal = "bitwise equal" if golden.is_full_precision else "equal to five decimals"
        return replace(comparison, rule=ComparisonRule.BITWISE, notes=(equal,))
    if comparison.rule is not ComparisonRule.BAND:
        return comparison
    drift = drift_between(case.golden.provenance, case.surroundings)
    if drift.changes:
        notes = (*comparison.notes, drift.text)
        comparison = replace(comparison, rule=ComparisonRule.DRIFT, notes=notes)
    return comparison


def _measured_part(case: StrictCase, metric: str, golden: Series, observed: Series) -> Series:
    """Return the steps of the golden that the run has to have measured.

    Left out are an end without values, Megatron-LM's placeholders for what it did not measure, and
    times that the run says it has not (its first step, as after a restart, and single ones).
    """
    golden = without_unmeasured_end(golden)
    has_number = any(not isinstance(value, str) for value in golden.values)
    if metric in _WITH_PLACEHOLDERS and has_number:
        # Megatron-LM writes "nan" where it measured nothing: a step that it did not time, or one
        # without an update (fp16 loss scaling), which has no gradient. In a loss it is a hole.
        golden = golden.where(lambda _, value: not isinstance(value, str))
    if metric == _TIME and len(golden) > 1 and not is_finite(observed.at(golden.steps[0])):
        golden = golden.after(golden.steps[0])
    if not isinstance(case.policy.limits(metric), CostLimits):
        return golden
    # Median and quartile, which judge times, are not moved by single steps at which the run wrote
    # that it has no number. Steps that are not there at all stay.
    at = dict(observed.items())
    untimed = {step for step in golden.steps if step in at and not is_finite(at[step])}
    if len(golden) < _LEAST_TIMED or len(untimed) > max(1, _MOST_UNTIMED * len(golden)):
        return golden
    return golden.where(lambda step, _: step not in untimed)


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
        is_learned=metric in made.spread and (made.repeats or 1) >= _LEAST_REPEATS,
        is_elsewhere=is_elsewhere,
        is_at_home=drift.is_same_platform,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The deviations allowed around a golden.

    Attributes:
        limits: Those that it was made of.
        allowed: (num_steps,) absolute deviation allowed at each step of the golden.
        rounding: The part of it that does not grow with the golden's value.
        num_outside: How many steps may be outside, each by `LossLimits.outside_factor` at most.
        needs_company: True if such a step must have neighbours that are off too, since the
            noise is not known.
        bias: Absolute deviation allowed of the mean over all steps.
        tail: The same over the last steps (`tail_length`).
        note: Why the band is as it is, for the message.
        as_allowed: The band in few numbers: a width holds for many steps.
    """

    limits: LossLimits
    allowed: Numbers
    rounding: float
    num_outside: int
    needs_company: bool
    bias: float
    tail: float
    note: str
    as_allowed: RecordedBand


def band_around(
    golden: Golden, metric: str, series: Series, known: Knowledge, limits: LossLimits
) -> Band:
    """Return the band of one metric, whose golden values must all be finite numbers.

    The spread of repeats holds for their platform. Another one rounds differently: in fp32 by 2e-7
    at most in 50 steps, which any band forgives; in bf16 by 2e-4 (two kinds of CPU, one training),
    so that there the band is at least that of a golden without repeats.
    """
    made = golden.provenance or Provenance()
    repeats = 1 if made.repeats is None else made.repeats
    factor = prediction_factor(repeats) if known.is_learned else _FEW_FACTOR
    learned = factor * np.array(growing_deviation(made.spread.get(metric), series.steps))
    floor = limits.floor_in(made.precision, is_at_home=known.is_learned and known.is_at_home)
    fixed = [floor if known.is_narrow else limits.fixed_at(step) for step in series.steps]
    widths = np.maximum(learned, fixed)
    scales = abs(np.array(series.values, np.float64))
    rounding = limits.absolute + (_FULL_ROUNDING if series.is_full_precision else _ROUNDING)
    of_tail = slice(-tail_length(len(scales)), None)
    mean, tail = (
        max(limit * math.fsum(scale), part * math.fsum(noise)) / len(scale)
        for limit, part, noise, scale in (
            (limits.mean, _MEAN_FRACTION, learned * scales, scales),
            (
                limits.tail_mean,
                _TAIL_MEAN_FRACTION,
                (learned * scales)[of_tail],
                scales[of_tail],
            ),
        )
    )
    return Band(
        limits=limits,
        allowed=widths * scales + rounding,
        rounding=rounding,
        num_outside=0 if known.is_deterministic else int(limits.outside_fraction * len(scales)),
        needs_company=not (known.is_learned or known.is_deterministic),
        bias=mean + limits.absolute + _ROUNDING,
        tail=tail + limits.absolute + _ROUNDING,
        note=_describe(repeats, known),
        as_allowed=band_of(dict(zip(series.steps, widths.tolist(), strict=True)), rounding),
    )


def prediction_factor(repeats: int) -> float:
    """Return by how many sample standard deviations of `repeats` runs another run may be off.

    Student's t at p = 1e-3 with repeats - 1 degrees of freedom, times sqrt(1 + 1/repeats): the
    golden is the mean of the repeats or one of them, and the new run varies too.
    """
    at = bisect_right(_T_DEGREES, repeats - 1) - 1
    return _T_QUANTILES[at] * math.sqrt(1 + 1 / repeats)


def growing_deviation(
    spread: Spread | None, steps: tuple[int, ...], *, look_back: int = 8, look_ahead: int = 2
) -> list[float]:
    """Return the relative standard deviation to use at each step.

    At a step it is the largest of the values around it: the estimate of one step from a few repeats
    may be near 0 by chance. Steps that the spread lacks have the last.

    Args:
        spread: What repeats showed.
        steps: The golden's.
        look_back: How many values of the spread up to a step are around it.
        look_ahead: How many steps after it: where noise grows, that of another platform, which
            begins a little larger, is a few steps ahead.
    """
    if not isinstance(spread, Series):
        return [spread or 0.0] * len(steps)
    known = [v for v in spread.values if isinstance(v, float)]
    ends = [bisect_right(spread.steps, step + look_ahead) for step in steps]
    starts = [max(0, bisect_right(spread.steps, step) - look_back) for step in steps]
    pairs = zip(starts, ends, strict=True)
    return [max(known[start:end], default=0.0) for start, end in pairs]


def _describe(repeats: int, known: Knowledge) -> str:
    """Describe what is known of the golden's noise."""
    if known.is_elsewhere:
        return "golden from another platform, where fewer digits are the same"
    if known.is_deterministic:
        return "golden is deterministic"
    if known.is_learned:
        return f"band learned from {repeats} repeats"
    return "golden without repeats enough for a band of its own"


@dataclass(frozen=True, slots=True)
class LayerFinding:
    """The result of one layer; `first`, `summary` and `notes` are those of `Comparison`."""

    layer: RecordedLayer
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
        rule=ComparisonRule(failed.layer.layer),
        first=failed.first,
        summary=failed.summary,
        notes=failed.notes,
    )


def _exact_layer(points: Points) -> LayerFinding:
    """Count the steps that differ at all, where none may."""
    differing = points[points.observed != points.golden]
    layer = counting_layer(ComparisonRule.EXACT, len(differing), 0, "steps differ")
    if not len(differing):
        return LayerFinding(layer)
    steps = counted(len(points), "step")
    ulps = _ulps_between(differing.observed[0], differing.golden[0])
    notes = (
        f"{len(differing)} of {steps} differ, the first by {ulps} float32 ulps",
        "the golden is deterministic and from this image, these versions and this class of host",
    )
    return LayerFinding(layer, first=differing.at(0, 0.0), notes=notes)


def _ulps_between(observed: float, golden: float) -> int:
    """Return how many float32 numbers lie between two of them, counted from one to the other."""
    bits = np.array((observed, golden), np.float32).view(np.int32).astype(np.int64)
    first, second = np.where(bits >= 0, bits, -(bits & 0x7FFFFFFF)).tolist()
    return abs(int(first) - int(second))


def _loss_layers(
    series: tuple[Series, Series], points: Points, band: Band
) -> Iterator[LayerFinding]:
    """Yield the layers of a loss: first step, shape, early window, every step, mean and tail."""
    limits = band.limits
    if points.steps[0] == 1:  # it has seen no update: a difference there is no drift of numerics
        allowed = limits.step_1 * abs(points.golden[0]) + limits.absolute + _ROUNDING
        notes = ("data, initialisation or forward pass differ",)
        yield _at_step(ComparisonRule.STEP_1, points, 0, min(allowed, band.allowed[0]), notes)
    yield _shape(*series, limits)
    early = (points.steps > 1) & (points.steps <= limits.early_steps)
    if early.any():
        yield _every_step(ComparisonRule.EARLY, points[early], band.allowed[early], 0, band.note)
    yield _every_step(ComparisonRule.BAND, points, band.allowed, band.num_outside, band.note)
    yield _outlier(points, band)
    if len(points) >= _LEAST_STEPS_FOR_MEANS:
        yield _mean(ComparisonRule.BIAS, points, band.bias, band.note)
        yield _mean(ComparisonRule.TAIL, _tail(points), band.tail, band.note)
    if limits.window_mean is not None:
        yield _windows(points, limits.window_mean, band)


def _at_step(
    rule: ComparisonRule, points: Points, at: int, allowed: float, notes: tuple[str, ...]
) -> LayerFinding:
    """Limit the deviation of one step."""
    first = points.at(at, allowed)
    layer = RecordedLayer(
        layer=rule.value,
        passed=bool(points.off[at] <= allowed),
        measured=abs(relative(points.observed[at], points.golden[at])),
        limit=first.tolerance,
        place=None if rule is ComparisonRule.STEP_1 else f"step {first.step}",
    )
    return LayerFinding(layer, first=first, notes=notes)


def _shape(golden: Series, observed: Series, limits: LossLimits) -> LayerFinding:
    """Judge whether the curve stands still where the golden moves."""
    least = max(limits.frozen_steps, int(limits.frozen_fraction * len(golden)))
    frozen = find_frozen(golden, observed, least_steps=least)
    first, last = frozen or (0, -1)
    num_steps = sum(first <= step <= last for step in golden.steps)
    layer = counting_layer(ComparisonRule.FROZEN, num_steps, least - 1, "steps")
    if frozen is None:
        return LayerFinding(layer)
    at, expected = observed.finite()[first], golden.finite()[first]
    notes = (f"constant from step {first} to {last}, where the golden moves",)
    return LayerFinding(
        layer, first=StepDifference(step=first, observed=at, golden=expected), notes=notes
    )


def _every_step(
    rule: ComparisonRule, points: Points, allowed: Numbers, budget: int, note: str
) -> LayerFinding:
    """Count the steps outside of the band; name the one that comes nearest, or goes farthest."""
    outside = np.flatnonzero(~(points.off <= allowed))
    worst = (points.off / allowed).argmax()
    scale = abs(points.golden[worst])
    sizes = (
        f"{amount / scale:.1e}" if scale else f"{amount:.1e} absolute"
        for amount in (points.off[worst], allowed[worst])
    )
    place = f"{' of '.join(sizes)} at step {points.steps[worst]}"
    layer = counting_layer(rule, len(outside), budget, "steps outside", place)
    count = f"{len(outside)} of {counted(len(points), 'step')} outside, {none_or(budget)} may be"
    first = points.at(outside[0], allowed[outside[0]]) if len(outside) else None
    return LayerFinding(layer, first=first, notes=(count, note))


def _outlier(points: Points, band: Band) -> LayerFinding:
    """Check the step that is farthest outside: even one that may be outside has a limit.

    That is some bands and, where the noise is not known, some times what its neighbours are off by:
    noise comes in company, and a step that is off alone is a fault.
    """
    off, most = points.off, band.limits.outside_factor * band.allowed
    if band.needs_company:
        company = [_in_company(off, at) for at in range(len(off))]
        most = np.maximum(band.allowed, np.minimum(most, np.array(company) + band.rounding))
    far = np.flatnonzero(~(off <= most))
    at = int(far[0] if len(far) else (off / most).argmax())
    count = f"{len(far)} of {counted(len(points), 'step')} too far outside the band for any step"
    return _at_step(ComparisonRule.OUTLIER, points, at, most[at], (count, band.note))


def _in_company(off: Numbers, at: int) -> float:
    """Return the deviation allowed at a step, given those of the steps around it."""
    around = sorted((*off[max(0, at - _NEIGHBOURS) : at], *off[at + 1 : at + 1 + _NEIGHBOURS]))
    return _NEIGHBOUR_FACTOR * around[int(_NEIGHBOUR_PART * len(around))] if around else 0.0


def _windows(points: Points, limit: float, band: Band) -> LayerFinding:
    """Find a shift that lasts for a part of the training; name the window farthest off."""
    size = max(_LEAST_WINDOW_STEPS, len(points) // _NUM_WINDOWS)
    *starts, last = range(0, max(1, len(points) - size + 1), size)
    windows = [*(points[start : start + size] for start in starts), points[last:]]

    def excess(window: Points) -> float:
        observed, golden = window.means
        return abs(observed - golden) - limit * abs(golden)

    worst = max(windows, key=excess)
    allowed = limit * abs(worst.means[1]) + band.rounding
    return _mean(ComparisonRule.WINDOW, worst, allowed, band.note)


def _mean(rule: ComparisonRule, points: Points, allowed: float, note: str) -> LayerFinding:
    """Find a small shift that lasts."""
    observed, golden = points.means
    tolerance, name = part_of(allowed, golden), points.named("mean")
    summary = SeriesSummary(name=name, observed=observed, golden=golden, tolerance=tolerance)
    return _in_all(rule, summary, allowed, note)


def _in_all(
    rule: ComparisonRule, summary: SeriesSummary, allowed: float, *notes: str
) -> LayerFinding:
    """Limit the deviation of one number that is made of many steps."""
    layer = summary_layer(rule, summary, passed=abs(summary.observed - summary.golden) <= allowed)
    layer = replace(layer, limit=part_of(allowed, summary.golden))
    return LayerFinding(layer, summary=summary, notes=notes)


def _tail(points: Points) -> Points:
    return points[-tail_length(len(points)) :]


def _trimmed(points: Points) -> Points:
    """Return the steps without those whose count differs most, as many on either side."""
    left_out = int(_TRIMMED_FRACTION * len(points))
    by_ratio = np.argsort((points.observed + 1) / (points.golden + 1), kind="stable")
    return points[by_ratio[left_out : len(points) - left_out]]


def _count_layers(points: Points, limits: CountLimits) -> Iterator[LayerFinding]:
    """Yield the layers of a count: mean, mean of the tail, median; single steps vary too much.

    The means leave out the steps that differ most: after a change of container a few steps may have
    many times as many zeros. Nor may all steps together be off by much more.
    """
    tail = _tail(points)
    medians = float(np.median(points.observed)), float(np.median(points.golden))
    mean, untrimmed = limits.mean, _UNTRIMMED_FACTOR * limits.mean
    for rule, name, (observed, golden), tolerance in (
        (ComparisonRule.BIAS, points.named("trimmed mean"), _trimmed(points).means, mean),
        (ComparisonRule.TAIL, tail.named("trimmed mean"), _trimmed(tail).means, limits.tail_mean),
        (ComparisonRule.MEDIAN, points.named("median"), medians, limits.median),
        (ComparisonRule.OUTLIER, points.named("mean"), points.means, untrimmed),
    ):
        summary = SeriesSummary(name=name, observed=observed, golden=golden, tolerance=tolerance)
        yield _in_all(rule, summary, max(tolerance * abs(golden), limits.absolute))


def _cost_layers(
    points: Points, limits: CostLimits, spread: Spread | None = None
) -> Iterator[LayerFinding]:
    """Yield the layers of a time or a rate after the warm-up: its median and a quartile.

    Args:
        points: Values of the run and the golden.
        limits: The limit of each.
        spread: Spread of the repeats; a limit that is narrower than `_TIME_SPREADS` of it in the
            median is widened to that, since so far apart are runs of the same training there.
    """
    start = max(1, int(limits.warm_up * len(points)))
    steady = points[start:] if len(points) > start else points
    if isinstance(spread, Series):
        steps = set(steady.steps.tolist())
        known = [v for step, v in spread.finite().items() if step in steps]
        spread = statistics.median(known) if known else 0.0
    noise, worse = _TIME_SPREADS * (spread or 0.0), limits.worse
    median, quartile = max(limits.median, noise), max(limits.quartile, noise)
    yield statistic_layer(ComparisonRule.MEDIAN, "median", steady, np.median, (median, worse))
    name, index = ("lower", 0) if worse is Worse.LOWER else ("upper", 2)

    def quartile_of(values: Numbers) -> float:
        numbers: list[float] = values.tolist()
        return statistics.quantiles(numbers, n=4)[index] if len(numbers) > 1 else numbers[0]

    name = f"{name} quartile"
    yield statistic_layer(ComparisonRule.QUARTILE, name, steady, quartile_of, (quartile, worse))


def _memory_layers(points: Points, limits: MemoryLimits) -> Iterator[LayerFinding]:
    """Yield the layers of memory, its peak and median, so that neither spike nor shift hides."""
    worse = limits.worse
    yield statistic_layer(ComparisonRule.PEAK, "peak", points, np.max, (limits.peak, worse))
    yield statistic_layer(
        ComparisonRule.MEDIAN, "median", points, np.median, (limits.median, worse)
    )


def statistic_layer(
    rule: ComparisonRule,
    name: str,
    points: Points,
    of: Callable[[Numbers], float],
    limit: tuple[float, Worse],
) -> LayerFinding:
    """Compare one statistic of all steps on the side where it is worse."""
    tolerance, worse = limit
    summary = SeriesSummary(
        name=points.named(name),
        observed=float(of(points.observed)),
        golden=float(of(points.golden)),
        tolerance=tolerance,
    )
    layer = summary_layer(rule, summary, passed=is_within(summary, worse))
    return LayerFinding(layer, summary=summary)
