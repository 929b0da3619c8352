"""Comparison of a run with its golden under a policy: the entry point. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from pytest_megatron.golden.compare.environment import NOWHERE, RunEnvironment
from pytest_megatron.golden.compare.megatron import DEFAULT_METRICS, compare_like_megatron
from pytest_megatron.golden.compare.result import Comparison
from pytest_megatron.golden.compare.strict import compare_strictly
from pytest_megatron.golden.model import MetricMap
from pytest_megatron.golden.policy import Base, ComparisonPolicy
from pytest_megatron.golden.provenance import Golden, Provenance

__all__ = ["ComparisonPolicy", "compare", "compare_resume"]


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
        metrics: The case's METRICS. None takes the default of the policy: every metric of
            the golden (strict), or `lm loss` and `num-zeros` where the golden has them (megatron).
        policy: The policy for this workload (`ComparisonPolicy.at`).
        nondeterministic: The case's NON_DETERMINSTIC_RESULTS.
        surroundings: The environment of the run; only `strict` uses it.

    Raises:
        GoldenError: The policy leaves out every one of `metrics`.
    """
    match policy.base:
        case Base.STRICT:
            return compare_strictly(
                golden,
                observed,
                metrics=metrics,
                policy=policy,
                nondeterministic=nondeterministic,
                surroundings=surroundings,
            )
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
        metrics: As for `compare`.
        policy: As for `compare`.
        nondeterministic: As for `compare`; if false, the strict policy allows what it allows
            against a deterministic golden.
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
