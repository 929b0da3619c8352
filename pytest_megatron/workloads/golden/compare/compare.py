"""Comparison of a run with its golden under a policy: the entry point, and strict. Pure.

Under `strict`, the default, a run passes only if it is whole and within the limits. Layers, in this
order; the first that fails decides and is named in the answer, and all are in it:

1. presence: the golden is whole, the run is whole: missing, nan, inf and text are different;
2. exact: a deterministic golden, and a run on its image, versions and class of host;
3. by kind of metric: a loss, and any metric that is none of the others, by its first step, its
   shape, its early window, every step, mean and tail; a count by mean, tail and median; time and
   memory on the side where they are worse, and only against a golden of the same class of host.

A run that is equal bit for bit has passed all of them. The layers are in `layers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from pytest_megatron.workloads.golden.compare.layers import (
    LAST_DIGITS,
    Knowledge,
    LayerFinding,
    band_around,
    cost_layers,
    count_layers,
    decide,
    exact_layer,
    find_hole,
    knowledge_of,
    loss_layers,
    memory_layers,
)
from pytest_megatron.workloads.golden.compare.megatron import DEFAULT_METRICS, compare_like_megatron
from pytest_megatron.workloads.golden.compare.result import (
    Allowed,
    Comparison,
    ComparisonRule,
    Point,
    align,
    describe_extra,
    describe_skipped,
    describe_uncovered,
    find_unusable,
    first_difference,
    measure,
    relative,
    shared_points,
    without_unmeasured_end,
)
from pytest_megatron.workloads.golden.model import (
    NOWHERE,
    Golden,
    MetricMap,
    Provenance,
    RunEnvironment,
    Series,
    drift_between,
    is_finite,
    why_not_timed,
)
from pytest_megatron.workloads.golden.policy import (
    LONG_STEPS,
    Base,
    ComparisonPolicy,
    CostLimits,
    CountLimits,
    Exact,
    Limits,
    LossLimits,
    MemoryLimits,
)

_TIME = "iteration-time"
_ZEROS = "num-zeros"
_LEAST_TIMED, _MOST_UNTIMED = 10, 0.02  # steps, and the part of them that may have no time
_WITH_PLACEHOLDERS = (_TIME, _ZEROS, "grad-norm")


@dataclass(frozen=True, slots=True)
class _StrictCase:
    """The arguments of `compare` that all metrics share under `strict`."""

    golden: Golden
    policy: ComparisonPolicy
    nondeterministic: bool
    surroundings: RunEnvironment
    is_metric_asked_for: bool


def compare(
    golden: Golden,
    observed: MetricMap,
    *,
    metrics: Sequence[str] | None = None,
    policy: ComparisonPolicy = ComparisonPolicy.STRICT,
    nondeterministic: bool = False,
    surroundings: RunEnvironment = NOWHERE,
) -> tuple[Comparison, ...]:
    """Compare a run with its golden; one answer a metric, in the order of `metrics`.

    Args:
        golden: The committed values.
        observed: The values of this attempt.
        metrics: The case's METRICS. None takes the default of the policy: every metric of the
            golden (strict), where one without any number (Megatron-LM writes "nan" for steps that
            it did not measure) is not judged, or `lm loss` and `num-zeros` where the golden has
            them (megatron).
        policy: The policy for this workload (`ComparisonPolicy.at`).
        nondeterministic: The case's NON_DETERMINSTIC_RESULTS.
        surroundings: The environment of the run; only `strict` uses it. Time and memory are judged
            only against a golden of the same class of host, every bit only against one of the same
            platform, and a loss of reduced precision more loosely against one of another.

    Raises:
        GoldenError: The policy leaves out every one of `metrics`.
    """
    match policy.base:
        case Base.STRICT:
            case = _StrictCase(golden, policy, nondeterministic, surroundings, metrics is not None)
            wanted = tuple(golden.metrics) if metrics is None else tuple(metrics)
            policy.require_judged(wanted)
            return tuple(_compare(case, metric, observed.get(metric)) for metric in wanted)
        case Base.MEGATRON:
            if metrics is None:
                metrics = [name for name in DEFAULT_METRICS if name in golden.metrics]
            return compare_like_megatron(
                golden, observed, metrics=metrics, policy=policy, nondeterministic=nondeterministic
            )
    assert_never(policy.base)


def compare_resume(  # noqa: PLR0913 - two runs, and the case's settings by name
    first: MetricMap,
    second: MetricMap,
    *,
    train_iters: int,
    metrics: Sequence[str] | None = None,
    policy: ComparisonPolicy = ComparisonPolicy.STRICT,
    nondeterministic: bool = False,
    where: str = "the first run",
) -> tuple[Comparison, ...]:
    """Compare a run resumed from a checkpoint with the run that went through.

    The first run is the golden, cut like the second to the steps after `train_iters // 2`; time
    and memory are not judged by the strict policy, for the steps after a restart warm up again.

    Args:
        first: The values of the uninterrupted run.
        second: The values of the resumed run.
        train_iters: How many iterations the whole training has.
        metrics: Names to compare, in the same form as for `compare`.
        policy: The policy, in the same form as for `compare`.
        nondeterministic: True for values that vary; if false, the strict policy allows what it
            allows against a deterministic golden.
        where: Name of the first run in messages.

    Source: Megatron-LM tests/functional_tests/python_test_utils/
    test_pretraining_resume_checkpoint_pipeline.py, d98e8a64dd.
    """
    middle = train_iters // 2
    golden = Golden(
        path=where,
        metrics={name: series.after(middle) for name, series in first.items()},
        provenance=Provenance(deterministic=not nondeterministic),
    )
    return compare(
        golden,
        {name: series.after(middle) for name, series in second.items()},
        metrics=metrics,
        policy=policy,
        nondeterministic=nondeterministic,
    )


def _compare(case: _StrictCase, metric: str, observed: Series | None) -> Comparison:
    """Compare one metric under `strict`."""
    golden = case.golden.metrics.get(metric)
    answer = Comparison(
        metric=metric, passed=False, rule=ComparisonRule.NO_GOLDEN, golden_path=case.golden.path
    )
    if not case.policy.is_judged(metric):
        note = "the policy leaves it out"
        return replace(answer, passed=True, rule=ComparisonRule.NOT_JUDGED, notes=(note,))
    if golden is None:
        return answer
    if not (case.is_metric_asked_for or any(is_finite(value) for value in golden.values)):
        note = "the golden has no number for it"
        return replace(answer, passed=True, rule=ComparisonRule.NOT_JUDGED, notes=(note,))
    if observed is None:
        return replace(answer, rule=ComparisonRule.NO_METRIC)
    golden, observed = align(golden, observed)
    num_steps = len(golden)
    golden = _measured_part(case, metric, golden, observed)
    points = shared_points(golden, observed)
    answer = _find_hole(replace(answer, passed=True), golden, observed, points)
    if answer.passed:
        answer = _judge(case, answer, golden, observed, points)
    if answer.passed and answer.is_judged:
        answer = _name_pass(case, answer, golden, points)
    first = answer.first
    if first is None and answer.rule is not ComparisonRule.GOLDEN_UNUSABLE:
        first = first_difference(golden, observed)
    skipped = describe_skipped(num_steps - len(golden))
    return replace(
        answer,
        first=first,
        deviation=measure(points),
        notes=(*answer.notes, *skipped, *describe_extra(golden, observed)),
        allowed=answer.allowed or _allowed(case, metric, golden),
    )


def _find_hole(
    comparison: Comparison, golden: Series, observed: Series, points: list[Point]
) -> Comparison:
    """Judge missing steps, and a golden that ends before the run."""
    comparison = find_hole(comparison, golden, observed, points)
    uncovered = describe_uncovered(golden, observed)
    if not comparison.passed or comparison.metric == _TIME or uncovered is None:
        return comparison
    return replace(
        comparison,
        passed=False,
        rule=ComparisonRule.GOLDEN_UNUSABLE,
        notes=(uncovered,),
        layers=(replace(comparison.layers[0], passed=False),),
    )


def _judge(
    case: _StrictCase, comparison: Comparison, golden: Series, observed: Series, points: list[Point]
) -> Comparison:
    """Compare two whole series by the kind of the metric."""
    metric = comparison.metric
    known = _knowledge(case, metric)
    limits = _limits(case, metric, golden, known)
    match limits:
        case CostLimits() | MemoryLimits():
            return _judge_cost(case, comparison, limits, points)
        case CountLimits():
            findings = _exact(known, limits.exact, points)
            findings += count_layers(points, limits)
            return decide(findings, replace(comparison, rule=ComparisonRule.BIAS))
        case LossLimits():
            band = band_around(case.golden, metric, golden, known, limits)
            largest = measure(points).largest_relative
            notes = (f"within the band (largest {largest:.1e})", band.note)
            layers = loss_layers(golden, observed, points, band, limits)
            findings = [*_exact(known, limits.exact, points), *layers]
            comparison = replace(
                comparison, rule=ComparisonRule.BAND, notes=notes, allowed=band.as_allowed
            )
            return decide(findings, comparison)
    assert_never(limits)


def _limits(case: _StrictCase, metric: str, golden: Series, known: Knowledge) -> Limits:
    """Return the limits of a metric, which are others for a long golden of unknown noise."""
    is_long = len(golden) > LONG_STEPS and not known.is_narrow
    return case.policy.limits(metric, is_long=is_long)


def _knowledge(case: _StrictCase, metric: str) -> Knowledge:
    """Return what is known of a metric's noise."""
    return knowledge_of(
        case.golden,
        metric,
        nondeterministic=case.nondeterministic,
        surroundings=case.surroundings,
    )


