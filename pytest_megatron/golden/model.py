"""Metrics as data: what a training measured at which step. Pure; knows no file format.

A golden and an observed run have the same shape, a `MetricMap`; what differs is who wrote it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from pytest_megatron.golden.generation import Generation

# A number, nan and inf included, or text that stands where a number belongs (Megatron-LM's
# goldens hold the string "nan" for a step without a value). Telling them apart is the point:
# text, a real nan, inf and a missing step are four different things.
Value: TypeAlias = float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric of one run.

    Attributes:
        steps: (num_values,) training iterations, strictly ascending, counted from 1.
        values: (num_values,) what was measured at each of them.
        is_full_precision: Whether the values are as the training wrote them. Megatron-LM's
            own extraction rounds to five decimals, and its goldens hold such values.
    """

    steps: tuple[int, ...]
    values: tuple[Value, ...]
    is_full_precision: bool = False

    def __post_init__(self) -> None:
        assert len(self.steps) == len(self.values)
        # `map` and a set of types: a long training has 100,000 values a metric.
        assert all(map(operator.lt, self.steps, self.steps[1:]))
        types = set(map(type, self.values))
        assert all(issubclass(t, float | str) for t in types), f"values are {types}"

    def __len__(self) -> int:
        return len(self.steps)

    def items(self) -> Iterator[tuple[int, Value]]:
        """Yield (step, value) in ascending order of step."""
        return zip(self.steps, self.values, strict=True)

    def at(self, step: int) -> Value | None:
        """Return the value at `step`, or None where the run has none."""
        return dict(self.items()).get(step)

    def after(self, step: int) -> Series:
        """Return the part with steps greater than `step`."""
        kept = [(s, v) for s, v in self.items() if s > step]
        return replace(self, steps=tuple(s for s, _ in kept), values=tuple(v for _, v in kept))


def series_of(values: Mapping[int, Value], *, is_full_precision: bool = False) -> Series:
    """Return the series of step to value, in any order of steps."""
    pairs = sorted(values.items())
    return Series(
        steps=tuple(step for step, _ in pairs),
        values=tuple(value for _, value in pairs),
        is_full_precision=is_full_precision,
    )


# Metric name, as TensorBoard has it (`lm loss`, `iteration-time`), to its series.
MetricMap: TypeAlias = Mapping[str, Series]


def is_loss(name: str) -> bool:
    """Whether a metric is a loss, by its name."""
    return "loss" in name


def is_finite(value: Value | None) -> bool:
    """Whether a value is a real number: not missing, not text, not nan, not inf."""
    return isinstance(value, float) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsFile:
    """One file that metrics were read from.

    Attributes:
        num_records: Whole records in it: events of TensorBoard, lines of a JSON-lines file.
        torn_at: Byte offset of a last record that was not written to its end, or None.
    """

    path: str
    num_records: int
    torn_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What one attempt measured, and where that was found.

    Attributes:
        files: In the order in which they were merged; a later one wins where steps overlap.
        notes: What a reader of the verdict should know: torn files, overlapping steps.
        generation: What an inference program generated; it has no metrics then.
    """

    metrics: MetricMap
    files: tuple[MetricsFile, ...] = ()
    notes: tuple[str, ...] = ()
    generation: Generation | None = None
