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

from pytest_megatron.golden.comparison import Comparison, Difference, Rule, Summary, relative
from pytest_megatron.golden.deviation import (
    Point,
    align,
    first_difference,
    measure,
    shared_points,
)
from pytest_megatron.golden.model import MetricMap, Series, is_finite
from pytest_megatron.golden.presence import find_absent, find_unusable
from pytest_megatron.golden.provenance import Golden

LOSS = "lm loss"
_LOSS_SPELT_OTHERWISE = "lm-loss"
_TIME = "iteration-time"
_MEMORY = ("mem-allocated-bytes", "mem-max-allocated-bytes")
_LOSS_RELATIVE, _LOSS_ABSOLUTE = 0.01, 1e-6
_LEARNED_FACTOR = 4.0  # standard deviations of the repeats
_TIME_RELATIVE = 0.15
_MEMORY_RELATIVE = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class RlRules:
    """How a run is judged.

    Attributes:
        is_strict: Which policy judges.
        start: Values of iteration-time to leave out at the start (THROUGHPUT_START_STEP).
        not_timed: Why time and memory are not judged; None where they are.
    """

    is_strict: bool
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
    if not rules.is_strict:  # the run has to have whatever the golden has, compared or not
        answers += [
            Comparison(metric=m, passed=False, rule=Rule.NO_METRIC, golden_path=golden.path)
            for m in golden.metrics
            if m not in observed and m not in metrics
        ]
    return tuple(answers)


def _compare(golden: Golden, observed: MetricMap, metric: str, rules: RlRules) -> Comparison:
    answer = Comparison(metric=metric, passed=False, rule=Rule.NO_GOLDEN, golden_path=golden.path)
    expected, got = golden.metrics.get(metric), observed.get(metric)
    if expected is None or got is None:
        rule = Rule.NO_GOLDEN if expected is None else Rule.NO_METRIC
        is_let_through = expected is None and not rules.is_strict
        note = "Megatron-LM passes what the golden does not have"
        return _unjudged(answer, note) if is_let_through else replace(answer, rule=rule)
    expected, got = align(expected, got)
    points = shared_points(expected, got)
    answer = replace(answer, deviation=measure(points), first=first_difference(expected, got))
    is_timed = metric == _TIME or metric in _MEMORY
    if not rules.is_strict and not is_timed:
        return _unjudged(answer, "Megatron-LM does not compare it")
    if metric == _TIME:  # a step without a time, such as the first, is no hole
        expected = _finite(expected)
    hole = _find_hole(answer, expected, got)
    return _judge(answer, points, golden, rules) if hole is None else hole


def _judge(answer: Comparison, points: list[Point], golden: Golden, rules: RlRules) -> Comparison:
    """Judge two whole series by the kind of the metric."""
    is_time, is_memory = answer.metric == _TIME, answer.metric in _MEMORY
    if (is_time or is_memory) and rules.not_timed is not None:
        return _unjudged(answer, rules.not_timed)
    if is_time:
        return _judge_time(answer, points, rules)
    return (
        _judge_memory(answer, points, rules) if is_memory else _judge_loss(answer, points, golden)
    )


def _find_hole(answer: Comparison, golden: Series, observed: Series) -> Comparison | None:
    """Look for what is not there, on either side."""
    unusable = find_unusable(golden)
    if unusable is not None or not len(golden):
        return replace(answer, rule=Rule.GOLDEN_UNUSABLE, first=unusable)
    absent = find_absent(golden, observed)
    if absent is None:
        return None
    rule, first, notes = absent
    return replace(answer, rule=rule, first=first, notes=notes)


def _judge_loss(answer: Comparison, points: list[Point], golden: Golden) -> Comparison:
    """Judge every step: by a part of the golden, a small amount, or what repeats differed by."""
    spread = None if golden.provenance is None else golden.provenance.spread.get(answer.metric)
    at = dict(spread.items()) if isinstance(spread, Series) else {}
    for point in points:
        learned = at.get(point.step, spread if isinstance(spread, float) else 0.0)
        assert isinstance(learned, float)  # a spread holds numbers only
        scale = abs(point.golden)
        part = max(_LOSS_RELATIVE, _LEARNED_FACTOR * learned) * scale
        allowed = part + _LOSS_ABSOLUTE
        if scale == 0:  # there the spread is absolute
            allowed += _LEARNED_FACTOR * learned
        if not abs(point.signed) <= allowed:
            outside = Difference(
                step=point.step,
                observed=point.observed,
                golden=point.golden,
                tolerance=allowed / scale if scale else allowed,
            )
            return replace(answer, rule=Rule.BAND, first=outside)
    return replace(answer, passed=True, rule=Rule.BAND)


def _judge_time(answer: Comparison, points: list[Point], rules: RlRules) -> Comparison:
    """Judge the median after the warm-up; under `strict` faster is fine."""
    steady = points[rules.start :] or points
    summary = Summary(
        name=f"median of steps {steady[0].step} to {steady[-1].step}",
        observed=statistics.median(p.observed for p in steady),
        golden=statistics.median(p.golden for p in steady),
        tolerance=_TIME_RELATIVE,
    )
    off = relative(summary.observed, summary.golden)
    passed = off <= _TIME_RELATIVE and (rules.is_strict or off >= -_TIME_RELATIVE)
    return _of_summary(answer, summary, Rule.MEDIAN, passed=passed)


def _judge_memory(answer: Comparison, points: list[Point], rules: RlRules) -> Comparison:
    """Judge the peak after the first step; under `strict` both ways: less was done with less."""
    steady = points[1:] or points
    summary = Summary(
        name=f"peak of steps {steady[0].step} to {steady[-1].step}",
        observed=max(p.observed for p in steady),
        golden=max(p.golden for p in steady),
        tolerance=_MEMORY_RELATIVE,
    )
    off = relative(summary.observed, summary.golden)
    passed = off <= _MEMORY_RELATIVE and (not rules.is_strict or off >= -_MEMORY_RELATIVE)
    return _of_summary(answer, summary, Rule.PEAK, passed=passed)


def _of_summary(answer: Comparison, summary: Summary, rule: Rule, *, passed: bool) -> Comparison:
    off = f"{summary.name} {relative(summary.observed, summary.golden):+.1%}"
    return replace(
        answer,
        passed=passed,
        rule=rule,
        summary=None if passed else summary,
        notes=(off,) if passed else (),
    )


def _unjudged(answer: Comparison, note: str) -> Comparison:
    return replace(answer, passed=True, rule=Rule.NOT_JUDGED, notes=(note,))


def _finite(series: Series) -> Series:
    kept = [(step, value) for step, value in series.items() if is_finite(value)]
    return replace(series, steps=tuple(s for s, _ in kept), values=tuple(v for _, v in kept))
