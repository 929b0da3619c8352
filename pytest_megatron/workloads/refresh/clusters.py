"""Clusters of goldens that change in the same way, for one decision on many of them. Pure.

Goldens are in one cluster if their losses change in the same direction, by the same order of
magnitude, from the same part of the curve on, under the same changes of image, GPU and versions,
and if the gate refuses them by the same rules. No golden is accepted for being in a cluster: each
one still passes the gate by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pytest_megatron.base.text import counted, listed
from pytest_megatron.workloads.golden.model import is_loss
from pytest_megatron.workloads.refresh.difference import (
    BUCKETS,
    Divergence,
    FileChange,
    FileDifference,
    MetricDifference,
    Trend,
    bucket_of,
)

_CONFIG = "config hash "  # the case changed, which the gate asks a reason for
_MOST_CAUSES = 5
_STARTS = {
    Divergence.STEP_1: "from step 1 on",
    Divergence.EARLY: "from one of the first 10 steps on",
    Divergence.LATER: "from a later step on",
    Divergence.NOWHERE: "",
}
MIN_CLUSTERED = 8  # goldens; fewer are read one by one
MOST_OUTLIERS = 2  # goldens that share a way
_TRENDS = {Trend.WORSE: "worse", Trend.BETTER: "better", Trend.SAME: "both ways"}
_Member = TypeVar("_Member")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeKind:
    """The way in which a golden changes.

    Attributes:
        is_outside: The policy would refuse the new values against the old golden.
        direction: Direction of the loss, or of the metric that changes most where no loss does.
        size: Index in `BUCKETS` of the median relative deviation of that metric.
        start: Place of its first difference.
        metric: "loss", or the name of that metric; "" if none has values to compare.
        causes: Changes of image, GPU, driver and versions.
        refused: Rules by which the gate refuses it.
    """

    state: FileChange
    is_outside: bool = False
    metric: str = ""
    direction: str = ""
    size: int = 0
    start: Divergence = Divergence.NOWHERE
    causes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The way in one line."""
        parts = [self.state.value]
        if self.metric:
            size = BUCKETS[self.size]
            parts.append(f"{self.metric} {self.direction}, by {size} in the median")
            parts.append(_STARTS[self.start])
        parts.append("outside the band" if self.is_outside else "")
        parts += [f"refused: {', '.join(self.refused)}"] if self.refused else []
        parts.append(listed(self.causes, _MOST_CAUSES) if self.causes else "")
        return "; ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenCluster(Generic[_Member]):
    """Goldens that change in the same way.

    Attributes:
        members: The largest deviation first.
    """

    kind: ChangeKind
    members: tuple[_Member, ...]

    @property
    def text(self) -> str:
        """Size and kind in one line."""
        return f"{counted(len(self.members), 'golden')}: {self.kind.text}"


def cluster(
    members: Iterable[_Member],
    difference_of: Callable[[_Member], FileDifference],
    rules_of: Callable[[_Member], Sequence[str]] = lambda _: (),
) -> tuple[GoldenCluster[_Member], ...]:
    """Return members by the way in which their goldens change, outliers first.

    An outlier is a way that few goldens share; of two with as many members, the larger change is
    first. Goldens that do not change are left out.

    Args:
        members: Goldens, or what stands for them.
        difference_of: Returns the difference of a member.
        rules_of: Returns the rules by which the gate refuses it.
    """
    found: dict[ChangeKind, list[_Member]] = {}
    for member in members:
        difference = difference_of(member)
        if difference.state is not FileChange.UNCHANGED:
            kind = _change_kind(difference, tuple(dict.fromkeys(rules_of(member))))
            found.setdefault(kind, []).append(member)
    clusters = [
        GoldenCluster(
            kind=kind, members=tuple(sorted(ones, key=lambda m: -difference_of(m).largest))
        )
        for kind, ones in found.items()
    ]
    return tuple(
        sorted(clusters, key=lambda c: (len(c.members), not c.kind.is_outside, -c.kind.size))
    )


def clusters_of(
    differences: Sequence[FileDifference],
) -> tuple[GoldenCluster[FileDifference], ...]:
    """Return the clusters of goldens that change; none where they are few, to be read singly."""
    if sum(d.state is not FileChange.UNCHANGED for d in differences) < MIN_CLUSTERED:
        return ()
    return cluster(differences, lambda difference: difference)


def _change_kind(difference: FileDifference, refused: tuple[str, ...]) -> ChangeKind:
    """Return the kind of a change, by the metric that weighs most in it."""
    causes = tuple(cause for cause in difference.causes if not cause.startswith(_CONFIG))
    kind = ChangeKind(state=difference.state, causes=causes, refused=refused)
    compared = [m for m in difference.metrics if m.deviations]
    if not compared:
        return kind
    shown = max(compared, key=_weight)
    return ChangeKind(
        state=difference.state,
        is_outside=difference.is_outside,
        metric="loss" if is_loss(shown.metric) else shown.metric.partition(" of ")[0],
        direction=_TRENDS[shown.trend] if is_loss(shown.metric) else _sign(shown),
        size=bucket_of(shown.median),
        start=shown.start,
        causes=causes,
        refused=refused,
    )


def _weight(metric: MetricDifference) -> tuple[bool, bool, float]:
    return is_loss(metric.metric), metric.is_outside, metric.median


def _sign(metric: MetricDifference) -> str:
    """Describe the direction in which a metric changed."""
    if not metric.mean_signed:
        return "as before"
    return "larger" if metric.mean_signed > 0 else "smaller"
