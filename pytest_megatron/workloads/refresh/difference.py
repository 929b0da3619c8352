"""Differences between two goldens. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from pytest_megatron.runs.record import Deviation
from pytest_megatron.workloads.golden.build import series_in
from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.compare.inference import LOGPROB_ABSOLUTE
from pytest_megatron.workloads.golden.compare.result import relative
from pytest_megatron.workloads.golden.model import (
    Golden,
    MetricMap,
    Series,
    environment_of,
    is_loss,
    is_same,
    series_of,
)
from pytest_megatron.workloads.golden.policy import (
    ComparisonPolicy,
    CountLimits,
    Exact,
    LossLimits,
    limits_of,
)

NOISE = 1e-4  # of a signed mean; below it a loss counts as the same
_ZERO = 1e-12  # an old value that nothing is divided by
# The limits of a run, but for bits and for the single steps that it may have outside its band.
_BAND = replace(
    ComparisonPolicy.STRICT, metrics={"*": {"exact": Exact.NEVER, "outside_fraction": 0.0}}
)


class Trend(Enum):
    """Directions of a loss."""

    WORSE = "worse"
    BETTER = "better"
    SAME = "same"


class MetricChange(Enum):
    """Changes of a metric, the worst first."""

    GONE = "gone"
    CURVE = "curve"
    OUTSIDE = "outside"
    NEW = "new"
    DIGITS = "digits"
    NOT_JUDGED = "-"


class FileChange(Enum):
    """Changes of a file."""

    NEW = "new"
    GONE = "gone"
    UNREADABLE = "unreadable"  # before, or now
    CHANGED = "changed"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDifference:
    """The difference of one metric of one golden.

    Attributes:
        num_old: Steps of the old one, 0 where it lacks the metric; likewise `num_new`.
        num_changed: Steps whose value differs, those that only one has among them.
        first_step: The first of them.
        mean: Mean of (old - new) / old over the steps at which both have a finite number and the
            old one is not zero, as Megatron-LM's script has it; None without such steps. Steps
            that differ both ways cancel in it.
        deviation: Of the new values from the old ones.
        signed: Mean of (new - old) / |old|: positive means that the values grew.
        is_outside: The band of the policy would refuse the new values against the old golden.
    """

    metric: str
    num_old: int
    num_new: int
    num_changed: int = 0
    first_step: int | None = None
    mean: float | None = None
    deviation: Deviation = field(default_factory=Deviation)
    signed: float = 0.0
    is_outside: bool = False

    @property
    def change(self) -> MetricChange:
        """What kind of change it is; a time or an amount of memory has no curve."""
        if not self.num_new:
            return MetricChange.GONE
        if not self.num_old:
            return MetricChange.NEW
        has_curve = isinstance(limits_of(self.metric), LossLimits | CountLimits)
        if self.is_outside:
            return MetricChange.CURVE if has_curve else MetricChange.OUTSIDE
        return MetricChange.DIGITS if has_curve else MetricChange.NOT_JUDGED

    @property
    def largest(self) -> float:
        """Largest relative deviation."""
        return self.deviation.largest_relative

    @property
    def trend(self) -> Trend:
        """The direction of a quantity of which less is better."""
        if abs(self.signed) < NOISE:
            return Trend.SAME
        return Trend.WORSE if self.signed > 0 else Trend.BETTER


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDifference:
    """The difference of one golden.

    Attributes:
        path: Path in the project.
        metrics: Those that differ; all of a file that is new.
        old: The golden before, None where there was none; likewise `new`.
    """

    path: str
    state: FileChange
    metrics: tuple[MetricDifference, ...] = ()
    old: Golden | None = None
    new: Golden | None = None

    @property
    def has_other_curve(self) -> bool:
        """True if more than the last digits of a metric differ, or one is gone."""
        changes = {metric.change for metric in self.metrics}
        is_there = self.state is FileChange.CHANGED
        return is_there and bool(changes & {MetricChange.CURVE, MetricChange.GONE})

    @property
    def trend(self) -> Trend | None:
        """The direction of the golden's loss; None without a loss that changes."""
        found = [m for m in self.metrics if is_loss(m.metric) and m.num_old and m.num_new]
        return max(found, key=lambda m: abs(m.signed)).trend if found else None


