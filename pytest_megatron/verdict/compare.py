"""Compares what a workload measured with its golden, and a resumed training with the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.files import JsonValue
from pytest_megatron.golden.compare.api import compare_resume
from pytest_megatron.golden.compare.environment import RunEnvironment
from pytest_megatron.golden.compare.result import Comparison, comparison_to_json
from pytest_megatron.golden.policy import ComparedWorkload, ComparisonPolicy
from pytest_megatron.golden.provenance import Golden
from pytest_megatron.recipe.case import TestType, WorkloadCase
from pytest_megatron.runs.environment import SessionFacts
from pytest_megatron.runs.record import headed
from pytest_megatron.verdict.attempt import Attempt
from pytest_megatron.verdict.job import Training, WorkloadJob
from pytest_megatron.verdict.mode import check_golden_kind, compare_in_mode, norms_judged

GOLDEN = "golden"  # what a repeat was compared with


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatComparison:
    """The comparisons of one repeat.

    Attributes:
        against: `golden`, `first phase` for a resumed training, or `gradients of MODEL_ARGS` for
            those of another layout.
        measured: The file, or the directory of the checkpoint, that was judged.
    """

    repeat: int
    against: str
    measured: Path
    comparisons: tuple[Comparison, ...]

    @property
    def is_of_gradients(self) -> bool:
        """Whether tensors were compared instead of metrics."""
        return self.against.startswith("gradients")

    @property
    def failed(self) -> tuple[Comparison, ...]:
        """The metrics that disagree."""
        return tuple(c for c in self.comparisons if not c.passed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All comparisons of a workload."""

    repeats: tuple[RepeatComparison, ...]

    @property
    def has_golden(self) -> bool:
        """Whether every repeat was compared with a golden, in at least one metric."""
        compared = [r for r in self.repeats if r.against == GOLDEN]
        return bool(compared) and all(r.comparisons for r in compared)

    @property
    def failed(self) -> tuple[RepeatComparison, ...]:
        """The repeats in which a metric disagrees."""
        return tuple(repeat for repeat in self.repeats if repeat.failed)

    def as_json(self) -> dict[str, JsonValue]:
        """Return the content of `comparison.json`."""
        repeats: list[JsonValue] = [
            {
                "repeat": repeat.repeat,
                "against": repeat.against,
                "comparisons": [comparison_to_json(c) for c in repeat.comparisons],
            }
            for repeat in self.repeats
        ]
        return headed({"passed": not self.failed, "repeats": repeats})


def judge(
    training: Training, golden: Golden | None, policy: ComparisonPolicy, facts: SessionFacts
) -> Judgement:
    """Compare every clean repeat of a training.

    Args:
        training: With a case; a script judges itself.
        golden: None leaves only the comparison of a resumed training with the first phase.
        policy: How close is close enough.
        facts: Of this host: time and memory are judged only on the kind of host that made the
            golden.
    """
    found: list[RepeatComparison] = []
    for attempt in training.clean:
        if golden is not None:
            found.append(_with_golden(training, attempt, golden, policy, facts))
        found += _within(training, attempt, policy)
    return Judgement(repeats=tuple(found))


def _within(
    training: Training, attempt: Attempt, policy: ComparisonPolicy
) -> list[RepeatComparison]:
    """Compare the phases of an attempt with one another, as its test type asks."""
    case, _ = _case(training)
    if case.test_type in (TestType.CKPT_RESUME, TestType.FROZEN_RESUME):
        return [_with_first_phase(training, attempt, policy)]
    names = [end.plan.name for end in attempt.ends]
    return [
        RepeatComparison(
            repeat=attempt.repeat,
            against=f"gradients of {names[0]}",
            measured=attempt.dirs.phase(names.index(name) + 1).root,
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
            policy=policy.at(place_of(training.job)),
            surroundings=RunEnvironment(
                host_class=facts.host.platform_class(training.job.workload.platform),
                image=facts.image,
                versions=facts.versions_on(training.job.workload.platform),
            ),
        ),
    )


def _with_first_phase(
    training: Training, attempt: Attempt, policy: ComparisonPolicy
) -> RepeatComparison:
    case, names = _case(training)
    policy = policy.at(place_of(training.job))
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


def place_of(job: WorkloadJob) -> ComparedWorkload:
    """Return what a policy may distinguish a workload by."""
    workload = job.workload
    return ComparedWorkload(
        case=f"{workload.model}/{workload.test_case}",
        platform=workload.platform,
        environment=workload.environment,
    )


def _case(training: Training) -> tuple[WorkloadCase, Sequence[str]]:
    job = training.job
    assert job.case is not None
    assert job.metric_names is not None
    return job.case, job.metric_names