def _allowed(case: _StrictCase, metric: str, golden: Series) -> Allowed | None:
    """Return the deviation allowed to a run with a hole, where the golden is whole."""
    known = _knowledge(case, metric)
    limits = _limits(case, metric, golden, known)
    is_whole = len(golden) and find_unusable(golden) is None
    if not isinstance(limits, LossLimits) or not is_whole:
        return None
    return band_around(case.golden, metric, golden, known, limits).as_allowed


def _judge_cost(
    case: _StrictCase,
    comparison: Comparison,
    limits: CostLimits | MemoryLimits,
    points: list[Point],
) -> Comparison:
    """Compare time or memory, if the golden is from a host like this one."""
    if all(p.observed == p.golden for p in points):
        return replace(comparison, rule=ComparisonRule.BITWISE)
    reason = why_not_timed(case.golden, case.surroundings.host_class)
    if case.surroundings.is_traced:
        reason = "tensors were traced, which costs time and memory"
    if reason is not None:
        return replace(comparison, rule=ComparisonRule.NOT_JUDGED, notes=(reason,))
    if isinstance(limits, MemoryLimits):
        what, findings = "peak", list(memory_layers(points, limits))
    else:
        made = case.golden.provenance
        settings = case.policy.settings(comparison.metric)
        is_typed = not settings.keys().isdisjoint(("median", "quartile"))
        spread = None if made is None or is_typed else made.spread.get(comparison.metric)
        what, findings = None, list(cost_layers(points, limits, spread))
    decisive = findings[0]
    assert decisive.summary is not None
    assert decisive.layer.measured is not None
    note = f"{what or decisive.summary.name} {decisive.layer.measured:+.1%}"
    return decide(findings, replace(comparison, rule=decisive.layer.rule, notes=(note,)))


