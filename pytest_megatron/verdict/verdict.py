"""From the attempts of a workload to one word. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pytest_megatron.recipe.case import Evaluation, WorkloadCase
from pytest_megatron.runs.record import RecordedVerdict
from pytest_megatron.verdict.attempt import Attempt


class Verdict(Enum):
    """The decision over all attempts and repeats of a workload."""

    _value_: RecordedVerdict

    PASSED = "passed"
    FAILED = "failed"  # the training failed, or a metric disagrees
    FLAKY = "flaky"  # passed after a transient failure
    BROKEN = "broken"  # the infrastructure failed to the end: nothing is known about the code


def decide_training(attempts: Sequence[Attempt]) -> Verdict:
    """Decide what the attempts say before any golden is looked at.

    Every repeat's last attempt counts; the earlier ones of it failed for a transient cause.
    """
    final = {attempt.repeat: attempt for attempt in attempts}
    causes = [attempt.cause for attempt in final.values() if attempt.cause is not None]
    if any(not (cause.is_transient or cause.is_of_engine) for cause in causes):
        return Verdict.FAILED
    if causes:
        return Verdict.BROKEN
    return Verdict.FLAKY if len(attempts) > len(final) else Verdict.PASSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What is left of a problem once it is known what was expected.

    Attributes:
        problem: Why the workload does not pass, or None.
        is_expected: Whether it failed as it was expected to.
    """

    problem: str | None
    is_expected: bool = False


def evaluate(case: WorkloadCase | None, node_id: str, problem: str | None) -> Evaluated:
    """Return what a judged workload comes to; a broken one must not be brought here.

    Args:
        case: None for a row with a script.
        node_id: Begins the text of a new problem.
        problem: Why it failed, evidence included; None if it passed.
    """
    if case is None or case.evaluation is Evaluation.PASS:
        return Evaluated(problem=problem)
    if problem is None:
        text = (
            f"{node_id}: passed, but TEST_EVALUATION is xpass, so it was expected to fail; "
            f"if that is mended, remove TEST_EVALUATION from {case.path}"
        )
        return Evaluated(problem=text)
    pattern = case.expected_failure
    if pattern is None or re.search(pattern, problem):
        return Evaluated(problem=problem, is_expected=True)
    return Evaluated(problem=f"{problem}\nnot the failure that was expected: {pattern!r}")
