"""Differences between two goldens. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pytest_megatron.workloads.golden.build import series_in
from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.compare.inference import LOGPROB_ABSOLUTE
from pytest_megatron.workloads.golden.compare.result import relative
from pytest_megatron.workloads.golden.model import (
    ROUTING,
    TEXT,
    Golden,
    MetricMap,
    Provenance,
    Series,
    Value,
    environment_of,
    is_finite,
    is_loss,
)

# Relative deviations of single steps, as Megatron-LM's refresh skill sorts them.
EDGES = (0.0, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, math.inf)
BUCKETS = ("0", "< 1e-6", "< 1e-4", "< 1e-3", "< 1e-2", "< 1e-1", ">= 1e-1")
NOISE = 1e-4  # of a signed mean; below it a loss counts as the same
_EARLY_STEP = 10
_CAUSES = ("image", "gpu", "driver", "host_class", "precision", "world_size", "config_hash")


class Trend(Enum):
    """Directions of a loss."""

    WORSE = "worse"
    BETTER = "better"
    SAME = "same"


class Divergence(Enum):
    """Places where two series diverge."""

    STEP_1 = "step 1"
    EARLY = "by step 10"
    LATER = "later"
    NOWHERE = "nowhere"


class FileChange(Enum):
    """Changes of a file."""

    NEW = "new"
    GONE = "gone"
    UNREADABLE = "was unreadable"
    CHANGED = "changed"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDifference:
    """The difference of one metric of one golden.

    Attributes:
        num_old: Steps of the old one, 0 where it lacks the metric; likewise `num_new`.
        num_not_finite: (2,) values that are no finite numbers, of the old one and of the new.
        num_added: Steps that only the new one has; likewise `num_lost`.
        num_changed: Steps whose value differs, those that only one has among them.
        deviations: Step to (new - old) / |old|, where both have a finite number.
        is_outside: The policy would refuse the new values against the old golden.
    """

    metric: str
    num_old: int
    num_new: int
    num_not_finite: tuple[int, int] = (0, 0)
    num_added: int = 0
    num_lost: int = 0
    num_changed: int = 0
    deviations: Mapping[int, float] = field(default_factory=dict)
    is_outside: bool = False

    @property
    def median(self) -> float:
        """Median of |deviation|."""
        return statistics.median(map(abs, self.deviations.values())) if self.deviations else 0.0

    @property
    def largest(self) -> float:
        """Largest |deviation|."""
        return max(map(abs, self.deviations.values()), default=0.0)

    @property
    def worst_step(self) -> int | None:
        """The step of the largest deviation; None if nothing deviates."""
        if not self.largest:
            return None
        return max(self.deviations, key=lambda step: abs(self.deviations[step]))

    @property
    def mean_signed(self) -> float:
        """Mean deviation with its sign: positive means that the values grew."""
        finite = [d for d in self.deviations.values() if math.isfinite(d)]
        return math.fsum(finite) / len(finite) if finite else 0.0

    @property
    def first_step(self) -> int | None:
        """The first step at which both have a number and not the same."""
        return min((step for step, off in self.deviations.items() if off), default=None)

    @property
    def start(self) -> Divergence:
        """The place of the first difference."""
        first = self.first_step
        if first is None:
            return Divergence.NOWHERE
        if first == 1:
            return Divergence.STEP_1
        return Divergence.EARLY if first <= _EARLY_STEP else Divergence.LATER

    @property
    def trend(self) -> Trend:
        """The direction of a quantity of which less is better."""
        if abs(self.mean_signed) < NOISE:
            return Trend.SAME
        return Trend.WORSE if self.mean_signed > 0 else Trend.BETTER

    def histogram(self) -> Counter[tuple[int, int]]:
        """Count steps by (bucket, sign): the index in `BUCKETS`, and -1, 0 or 1."""
        return Counter((bucket_of(off), (off > 0) - (off < 0)) for off in self.deviations.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDifference:
    """The difference of one golden.

    Attributes:
        path: Path in the project.
        metrics: Those that differ; all of a file that is new.
        num_metrics: Metrics of the new file, or of the old one where that is gone.
        causes: Changes of the provenance, as in `image a -> b`.
        old: The golden before, None where there was none; likewise `new`.
    """

    path: str
    state: FileChange
    metrics: tuple[MetricDifference, ...] = ()
    num_metrics: int = 0
    causes: tuple[str, ...] = ()
    old: Golden | None = None
    new: Golden | None = None

    @property
    def is_outside(self) -> bool:
        """True if the policy would refuse any metric."""
        return any(metric.is_outside for metric in self.metrics)

    @property
    def largest(self) -> float:
        """The largest deviation of any metric."""
        return max((metric.largest for metric in self.metrics), default=0.0)

    @property
    def trend(self) -> Trend | None:
        """The direction of the golden's loss; None without a loss that changes."""
        found = [m for m in self.metrics if is_loss(m.metric) and m.num_old and m.num_new]
        return max(found, key=lambda m: abs(m.mean_signed)).trend if found else None


