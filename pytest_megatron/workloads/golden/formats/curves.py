"""Metrics as they are read value by value, of one file or of several ranks and files. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from pytest_megatron.workloads.golden.model import Disagreements, MetricMap, is_same, series_of


class Curves:
    """Metrics that are read value by value.

    Attributes:
        disagreements: Metrics that have two values at a step, of which the first stays.
        is_counted: Whether steps are counted, as what was read names none.
    """

    def __init__(self) -> None:
        self.disagreements: Disagreements = {}
        self.is_counted = False
        self._values: dict[str, dict[int, float]] = {}

    @classmethod
    def of(cls, values: dict[str, dict[int, float]], disagreements: Disagreements) -> Self:
        """Return metrics that were read as a whole, with their values by step."""
        curves = cls()
        curves.disagreements = disagreements
        curves._values = values
        return curves

    def __len__(self) -> int:
        return len(self._values)

    def at(self, name: str, step: int) -> float | None:
        """Return the value of a metric at a step, None without one."""
        return self._values.get(name, {}).get(step)

    def add(self, name: str, step: int, value: float, where: str) -> None:
        """Add a value; where the step has one already, that stays."""
        values = self._values.setdefault(name, {})
        known = values.setdefault(step, value)
        if not is_same(known, value) and name not in self.disagreements:
            self.disagreements[name] = (where, two_values(name, step, known, value))

    def count(self, name: str, value: float, where: str) -> None:
        """Add the next value of a metric without steps, counted from 1."""
        self.is_counted = True
        self.add(name, len(self._values.get(name, ())) + 1, value, where)

    @property
    def metrics(self) -> MetricMap:
        """The metrics that were read."""
        return {
            name: series_of({**values}, is_full_precision=True)
            for name, values in sorted(self._values.items())
        }


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
                    whole.disagreements[name] = (where, two_values(name, step, known, value, first))
    return whole


def two_values(name: str, step: int, known: float, value: float, place: str | None = None) -> str:
    """Describe a step that has two values of a metric, the first one at `place`, or here."""
    values = f"{known!r} and then {value!r}"
    if place is not None:
        values = f"{value!r} here and {known!r} in {place}"
    return (
        f"step {step} has two values of {name!r}, {values}; have one rank write it, each training "
        "a file of its own, and a resumed one go on counting"
    )
