"""Metrics as they are read value by value, of one file or of several ranks and files. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Self

from pytest_megatron.base.text import counted
from pytest_megatron.workloads.golden.model import Disagreements, MetricMap, series_of

MOST_STEPS = 1 << 17  # of a metric; of a longer one every 2nd, 4th, ... is kept
_MOST_ODD = 1000  # values that are not finite, kept whatever their step


@dataclass(slots=True)
class _KeptPoints:
    values: dict[int, float] = field(default_factory=dict)
    odd: dict[int, float] = field(default_factory=dict)
    stride: int = 1
    num_values: int = 0
    last: int = 0

    def add(self, step: int, value: float) -> float | None:
        """Add a value; return the one that the step already has, which stays."""
        self.num_values += 1
        self.last = max(self.last, step)
        known = self.at(step)
        if known is not None:
            return known
        if not math.isfinite(value):
            if len(self.odd) < _MOST_ODD:
                self.odd[step] = value
        elif step % self.stride == 0:
            self.values[step] = value
            if len(self.values) > MOST_STEPS:
                self.stride *= 2
                self.values = {s: v for s, v in self.values.items() if s % self.stride == 0}
        return None

    def at(self, step: int) -> float | None:
        """Return the value of a step."""
        return self.values.get(step, self.odd.get(step))


class Curves:
    """Metrics that are read value by value; of very long ones every 2nd, 4th, ... step is kept.

    Attributes:
        disagreements: Metrics that have two values at a step, of which the first stays.
        is_counted: Whether steps are counted, as what was read names none.
    """

    def __init__(self) -> None:
        self.disagreements: Disagreements = {}
        self.is_counted = False
        self._curves: dict[str, _KeptPoints] = {}

    @classmethod
    def of(cls, values: Mapping[str, dict[int, float]], disagreements: Disagreements) -> Self:
        """Return metrics that were read as a whole, with their values by step."""
        curves = cls()
        curves.disagreements = disagreements
        curves._curves = {name: _KeptPoints(values=known) for name, known in values.items()}
        return curves

    def __len__(self) -> int:
        return len(self._curves)

    def at(self, name: str, step: int) -> float | None:
        """Return the value of a metric at a step, None without one."""
        return None if name not in self._curves else self._curves[name].at(step)

    def add(self, name: str, step: int, value: float, where: str) -> bool:
        """Add a value; return if the step has one already, which stays."""
        curve = self._curves.setdefault(name, _KeptPoints())
        last, known = curve.last, curve.add(step, value)
        if known is None:
            return False
        if not is_same(known, value) and name not in self.disagreements:
            text = two_values(name, step, known, value, after=last if step < last else None)
            self.disagreements[name] = (where, text)
        return True

    def count(self, name: str, value: float, where: str) -> None:
        """Add the next value of a metric without steps, counted from 1."""
        self.is_counted = True
        known = self._curves.get(name)
        self.add(name, 1 if known is None else known.num_values + 1, value, where)

    @property
    def metrics(self) -> MetricMap:
        """The metrics that were read."""
        return {
            name: series_of({**curve.values, **curve.odd}, is_full_precision=True)
            for name, curve in sorted(self._curves.items())
        }

    @property
    def notes(self) -> list[str]:
        """Notes on rows that were left out."""
        long = [(n, c.stride) for n, c in sorted(self._curves.items()) if c.stride > 1]
        if not long:
            return []
        name, stride = long[0]
        more = f" and {counted(len(long) - 1, 'other')}" if len(long) > 1 else ""
        return [f"{name}{more}: too long to keep, every {stride}th step is"]


def joined(parts: Mapping[str, Curves]) -> Curves:
    """Return the metrics of several files or ranks as those of one; equal values of a step are one.

    Args:
        parts: By what the text of a disagreement calls them.
    """
    if len(parts) == 1:
        return next(iter(parts.values()))
    whole = Curves()
    for where, part in parts.items():
        whole.is_counted |= part.is_counted
        for name, odd in part.disagreements.items():
            whole.disagreements.setdefault(name, odd)
        for name, series in part.metrics.items():
            for step, value in series.items():
                known = whole.at(name, step)
                assert isinstance(value, float)
                if known is None:
                    whole.add(name, step, value, where)
                elif not is_same(known, value) and name not in whole.disagreements:
                    first = next(w for w, p in parts.items() if p.at(name, step) is not None)
                    other, here = PurePath(first), PurePath(where)
                    place = other.name if other.parent == here.parent else first
                    text = two_values(name, step, known, value, place=place)
                    whole.disagreements[name] = (where, text)
    return whole


def is_same(one: float, other: float) -> bool:
    """Return whether two values are the same; nan is nan."""
    return one == other or repr(one) == repr(other)


def two_values(
    name: str,
    step: int,
    known: float,
    value: float,
    *,
    after: int | None = None,
    place: str | None = None,
) -> str:
    """Describe a step that has two values of a metric.

    Args:
        name: Of the metric.
        step: Of both values.
        known: The first one.
        value: The later one.
        after: The last step between them, where that is a later one.
        place: File or rank of the first one, where that is another.
    """
    values, fix = f"{known!r} and then {value!r}", ""
    if place is not None:
        values = f"{value!r} here and {known!r} in {place}"
    elif after is not None:
        values = f"{known!r} and, after step {after}, {value!r}"
        fix = ", or a resumed one go on counting"
    return (
        f"step {step} has two values of {name!r}, {values}; have one rank write it, and each "
        f"training a file of its own{fix}"
    )