def differ(
    path: str, old: Golden | None, new: Golden | None, *, broken: str = ""
) -> FileDifference:
    """Return how a golden differs; at least one of the two is there.

    Args:
        path: Name in messages.
        old: None where there was none, or it cannot be read.
        new: None where it is gone, or cannot be read.
        broken: Why one of them cannot be read.
    """
    before: MetricMap = {} if old is None else series_in(old)
    after: MetricMap = {} if new is None else series_in(new)
    outside = _outside(old, new)
    metrics = [
        _difference(name, before.get(name), after.get(name), is_outside=name in outside)
        for name in sorted({*before, *after})
    ]
    changed = tuple(m for m in metrics if m.num_changed or m.num_old == 0 or m.num_new == 0)
    if old is None:
        state = FileChange.UNREADABLE if broken else FileChange.NEW
    elif new is None:
        state = FileChange.UNREADABLE if broken else FileChange.GONE
    else:
        state = FileChange.CHANGED if changed else FileChange.UNCHANGED
    return FileDifference(
        path=path,
        state=state,
        metrics=changed,
        old=old,
        new=new,
    )


def _difference(
    name: str, old: Series | None, new: Series | None, *, is_outside: bool
) -> MetricDifference:
    """Return how a metric differs between two goldens.

    Source: Megatron-LM tests/test_utils/python_scripts/compare_golden_values_kl.py,
    compare_metric(), d98e8a64dd, for the mean.
    """
    from pytest_megatron.workloads.golden.compare.points import (  # noqa: PLC0415 - numpy
        measure,
        shared_points,
    )

    old, new = old or series_of({}), new or series_of({})
    before, after, points = dict(old.items()), dict(new.items()), shared_points(old, new)
    steps = sorted(before.keys() | after.keys())
    changed = [step for step in steps if not is_same(before.get(step), after.get(step))]
    pairs = list(zip(points.golden.tolist(), points.observed.tolist(), strict=True))
    means = [(a - b) / a for a, b in pairs if abs(a) >= _ZERO]
    signed = [part for a, b in pairs if math.isfinite(part := relative(b, a))]
    return MetricDifference(
        metric=name,
        num_old=len(before),
        num_new=len(after),
        num_changed=len(changed),
        first_step=changed[0] if changed else None,
        mean=sum(means) / len(means) if means else None,
        deviation=measure(points),
        signed=math.fsum(signed) / len(signed) if signed else 0.0,
        is_outside=is_outside,
    )


def _outside(old: Golden | None, new: Golden | None) -> frozenset[str]:
    """Return the metrics whose new values are outside the band of the old golden."""
    if old is None or new is None:
        return frozenset()
    if old.generation is not None or new.generation is not None:
        a, b = series_in(old), series_in(new)
        both = a.keys() | b.keys()
        return frozenset(n for n in both if _is_generated_otherwise(a.get(n), b.get(n)))
    names = old.metrics.keys() & new.metrics.keys()
    there = environment_of(new.provenance)
    found = compare(old, new.metrics, metrics=sorted(names), policy=_BAND, surroundings=there)
    return frozenset(c.metric for c in found if not c.passed) | (old.metrics.keys() - names)


def _is_generated_otherwise(old: Series | None, new: Series | None) -> bool:
    """Return True if requests differ by more than the last digits of a probability."""
    if old is None or new is None or old.steps != new.steps:
        return True
    return any(
        a != b if isinstance(a, str) or isinstance(b, str) else not abs(a - b) <= LOGPROB_ABSOLUTE
        for a, b in zip(old.values, new.values, strict=True)
    )
