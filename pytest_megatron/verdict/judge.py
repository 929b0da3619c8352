"""Compares what a workload measured with its golden, and a resumed training with the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_megatron.files import JsonValue
from pytest_megatron.golden.compare import Policy, compare_resume
from pytest_megatron.golden.comparison import Comparison, comparison_to_json
from pytest_megatron.golden.provenance import Golden, Provenance
from pytest_megatron.launch.case import Case
from pytest_megatron.launch.facts import Facts
from pytest_megatron.verdict.attempt import Attempt
from pytest_megatron.verdict.modes import check_golden_kind, compare_in_mode
from pytest_megatron.verdict.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatComparison:
    """The comparisons of one repeat.

    Attributes:
        against: `golden`, or `first phase` for a resumed training.
    """

    repeat: int
    against: str
    comparisons: tuple[Comparison, ...]

    @property
    def failed(self) -> tuple[Comparison, ...]:
        """The metrics that disagree."""
        return tuple(c for c in self.comparisons if not c.passed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All comparisons of a workload."""

    repeats: tuple[RepeatComparison, ...]

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
        return {"schema": 1, "passed": not self.failed, "repeats": repeats}


def judge(training: Training, golden: Golden | None, policy: Policy, facts: Facts) -> Judgement:
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
        if len(attempt.metrics) > 1:
            found.append(_with_first_phase(training, attempt, policy))
    return Judgement(repeats=tuple(found))


def compare_repeats(training: Training, policy: Policy, facts: Facts) -> Judgement:
    """Compare every repeat but the first with the first, as if that were the golden."""
    first, *others = training.clean
    case, _ = _case(training)
    stand_in = Golden(
        path=str(first.dirs.phase(1).metrics),
        metrics=first.metrics[0] if first.generation is None else {},
        generation=first.generation,
        provenance=Provenance(deterministic=not case.is_nondeterministic),
    )
    found = [_with_golden(training, other, stand_in, policy, facts) for other in others]
    found += [_with_first_phase(training, a, policy) for a in training.clean if len(a.metrics) > 1]
    return Judgement(repeats=tuple(found))


def _with_golden(
    training: Training, attempt: Attempt, golden: Golden, policy: Policy, facts: Facts
) -> RepeatComparison:
    case, names = _case(training)
    check_golden_kind(case, golden)
    return RepeatComparison(
        repeat=attempt.repeat,
        against="golden",
        comparisons=compare_in_mode(
            case,
            golden,
            attempt.measured,
            metrics=names,
            policy=policy,
            host_class=facts.host.platform_class(training.job.workload.platform),
        ),
    )


def _with_first_phase(training: Training, attempt: Attempt, policy: Policy) -> RepeatComparison:
    case, names = _case(training)
    rewind = attempt.ends[1].plan.rewind
    assert rewind is not None
    return RepeatComparison(
        repeat=attempt.repeat,
        against="first phase",
        comparisons=compare_resume(
            attempt.metrics[0],
            attempt.metrics[1],
            train_iters=rewind.last,
            metrics=names,
            policy=policy,
            nondeterministic=case.is_nondeterministic,
            where=str(attempt.dirs.phase(1).metrics),
        ),
    )


def _case(training: Training) -> tuple[Case, Sequence[str]]:
    job = training.job
    assert job.case is not None
    assert job.metric_names is not None
    return job.case, job.metric_names
