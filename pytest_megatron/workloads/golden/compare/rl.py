"""Comparison of a reinforcement-learning run with its golden, under either policy. Pure.

The loss of such a run lies around zero, where a relative band is of little use: each step may be
off by a part of the golden or by a small amount. Under `strict` the loss is always compared, under
whichever of its two names the run and the golden have it, memory is judged both ways, and what is
missing is a failure. Under `megatron` the verdict is that of Megatron-LM's own comparison, which
looks the loss up under a name that its extraction does not write, and so never judges it.

Source: Megatron-LM tests/functional_tests/python_test_utils/test_grpo_training_loop.py, d98e8a64dd.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pytest_megatron.workloads.golden.compare.layers import decide, find_hole, statistic_layer
from pytest_megatron.workloads.golden.compare.result import (
    Comparison,
    ComparisonRule,
    Point,
    StepDifference,
    align,
    allowed_of,
    counting_layer,
    first_difference,
    measure,
    relative,
    shared_points,
)
from pytest_megatron.workloads.golden.model import Golden, MetricMap, Series, is_finite
from pytest_megatron.workloads.golden.policy import ComparisonPolicy, Worse

LOSS = "lm loss"
_LOSS_SPELT_OTHERWISE = "lm-loss"
_Of = TypeVar("_Of")
_TIME = "iteration-time"
_MEMORY = ("mem-allocated-bytes", "mem-max-allocated-bytes")
# A policy file changes these under the names that they have for a training.
_LOSS_BAND, _LOSS_ABSOLUTE = 0.01, 1e-6
_TIME_MEDIAN, _MEMORY_PEAK = 0.15, 0.10
_LEARNED_FACTOR = 4.0  # standard deviations of the repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class RlRules:
    """The policy and conditions of a comparison.

    Attributes:
        policy: Which policy judges.
        start: Values of iteration-time to leave out at the start (THROUGHPUT_START_STEP).
        not_timed: Why time and memory are not judged; None where they are.
    """

    policy: ComparisonPolicy
    start: int = 1
    not_timed: str | None = None


def rl_metrics(metrics: Sequence[str] | None) -> tuple[str, ...]:
    """Return the metrics that a case compares: the loss, then its METRICS."""
    names = (LOSS, *(LOSS if m == _LOSS_SPELT_OTHERWISE else m for m in metrics or ()))
    return tuple(dict.fromkeys(names))


def with_one_loss_name(found: Mapping[str, _Of]) -> Mapping[str, _Of]:
    """Return what is kept by metric, the loss as `lm loss` also where it is called `lm-loss`."""
    if LOSS in found or _LOSS_SPELT_OTHERWISE not in found:
        return found
    return {LOSS if k == _LOSS_SPELT_OTHERWISE else k: v for k, v in found.items()}


def compare_rl(
    golden: Golden, observed: MetricMap, metrics: Sequence[str], rules: RlRules
) -> tuple[Comparison, ...]:
    """Compare `metrics` of a run with a golden, one answer each.

    Args:
        golden: The committed values.
        observed: The values of the run.
        metrics: Metrics from `rl_metrics`.
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
    """Compare one metric of reinforcement learning."""
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
    answer = find_hole(replace(answer, passed=True), expected, got, points)
    return _judge(answer, points, golden, rules) if answer.passed else answer


def _judge(
    comparison: Comparison, points: list[Point], golden: Golden, rules: RlRules
) -> Comparison:
    """Compare two whole series by the kind of the metric."""
    if comparison.metric != _TIME and comparison.metric not in _MEMORY:
        return _judge_loss(comparison, points, golden, rules)
    if rules.not_timed is not None:
        return _unjudged(comparison, rules.not_timed)
    return _judge_cost(comparison, points, rules)


def _judge_loss(
    comparison: Comparison, points: list[Point], golden: Golden, rules: RlRules
) -> Comparison:
    """Compare every step: within a part of the golden, a small amount, or the spread of repeats."""
    spread = None if golden.provenance is None else golden.provenance.spread.get(comparison.metric)
    at = dict(spread.items()) if isinstance(spread, Series) else {}
    policy = rules.policy
    band = policy.limit(comparison.metric, "band", _LOSS_BAND)
    absolute = policy.limit(comparison.metric, "absolute", _LOSS_ABSOLUTE)
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
    comparison = replace(comparison, allowed=allowed_of(widths, absolute))
    place = f"band {band:g} and {absolute:g} absolute"
    layer = counting_layer(ComparisonRule.BAND, len(outside), 0, "steps outside", place)
    first = outside[0] if outside else comparison.first
    return replace(
        comparison,
        passed=not outside,
        rule=ComparisonRule.BAND,
        first=first,
        layers=(*comparison.layers, layer),
    )


def _judge_cost(comparison: Comparison, points: list[Point], rules: RlRules) -> Comparison:
    """Compare the median time or the peak of memory after the warm-up.

    Under `strict` a faster run passes; less memory fails, since less was done with it.
    """
    policy, metric = rules.policy, comparison.metric
    if metric == _TIME:
        steady = points[rules.start :] or points
        worse = policy.worse(metric, Worse.HIGHER if policy.is_strict else Worse.EITHER)
        limit = (policy.limit(metric, "median", _TIME_MEDIAN), worse)
        found = statistic_layer(ComparisonRule.MEDIAN, "median", steady, statistics.median, limit)
    else:
        steady = points[1:] or points
        worse = policy.worse(metric, Worse.EITHER if policy.is_strict else Worse.HIGHER)
        limit = (policy.limit(metric, "peak", _MEMORY_PEAK), worse)
        found = statistic_layer(ComparisonRule.PEAK, "peak", steady, max, limit)
    assert found.summary is not None
    off = relative(found.summary.observed, found.summary.golden)
    notes = (f"{found.summary.name} {off:+.1%}",)
    judged = decide([found], replace(comparison, rule=found.layer.rule, notes=notes))
    return replace(judged, first=comparison.first)


def _unjudged(comparison: Comparison, note: str) -> Comparison:
    return replace(comparison, passed=True, rule=ComparisonRule.NOT_JUDGED, notes=(note,))


def _finite(series: Series) -> Series:
    kept = [(step, value) for step, value in series.items() if is_finite(value)]
    return replace(series, steps=tuple(s for s, _ in kept), values=tuple(v for _, v in kept))
