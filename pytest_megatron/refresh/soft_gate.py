"""What nobody writes into a golden by accident, and so wants a reason. Pure.

A candidate is compared with the golden that it would replace, and looked at by itself: does the
curve begin where the training does, does it fall, can its values be. Time and memory count on one
class of host only, and time only beyond what the repeats of either golden were apart.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_megatron.golden.band import tail_length
from pytest_megatron.golden.compare import compare
from pytest_megatron.golden.deviation import Point, mean_signed, shared_points
from pytest_megatron.golden.document import step_interval
from pytest_megatron.golden.generation import LOGPROBS
from pytest_megatron.golden.limits import CountLimits, Exact, LossLimits
from pytest_megatron.golden.model import MetricMap, Series, is_finite, is_loss, series_of
from pytest_megatron.golden.policy import Base, ComparisonPolicy
from pytest_megatron.golden.provenance import Golden, Provenance
from pytest_megatron.golden.refresh import series_in
from pytest_megatron.golden.surroundings import RunEnvironment
from pytest_megatron.refresh.candidate import Candidate, GateRule, Refusal
from pytest_megatron.refresh.difference import differ

LOSS = 1e-3  # of a mean
SPREADS = 3.0
STEP_1 = 1e-3
FALLS = 3.0  # standard errors of the means of both ends
MEMORY = 0.01  # of the peak
TIME = 0.05  # of the median
# Guessing evenly among the largest vocabularies costs 13; the worst start of Megatron-LM is 43.
MOST_LOSS = 100.0
_TIME_METRIC = "iteration-time"
_MEMORY_METRIC = "mem-max-allocated-bytes"
_WARM_UP = 0.1
# What has a loss in its name and is none, or need not fall.
_IS_AUXILIARY = re.compile(r"aux|balanc|indexer|ppl|scale|z[-_]loss").search
_NORMS = ("grad-norm", "params-norm")
# Values that change a little with a container are within the band; bits count where the commit,
# the image, the versions and the host are those of the old golden.
_BAND = ComparisonPolicy(
    base=Base.STRICT,
    name="strict",
    metrics={"*": {"exact": Exact.NEVER, "outside_fraction": 0.0}},
)


def soft_refusals(candidate: Candidate, old: Golden | None) -> Iterator[Refusal]:
    """Yield what a reviewer has to be told a reason for.

    What the old golden has in common with the candidate was accepted before.
    """
    new = candidate.golden
    assert new is not None
    accepted = set() if old is None else {odd[:2] for odd in _oddities(candidate, old)}
    for rule, metric, text in _oddities(candidate, new):
        if (rule, metric) not in accepted:
            yield Refusal(rule=rule, text=f"{metric} {text}")
    if old is None:
        return
    yield from changed_config(old, new)
    if new.generation is not None:
        yield from _of_generation(old, new)
        return
    for name in sorted(old.metrics.keys() & new.metrics.keys()):
        yield from _of_metric(name, old, new)
    before, after = old.provenance, new.provenance
    if before is None or after is None or before.host_class != after.host_class:
        return
    if before.host_class is not None:
        yield from _of_costs(old, new)


def _oddities(candidate: Candidate, golden: Golden) -> Iterator[tuple[GateRule, str, str]]:
    """Yield what no sound training measures: rule, metric and what is odd about it."""
    for name, series in series_in(golden).items():
        steps = [step for step, value in series.items() if is_finite(value)]
        values = [v for v in series.values if isinstance(v, float) and math.isfinite(v)]
        if not values:
            continue
        is_guess = candidate.has_cross_entropy and is_loss(name) and not _IS_AUXILIARY(name)
        if (range_ := _range_of(name, is_guess=is_guess)) is not None:
            least, most = range_
            odd = [(s, v) for s, v in zip(steps, values, strict=True) if not least <= v <= most]
            for step, value in odd[:1]:
                text = f"is {value:g} at step {step}, expected {least:g} to {most:g}"
                yield GateRule.IMPLAUSIBLE, name, text
        if golden.generation is not None:
            continue
        begin = candidate.first_step
        if is_loss(name) and begin is not None and steps[0] - begin >= step_interval(steps):
            text = f"begins at step {steps[0]}, the training at {begin}"
            yield GateRule.LATE_START, name, text
        if is_guess and len(values) > 1:
            first, last = _ends_of(values)
            noise = (statistics.pvariance(first) + statistics.pvariance(last)) / len(first)
            start, end = statistics.fmean(first), statistics.fmean(last)
            if start - end <= FALLS * math.sqrt(noise):
                text = f"does not fall: {start:.6g} in the first quarter, {end:.6g} in the last"
                yield GateRule.NOT_FALLING, name, text


def _ends_of(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    quarter = tail_length(len(values))
    return values[:quarter], values[-quarter:]


def _range_of(name: str, *, is_guess: bool) -> tuple[float, float] | None:
    """Return what the values of a metric can be; None where nothing is known of it."""
    if is_guess:
        return 0.0, MOST_LOSS
    if name.partition(" of ")[0] in LOGPROBS:
        return -math.inf, 0.0
    is_amount = not isinstance(ComparisonPolicy.STRICT.limits(name), LossLimits)
    return (0.0, math.inf) if is_amount or name in _NORMS else None


def changed_config(old: Golden, new: Golden) -> Iterator[Refusal]:
    """Yield that the case or the row is not what the old golden was made of."""
    hashes = [(golden.provenance or Provenance()).config_hash for golden in (old, new)]
    if None not in hashes and hashes[0] != hashes[1]:
        yield Refusal(rule=GateRule.CONFIG, text="the case asks for something else than before")


def _of_generation(old: Golden, new: Golden) -> Iterator[Refusal]:
    outside = [m for m in differ("", old, new).metrics if m.is_outside]
    if outside:
        more = f" (and {len(outside) - 1} more)" if len(outside) > 1 else ""
        counts = f"{outside[0].num_changed} of {outside[0].num_old}"
        text = f"{outside[0].metric} changes at {counts} positions{more}"
        yield Refusal(rule=GateRule.OUTSIDE, text=text)


def _of_metric(name: str, old: Golden, new: Golden) -> Iterator[Refusal]:
    """Look at a loss, a count, or any metric that is judged like a loss."""
    before, after = old.metrics[name], new.metrics[name]
    if not isinstance(_BAND.limits(name), LossLimits | CountLimits):
        return
    points = shared_points(before, after)
    lost = {s for s, v in before.items() if is_finite(v)} - {point.step for point in points}
    if lost:
        text = f"{name} lacks {len(lost)} steps of the old golden, {min(lost)} to {max(lost)}"
        yield Refusal(rule=GateRule.FEWER_STEPS, text=text)
    if not points:
        return
    found = list(_of_loss(name, points, old)) if is_loss(name) else []
    yield from found or _outside(name, points, old, new)


def _of_loss(name: str, points: list[Point], old: Golden) -> Iterator[Refusal]:
    first = points[0]
    off = (first.observed - first.golden) / (abs(first.golden) or 1.0)
    if first.step == 1 and abs(off) > STEP_1:
        text = f"{name} changes by {off:+.1e} at step 1: data, initialisation or forward pass"
        yield Refusal(rule=GateRule.STEP_1, text=text)
    limit = max(LOSS, SPREADS * _spread_of(old, name))
    tail = points[-tail_length(len(points)) :]
    means = ((mean_signed(points), ""), (mean_signed(tail), f" of the last {len(tail)} steps"))
    for sign, rule, word in ((1, GateRule.LOSS, "worse"), (-1, GateRule.BETTER, "better")):
        for mean, where in means:
            if sign * mean > limit:
                text = f"{name} gets {word} by {abs(mean):.1e} in the mean{where}"
                yield Refusal(rule=rule, text=f"{text}, {limit:.1e} needs no reason")
                return
    moved = math.fsum(abs(p.signed) for p in points) / (
        math.fsum(abs(p.golden) for p in points) or 1.0
    )
    if moved > limit:
        text = f"{name} moves by {moved:.1e} in the mean of absolute differences"
        yield Refusal(rule=GateRule.OUTSIDE, text=f"{text}, {limit:.1e} needs no reason")


def _outside(name: str, points: Sequence[Point], old: Golden, new: Golden) -> Iterator[Refusal]:
    """Compare what both have as a run would be compared, but for single bits of another commit."""
    before, after = old.provenance or Provenance(), new.provenance or Provenance()
    is_same_commit = before.commit is not None and before.commit == after.commit
    is_clean = before.is_dirty is False and after.is_dirty is False
    steps = {point.step for point in points}
    (comparison,) = compare(
        replace(old, metrics=_cut(old.metrics, name, steps)),
        _cut(new.metrics, name, steps),
        metrics=[name],
        policy=ComparisonPolicy.STRICT if is_same_commit and is_clean else _BAND,
        surroundings=RunEnvironment(
            host_class=after.host_class, image=after.image, versions=after.versions
        ),
    )
    failed = [layer.text for layer in comparison.layers if not layer.passed]
    if failed:
        text = f"{name} is outside the band of the old golden: {'; '.join(failed)}"
        yield Refusal(rule=GateRule.OUTSIDE, text=text)


def _cut(metrics: MetricMap, name: str, steps: set[int]) -> MetricMap:
    series = metrics[name]
    kept = {step: value for step, value in series.items() if step in steps}
    return {name: series_of(kept, is_full_precision=series.is_full_precision)}


def _of_costs(old: Golden, new: Golden) -> Iterator[Refusal]:
    peaks = [_numbers(golden, _MEMORY_METRIC) for golden in (old, new)]
    if all(peaks):
        grown = max(peaks[1]) / max(peaks[0]) - 1 if max(peaks[0]) > 0 else math.inf
        if grown > MEMORY:
            text = f"{_MEMORY_METRIC} grows by {grown:.1%}, {MEMORY:.0%} needs no reason"
            yield Refusal(rule=GateRule.MEMORY, text=text)
    times = [_steady(_numbers(golden, _TIME_METRIC)) for golden in (old, new)]
    if all(times):
        medians = [statistics.median(one) for one in times]
        slower = medians[1] / medians[0] - 1 if medians[0] > 0 else math.inf
        limit = max(TIME, SPREADS * max(_spread_of(golden, _TIME_METRIC) for golden in (old, new)))
        if slower > limit:
            text = (
                f"{_TIME_METRIC} grows by {slower:.1%} in the median, {limit:.0%} needs no reason"
            )
            yield Refusal(rule=GateRule.TIME, text=text)


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
        return statistics.median([v for v in spread.values if isinstance(v, float)] or [0.0])
    return spread or 0.0
