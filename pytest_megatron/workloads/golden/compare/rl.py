"""Comparison of a reinforcement-learning run with its golden, under either policy. Pure.

The loss of such a run lies around zero, where a relative band is of little use: each step may be
off by a part of the golden or by a small amount. Under `strict` the loss is always compared, under
whichever of its two names the run and the golden have it, memory is judged both ways, and what is
missing is a failure. Under `megatron` the verdict is that of Megatron-LM's own comparison, which
looks the loss up under a name that its extraction does not write, and so never judges it.

Source: Megatron-LM tests/functional_tests/python_test_utils/test_grpo_training_loop.py, d98e8a64dd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pytest_megatron.workloads.golden.compare.points import (
    Points,
    align,
    find_hole,
    first_difference,
    measure,
    shared_points,
)
from pytest_megatron.workloads.golden.compare.result import (
    Comparison,
    ComparisonRule,
    band_of,
    counting_layer,
    relative,
    unjudged,
)
from pytest_megatron.workloads.golden.compare.strict import decide, statistic_layer
from pytest_megatron.workloads.golden.model import (
    Golden,
    MetricMap,
    Series,
    is_finite,
    with_one_loss_name,
)
from pytest_megatron.workloads.golden.policy import ComparisonPolicy, Worse

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


@np.errstate(all="ignore")
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
        return unjudged(answer, note) if is_let_through else replace(answer, rule=rule)
    expected, got = align(expected, got)
    points = shared_points(expected, got)
    answer = replace(answer, deviation=measure(points), first=first_difference(expected, got))
    is_timed = metric == _TIME or metric in _MEMORY
    if not rules.policy.is_strict and not is_timed:
        return unjudged(answer, "Megatron-LM does not compare it")
    if metric == _TIME:  # a step without a time, such as the first, is no hole
        expected = expected.where(lambda _, value: is_finite(value))
    answer = find_hole(replace(answer, passed=True), expected, got, points)
    return _judge(answer, points, golden, rules) if answer.passed else answer


def _judge(comparison: Comparison, points: Points, golden: Golden, rules: RlRules) -> Comparison:
    """Compare two whole series by the kind of the metric."""
    if comparison.metric != _TIME and comparison.metric not in _MEMORY:
        return _judge_loss(comparison, points, golden, rules)
    if rules.not_timed is not None:
        return unjudged(comparison, rules.not_timed)
    return _judge_cost(comparison, points, rules)


def _judge_loss(
    comparison: Comparison, points: Points, golden: Golden, rules: RlRules
) -> Comparison:
    """Compare every step: within a part of the golden, a small amount, or the spread of repeats."""
    spread = None if golden.provenance is None else golden.provenance.spread.get(comparison.metric)
    steps: list[int] = points.steps.tolist()
    at = spread.finite() if isinstance(spread, Series) else dict.fromkeys(steps, spread or 0.0)
    noise = _LEARNED_FACTOR * np.array([at.get(step, 0.0) for step in steps])
    band = rules.policy.limit(comparison.metric, "band", _LOSS_BAND)
    absolute = rules.policy.limit(comparison.metric, "absolute", _LOSS_ABSOLUTE)
    widths, scales = np.maximum(band, noise), abs(points.golden)
    # The spread is absolute where the golden is 0.
    allowed = np.where(scales > 0, widths * scales + absolute, absolute + noise)
    outside = np.flatnonzero(~(points.off <= allowed))
    place = f"band {band:g} and {absolute:g} absolute"
    layer = counting_layer(ComparisonRule.BAND, len(outside), 0, "steps outside", place)
    first = comparison.first
    if len(outside):
        first = points.at(outside[0], allowed[outside[0]])
        if not first.golden:
            first = replace(first, tolerance=float(allowed[outside[0]]))
    return replace(
        comparison,
        passed=not len(outside),
        rule=ComparisonRule.BAND,
        first=first,
        allowed=band_of(dict(zip(steps, widths.tolist(), strict=True)), absolute),
        layers=(*comparison.layers, layer),
    )


def _judge_cost(comparison: Comparison, points: Points, rules: RlRules) -> Comparison:
    """Compare the median time or the peak of memory after the warm-up.

    Under `strict` a faster run passes; less memory fails, since less was done with it.
    """
    policy, metric = rules.policy, comparison.metric
    if metric == _TIME:
        steady = points[rules.start :] if len(points) > rules.start else points
        worse = policy.worse(metric, Worse.HIGHER if policy.is_strict else Worse.EITHER)
        limit = (policy.limit(metric, "median", _TIME_MEDIAN), worse)
        found = statistic_layer(ComparisonRule.MEDIAN, "median", steady, np.median, limit)
    else:
        steady = points[1:] if len(points) > 1 else points
        worse = policy.worse(metric, Worse.EITHER if policy.is_strict else Worse.HIGHER)
        limit = (policy.limit(metric, "peak", _MEMORY_PEAK), worse)
        found = statistic_layer(ComparisonRule.PEAK, "peak", steady, np.max, limit)
    assert found.summary is not None
    off = relative(found.summary.observed, found.summary.golden)
    notes = (f"{found.summary.name} {off:+.1%}",)
    rule = ComparisonRule(found.layer.layer)
    judged = decide([found], replace(comparison, rule=rule, notes=notes))
    return replace(judged, first=comparison.first)
