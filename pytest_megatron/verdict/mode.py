"""What differs by MODE: what a case compares, and who compares it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_megatron.errors import CaseError, GoldenError
from pytest_megatron.golden.compare.api import compare
from pytest_megatron.golden.compare.environment import RunEnvironment, why_not_timed
from pytest_megatron.golden.compare.inference import Pair, compare_generation
from pytest_megatron.golden.compare.limits import NORMS
from pytest_megatron.golden.compare.result import Comparison, ComparisonRule
from pytest_megatron.golden.compare.rl import RlRules, compare_rl, rl_metrics
from pytest_megatron.golden.model import GENERATION_METRICS, Generation, MetricMap
from pytest_megatron.golden.policy import ComparisonPolicy
from pytest_megatron.golden.provenance import Golden
from pytest_megatron.recipe.case import CaseMode, WorkloadCase
from pytest_megatron.verdict.attempt import DEFAULT_METRICS

_START_VARIABLE = "THROUGHPUT_START_STEP"


def metric_names_of(case: WorkloadCase) -> tuple[str, ...]:
    """Return what a case compares.

    Raises:
        CaseError: It names nothing to compare, or, in an inference case, what no such program
            writes: then nothing would be compared, or not what was meant.
    """
    if case.mode is CaseMode.RL:
        return rl_metrics(case.metrics)
    if case.metrics == ():
        raise CaseError(
            str(case.path),
            "METRICS is empty, so nothing would be compared; name metrics, or leave it out",
        )
    if case.mode is CaseMode.PRETRAINING:
        return DEFAULT_METRICS if case.metrics is None else case.metrics
    known = ", ".join(sorted(GENERATION_METRICS))
    if case.metrics is None:
        raise CaseError(str(case.path), f"METRICS is missing, expected some of {known}")
    for name in case.metrics:
        if name not in GENERATION_METRICS:
            raise CaseError(
                str(case.path),
                f"METRICS: {name!r} is not compared in MODE inference, expected some of {known}",
            )
    return case.metrics


def check_golden_kind(case: WorkloadCase, golden: Golden) -> None:
    """Make sure that a golden is of the kind that its case is compared with.

    Raises:
        GoldenError: One of an inference program stands where one of a training belongs, or the
            other way round.
    """
    is_generation = golden.generation is not None
    if is_generation != (case.mode is CaseMode.INFERENCE):
        kind = "the output of an inference program" if is_generation else "series of a training"
        raise GoldenError(
            golden.path,
            f"holds {kind}, but MODE of {case.path} is {case.mode.value!r}; record it again",
        )


def compare_in_mode(
    case: WorkloadCase,
    golden: Golden,
    observed: MetricMap | Generation,
    *,
    metrics: Sequence[str],
    policy: ComparisonPolicy,
    surroundings: RunEnvironment,
) -> tuple[Comparison, ...]:
    """Compare one phase with its golden as the case's MODE asks.

    Args:
        case: Whose MODE it is.
        golden: Of the kind that `check_golden_kind` lets through.
        observed: Series of a training, or what an inference program generated.
        metrics: As `metric_names_of` returns them; of a training norms are looked at beside them.
        policy: How close is close enough for this workload.
        surroundings: Of the run.
    """
    not_timed = why_not_timed(golden, surroundings.host_class) if policy.is_strict else None
    if isinstance(observed, Generation):
        assert golden.generation is not None
        pair = Pair(
            golden=golden.generation,
            observed=observed,
            path=golden.path,
            policy=policy,
            not_timed=not_timed,
        )
        return compare_generation(pair, metrics)
    if case.mode is CaseMode.RL:
        start = case.env.get(_START_VARIABLE, "1")
        if not start.isdecimal():
            raise CaseError(
                str(case.path), f"ENV_VARS.{_START_VARIABLE} is {start!r}, expected a number"
            )
        rules = RlRules(policy=policy, start=int(start), not_timed=not_timed)
        return compare_rl(golden, observed, metrics, rules)
    return _compare_training(case, golden, observed, metrics, policy, surroundings)


def norms_judged(
    case: WorkloadCase, golden: MetricMap, metrics: Sequence[str], policy: ComparisonPolicy
) -> tuple[str, ...]:
    """Return the norms of a golden that are judged although `metrics` does not name them.

    They are where the case has no METRICS, or a policy file says `judged: true` of them.
    """
    return tuple(
        norm
        for norm in _norms_beside(golden, metrics, policy)
        if case.metrics is None or policy.settings(norm).get("judged") is True
    )


def _norms_beside(
    golden: MetricMap, metrics: Sequence[str], policy: ComparisonPolicy
) -> tuple[str, ...]:
    if not policy.is_strict:
        return ()
    return tuple(n for n in NORMS if n in golden and n not in metrics and policy.is_judged(n))


def _compare_training(
    case: WorkloadCase,
    golden: Golden,
    observed: MetricMap,
    metrics: Sequence[str],
    policy: ComparisonPolicy,
    surroundings: RunEnvironment,
) -> tuple[Comparison, ...]:
    """Compare metrics, and say of a norm that METRICS leaves out where it would have failed."""
    asked = (*metrics, *norms_judged(case, golden.metrics, metrics, policy))
    unasked = [n for n in _norms_beside(golden.metrics, asked, policy) if n in observed]
    compared = compare(
        golden,
        observed,
        metrics=[*asked, *unasked],
        policy=policy,
        nondeterministic=case.is_nondeterministic,
        surroundings=surroundings,
    )
    return tuple(
        _unjudged(comparison) if comparison.metric in unasked else comparison
        for comparison in compared
        if comparison.metric in asked or not comparison.passed
    )


def _unjudged(comparison: Comparison) -> Comparison:
    """Return what failed as a note."""
    note = (
        f"{comparison.metric} would fail by {comparison.rule.value!r}, which does not count: "
        "METRICS does not name it"
    )
    return replace(comparison, passed=True, rule=ComparisonRule.NOT_JUDGED, notes=(note,))
