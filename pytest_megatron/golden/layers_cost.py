"""The layers of the strict policy for time, throughput and memory. Pure.

By default a run fails only on the side where it is worse: one that is faster or smaller passes and
says so. All are robust statistics, since single steps of a shared machine say little.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

from pytest_megatron.golden.comparison import ComparisonRule, SeriesSummary
from pytest_megatron.golden.deviation import Point
from pytest_megatron.golden.layers import LayerFinding, is_within, named, of_summary
from pytest_megatron.golden.limits import TIME_SPREADS, CostLimits, MemoryLimits, Worse
from pytest_megatron.golden.model import Series
from pytest_megatron.golden.provenance import Spread

_Statistic = Callable[[Sequence[float]], float]


def cost_layers(
    points: list[Point], limits: CostLimits, spread: Spread | None = None
) -> Iterable[LayerFinding]:
    """Judge a time or a rate after the warm-up: its median, and how bad its worse steps are.

    Args:
        points: Of the run and the golden.
        limits: What each may be off.
        spread: Of the golden's repeats; a limit that is narrower than `TIME_SPREADS` of it in the
            median is widened to that, since so far apart are runs of the same training there.
    """
    steady = points[max(1, int(limits.warm_up * len(points))) :] or points
    noise = TIME_SPREADS * _median_of(spread, {point.step for point in steady})
    median, quartile = max(limits.median, noise), max(limits.quartile, noise)
    yield _layer(ComparisonRule.MEDIAN, "median", steady, statistics.median, (median, limits.worse))
    quarter = _lower_quartile if limits.worse is Worse.LOWER else _upper_quartile
    name = "lower quartile" if limits.worse is Worse.LOWER else "upper quartile"
    yield _layer(ComparisonRule.QUARTILE, name, steady, quarter, (quartile, limits.worse))


def memory_layers(points: list[Point], limits: MemoryLimits) -> Iterable[LayerFinding]:
    """Judge memory by its peak and by its median, so that neither a spike nor a shift hides."""
    yield _layer(ComparisonRule.PEAK, "peak", points, max, (limits.peak, limits.worse))
    yield _layer(
        ComparisonRule.MEDIAN, "median", points, statistics.median, (limits.median, limits.worse)
    )


def _layer(
    rule: ComparisonRule,
    name: str,
    points: Sequence[Point],
    of: _Statistic,
    limit: tuple[float, Worse],
) -> LayerFinding:
    tolerance, worse = limit
    summary = SeriesSummary(
        name=named(name, points),
        observed=of([p.observed for p in points]),
        golden=of([p.golden for p in points]),
        tolerance=tolerance,
    )
    return of_summary(rule, summary, passed=is_within(summary, worse))


def _median_of(spread: Spread | None, steps: AbstractSet[int]) -> float:
    if not isinstance(spread, Series):
        return spread or 0.0
    known = [v for step, v in spread.items() if step in steps and isinstance(v, float)]
    return statistics.median(known) if known else 0.0


def _upper_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4)[2] if len(values) > 1 else values[0]


def _lower_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]
