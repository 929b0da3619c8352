"""Comparison of a run with its golden under a policy: the entry point. Pure.

Under `strict`, the default, a run passes only if it is whole and within the limits. Layers, in this
order; the first that fails decides and is named in the answer, and all are in it:

1. presence: the golden is whole, the run is whole: missing, nan, inf and text are different;
2. exact: a deterministic golden, and a run on its image, versions and class of host;
3. by kind of metric: a loss, and any metric that is none of the others, by its first step, its
   shape, its early window, every step, mean and tail; a count by mean, tail and median; time and
   memory on the side where they are worse, and only against a golden of the same class of host.

A run that is equal bit for bit has passed all of them. The layers are in `strict.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from pytest_megatron.workloads.golden.compare.result import Comparison
from pytest_megatron.workloads.golden.model import (
    NOWHERE,
    Golden,
    MetricMap,
    Provenance,
    RunEnvironment,
)
from pytest_megatron.workloads.golden.policy import Base, ComparisonPolicy


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
            from pytest_megatron.workloads.golden.compare.strict import (  # noqa: PLC0415 - numpy
                StrictCase,
                compare_strictly,
            )

            case = StrictCase(golden, policy, nondeterministic, surroundings, metrics is not None)
            wanted = tuple(golden.metrics) if metrics is None else tuple(metrics)
            policy.require_judged(wanted)
            return tuple(compare_strictly(case, name, observed.get(name)) for name in wanted)
        case Base.MEGATRON:
            from pytest_megatron.workloads.golden.compare.megatron import (  # noqa: PLC0415 - numpy
                DEFAULT_METRICS,
                compare_like_megatron,
            )

            if metrics is None:
                metrics = [name for name in DEFAULT_METRICS if name in golden.metrics]
            return compare_like_megatron(
                golden, observed, metrics=metrics, nondeterministic=nondeterministic
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