def differ(
    path: str, old: Golden | None, new: Golden | None, *, broken: str = ""
) -> FileDifference:
    """Return how a golden differs; at least one of the two is there.

    Args:
        path: Name in messages.
        old: None where there was none, or it cannot be read.
        new: None where it is gone.
        broken: Why the old one cannot be read.
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
        state = FileChange.GONE
    else:
        state = FileChange.CHANGED if changed else FileChange.UNCHANGED
    return FileDifference(
        path=path,
        state=state,
        metrics=changed,
        num_metrics=len(after or before),
        causes=_causes(old, new),
        old=old,
        new=new,
    )


def bucket_of(deviation: float) -> int:
    """Return the index in `BUCKETS` of a relative deviation, whatever its sign."""
    size = abs(deviation)
    if size == 0:
        return 0
    return next(i for i, edge in enumerate(EDGES[1:], start=1) if size < edge or edge == math.inf)


def _difference(
    name: str, old: Series | None, new: Series | None, *, is_outside: bool
) -> MetricDifference:
    """Return how a metric differs between two goldens."""
    before: dict[int, Value] = {} if old is None else dict(old.items())
    after: dict[int, Value] = {} if new is None else dict(new.items())
    deviations: dict[int, float] = {}
    for step in sorted(before.keys() & after.keys()):
        a, b = before[step], after[step]
        if isinstance(a, float) and isinstance(b, float) and is_finite(a) and is_finite(b):
            deviations[step] = relative(b, a)
    steps = before.keys() | after.keys()
    return MetricDifference(
        metric=name,
        num_old=len(before),
        num_new=len(after),
        num_not_finite=(_num_not_finite(name, before), _num_not_finite(name, after)),
        num_added=len(after.keys() - before.keys()),
        num_lost=len(before.keys() - after.keys()),
        num_changed=sum(not _is_same(before.get(step), after.get(step)) for step in steps),
        deviations=deviations,
        is_outside=is_outside,
    )


def _is_same(a: Value | None, b: Value | None) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and a != a and b != b)  # noqa: PLR0124 - nan


def _num_not_finite(name: str, values: Mapping[int, Value]) -> int:
    """Count values that are no finite number, but for generated text."""
    is_text = name.partition(" of ")[0] in (TEXT, ROUTING)
    return sum(not is_finite(v) and not (is_text and isinstance(v, str)) for v in values.values())


def _outside(old: Golden | None, new: Golden | None) -> frozenset[str]:
    """Return the metrics whose new values the policy would refuse against the old golden."""
    if old is None or new is None:
        return frozenset()
    if old.generation is not None or new.generation is not None:
        a, b = series_in(old), series_in(new)
        both = a.keys() | b.keys()
        return frozenset(n for n in both if _is_generated_otherwise(a.get(n), b.get(n)))
    names = old.metrics.keys() & new.metrics.keys()
    there = environment_of(new.provenance)
    found = compare(old, new.metrics, metrics=sorted(names), surroundings=there)
    return frozenset(c.metric for c in found if not c.passed) | (old.metrics.keys() - names)


def _is_generated_otherwise(old: Series | None, new: Series | None) -> bool:
    """Return True if requests differ by more than the last digits of a probability."""
    if old is None or new is None or old.steps != new.steps:
        return True
    return any(
        a != b if isinstance(a, str) or isinstance(b, str) else not abs(a - b) <= LOGPROB_ABSOLUTE
        for a, b in zip(old.values, new.values, strict=True)
    )


def _causes(old: Golden | None, new: Golden | None) -> tuple[str, ...]:
    """Return what of the origin of two goldens differs."""
    before = old.provenance if old is not None else None
    after = new.provenance if new is not None else None
    if before is None or after is None:
        return ()
    found = [
        f"{name.replace('_', ' ')} {getattr(before, name)} -> {getattr(after, name)}"
        for name in _CAUSES
        if getattr(before, name) not in (None, getattr(after, name))
    ]
    return (*found, *_versions(before, after))


def _versions(before: Provenance, after: Provenance) -> Sequence[str]:
    """Return the packages whose versions differ."""
    names = sorted(before.versions.keys() & after.versions.keys())
    return [
        f"{name} {before.versions[name]} -> {after.versions[name]}"
        for name in names
        if before.versions[name] != after.versions[name]
    ]
