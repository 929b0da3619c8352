"""What an engine's trouble is to a verdict. Pure."""

from __future__ import annotations

from pytest_megatron.engines.base import Outcome
from pytest_megatron.triage.signature import Table
from pytest_megatron.verdict.attempt import Cause


def cause_of(outcome: Outcome, table: Table) -> Cause:
    """Return why an attempt that an engine did not bring to its end is no good.

    Args:
        outcome: With trouble.
        table: Has a row `engine_<kind>` for each kind that is more than the code's own matter.
    """
    trouble = outcome.trouble
    assert trouble is not None
    name = f"engine_{trouble.kind.value}"
    row = next((row for row in table.signatures if row.id == name), None)
    return Cause(text=trouble.text, evidence=trouble.evidence, signature=row)
