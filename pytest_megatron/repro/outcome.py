"""What it means that an item passed or failed again. Pure.

The exit codes suit `git bisect run`: 0 is good, 1 is bad, 125 skips a commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from pytest_megatron.repro.choose import Chosen, headline
from pytest_megatron.repro.recorded import RecordedItem


class ReproExit(IntEnum):
    """Exit codes of `pytest-megatron repro`."""

    PASSED = 0
    SAME = 1
    OTHER = 3
    UNKNOWN = 125  # also OTHER, while git bisects: another failure says nothing about this one
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproOutcome:
    """What came of it.

    Attributes:
        text: In a line or two.
    """

    exit: ReproExit
    text: str


_PYTEST = {
    2: "pytest was interrupted, or could not import a test module",
    3: "pytest itself failed",
    4: "pytest has no such test here, could not import its module, or refused an option",
    5: "there is no such test here",
}


def judge_again(chosen: Chosen, again: RecordedItem | None, returncode: int) -> ReproOutcome:
    """Compare an item that ran again with what it was.

    Args:
        chosen: What it was.
        again: What `run.json` says of it now; None where it did not run.
        returncode: Of pytest.
    """
    if again is None or again.verdict == "skipped":
        why = "it was skipped" if again is not None else _PYTEST.get(returncode, "it did not run")
        return ReproOutcome(
            exit=ReproExit.UNKNOWN, text=f"cannot tell: {why} (pytest ended with {returncode})"
        )
    if again.verdict in ("passed", "flaky"):
        return ReproOutcome(exit=ReproExit.PASSED, text="passes here")
    told = headline(chosen.node_id, again.problem)
    if not chosen.has_failed:
        return ReproOutcome(exit=ReproExit.OTHER, text=f"fails here, and did not there: {told}")
    if is_same_failure(chosen, again):
        return ReproOutcome(exit=ReproExit.SAME, text=f"fails in the same way: {told}")
    if again.verdict == "broken" and chosen.item.verdict != "broken":
        return ReproOutcome(
            exit=ReproExit.UNKNOWN, text=f"cannot tell: it could not run here: {told}"
        )
    return ReproOutcome(
        exit=ReproExit.OTHER,
        text=f"fails in another way\n  there: {chosen.problem}\n  here:  {told}",
    )


def is_same_failure(chosen: Chosen, again: RecordedItem) -> bool:
    """Whether two failures of an item have the same fingerprint, of the best that is known."""
    if chosen.fingerprint is not None and again.fingerprint is not None:
        return chosen.fingerprint == again.fingerprint
    there, here = chosen.attempt, again.attempts[-1] if again.attempts else None
    if there is None or here is None:
        return chosen.problem == headline(chosen.node_id, again.problem)
    if there.fingerprint is not None and here.fingerprint is not None:
        return there.fingerprint == here.fingerprint
    return there.signature == here.signature
