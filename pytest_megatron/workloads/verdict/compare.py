"""Comparison of a training with its golden, for each MODE, and of a resume with its first run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.errors import CaseError, GoldenError
from pytest_megatron.runs.environment import SessionFacts
from pytest_megatron.runs.record import RecordedComparison, RecordedRepeat
from pytest_megatron.workloads.golden.compare.compare import compare, compare_resume
from pytest_megatron.workloads.golden.compare.inference import Pair, compare_generation
from pytest_megatron.workloads.golden.compare.result import (
    Comparison,
    ComparisonRule,
    recorded,
)
from pytest_megatron.workloads.golden.model import (
    Generation,
    Golden,
    MetricMap,
    RunEnvironment,
    is_finite,
    why_not_timed,
)
from pytest_megatron.workloads.golden.policy import (
    NORMS,
    ComparedWorkload,
    ComparisonPolicy,
    CostLimits,
    MemoryLimits,
    limits_of,
)
from pytest_megatron.workloads.recipe.case import CaseMode, TestType, WorkloadCase
from pytest_megatron.workloads.verdict.attempt import Attempt
from pytest_megatron.workloads.verdict.job import Training

_START_VARIABLE = "THROUGHPUT_START_STEP"


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
        golden: A golden of the kind that `check_golden_kind` lets through.
        observed: Series of a training, or what an inference program generated.
        metrics: Names by `metric_names_of`; of a training norms are looked at beside them.
        policy: How close is close enough for this workload.
        surroundings: Surroundings of the run.
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
        from pytest_megatron.workloads.golden.compare.rl import (  # noqa: PLC0415 - numpy
            RlRules,
            compare_rl,
        )

        rules = RlRules(policy=policy, start=int(start), not_timed=not_timed)
        return compare_rl(golden, observed, metrics, rules)
    return compare(
        golden,
        observed,
        metrics=(*metrics, *norms_judged(case, golden.metrics, metrics, policy)),
        policy=policy,
        nondeterministic=case.is_nondeterministic,
        surroundings=surroundings,
    )


def norms_judged(
    case: WorkloadCase, golden: MetricMap, metrics: Sequence[str], policy: ComparisonPolicy
) -> tuple[str, ...]:
    """Return the norms of a golden that are judged although `metrics` does not name them.

    They are where the case has no METRICS, or a policy file has `judged: true` for them.
    """
    if not policy.is_strict:
        return ()
    asked = {norm: policy.settings(norm).get("judged", case.metrics is None) for norm in NORMS}
    return tuple(n for n in NORMS if n in golden and n not in metrics and asked[n])


def first_off_first(failed: Iterable[Comparison]) -> tuple[Comparison, ...]:
    """Return comparisons by the step at which they are off first; goldens at fault come last."""
    return tuple(sorted(failed, key=_place_of))


def _place_of(failed: Comparison) -> tuple[bool, bool, float]:
    """Return the order of a failure: without a step after all with one, a time or memory later."""
    first = failed.first
    is_step = first is not None and first.place is None and failed.summary is None
    is_cost = isinstance(limits_of(failed.metric), CostLimits | MemoryLimits)
    return failed.is_golden_to_blame, is_cost, first.step if first and is_step else math.inf


GOLDEN = "golden"  # what a repeat was compared with


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatComparison:
    """The comparisons of one repeat.

    Attributes:
        against: `golden`, `first phase` for a resumed training, `gradients of MODEL_ARGS` for
            those of another layout.
        measured: The file, or the directory, that was judged.
    """

    repeat: int
    against: str
    measured: Path
    comparisons: tuple[Comparison, ...]

    @property
    def compared(self) -> str:
        """The plural of what was compared: `metrics` or `gradients`."""
        return "gradients" if self.against.startswith("gradients") else "metrics"

    @property
    def failed(self) -> tuple[Comparison, ...]:
        """The metrics that disagree, the one that was off first before the others."""
        return first_off_first(c for c in self.comparisons if not c.passed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All comparisons of a workload.

    Attributes:
        policy: How close was close enough, as it is for this workload.
    """

    repeats: tuple[RepeatComparison, ...]
    policy: ComparisonPolicy

    @property
    def has_golden(self) -> bool:
        """True if every repeat was compared with a golden, in at least one metric."""
        compared = [r for r in self.repeats if r.against == GOLDEN]
        return bool(compared) and all(r.comparisons for r in compared)

    @property
    def failed(self) -> tuple[RepeatComparison, ...]:
        """The repeats in which a metric disagrees."""
        return tuple(repeat for repeat in self.repeats if repeat.failed)

    @property
    def in_short(self) -> str:
        """The metric that disagrees and where, for a line that ends at the terminal's width."""
        failed = [c for repeat in self.failed for c in repeat.failed]
        first = first_off_first(failed)[0]
        num_more = len({comparison.metric for comparison in failed} - {first.metric})
        step = None if first.summary is not None else first.first
        where = "" if step is None else f" at {step.where}"
        what = f": {first.rule.value}" if first.is_golden_to_blame else " is off"
        if first.rule is ComparisonRule.FROZEN:
            what = " is frozen"
        if step is not None and step.observed is not None and not is_finite(step.observed):
            what = f" is {step.observed}"
        return f"{first.metric}{what}{where}" + (f" (and {num_more} more)" if num_more else "")

    @property
    def is_golden_to_blame(self) -> bool:
        """True if nothing failed but what no run could pass."""
        return all(c.is_golden_to_blame for repeat in self.failed for c in repeat.failed)

    @property
    def is_too_short(self) -> bool:
        """True if a metric ends before the golden does."""
        failed = (c for repeat in self.failed for c in repeat.failed)
        return any(c.rule is ComparisonRule.TRUNCATED for c in failed)

    @property
    def record(self) -> RecordedComparison:
        """The content of `comparison.json`."""
        repeats = (
            RecordedRepeat(
                repeat=repeat.repeat,
                against=repeat.against,
                comparisons=tuple(recorded(c) for c in repeat.comparisons),
            )
            for repeat in self.repeats
        )
        return RecordedComparison(passed=not self.failed, repeats=tuple(repeats))


