"""From the attempts of a workload to one word. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from pytest_megatron.verdict.attempt import Attempt


class Verdict(Enum):
    """The decision over all attempts and repeats of a workload."""

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
