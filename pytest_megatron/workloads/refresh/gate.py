"""Candidates for goldens, and the gate: rules that they must meet, some waived by a reason. Pure.

Megatron-LM's tool takes the values of the jobs that failed, from any run; here a golden comes from
a whole, clean and repeated training only.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Self

from pytest_megatron.base.text import counted, listed
from pytest_megatron.gpu.host import CPU_PLATFORM, PLATFORM_GPUS
from pytest_megatron.runs.record import RecordedAttempt, RecordedGolden, RecordedWorkload
from pytest_megatron.workloads.golden.build import series_in
from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.compare.result import layer_text
from pytest_megatron.workloads.golden.model import (
    LOGPROBS,
    Golden,
    MetricMap,
    Provenance,
    Series,
    environment_of,
    find_frozen,
    is_finite,
    is_loss,
    series_of,
    to_float32,
)
from pytest_megatron.workloads.golden.policy import (
    FULL_PRECISION,
    NORMS,
    ComparisonPolicy,
    CountLimits,
    Exact,
    LossLimits,
    Settings,
    tail_length,
)
from pytest_megatron.workloads.refresh.difference import FileDifference, Trend, differ

if TYPE_CHECKING:
    from pytest_megatron.workloads.golden.compare.points import Points


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One workload of a run that measured values for a golden.

    Attributes:
        target: Where the golden belongs, relative to the project.
        directory: Directory of the workload, in the run or in an unpacked artifact of it.
        record: What the run says of it; `skipped` before it has run.
        golden: Values and provenance, None where the run left none.
        repeats: The values of each clean repeat.
        first_step: The iteration that the training begins with; None where that is not known.
        last_step: The iteration that the plan trains to; None where it names none.
        has_cross_entropy: Whether a loss of it is one: not negative, and falling with training.
        spread: Differences between repeats that the policy does not allow, a line each.
        disagreements: Comparisons that failed, but for the golden's: a resumed training, gradients.
        damage: Missing or wrong parts of the run's files.
    """

    node_id: str
    target: PurePosixPath
    directory: Path
    record: RecordedWorkload
    golden: Golden | None = None
    repeats: tuple[MetricMap, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    has_cross_entropy: bool = True
    spread: tuple[str, ...] = ()
    disagreements: tuple[str, ...] = ()
    is_lightweight: bool = False
    damage: tuple[str, ...] = ()


class GateRule(Enum):
    """Reasons to refuse a golden; the value is the name that is printed.

    Attributes:
        is_soft: Whether a typed reason is enough.
    """

    is_soft: bool

    def __new__(cls, name: str, is_soft: bool = False) -> Self:  # noqa: FBT001, FBT002 - of a table
        """Make a rule; one without `is_soft` lets no golden through, whatever the reason."""
        rule = object.__new__(cls)
        rule._value_, rule.is_soft = name, is_soft
        return rule

    # Never.
    DAMAGED = "damaged-run"
    NOT_TRAINED = "not-trained"
    RETRY = "retry"
    HARDWARE = "hardware"
    EXPECTED_FAILURE = "expected-failure"
    QUARANTINE = "quarantine"
    LIGHTWEIGHT = "lightweight"
    DISAGREES = "disagrees"
    REPEATS = "repeats"
    SPREAD = "spread"
    NOT_FINITE = "not-finite"
    UNEQUAL = "unequal-steps"
    DUPLICATE = "offered-twice"
    TRUNCATED = "truncated"
    FROZEN = "frozen"
    FEWER_METRICS = "fewer-metrics"
    OTHER_KIND = "other-kind"
    NOT_COMMITTED = "not-committed"
    DIRTY = "dirty"
    PLATFORM = "platform"
    GPU = "gpu"
    WORLD_SIZE = "world-size"
    # Only with a reason.
    LATE_START = "late-start", True
    MISSING = "missing-steps", True
    CONSTANT = "constant", True
    NOT_FALLING = "not-falling", True
    IMPLAUSIBLE = "implausible", True
    ROUNDED = "rounded", True
    CONFIG = "config-changed", True
    FEWER_STEPS = "fewer-steps", True
    STEP_1 = "step-1", True
    LOSS = "loss-worse", True
    BETTER = "loss-better", True
    OUTSIDE = "outside-band", True
    MEMORY = "memory", True
    TIME = "time", True
    MASS = "one-direction", True


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason to refuse one golden, or a set of them.

    Attributes:
        text: The value found, the expected one and the remedy.
    """

    rule: GateRule
    text: str

    @property
    def line(self) -> str:
        """The rule by name, then the text."""
        return f"[{self.rule.value}] {self.text}"


def hard(refusals: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """Return those that no reason outweighs."""
    return tuple(refusal for refusal in refusals if not refusal.rule.is_soft)


LOSS = 1e-3  # of a mean
SPREADS = 3.0
STEP_1 = 1e-3
FALLS = 3.0  # standard errors of the means of both ends
_NORMAL_DEVIATIONS = 1.4826  # from a median absolute deviation to a standard one
MEMORY = 0.01  # of the peak
TIME = 0.05  # of the median
# Guessing evenly among the largest vocabularies costs 13; the worst start of Megatron-LM is 43.
MOST_LOSS = 100.0
MOST_NAMED, MOST_CHANGED = 5, 20  # files
LEAVE_ALONE = (
    "leave it alone, keep what trainings write out of git, and run again; or give --allow-dirty, "
    "which the golden then says"
)
_DELETE = "if that is meant, delete the old golden, then record it"
ROUNDED = 1e-4  # of the median; five decimals, which Megatron-LM's goldens have, are sound
_DECIMALS, _BITS, _LEAST_DIGITS = 5, 24, 8
_TIME_METRIC = "iteration-time"
_MEMORY_METRIC = "mem-max-allocated-bytes"
_WARM_UP = 0.1
# What has a loss in its name and is none, or need not fall.
_IS_AUXILIARY = re.compile(r"aux|balanc|indexer|ppl|scale|z[-_]loss").search
_SHORT = LossLimits()
# A run is allowed single steps, and more where its golden is long; a new golden wants a reason.
_BAND: Settings = {"outside_fraction": 0.0}
_LOSS_BAND: Settings = {
    "band": _SHORT.band,
    "mean": _SHORT.mean,
    "tail_mean": _SHORT.tail_mean,
    **_BAND,
}


def soft_refusals(candidate: Candidate, old: Golden | None) -> Iterator[Refusal]:
    """Yield the changes that need a typed reason.

    Oddities that the old golden has as well were accepted before.
    """
    new = candidate.golden
    assert new is not None
    accepted = set() if old is None else {odd[:2] for odd in _oddities(candidate, old)}
    for rule, metric, text in _oddities(candidate, new):
        if (rule, metric) not in accepted:
            yield Refusal(rule, f"{metric} {text}")
    if old is None:
        return
    yield from changed_config(old, new)
    if new.generation is not None:
        yield from _check_generation(old, new)
        return
    for name in sorted(old.metrics.keys() & new.metrics.keys()):
        yield from _check_metric(name, old, new)
    before, after = old.provenance, new.provenance
    if before is None or after is None or before.host_class != after.host_class:
        return
    if before.host_class is not None:
        yield from _check_costs(old, new)


def _oddities(candidate: Candidate, golden: Golden) -> Iterator[tuple[GateRule, str, str]]:
    """Yield values that no sound training measures: rule, metric and description."""
    for name, series in series_in(golden).items():
        finite = series.finite()
        if not finite:
            continue
        values = list(finite.values())
        is_guess = candidate.has_cross_entropy and is_loss(name) and not _IS_AUXILIARY(name)
        if (range_ := _range_of(name, is_guess=is_guess)) is not None:
            least, most = range_
            odd = [(s, v) for s, v in finite.items() if not least <= v <= most]
            for step, value in odd[:1]:
                text = f"is {value:g} at step {step}, expected {least:g} to {most:g}"
                yield GateRule.IMPLAUSIBLE, name, text
        if golden.generation is not None:
            continue
        if is_loss(name):
            yield from ((rule, name, text) for rule, text in _odd_steps(candidate, series))
        if is_guess and (lost := _rounded(values)) is not None:
            text = f"has {lost[0]}, which hide changes below {lost[1]:.1e}"
            yield GateRule.ROUNDED, name, f"{text}; have the program log all digits of a float32"
        if is_guess and len(values) > 1:
            first, last = values[: tail_length(len(values))], values[-tail_length(len(values)) :]
            noise = min(statistics.pvariance(first), _noise_of(values)) + statistics.pvariance(last)
            start = min(statistics.fmean(first), statistics.median(first))
            end = statistics.fmean(last)
            if start - end <= FALLS * math.sqrt(noise / len(first)):
                text = f"does not fall: {start:.6g} in the first quarter, {end:.6g} in the last"
                yield GateRule.NOT_FALLING, name, text


def _odd_steps(candidate: Candidate, series: Series) -> Iterator[tuple[GateRule, str]]:
    """Yield what is odd about the steps at which a loss was logged, or about those it rests in."""
    steps, begin = list(series.finite()), candidate.first_step
    interval = _usual_distance(steps)
    if begin is not None and steps[0] - begin >= (interval or 1):
        yield GateRule.LATE_START, f"begins at step {steps[0]}, the training at {begin}"
    if (hole := _hole(steps, interval)) is not None:
        text = f"has step {hole[0]} and then {hole[1]}, most are {interval} apart"
        yield GateRule.MISSING, text
    if (stretch := _constant(series)) is not None:
        yield GateRule.CONSTANT, f"is the same from step {stretch[0]} to {stretch[1]}"


def _rounded(values: Sequence[float]) -> tuple[str, float] | None:
    """Return what values were rounded to and their relative error; None of sound ones."""
    broken = [value for value in values if not value.is_integer()]
    usual = statistics.median(map(abs, values)) or math.inf
    parts = [math.frexp(to_float32(value))[0] for value in broken]
    decimals = next(
        (d for d in range(_DECIMALS) if all(round(v, d) == v for v in broken)), _DECIMALS
    )
    bits = next((b for b in range(_BITS) if all(p * 2**b % 1 == 0 for p in parts)), _BITS)
    for text, unit, missing in (
        (f"{decimals} decimals", 10.0**-decimals, _DECIMALS - decimals),
        (f"{bits} bits", 2.0 ** (math.frexp(usual)[1] - bits), (_BITS - bits) * math.log10(2)),
    ):
        # A value has no more by chance in one of 10 ** missing.
        if len(broken) * missing >= _LEAST_DIGITS and unit / 2 > ROUNDED * usual:
            return text, unit / 2 / usual
    return None


def _noise_of(values: Sequence[float]) -> float:
    """Return the variance of noise between neighbouring values, whatever the curve does."""
    changes = [after - before for before, after in pairwise(values)]
    usual = statistics.median(changes)
    deviation = statistics.median(abs(change - usual) for change in changes)
    return (_NORMAL_DEVIATIONS * deviation) ** 2 / 2  # a change has the noise of two values


def _range_of(name: str, *, is_guess: bool) -> tuple[float, float] | None:
    """Return the range of a metric's values; None where it is not known."""
    if is_guess:
        return 0.0, MOST_LOSS
    if name.partition(" of ")[0] in LOGPROBS:
        return -math.inf, 0.0
    is_amount = not isinstance(ComparisonPolicy.STRICT.limits(name), LossLimits)
    return (0.0, math.inf) if is_amount or name in NORMS else None


def changed_config(old: Golden, new: Golden) -> Iterator[Refusal]:
    """Yield a change of the case or the recipe row since the old golden."""
    hashes = [(golden.provenance or Provenance()).config_hash for golden in (old, new)]
    if None not in hashes and hashes[0] != hashes[1]:
        yield Refusal(GateRule.CONFIG, "the case asks for something else than before")


def _check_generation(old: Golden, new: Golden) -> Iterator[Refusal]:
    """Yield a refusal if the output of an inference program differs."""
    outside = [m for m in differ("", old, new).metrics if m.is_outside]
    if outside:
        more = f" (and {len(outside) - 1} more)" if len(outside) > 1 else ""
        counts = f"{outside[0].num_changed} of {outside[0].num_old}"
        text = f"{outside[0].metric} changes at {counts} positions{more}"
        yield Refusal(GateRule.OUTSIDE, text)


def _check_metric(name: str, old: Golden, new: Golden) -> Iterator[Refusal]:
    """Check a loss, a count, or any metric that is compared like a loss."""
    before, after = old.metrics[name], new.metrics[name]
    if not isinstance(ComparisonPolicy.STRICT.limits(name), LossLimits | CountLimits):
        return
    from pytest_megatron.workloads.golden.compare.points import (  # noqa: PLC0415 - numpy
        shared_points,
    )

    points = shared_points(before, after)
    lost = before.finite().keys() - set(points.steps.tolist())
    if lost:
        steps = counted(len(lost), "step")
        text = f"{name} lacks {steps} of the old golden, {min(lost)} to {max(lost)}"
        yield Refusal(GateRule.FEWER_STEPS, text)
    if not len(points):
        return
    found = list(_check_loss(name, points, old)) if is_loss(name) else []
    yield from found or _outside(name, points, old, new)


def _check_loss(name: str, points: Points, old: Golden) -> Iterator[Refusal]:
    """Yield what a loss changes by too much: at step 1, in its mean, or in absolute differences.

    The mean of all steps, or of the last ones, may be off by `LOSS`, or by a multiple of what the
    old golden's repeats differ by. More needs a reason, in either direction.
    """
    golden = float(points.golden[0])
    off = (float(points.observed[0]) - golden) / (abs(golden) or 1.0)
    if points.steps[0] == 1 and abs(off) > STEP_1:
        text = f"{name} changes by {off:+.1e} at step 1: data, initialisation or forward pass"
        yield Refusal(GateRule.STEP_1, text)
    limit = max(LOSS, SPREADS * _spread_of(old, name))
    tail = points[-tail_length(len(points)) :]
    means = (
        (points.mean_signed, ""),
        (tail.mean_signed, f" of the last {counted(len(tail), 'step')}"),
    )
    for sign, rule, word in ((1, GateRule.LOSS, "worse"), (-1, GateRule.BETTER, "better")):
        for mean, where in means:
            if sign * mean > limit:
                text = f"{name} gets {word} by {abs(mean):.1e} in the mean{where}"
                yield Refusal(rule, f"{text}, {limit:.1e} needs no reason")
                return
    moved = math.fsum(points.off) / (math.fsum(abs(points.golden)) or 1.0)
    if moved > limit:
        text = f"{name} moves by {moved:.1e} in the mean of absolute differences"
        yield Refusal(GateRule.OUTSIDE, f"{text}, {limit:.1e} needs no reason")


def _outside(name: str, points: Points, old: Golden, new: Golden) -> Iterator[Refusal]:
    """Compare the shared steps like a run, but for single bits of another commit."""
    before, after = old.provenance or Provenance(), new.provenance or Provenance()
    is_same_commit = before.commit is not None and before.commit == after.commit
    is_clean = before.is_dirty is False and after.is_dirty is False
    steps = set(points.steps.tolist())
    # Values that change a little with a container are within the band; bits count where the
    # commit, the image, the versions and the host are those of the old golden.
    exact = Exact.AUTO if is_same_commit and is_clean else Exact.NEVER
    if exact is Exact.NEVER and before.deterministic and before.precision != FULL_PRECISION:
        # Repeats that are equal say nothing about the order in which another commit adds.
        old = replace(old, provenance=replace(before, deterministic=None, repeats=1))
    band = {**(_LOSS_BAND if is_loss(name) else _BAND), "exact": exact}
    (comparison,) = compare(
        replace(old, metrics=_cut(old.metrics, name, steps)),
        _cut(new.metrics, name, steps),
        metrics=[name],
        policy=replace(ComparisonPolicy.STRICT, metrics={name: band}),
        surroundings=environment_of(after),
    )
    failed = [layer_text(layer) for layer in comparison.layers if not layer.passed]
    if failed:
        text = f"{name} is outside the band of the old golden: {'; '.join(failed)}"
        yield Refusal(GateRule.OUTSIDE, text)


def _cut(metrics: MetricMap, name: str, steps: set[int]) -> MetricMap:
    """Return a metric at some steps alone."""
    series = metrics[name]
    kept = {step: value for step, value in series.items() if step in steps}
    return {name: series_of(kept, is_full_precision=series.is_full_precision)}


def _check_costs(old: Golden, new: Golden) -> Iterator[Refusal]:
    """Yield what wants a reason about memory and time."""
    noise = SPREADS * max(_spread_of(golden, _TIME_METRIC) for golden in (old, new))
    for rule, name, of, what, limit in (
        (GateRule.MEMORY, _MEMORY_METRIC, max, "", MEMORY),
        (GateRule.TIME, _TIME_METRIC, _steady, " in the median", max(TIME, noise)),
    ):
        sides = [golden.metrics.get(name, series_of({})).finite() for golden in (old, new)]
        if not all(sides):
            continue
        before, after = (of(list(side.values())) for side in sides)
        grown = after / before - 1 if before > 0 else math.inf
        if grown > limit:
            text = f"{name} grows by {grown:.1%}{what}, {limit:.0%} needs no reason"
            yield Refusal(rule, text)


def _steady(times: list[float]) -> float:
    """Return the median after the warm-up."""
    return statistics.median(times[max(1, int(_WARM_UP * len(times))) :] or times)


def _spread_of(golden: Golden, name: str) -> float:
    """Return the spread of the repeats, in the median over the steps; large on a busy host."""
    spread = None if golden.provenance is None else golden.provenance.spread.get(name)
    if isinstance(spread, Series):
        return statistics.median([v for v in spread.values if isinstance(v, float)] or [0.0])
    return spread or 0.0


MIN_REPEATS = 2
LEAST_FOR_MASS = 20
MASS_FRACTION = 0.6
_FROZEN_STEPS, _FROZEN_FRACTION = 5, 0.1


def refusals_of(
    candidate: Candidate, old: Golden | None, *, is_dirty_allowed: bool = False
) -> tuple[Refusal, ...]:
    """Return the refusals of a candidate for `old`, the weightiest first; none if all is well.

    Args:
        candidate: The candidate.
        old: The present golden, or None.
        is_dirty_allowed: Accept a tree that no commit names.
    """
    if (untrained := next(_check_training(candidate), None)) is not None:
        return (untrained,)  # what it measured says nothing
    found = [*_check_values(candidate, old)]
    found += _check_origin(candidate, old, is_dirty_allowed=is_dirty_allowed)
    return tuple(found or soft_refusals(candidate, old))


def early_refusals(
    prospect: Candidate, old: Golden | None, *, is_dirty_allowed: bool = False
) -> tuple[Refusal, ...]:
    """Return the refusals of a candidate without values that hold whatever it measures."""
    found = list(_check_origin(prospect, old, is_dirty_allowed=is_dirty_allowed))
    if old is not None and prospect.golden is not None:
        found += changed_config(old, prospect.golden)
    return tuple(found)


def refuse_mass(differences: Sequence[FileDifference]) -> Refusal | None:
    """Return the reason to refuse a set of many goldens although each one may be written.

    More than 20 losses that change, of which more than 60 % move the same way, have one cause that
    must be named. In Megatron-LM's history 102 of 126 got worse in one commit.
    """
    trends = Counter(t for d in differences if (t := d.trend) not in (None, Trend.SAME))
    for trend, most in trends.most_common(1):
        if trends.total() > LEAST_FOR_MASS and most > MASS_FRACTION * trends.total():
            text = f"{most} of {trends.total()} losses that change get {trend.value}"
            return Refusal(GateRule.MASS, f"{text}, which one cause explains, not many")
    return None


def _check_training(candidate: Candidate) -> Iterator[Refusal]:
    """Yield what was wrong with the training, the weightiest first."""
    record = candidate.record
    if candidate.damage:
        yield Refusal(GateRule.DAMAGED, candidate.damage[0])
    if candidate.is_lightweight:
        text = "a lightweight run measures nothing to keep; run it without --lightweight"
        yield Refusal(GateRule.LIGHTWEIGHT, text)
    if record.is_expected:
        text = "the case is expected to fail, and did; fix it and take TEST_EVALUATION out of it"
        yield Refusal(GateRule.EXPECTED_FAILURE, text)
    if record.is_held and record.verdict != "passed":
        text = "its failure did not count; fix it, end its quarantine, and run it again"
        yield Refusal(GateRule.QUARANTINE, text)
    failed = [attempt for attempt in record.attempts if attempt.cause is not None]
    if failed and any(_is_later(one, failed[0]) for one in record.attempts):
        text = f"needed another attempt, so it is no golden; run it again: {failed[0].cause}"
        yield Refusal(GateRule.RETRY, text)
    if failed:
        text = f"{failed[0].cause}; run it again, once it trains to its end"
        yield Refusal(GateRule.NOT_TRAINED, text)
    counted_codes = (code for a in record.attempts if a.note is None for code in a.exit_codes)
    if (bad := next(filter(None, counted_codes), None)) is not None:
        text = f"a phase ended with exit code {bad}; fix the training, then run it again"
        yield Refusal(GateRule.NOT_TRAINED, text)
    for fault in (f for a in record.attempts if a.health is not None for f in a.health.faults):
        yield Refusal(GateRule.HARDWARE, f"{fault} meanwhile, so it is no golden; run it again")
    if record.verdict == "broken" or candidate.golden is None:
        text = record.problem or "the run left no values for it"
        yield Refusal(GateRule.NOT_TRAINED, text.splitlines()[0])


def _is_later(one: RecordedAttempt, other: RecordedAttempt) -> bool:
    return one.repeat == other.repeat and (one.attempt or 0) > (other.attempt or 0)


def _check_values(candidate: Candidate, old: Golden | None) -> Iterator[Refusal]:
    """Refuse measured values that are too few, disagree, or are worse than the old ones."""
    assert candidate.golden is not None
    num = len(candidate.repeats)
    if num < MIN_REPEATS:
        text = f"measured {num} time(s), expected at least {MIN_REPEATS} to know the spread"
        yield Refusal(GateRule.REPEATS, f"{text}; run it with --n-repeat {MIN_REPEATS} or more")
    for number, repeat in enumerate(candidate.repeats, start=1):
        where = f"repeat {number}, " if num > 1 else ""
        yield from _check_repeat(candidate, repeat, where)
    yield from _unequal_steps(candidate.repeats)
    for line in candidate.disagreements[:1]:
        text = f"{line}; there is a new golden once they agree"
        yield Refusal(GateRule.DISAGREES, text)
    if candidate.spread:
        yield Refusal(
            GateRule.SPREAD,
            "the repeats differ from one another, so there is no new golden: "
            f"{candidate.spread[0]}; seed the program, or set NON_DETERMINSTIC_RESULTS: 1 in the "
            "case",
        )
    if old is not None:
        yield from _against_old(candidate.golden, old)
        yield from _frozen(candidate.golden, old)


def _check_repeat(candidate: Candidate, repeat: MetricMap, where: str) -> Iterator[Refusal]:
    """Refuse values that are missing at the end of one repeat, or are no numbers."""
    assert candidate.golden is not None
    if candidate.golden.generation is not None:
        return
    for name in sorted(candidate.golden.metrics.keys() & repeat.keys()):
        series = repeat[name]
        bad = next(((s, v) for s, v in series.items() if not is_finite(v)), None)
        if bad is not None:
            text = f"{where}{name} is {bad[1]} at step {bad[0]}, expected a finite number"
            yield Refusal(GateRule.NOT_FINITE, f"{text}; fix the training")
        if not is_loss(name) or not len(series):
            continue
        interval = _usual_distance(series.steps) or max(series.steps[-1], 1)
        if candidate.last_step is not None and series.steps[-1] + interval <= candidate.last_step:
            text = (
                f"{where}{name} ends at step {series.steps[-1]}, expected it to go on to "
                f"{candidate.last_step}; have it logged to the end, or change the case's iterations"
            )
            yield Refusal(GateRule.TRUNCATED, text)


def _unequal_steps(repeats: Sequence[MetricMap]) -> Iterator[Refusal]:
    """Yield metrics that have other steps in another repeat."""
    for number, repeat in enumerate(repeats[1:], start=2):
        for name in sorted(repeats[0].keys() & repeat.keys()):
            different = set(repeats[0][name].steps) ^ set(repeat[name].steps)
            if different and is_loss(name):
                text = f"{name}: repeats 1 and {number} do not both have step {min(different)}"
                yield Refusal(GateRule.UNEQUAL, f"{text}; have both log the same steps")


def _against_old(new: Golden, old: Golden) -> Iterator[Refusal]:
    """Yield that a golden cannot stand for the old one."""
    if (new.generation is None) != (old.generation is None):
        text = "one is the output of an inference program, the other the series of a training"
        yield Refusal(GateRule.OTHER_KIND, f"{text}; {_DELETE}")
    elif gone := sorted(series_in(old).keys() - series_in(new).keys()):
        text = f"lacks {', '.join(map(repr, gone))}, which the old golden has"
        yield Refusal(GateRule.FEWER_METRICS, f"{text}; {_DELETE}")


def _frozen(new: Golden, old: Golden) -> Iterator[Refusal]:
    """Find a loss that stands still where the old one moves."""
    for name, series in new.metrics.items():
        before = old.metrics.get(name)
        if is_loss(name) and before is not None and (found := _constant(series, before)):
            text = f"{name} is the same from step {found[0]} to {found[1]}, where the old one moves"
            yield Refusal(GateRule.FROZEN, f"{text}; {_DELETE}")


def _constant(series: Series, before: Series | None = None) -> tuple[int, int] | None:
    """Return first and last step of a stretch in which a loss stands still, but not `before`."""
    least = max(_FROZEN_STEPS, int(_FROZEN_FRACTION * len(series)))
    return find_frozen(before, series, least_steps=least)


def _check_origin(
    candidate: Candidate, old: Golden | None, *, is_dirty_allowed: bool
) -> Iterator[Refusal]:
    """Check where a candidate was measured: platform, GPU, number of ranks."""
    assert candidate.golden is not None
    origin, record = candidate.golden.provenance or Provenance(), candidate.record
    tree = record.golden or RecordedGolden()
    if not is_dirty_allowed:
        if origin.commit is None:
            text = "the run was not of a git commit, which the golden has to name; commit, or give"
            yield Refusal(GateRule.NOT_COMMITTED, f"{text} --allow-dirty")
        elif tree.changed:
            names = listed(tree.changed, MOST_CHANGED)
            text = f"the tree changed after the run had begun: {names}; {LEAVE_ALONE}"
            yield Refusal(GateRule.DIRTY, text)
        elif origin.is_dirty:
            names = f": {listed(tree.uncommitted, MOST_NAMED)}" if tree.uncommitted else ""
            text = f"the tree of the run had changes that its commit lacks{names}; commit them, or "
            text += "have git ignore those that no training reads, and run again; or give "
            yield Refusal(GateRule.DIRTY, f"{text}--allow-dirty, which the golden then says")
    platform, gpu = record.platform, origin.gpu
    wanted = PLATFORM_GPUS.get(platform or "")
    if platform is not None and not candidate.target.stem.endswith(f"_{platform}"):
        text = f"the run was on {platform}, the golden is {candidate.target.name}"
        yield Refusal(GateRule.PLATFORM, f"{text}; record the one of --platform {platform}")
    elif wanted is not None and platform != CPU_PLATFORM and wanted not in (gpu or ""):
        text = f"{platform} means {wanted}, the run was on {gpu or 'no GPU'}"
        yield Refusal(GateRule.GPU, f"{text}; run it there, or give this machine's --platform")
    before = (old.provenance if old is not None else None) or Provenance()
    if None not in (before.gpu, gpu) and before.gpu != gpu:
        text = f"the old golden is from {before.gpu}, the run was on {gpu}"
        yield Refusal(GateRule.GPU, f"{text}; {_DELETE}")
    sizes = before.world_size, origin.world_size
    if None not in sizes and sizes[0] != sizes[1]:
        text = f"the old golden is of {sizes[0]} ranks, the run had {sizes[1]}"
        yield Refusal(GateRule.WORLD_SIZE, f"{text}; {_DELETE}")


def _usual_distance(steps: Sequence[int]) -> int | None:
    """Return the commonest distance of logged steps, the smaller of two; None of a single step.

    That from step 1 counts where there is no other: programs log it beside every Nth.
    """
    spaced = [step for step in steps if step != 1]
    counts = Counter(b - a for a, b in pairwise(spaced if len(spaced) > 1 else steps))
    return max(counts, key=lambda distance: (counts[distance], -distance), default=None)


def _hole(steps: Sequence[int], interval: int | None) -> tuple[int, int] | None:
    """Return the steps on both sides of the first hole."""
    return next((pair for pair in pairwise(steps) if pair[1] - pair[0] > (interval or 0)), None)
