"""What an engine's trouble is to a verdict. Pure."""

from __future__ import annotations

from dataclasses import replace

from pytest_megatron.engines.base import SubmissionOutcome, TroubleKind
from pytest_megatron.triage.signature import Table
from pytest_megatron.verdict.attempt import FailureCause


def cause_of(outcome: SubmissionOutcome, table: Table) -> FailureCause:
    """Return why an attempt that an engine did not bring to its end is no good.

    Args:
        outcome: With trouble.
        table: The signatures.
    """
    trouble = outcome.trouble
    assert trouble is not None
    row = table.engine(trouble.kind.value)
    if row is not None and trouble.is_transient is not None:
        row = replace(row, is_transient=trouble.is_transient)
    return FailureCause(
        text=trouble.text,
        evidence=trouble.evidence,
        signature=row,
        is_of_engine=trouble.kind is not TroubleKind.OUT_OF_MEMORY,
    )
