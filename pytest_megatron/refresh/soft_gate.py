"""What gets worse with a new golden, and so wants a reason. Pure.

Each guard compares two goldens of one workload. Time and memory count on one class of host only,
and time only beyond what the repeats of either golden were apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from pytest_megatron.golden.deviation import mean_signed, shared_points
from pytest_megatron.golden.model import Series, is_loss
from pytest_megatron.golden.provenance import Golden
from pytest_megatron.refresh.candidate import Refusal, Rule

LOSS_WORSE = 1e-3  # of the mean
SPREADS = 3.0
STEP_1 = 1e-3
MEMORY = 0.01  # of the peak
TIME = 0.05  # of the median
_TIME_METRIC = "iteration-time"
_MEMORY_METRIC = "mem-max-allocated-bytes"
_WARM_UP = 0.1


def soft_refusals(old: Golden, new: Golden) -> Iterator[Refusal]:
    """Yield what a reviewer has to be told a reason for."""
    before, after = old.provenance, new.provenance
    if before is not None and after is not None:
        hashes = (before.config_hash, after.config_hash)
        if None not in hashes and hashes[0] != hashes[1]:
            yield Refusal(rule=Rule.CONFIG, text="the case asks for something else than before")
    for name in sorted(old.metrics.keys() & new.metrics.keys()):
        if is_loss(name):
            yield from _of_loss(name, old.metrics[name], new)
    if before is None or after is None or before.host_class != after.host_class:
        return
    if before.host_class is not None:
        yield from _of_costs(old, new)


def _of_loss(name: str, old: Series, new: Golden) -> Iterator[Refusal]:
    points = shared_points(old, new.metrics[name])
    if not points:
        return
    first = points[0]
    off = (first.observed - first.golden) / (abs(first.golden) or 1.0)
    if first.step == 1 and abs(off) > STEP_1:
        text = f"{name} changes by {off:+.1e} at step 1: data, initialisation or forward pass"
        yield Refusal(rule=Rule.STEP_1, text=text)
    mean = mean_signed(points)
    limit = max(LOSS_WORSE, SPREADS * _spread_of(new, name))
    if mean > limit:
        text = f"{name} gets worse by {mean:.1e} in the mean, {limit:.1e} needs no reason"
        yield Refusal(rule=Rule.LOSS, text=text)


def _of_costs(old: Golden, new: Golden) -> Iterator[Refusal]:
    peaks = [_numbers(golden, _MEMORY_METRIC) for golden in (old, new)]
    if all(peaks):
        grown = max(peaks[1]) / max(peaks[0]) - 1 if max(peaks[0]) > 0 else math.inf
        if grown > MEMORY:
            text = f"{_MEMORY_METRIC} grows by {grown:.1%}, {MEMORY:.0%} needs no reason"
            yield Refusal(rule=Rule.MEMORY, text=text)
    times = [_steady(_numbers(golden, _TIME_METRIC)) for golden in (old, new)]
    if all(times):
        slower = statistics.median(times[1]) / statistics.median(times[0]) - 1
        limit = max(TIME, SPREADS * max(_spread_of(golden, _TIME_METRIC) for golden in (old, new)))
        if slower > limit:
            text = (
                f"{_TIME_METRIC} grows by {slower:.1%} in the median, {limit:.0%} needs no reason"
            )
            yield Refusal(rule=Rule.TIME, text=text)


def _numbers(golden: Golden, name: str) -> list[float]:
    series = golden.metrics.get(name)
    values = () if series is None else series.values
    return [value for value in values if isinstance(value, float) and math.isfinite(value)]


def _steady(times: list[float]) -> list[float]:
    return times[max(1, int(_WARM_UP * len(times))) :] or times


def _spread_of(golden: Golden, name: str) -> float:
    """Return how far repeats were apart, in the median over the steps; a busy host has much."""
    spread = None if golden.provenance is None else golden.provenance.spread.get(name)
    if isinstance(spread, Series):
        return statistics.median(v for v in spread.values if isinstance(v, float))
    return spread or 0.0
