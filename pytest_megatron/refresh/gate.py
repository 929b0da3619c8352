"""Which candidates may become goldens: every rule by name, and the guards that want a reason. Pure.

Megatron-LM's tool takes exactly the values of the jobs that failed, from any run (FORMATS 7); here
a golden is only what a whole, clean and repeated training measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from pytest_megatron.golden.model import MetricMap, is_finite, is_loss
from pytest_megatron.golden.presence import find_frozen
from pytest_megatron.golden.provenance import Golden
from pytest_megatron.golden.refresh import series_in
from pytest_megatron.host import CPU_PLATFORM, PLATFORM_GPUS
from pytest_megatron.refresh.candidate import Candidate, GateRule, Ran, Refusal
from pytest_megatron.refresh.difference import FileDifference, Trend
from pytest_megatron.refresh.soft_gate import changed_config, soft_refusals

MIN_REPEATS = 2
LEAST_FOR_MASS = 20
MASS_FRACTION = 0.6
_FROZEN_STEPS, _FROZEN_FRACTION = 5, 0.1
_WATCHDOGS = ("watchdog", "nccl_timeout", "collective_timeout")
_HANG = "a collective did not finish"


def refusals_of(
    candidate: Candidate, old: Golden | None, *, is_dirty_allowed: bool = False
) -> tuple[Refusal, ...]:
    """Return why a candidate may not replace `old`, the weightiest first; none if it may.

    Args:
        candidate: What a run measured.
        old: The golden that is there now, or None.
        is_dirty_allowed: Whether a tree that no commit names is fine.
    """
    found = [*_of_training(candidate)]
    if found:
        return tuple(found)  # what it measured says nothing
    found += _of_values(candidate, old)
    found += _of_origin(candidate, old, is_dirty_allowed=is_dirty_allowed)
    if not found:
        found += soft_refusals(candidate, old)
    return tuple(found)


def early_refusals(
    prospect: Candidate, old: Golden | None, *, is_dirty_allowed: bool = False
) -> tuple[Refusal, ...]:
    """Return why no values that a training may measure could replace `old`, the weightiest first.

    Args:
        prospect: A candidate with its provenance and no values.
        old: The golden that is there now, or None.
        is_dirty_allowed: Whether a tree that no commit names is fine.
    """
    found = list(_of_origin(prospect, old, is_dirty_allowed=is_dirty_allowed))
    if old is not None and prospect.golden is not None:
        found += changed_config(old, prospect.golden)
    return tuple(found)


def refuse_mass(differences: Sequence[FileDifference]) -> Refusal | None:
    """Return why a set of many goldens may not be written although each one may.

    More than 20 losses that change, of which more than 60 % move the same way, are one cause, which
    somebody has to name. In Megatron-LM's history 102 of 126 got worse in one commit (JUDGING 4.2).
    """
    trends: list[Trend] = [t for d in differences if (t := d.trend) not in (None, Trend.SAME)]
    if len(trends) <= LEAST_FOR_MASS:
        return None
    for trend in (Trend.WORSE, Trend.BETTER):
        if trends.count(trend) > MASS_FRACTION * len(trends):
            text = (
                f"{trends.count(trend)} of {len(trends)} losses that change get {trend.value}, "
                f"which one cause explains, not many"
            )
            return Refusal(rule=GateRule.MASS, text=text)
    return None


def _of_training(candidate: Candidate) -> Iterator[Refusal]:
    """Look at how it ran."""
    if candidate.damage:
        yield Refusal(rule=GateRule.DAMAGED, text=candidate.damage[0])
        return
    if candidate.is_lightweight:
        yield Refusal(rule=GateRule.LIGHTWEIGHT, text="a lightweight run measures nothing to keep")
        return
    if candidate.is_expected_to_fail:
        yield Refusal(rule=GateRule.EXPECTED_FAILURE, text="the case is expected to fail, and did")
        return
    if candidate.is_quarantined:
        yield Refusal(
            rule=GateRule.QUARANTINE, text="its failure did not count, so nothing says it is right"
        )
        return
    failed = [attempt for attempt in candidate.attempts if attempt.cause is not None]
    retried = [a for a in failed if any(_is_later(b, a) for b in candidate.attempts)]
    for attempt in failed[:1]:
        rule = GateRule.RETRY if attempt in retried else _rule_of(attempt)
        what = "needed another attempt, so it is no golden: " if attempt in retried else ""
        yield Refusal(rule=rule, text=f"{what}{attempt.cause}")
    if not failed and (bad := [code for a in candidate.attempts for code in a.exit_codes if code]):
        rule = GateRule.SIGNAL if bad[0] < 0 else GateRule.EXIT_CODE
        yield Refusal(rule=rule, text=f"a phase ended with exit code {bad[0]}")
    faults = [fault for attempt in candidate.attempts for fault in attempt.faults]
    if faults:
        yield Refusal(
            rule=GateRule.HARDWARE, text=f"{faults[0]} meanwhile, so it is no golden; run it again"
        )
    if not failed and (candidate.verdict == "broken" or candidate.golden is None):
        text = candidate.problem or "the run left no values for it"
        yield Refusal(rule=GateRule.NOT_TRAINED, text=text.splitlines()[0])


def _is_later(one: Ran, other: Ran) -> bool:
    return one.repeat == other.repeat and one.number > other.number


def _rule_of(attempt: Ran) -> GateRule:
    """Return which rule an attempt that failed for good breaks."""
    said = f"{attempt.signature or ''} {attempt.cause or ''}".lower()
    if any(word in said for word in _WATCHDOGS) or _HANG in said:
        return GateRule.WATCHDOG
    if "was killed by" in said or any(code < 0 for code in attempt.exit_codes):
        return GateRule.SIGNAL
    if "is not finite" in said or "the first that is not" in said:
        return GateRule.NOT_FINITE
    if "stops at step" in said:
        return GateRule.TRUNCATED
    return GateRule.EXIT_CODE if any(attempt.exit_codes) else GateRule.NOT_TRAINED


def _of_values(candidate: Candidate, old: Golden | None) -> Iterator[Refusal]:
    """Look at what it measured."""
    assert candidate.golden is not None
    num = len(candidate.repeats)
    if num < MIN_REPEATS:
        yield Refusal(
            rule=GateRule.REPEATS,
            text=f"measured {num} time(s), expected at least {MIN_REPEATS}, whose spread says how "
            f"far to trust it; run it with --n-repeat {MIN_REPEATS} or more",
        )
    for number, repeat in enumerate(candidate.repeats, start=1):
        where = f"repeat {number}, " if num > 1 else ""
        yield from _of_repeat(candidate, repeat, where)
    yield from _unequal_steps(candidate.repeats)
    for attempt in candidate.attempts:
        for text in attempt.repeated_steps[:1]:
            yield Refusal(rule=GateRule.DUPLICATE, text=f"repeat {attempt.repeat}, {text}")
    for line in candidate.disagreements[:1]:
        yield Refusal(rule=GateRule.DISAGREES, text=line)
    if candidate.spread:
        more = f" (and {len(candidate.spread) - 1} more)" if len(candidate.spread) > 1 else ""
        yield Refusal(
            rule=GateRule.SPREAD,
            text="the repeats differ from one another, so there is no new golden: "
            f"{candidate.spread[0]}{more}",
        )
    if old is not None:
        yield from _against_old(candidate.golden, old)
    yield from _frozen(candidate.golden, old)


def _of_repeat(candidate: Candidate, repeat: MetricMap, where: str) -> Iterator[Refusal]:
    """Look for holes in one repeat."""
    assert candidate.golden is not None
    if candidate.golden.generation is not None:
        return
    for name in sorted(candidate.golden.metrics.keys() & repeat.keys()):
        series = repeat[name]
        bad = next(((s, v) for s, v in series.items() if not is_finite(v)), None)
        if bad is not None:
            text = f"{where}{name} is {bad[1]} at step {bad[0]}, expected a finite number"
            yield Refusal(rule=GateRule.NOT_FINITE, text=text)
        if not is_loss(name) or not len(series):
            continue
        interval = _interval(series.steps)
        if candidate.last_step is not None and series.steps[-1] + interval <= candidate.last_step:
            text = (
                f"{where}{name} ends at step {series.steps[-1]}, expected it to go on to "
                f"{candidate.last_step}"
            )
            yield Refusal(rule=GateRule.TRUNCATED, text=text)
        hole = _hole(series.steps, interval)
        if hole is not None:
            text = f"{where}{name} has step {hole[0]} and then {hole[1]}, the others are {interval}"
            yield Refusal(rule=GateRule.MISSING, text=f"{text} apart")


def _unequal_steps(repeats: Sequence[MetricMap]) -> Iterator[Refusal]:
    for number, repeat in enumerate(repeats[1:], start=2):
        for name in sorted(repeats[0].keys() & repeat.keys()):
            different = set(repeats[0][name].steps) ^ set(repeat[name].steps)
            if different and is_loss(name):
                text = f"{name}: repeats 1 and {number} do not both have step {min(different)}"
                yield Refusal(rule=GateRule.MISSING, text=text)


def _against_old(new: Golden, old: Golden) -> Iterator[Refusal]:
    if (new.generation is None) != (old.generation is None):
        yield Refusal(
            rule=GateRule.OTHER_KIND,
            text="one is the output of an inference program and the other the series of a "
            "training; delete the old golden, then record it",
        )
        return
    gone = sorted(series_in(old).keys() - series_in(new).keys())
    if gone:
        yield Refusal(
            rule=GateRule.FEWER_METRICS,
            text=f"lacks {', '.join(map(repr, gone))}, which the old golden has; if that is meant, "
            "delete the old golden, then record it",
        )


def _frozen(new: Golden, old: Golden | None) -> Iterator[Refusal]:
    """Look for a loss that stands still where the old one moves, or that never moved."""
    for name, series in new.metrics.items():
        if not is_loss(name):
            continue
        least = max(_FROZEN_STEPS, int(_FROZEN_FRACTION * len(series)))
        before = None if old is None else old.metrics.get(name)
        found = (
            _longest_constant(series.steps, series.values, least)
            if before is None
            else find_frozen(before, series, least_steps=least)
        )
        if found is not None:
            text = f"{name} is the same from step {found[0]} to {found[1]}"
            yield Refusal(rule=GateRule.FROZEN, text=text)


def _of_origin(
    candidate: Candidate, old: Golden | None, *, is_dirty_allowed: bool
) -> Iterator[Refusal]:
    """Look at where it was measured."""
    assert candidate.golden is not None
    origin = candidate.golden.provenance
    if origin is None or (origin.commit is None and not is_dirty_allowed):
        yield Refusal(
            rule=GateRule.NOT_COMMITTED,
            text="the run was not of a git commit, which the golden has to name; commit, or give "
            "--allow-dirty",
        )
    elif origin.is_dirty and not is_dirty_allowed:
        yield Refusal(
            rule=GateRule.DIRTY,
            text="the tree of the run had changes that its commit lacks; commit them and run "
            "again, or give --allow-dirty, which the golden then says",
        )
    platform = candidate.platform
    wanted = PLATFORM_GPUS.get(platform or "")
    gpu = None if origin is None else origin.gpu
    if platform is not None and not candidate.target.stem.endswith(f"_{platform}"):
        text = f"the run was on {platform}, the golden is {candidate.target.name}"
        yield Refusal(rule=GateRule.PLATFORM, text=text)
    elif wanted is not None and platform != CPU_PLATFORM and wanted not in (gpu or ""):
        yield Refusal(
            rule=GateRule.GPU, text=f"{platform} means {wanted}, the run was on {gpu or 'no GPU'}"
        )
    before = None if old is None else old.provenance
    if before is None or origin is None:
        return
    if None not in (before.gpu, gpu) and before.gpu != gpu:
        text = f"the old golden is from {before.gpu}, the run was on {gpu}"
        yield Refusal(rule=GateRule.GPU, text=f"{text}; run it there, or delete the old golden")
    if None not in (before.world_size, origin.world_size) and (
        before.world_size != origin.world_size
    ):
        text = f"the old golden is of {before.world_size} ranks, the run had {origin.world_size}"
        yield Refusal(
            rule=GateRule.WORLD_SIZE, text=f"{text}; if that is meant, delete the old golden"
        )


def _interval(steps: Sequence[int]) -> int:
    """Return the usual distance of two steps; the first one often stands apart."""
    gaps = _gaps(steps)
    return min(gaps.values(), default=1)


def _hole(steps: Sequence[int], interval: int) -> tuple[int, int] | None:
    """Return the steps on both sides of a hole; from step 1 to the first interval is none."""
    for (left, right), gap in _gaps(steps).items():
        if gap != interval and not (left == 1 and right % interval == 0 and right <= interval):
            return left, right
    return None


def _gaps(steps: Sequence[int]) -> Mapping[tuple[int, int], int]:
    return {(a, b): b - a for a, b in pairwise(steps)}


def _longest_constant(
    steps: Sequence[int], values: Sequence[object], least: int
) -> tuple[int, int] | None:
    start = 0
    for end in range(1, len(values) + 1):
        if end < len(values) and values[end] == values[start]:
            continue
        if end - start >= least:
            return steps[start], steps[end - 1]
        start = end
    return None