def _exact(known: Knowledge, when: Exact, points: list[Point]) -> list[LayerFinding]:
    """Compare every bit where each is expected to equal the golden's."""
    is_expected = known.is_deterministic and known.is_at_home
    is_demanded = when is Exact.ALWAYS or (when is Exact.AUTO and is_expected)
    return [exact_layer(points)] if is_demanded else []


def _name_pass(
    case: _StrictCase, comparison: Comparison, golden: Series, points: list[Point]
) -> Comparison:
    """Name the rule of a run that passed: equal, drifted with its platform, or within its band."""
    if all(p.observed == p.golden for p in points):
        equal = "bitwise equal" if golden.is_full_precision else "equal to five decimals"
        return replace(comparison, rule=ComparisonRule.BITWISE, notes=(equal,))
    if comparison.rule is not ComparisonRule.BAND:
        return comparison
    largest = max(abs(relative(p.observed, p.golden)) for p in points)
    if largest <= LAST_DIGITS:
        note = f"differs only in the last digits (largest {largest:.0e})"
        comparison = replace(comparison, rule=ComparisonRule.LAST_DIGITS, notes=(note,))
    drift = drift_between(case.golden.provenance, case.surroundings)
    if drift.changes:
        notes = (*comparison.notes, drift.text)
        comparison = replace(comparison, rule=ComparisonRule.DRIFT, notes=notes)
    return comparison


def _measured_part(case: _StrictCase, metric: str, golden: Series, observed: Series) -> Series:
    """Return the steps of the golden that the run has to have measured.

    Left out are an end without values, Megatron-LM's placeholders for what it did not measure, and
    times that the run says it has not (its first step, as after a restart, and single ones).
    """
    golden = without_unmeasured_end(golden)
    if metric in _WITH_PLACEHOLDERS:
        golden = _without_placeholders(golden)
    if metric == _TIME:
        golden = _without_untimed_start(golden, observed)
    is_cost = isinstance(case.policy.limits(metric), CostLimits)
    return _without_untimed_steps(golden, observed) if is_cost else golden


def _without_placeholders(golden: Series) -> Series:
    """Return the steps that the golden has a value for.

    Megatron-LM writes "nan" where it measured nothing: a step that it did not time, or a step
    without an update (fp16 loss scaling), which has no gradient to count zeros in or to measure.
    Neither is a hole; in a loss it would be one.
    """
    if all(isinstance(value, str) for value in golden.values):
        return golden
    return golden.where(lambda _, value: not isinstance(value, str))


def _without_untimed_start(golden: Series, observed: Series) -> Series:
    """Return the golden without its first step if the run has no time there, as after a restart."""
    if len(golden) > 1 and not is_finite(observed.at(golden.steps[0])):
        return golden.after(golden.steps[0])
    return golden


def _without_untimed_steps(golden: Series, observed: Series) -> Series:
    """Return the golden without single steps at which the run wrote that it has no number.

    Times are judged by median and quartile, which those do not move. Steps that are not there at
    all stay.
    """
    at = dict(observed.items())
    untimed = {step for step in golden.steps if step in at and not is_finite(at[step])}
    if len(golden) < _LEAST_TIMED or len(untimed) > max(1, _MOST_UNTIMED * len(golden)):
        return golden
    return golden.where(lambda step, _: step not in untimed)