def judge(
    training: Training, golden: Golden | None, policy: ComparisonPolicy, facts: SessionFacts
) -> Judgement:
    """Compare every whole repeat of a training.

    Args:
        training: With a case; a script judges itself.
        golden: None leaves only the comparison of a resumed training with the first phase.
        policy: How close is close enough.
        facts: Facts of this host: time and memory are judged only on the kind of host that made the
            golden.
    """
    policy = policy.at(ComparedWorkload.of(training.job.workload))
    found: list[RepeatComparison] = []
    for attempt in training.whole:
        if golden is not None:
            found.append(_with_golden(training, attempt, golden, policy, facts))
        found += _within(training, attempt, policy)
    return Judgement(repeats=tuple(found), policy=policy)


def _within(
    training: Training, attempt: Attempt, policy: ComparisonPolicy
) -> list[RepeatComparison]:
    """Compare the phases of an attempt with one another, as its test type asks."""
    case, _ = _case(training)
    if case.test_type in (TestType.CKPT_RESUME, TestType.FROZEN_RESUME):
        return [_with_first_phase(training, attempt, policy)]
    phases = {end.plan.name: end.plan.dirs.root for end in attempt.ends}
    return [
        RepeatComparison(
            repeat=attempt.repeat,
            against=f"gradients of {case.variants[0].key}",
            measured=phases.get(name, attempt.dirs.root),  # a script has them all
            comparisons=comparisons,
        )
        for name, comparisons in attempt.gradients
    ]


def _with_golden(
    training: Training,
    attempt: Attempt,
    golden: Golden,
    policy: ComparisonPolicy,
    facts: SessionFacts,
) -> RepeatComparison:
    """Compare an attempt with the golden."""
    case, names = _case(training)
    check_golden_kind(case, golden)
    return RepeatComparison(
        repeat=attempt.repeat,
        against=GOLDEN,
        measured=attempt.whole_path,
        comparisons=compare_in_mode(
            case,
            golden,
            attempt.generation or attempt.whole,
            metrics=names,
            policy=policy,
            surroundings=RunEnvironment(
                host_class=facts.host.platform_class(training.job.workload.platform),
                image=facts.image,
                versions=facts.versions_on(training.job.workload.platform),
                is_traced=training.job.setting.trace is not None,
            ),
        ),
    )


def _with_first_phase(
    training: Training, attempt: Attempt, policy: ComparisonPolicy
) -> RepeatComparison:
    """Compare a resumed phase with the first one."""
    case, names = _case(training)
    # A recipe's own script runs both trainings in one phase.
    half = attempt.ends[1].plan.resumes_after if len(attempt.ends) > 1 else case.train_iters // 2
    assert half is not None
    return RepeatComparison(
        repeat=attempt.repeat,
        against="first phase",
        measured=attempt.dirs.phase(2).metrics,
        comparisons=compare_resume(
            attempt.metrics[0],
            attempt.metrics[1],
            train_iters=2 * half,
            metrics=(*names, *norms_judged(case, attempt.metrics[0], names, policy)),
            policy=policy,
            nondeterministic=case.is_nondeterministic,
            where=str(attempt.dirs.phase(1).metrics),
        ),
    )


def _case(training: Training) -> tuple[WorkloadCase, Sequence[str]]:
    """Return the case of a training, and its metrics."""
    job = training.job
    assert job.case is not None
    assert job.metric_names is not None
    return job.case, job.metric_names
