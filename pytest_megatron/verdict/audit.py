"""Determinism audit: compares the traces of one training that was started twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_megatron.base.text import counted
from pytest_megatron.runs.record import RecordedAudit
from pytest_megatron.trace.bits import compare_bits, headline
from pytest_megatron.trace.divergences import TraceComparison, as_text
from pytest_megatron.workload.run.runner import PhaseEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Result of an audit.

    Attributes:
        comparison: Of the first training that differs from itself, else of the last one.
        training: Its name; empty where there is one alone.
        num_tensors: Of all trainings that were compared.
    """

    comparison: TraceComparison
    training: str
    num_tensors: int

    @property
    def is_deterministic(self) -> bool:
        """True if all tensors were the same, bit for bit."""
        return self.comparison.verdict == "equal"

    @property
    def headline(self) -> str:
        """The verdict in a line, with the first tensor that differs."""
        if self.is_deterministic:
            tensors, steps = counted(self.num_tensors, "tensor"), self.comparison.steps
            return f"deterministic: {tensors} of {counted(steps, 'step')}"
        where = f", {self.training}" if self.training else ""
        return f"not deterministic: {headline(self.comparison.divergences[0])}{where}"

    @property
    def block(self) -> str:
        """The first differences, at most a screen."""
        return as_text(self.comparison)

    @property
    def record(self) -> RecordedAudit:
        """The part of `run.json`."""
        return RecordedAudit(
            verdict="deterministic" if self.is_deterministic else "not deterministic",
            text=self.headline,
            steps=self.comparison.steps,
            num_tensors=self.num_tensors,
        )


def judge_audit(ends: Sequence[PhaseEnd]) -> Audit:
    """Compare pairs of phases that trained the same.

    Raises:
        TraceError: A trace cannot be read, or is of no training.
    """
    names, found = [], []
    for first, second in zip(ends[::2], ends[1::2], strict=True):
        found.append(compare_bits(first.plan.dirs.trace, second.plan.dirs.trace))
        names.append(second.plan.name.partition(" of ")[2])
    at = next((i for i, one in enumerate(found) if one.verdict != "equal"), -1)
    num_tensors = sum(one.num_compared for one in found)
    return Audit(comparison=found[at], training=names[at], num_tensors=num_tensors)
