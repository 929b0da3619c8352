"""The verdict of Megatron-LM's own comparison, its blind spots included. Pure.

For projects that move to this package: the same golden and the same run give the same answer, step
for step. docs/reference/goldens.md lists its blind spots, because of which `strict` is the default.

Source: Megatron-LM tests/functional_tests/python_test_utils/common.py, pipeline(), d98e8a64dd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pytest_megatron.base.text import counted, none_or
from pytest_megatron.runs.record import RecordedBand
from pytest_megatron.workloads.golden.compare.points import (
    Numbers,
    align,
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
)
from pytest_megatron.workloads.golden.model import Golden, MetricMap, Series

DEFAULT_METRICS = ("lm loss", "num-zeros")
_TIME = "iteration-time"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tests:
    """The tests of a metric: an exact one or not, and the tolerance of the approximate one."""

    has_exact: bool
    rtol: float


_LOSS = _Tests(has_exact=True, rtol=0.05)
_PERFORMANCE = _Tests(has_exact=False, rtol=0.05)
TESTS: Mapping[str, _Tests] = {
    "lm loss": _LOSS,
    "mtp_1 loss": _LOSS,
    "mtp_2 loss": _LOSS,
    "total loss": _LOSS,
    "generated_tokens": _LOSS,
    "logprobs": _LOSS,
    "num-zeros": _Tests(has_exact=True, rtol=0.20),
    _TIME: _PERFORMANCE,
    "mem-allocated-bytes": _PERFORMANCE,
    "mem-max-allocated-bytes": _PERFORMANCE,
}
_MAX_FAILING_STEPS = 50
# Windows of iteration-time: (first step, step after the last), for short and for long goldens.
_SHORT_WINDOW, _LONG_WINDOW = (5, 21), (30, 46)
_LAST_STEP_OF_SHORT = 25
_NUM_FALLBACK_STEPS = 4


@np.errstate(all="ignore")
def compare_like_megatron(
    golden: Golden,
    observed: MetricMap,
    *,
    metrics: Sequence[str],
    nondeterministic: bool,
) -> tuple[Comparison, ...]:
    """Compare `metrics` of a run with a golden as Megatron-LM does.

    Args:
        golden: The committed values.
        observed: The run's; of full precision they are rounded to five decimals first, as
            Megatron-LM's extraction does, unless the golden is of full precision too.
        metrics: The case's METRICS.
        nondeterministic: The case's NON_DETERMINSTIC_RESULTS: approximate tests only.
    """
    return tuple(
        _compare(golden, observed, metric, TESTS.get(metric), nondeterministic=nondeterministic)
        for metric in metrics
    )


def _compare(
    golden: Golden,
    observed: MetricMap,
    metric: str,
    tests: _Tests | None,
    *,
    nondeterministic: bool,
) -> Comparison:
    """Compare one metric as Megatron-LM does."""
    answer = Comparison(
        metric=metric, passed=False, rule=ComparisonRule.UNKNOWN, golden_path=golden.path
    )
    if tests is None:
        return answer
    if metric not in golden.metrics:
        return replace(answer, rule=ComparisonRule.NO_GOLDEN)
    if metric not in observed:
        return replace(answer, rule=ComparisonRule.NO_METRIC)
    expected, got = align(golden.metrics[metric], observed[metric])
    answer = replace(answer, deviation=measure(shared_points(expected, got)))
    if nondeterministic:
        tests = replace(tests, has_exact=False)
    answer = _judge(answer, expected, got, tests)
    return replace(
        answer,
        first=answer.first or first_difference(expected, got),
        allowed=_allowed(metric, expected, answer.rule, tests.rtol),
    )


def _allowed(metric: str, golden: Series, rule: ComparisonRule, rtol: float) -> RecordedBand | None:
    """Return the values around the golden that a test allows."""
    if metric == _TIME or not len(golden):
        return None
    share = rtol if rule is ComparisonRule.APPROXIMATE else 0.0
    return band_of({golden.steps[0]: share})


def _judge(comparison: Comparison, golden: Series, observed: Series, tests: _Tests) -> Comparison:
    """Judge a metric by Megatron-LM's exact and approximate tests."""
    if not len(golden):
        notes: tuple[str, ...] = ("it has no value",)
        return replace(comparison, rule=ComparisonRule.GOLDEN_UNUSABLE, notes=notes)
    refused = _refused_by_extraction(golden, observed)
    if refused is not None:
        notes = ("extraction refuses a value not finite",)
        return replace(comparison, rule=ComparisonRule.APPROXIMATE, first=refused, notes=notes)
    if comparison.metric == _TIME:
        return _judge_time(comparison, golden, observed, tests.rtol)
    rule = ComparisonRule.EXACT if tests.has_exact else ComparisonRule.APPROXIMATE
    failing, allowed = _failing(golden, observed, 0.0), 0
    if not (failing and tests.has_exact):
        failing = _failing(golden, observed, tests.rtol)
        num_steps = len(golden)
        allowed = min(max(num_steps // 100, 1), _MAX_FAILING_STEPS) if num_steps > 1 else 0
        # As it is written there, rounding included: 1 of 3 steps is not allowed, 1 of 2 is.
        passed = (num_steps - len(failing)) / num_steps >= 1 - allowed / num_steps
        comparison = replace(comparison, passed=passed)
    count = f"{len(failing)} of {counted(len(golden), 'step')} outside, {none_or(allowed)} allowed"
    first, notes = (failing[0], (count,)) if failing else (None, ())
    return replace(comparison, rule=rule, first=first, notes=notes)


def _failing(golden: Series, observed: Series, rtol: float) -> list[StepDifference]:
    """Return the golden steps that are not close; a step missing in the run is infinite."""
    at = dict(observed.items())
    got, expected = _values(golden.steps, observed, golden)
    is_close = np.isclose(got, expected, rtol, atol=0)
    return [
        StepDifference(step=step, observed=at.get(step), golden=value, tolerance=rtol)
        for (step, value), is_same in zip(golden.items(), is_close, strict=True)
        if not is_same
    ]


def _judge_time(
    comparison: Comparison, golden: Series, observed: Series, rtol: float
) -> Comparison:
    """Judge the median time of an iteration as Megatron-LM does."""
    finite = list(golden.finite())
    if not finite:
        notes = ("it has no finite value",)
        return replace(comparison, rule=ComparisonRule.GOLDEN_UNUSABLE, notes=notes)
    start, stop = _SHORT_WINDOW if finite[-1] <= _LAST_STEP_OF_SHORT else _LONG_WINDOW
    timed = [s for s in finite if s >= start]
    steps = [s for s in timed if s < stop] or timed[:_NUM_FALLBACK_STEPS]
    if not steps:
        notes = (f"it has no finite value from step {start} on",)
        return replace(comparison, rule=ComparisonRule.GOLDEN_UNUSABLE, notes=notes)
    ours, theirs = (float(np.median(values)) for values in _values(steps, observed, golden))
    name = f"median of steps {steps[0]} to {steps[-1]}"
    summary = SeriesSummary(name=name, observed=ours, golden=theirs, tolerance=rtol)
    passed = bool(np.isclose(ours, theirs, rtol, atol=0))
    return replace(comparison, passed=passed, rule=ComparisonRule.APPROXIMATE, summary=summary)


def _refused_by_extraction(golden: Series, observed: Series) -> StepDifference | None:
    """Return the first golden step at which a run of full precision has nan or inf.

    Such a run was not extracted by Megatron-LM, whose extraction ends with an error there.
    """
    if not observed.is_full_precision:
        return None
    expected = dict(golden.items())
    for step, value in observed.items():
        if step in expected and isinstance(value, float) and not math.isfinite(value):
            return StepDifference(step=step, observed=value, golden=expected[step])
    return None


def _values(steps: Sequence[int], *series: Series) -> Iterator[Numbers]:
    """Yield values as that comparison sees them: missing and any text are infinite."""
    for one in series:
        at = dict(one.items())
        found = (at.get(step) for step in steps)
        yield np.array([v if isinstance(v, float) else math.inf for v in found])
