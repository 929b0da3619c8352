"""What TEST_EVALUATION makes of the verdict: a case may be expected to fail. Pure.

In Megatron-LM `xpass` lets success and failure pass alike. Here it is strict: the case must fail,
and, where it says how, for that cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_megatron.launch.case import Evaluation, WorkloadCase


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
