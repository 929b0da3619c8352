"""Compares a reinforcement-learning run with its golden, under either policy. Pure.

The loss of such a run lies around zero, so that a relative band says little: each step may be off
by a part of the golden or by a small amount. Under `strict` the loss is always compared, under
whichever of its two names the run and the golden have it, memory is judged both ways, and what is
missing is a failure. Under `megatron` the verdict is that of Megatron-LM's own comparison, which
looks the loss up under a name that its extraction does not write, and so never judges it.

Source: Megatron-LM tests/functional_tests/python_test_utils/test_grpo_training_loop.py, d98e8a64dd.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_megatron.golden.compare.layers import find_hole, is_within, of_summary
from pytest_megatron.golden.compare.limits import Worse
from pytest_megatron.golden.compare.result import (
    Comparison,
    ComparisonRule,
    SeriesSummary,
    StepDifference,
    allowed_of,
    counting_layer,
    relative,
)
from pytest_megatron.golden.compare.series import (
    Point,
    align,
    first_difference,
    measure,
    shared_points,
)
from pytest_megatron.golden.model import MetricMap, Series, is_finite
from pytest_megatron.golden.policy import ComparisonPolicy
from pytest_megatron.golden.provenance import Golden

LOSS = "lm loss"
_LOSS_SPELT_OTHERWISE = "lm-loss"
_TIME = "iteration-time"
_MEMORY = ("mem-allocated-bytes", "mem-max-allocated-bytes")
# A policy file changes these under the names that they have for a training.
_LOSS_BAND, _LOSS_ABSOLUTE = 0.01, 1e-6
_TIME_MEDIAN, _MEMORY_PEAK = 0.15, 0.10
_LEARNED_FACTOR = 4.0  # standard deviations of the repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class RlRules:
    """How a run is judged.

    Attributes:
        policy: Which policy judges.
        start: Values of iteration-time to leave out at the start (THROUGHPUT_START_STEP).
        not_timed: Why time and memory are not judged; None where they are.
    """

    policy: ComparisonPolicy
    start: int = 1
    not_timed: str | None = None


def rl_metrics(metrics: Sequence[str] | None) -> tuple[str, ...]:
    """Return what a case compares: the loss, then its METRICS."""
    names = (LOSS, *(LOSS if m == _LOSS_SPELT_OTHERWISE else m for m in metrics or ()))
    return tuple(dict.fromkeys(names))


def with_one_loss_name(metrics: MetricMap) -> MetricMap:
    """Return the metrics with the loss under `lm loss`, also where it is called `lm-loss`."""
    if LOSS in metrics or _LOSS_SPELT_OTHERWISE not in metrics:
        return metrics
    return {LOSS if k == _LOSS_SPELT_OTHERWISE else k: v for k, v in metrics.items()}


def compare_rl(
    golden: Golden, observed: MetricMap, metrics: Sequence[str], rules: RlRules
) -> tuple[Comparison, ...]:
    """Compare `metrics` of a run with a golden, one answer each.

    Args:
        golden: What was committed.
        observed: What the run measured.
        metrics: As `rl_metrics` returns them.
        rules: How.
    """
    golden = replace(golden, metrics=with_one_loss_name(golden.metrics))
    observed = with_one_loss_name(observed)
    answers = [_compare(golden, observed, metric, rules) for metric in metrics]
    if not rules.policy.is_strict:  # the run has to have whatever the golden has, compared or not
        answers += [
            Comparison(
                metric=m, passed=False, rule=ComparisonRule.NO_METRIC, golden_path=golden.path
            )
            for m in golden.metrics
            if m not in observed and m not in metrics
        ]
    return tuple(answers)


def _compare(golden: Golden, observed: MetricMap, metric: str, rules: RlRules) -> Comparison:
    answer = Comparison(
        metric=metric, passed=False, rule=ComparisonRule.NO_GOLDEN, golden_path=golden.path
    )
    expected, got = golden.metrics.get(metric), observed.get(metric)
    if expected is None or got is None:
        rule = ComparisonRule.NO_GOLDEN if expected is None else ComparisonRule.NO_METRIC
        is_let_through = expected is None and not rules.policy.is_strict
        note = "Megatron-LM passes what the golden does not have"
        return _unjudged(answer, note) if is_let_through else replace(answer, rule=rule)
    expected, got = align(expected, got)
    points = shared_points(expected, got)
    answer = replace(answer, deviation=measure(points), first=first_difference(expected, got))
    is_timed = metric == _TIME or metric in _MEMORY
    if not rules.policy.is_strict and not is_timed:
        return _unjudged(answer, "Megatron-LM does not compare it")
    if metric == _TIME:  # a step without a time, such as the first, is no hole
        expected = _finite(expected)
    answer = find_hole(replace(answer, passed=True), expected, got)
    return _judge(answer, points, golden, rules) if answer.passed else answer


def _judge(answer: Comparison, points: list[Point], golden: Golden, rules: RlRules) -> Comparison:
    """Judge two whole series by the kind of the metric."""
    is_time, is_memory = answer.metric == _TIME, answer.metric in _MEMORY
    if (is_time or is_memory) and rules.not_timed is not None:
        return _unjudged(answer, rules.not_timed)
    if is_time:
        return _judge_time(answer, points, rules)
    return (
        _judge_memory(answer, points, rules)
        if is_memory
        else _judge_loss(answer, points, golden, rules)
    )


def _judge_loss(
    answer: Comparison, points: list[Point], golden: Golden, rules: RlRules
) -> Comparison:
    """Judge every step: by a part of the golden, a small amount, or what repeats differed by."""
    spread = None if golden.provenance is None else golden.provenance.spread.get(answer.metric)
    at = dict(spread.items()) if isinstance(spread, Series) else {}
    policy = rules.policy
    band = policy.limit(answer.metric, "band", _LOSS_BAND)
    absolute = policy.limit(answer.metric, "absolute", _LOSS_ABSOLUTE)
    outside: list[StepDifference] = []
    widths: dict[int, float] = {}
    for point in points:
        learned = at.get(point.step, spread if isinstance(spread, float) else 0.0)
        assert isinstance(learned, float)  # a spread holds numbers only
        scale = abs(point.golden)
        widths[point.step] = max(band, _LEARNED_FACTOR * learned)
        allowed = widths[point.step] * scale + absolute
        if scale == 0:  # there the spread is absolute
            allowed += _LEARNED_FACTOR * learned
        if not abs(point.signed) <= allowed:
            outside.append(
                StepDifference(
                    step=point.step,
                    observed=point.observed,
                    golden=point.golden,
                    tolerance=allowed / scale if scale else allowed,
                )
            )
    answer = replace(answer, allowed=allowed_of(widths, absolute))
    place = f"band {band:g} and {absolute:g} absolute"
    layer = counting_layer(ComparisonRule.BAND, len(outside), 0, "steps outside", place)
    first = outside[0] if outside else answer.first
    return replace(
        answer,
        passed=not outside,
        rule=ComparisonRule.BAND,
        first=first,
        layers=(*answer.layers, layer),
    )


def _judge_time(answer: Comparison, points: list[Point], rules: RlRules) -> Comparison:
    """Judge the median after the warm-up; under `strict` faster is fine."""
    steady = points[rules.start :] or points
    summary = SeriesSummary(
        name=f"median of steps {steady[0].step} to {steady[-1].step}",
        observed=statistics.median(p.observed for p in steady),
        golden=statistics.median(p.golden for p in steady),
        tolerance=rules.policy.limit(answer.metric, "median", _TIME_MEDIAN),
    )
    default = Worse.HIGHER if rules.policy.is_strict else Worse.EITHER
    return _of_summary(
        answer, summary, ComparisonRule.MEDIAN, rules.policy.worse(answer.metric, default)
    )


def _judge_memory(answer: Comparison, points: list[Point], rules: RlRules) -> Comparison:
    """Judge the peak after the first step; under `strict` both ways: less was done with less."""
    steady = points[1:] or points
    summary = SeriesSummary(
        name=f"peak of steps {steady[0].step} to {steady[-1].step}",
        observed=max(p.observed for p in steady),
        golden=max(p.golden for p in steady),
        tolerance=rules.policy.limit(answer.metric, "peak", _MEMORY_PEAK),
    )
    default = Worse.EITHER if rules.policy.is_strict else Worse.HIGHER
    return _of_summary(
        answer, summary, ComparisonRule.PEAK, rules.policy.worse(answer.metric, default)
    )


def _of_summary(
    answer: Comparison, summary: SeriesSummary, rule: ComparisonRule, worse: Worse
) -> Comparison:
    passed = is_within(summary, worse)
    off = f"{summary.name} {relative(summary.observed, summary.golden):+.1%}"
    layer = of_summary(rule, summary, passed=passed).layer
    return replace(
        answer,
        passed=passed,
        rule=rule,
        summary=None if passed else summary,
        notes=(off,) if passed else (),
        layers=(*answer.layers, layer),
    )


def _unjudged(answer: Comparison, note: str) -> Comparison:
    return replace(answer, passed=True, rule=ComparisonRule.NOT_JUDGED, notes=(note,))


def _finite(series: Series) -> Series:
    kept = [(step, value) for step, value in series.items() if is_finite(value)]
    return replace(series, steps=tuple(s for s, _ in kept), values=tuple(v for _, v in kept))
