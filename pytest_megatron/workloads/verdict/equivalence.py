"""Compares traces: of a row and the layout that its `equivalent_to` names, and of an audit.

The traces hold every tensor, so they are compared in a process of its own, which has torch; what
it found is a file. Weights and values of equal traces are removed, since they are large.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_megatron.base.text import counted
from pytest_megatron.errors import MetricsError
from pytest_megatron.runs.equivalence import (
    TraceComparison,
    as_text,
    headline,
    read_comparison,
)
from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.runs.record import RecordedAudit
from pytest_megatron.workloads.golden.compare.result import Comparison, ComparisonRule
from pytest_megatron.workloads.training.plan.trace_settings import trace_tools
from pytest_megatron.workloads.training.run.runner import PhaseEnd
from pytest_megatron.workloads.verdict.gradients import last_words, run_comparison

REFERENCE = "reference"
_ALL = "all tensors"


def compare_traces(python: str, dirs: AttemptDirs, env: Mapping[str, str]) -> TraceComparison:
    """Return how the candidate of an attempt compares with its reference.

    Raises:
        MetricsError: The program left no result; the text is the last line of its output.
        TraceError: The result cannot be read, or nothing compares traces.
    """
    reference, noise, candidate = (str(dirs.phase(number).trace) for number in (1, 2, 3))
    command = [python, *trace_tools().compare, reference, candidate, "--noise", noise]
    command += ["--output", str(dirs.equivalence)]
    done = run_comparison(command, env, where=reference)
    if not dirs.equivalence.is_file():
        raise MetricsError(reference, f"the traces cannot be compared: {last_words(done)}")
    found = read_comparison(dirs.equivalence)
    if found.verdict == "equal":
        _remove_values(dirs)
    return found


def _remove_values(dirs: AttemptDirs) -> None:
    """Remove the tensors themselves; the records of the traces stay."""
    shutil.rmtree(dirs.initial_weights, ignore_errors=True)
    for values in dirs.root.glob("phase_*/tensor_trace/*.bin"):
        with contextlib.suppress(OSError):
            values.unlink()


def judge_equivalence(found: TraceComparison, where: str) -> Comparison:
    """Return the verdict on a comparison of traces; its metric is the first tensor that differs."""
    metric = _ALL
    if found.divergences:
        first = found.divergences[0]
        name = first.parameter or first.module or "the model"
        metric = f"{name}, {first.phase}"
    passed = found.verdict == "equal" and found.num_compared > 0
    note = f"{counted(found.num_compared, 'tensor')} of {counted(found.steps, 'step')} agree"
    if found.not_compared:
        note += f" ({len(found.not_compared)} not compared)"
    first_lines = itertools.takewhile(lambda line: line != "then:", as_text(found).splitlines())
    return Comparison(
        metric=metric,
        passed=passed,
        rule=ComparisonRule.EQUIVALENCE,
        golden_path=where,
        notes=(note,) if passed else tuple(line.strip() for line in first_lines),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Result of an audit.

    Attributes:
        comparison: Comparison of the first training that differs from itself, else of the last one.
        training: Name of the training; empty where there is one alone.
        num_tensors: Number of tensors of all trainings that were compared.
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
        """The audit as `run.json` has it."""
        return RecordedAudit(
            verdict="deterministic" if self.is_deterministic else "not deterministic",
            text=self.headline,
            steps=self.comparison.steps,
            num_tensors=self.num_tensors,
        )


def judge_audit(ends: Sequence[PhaseEnd]) -> Audit:
    """Compare pairs of phases that trained the same.

    Raises:
        TraceError: A trace cannot be read, is of no training, or nothing compares traces.
    """
    compare_bits = trace_tools().compare_bits
    names, found = [], []
    for first, second in zip(ends[::2], ends[1::2], strict=True):
        found.append(compare_bits(first.plan.dirs.trace, second.plan.dirs.trace))
        names.append(second.plan.name.partition(" of ")[2])
    at = next((i for i, one in enumerate(found) if one.verdict != "equal"), -1)
    num_tensors = sum(one.num_compared for one in found)
    return Audit(comparison=found[at], training=names[at], num_tensors=num_tensors)
