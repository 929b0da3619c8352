"""The rules of `benchmarks/compare_curves.py`: how others compare two curves, and how we do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pytest_megatron.workloads.golden.build import combine, spread_of
from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.model import (
    NOWHERE,
    Golden,
    MetricMap,
    Provenance,
    RunEnvironment,
    Value,
    series_of,
)
from pytest_megatron.workloads.golden.policy import ComparisonPolicy

LOSS = "lm loss"
HERE = RunEnvironment(host_class="here", versions={"torch": "2.13.0"})
THERE = RunEnvironment(host_class="here", versions={"torch": "2.14.0"})

Curve: TypeAlias = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run and what its golden is made of.

    Attributes:
        repeats: The losses of each clean run, from step 1.
        run: Step to value; what it lacks is missing.
        precision: What the model computed in.
        surroundings: Of the run; the golden is from `HERE`.
    """

    repeats: Sequence[Curve]
    run: Mapping[int, Value]
    precision: str
    surroundings: RunEnvironment = HERE


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One way to compare: a row of the tables.

    Attributes:
        repeats: Of how many its golden is made; 0 for repeats that agree bit for bit.
        fails: Whether it refuses a run.
    """

    name: str
    repeats: int
    fails: Callable[[Pair], bool]


def steps_of(losses: Curve) -> dict[int, float]:
    """Return step, from 1, to loss."""
    return dict(enumerate(losses, start=1))


def all_rules() -> list[Rule]:
    """Return the rules of others, then ours."""
    return [
        Rule(name="Megatron-LM, approximate (5 %)", repeats=1, fails=megatron_approximate),
        Rule(name="Megatron-LM, exact", repeats=1, fails=megatron_exact),
        Rule(name="allclose 1 %", repeats=1, fails=all_close),
        Rule(name="mean relative < 1e-3", repeats=1, fails=mean_within),
        Rule(name="1.5 x the largest deviation of 5 repeats", repeats=5, fails=flat_tolerance),
        Rule(name="1.5 x the largest deviation of 8 repeats", repeats=8, fails=flat_tolerance),
        Rule(name="strict, golden without repeats", repeats=1, fails=ours),
        Rule(name="strict, 2 repeats", repeats=2, fails=ours),
        Rule(name="strict, band of 3 repeats", repeats=3, fails=ours),
        Rule(name="strict, band of 5 repeats", repeats=5, fails=ours),
        Rule(name="strict, band of 8 repeats", repeats=8, fails=ours),
        Rule(name="strict, band of 5 repeats, platform known", repeats=5, fails=ours_told),
        Rule(name="strict, band of 8 repeats, platform known", repeats=8, fails=ours_told),
        Rule(name="strict, deterministic golden, platform known", repeats=0, fails=ours_told),
    ]


def megatron_approximate(pair: Pair) -> bool:
    """The approximate test of Megatron-LM."""
    return verdict(
        of_five_decimals(pair), as_extracted(pair), ComparisonPolicy.MEGATRON, nondeterministic=True
    )


def megatron_exact(pair: Pair) -> bool:
    """The exact test of Megatron-LM."""
    return verdict(of_five_decimals(pair), as_extracted(pair), ComparisonPolicy.MEGATRON)


def all_close(pair: Pair) -> bool:
    """Every step within 1 %, as `numpy.allclose` has it."""
    return not all(abs(o - g) <= 0.01 * abs(g) for o, g in values_of(pair))


def mean_within(pair: Pair) -> bool:
    """The mean relative deviation over the steps that both have, below 1e-3."""
    shared = [(o - g) / g for o, g in values_of(pair) if o - o == 0]
    return bool(shared) and not abs(statistics.fmean(shared)) < 1e-3


def flat_tolerance(pair: Pair) -> bool:
    """One tolerance for all steps: 1.5 times the largest deviation of the repeats' mean."""
    means = [statistics.fmean(values) for values in zip(*pair.repeats, strict=True)]
    largest = max(
        abs(value - mean) / mean
        for repeat in pair.repeats
        for value, mean in zip(repeat, means, strict=True)
    )
    observed = (o for o, _ in values_of(pair))
    return not all(
        abs(o - mean) <= 1.5 * largest * mean for o, mean in zip(observed, means, strict=True)
    )


def ours(pair: Pair) -> bool:
    """The strict policy, with what the repeats say; of another platform it is not told."""
    return verdict(golden_of(pair), pair.run, ComparisonPolicy.STRICT)


def ours_told(pair: Pair) -> bool:
    """The same, where the golden's provenance shows that the platform is another."""
    return verdict(
        golden_of(pair), pair.run, ComparisonPolicy.STRICT, surroundings=pair.surroundings
    )


def golden_of(pair: Pair) -> Golden:
    """Make a golden as `--golden refresh` does; of one run there is no provenance."""
    maps: list[MetricMap] = [
        {LOSS: series_of({**steps_of(curve)}, is_full_precision=True)} for curve in pair.repeats
    ]
    metrics = combine(maps, (LOSS,))
    if len(maps) == 1:
        return Golden(path="golden", metrics=metrics)
    spread = spread_of(maps, metrics)
    provenance = Provenance(
        host_class=HERE.host_class,
        versions=HERE.versions,
        precision=pair.precision,
        repeats=len(maps),
        deterministic=spread[LOSS] == 0.0,
        spread=spread,
    )
    return Golden(path="golden", metrics=metrics, provenance=provenance)


def verdict(
    golden: Golden,
    run: Mapping[int, Value],
    policy: ComparisonPolicy,
    *,
    nondeterministic: bool = False,
    surroundings: RunEnvironment = NOWHERE,
) -> bool:
    """Return whether a run fails."""
    (comparison,) = compare(
        golden,
        {LOSS: series_of(run, is_full_precision=True)},
        metrics=[LOSS],
        policy=policy,
        nondeterministic=nondeterministic,
        surroundings=surroundings,
    )
    return not comparison.passed


def of_five_decimals(pair: Pair) -> Golden:
    """Make a golden as Megatron-LM does, of the last repeat."""
    rounded = {step: round(loss, 5) for step, loss in steps_of(pair.repeats[-1]).items()}
    return Golden(path="golden", metrics={LOSS: series_of({**rounded})})


def as_extracted(pair: Pair) -> dict[int, Value]:
    """Return a run with text where Megatron-LM's goldens have it; its extraction would refuse."""
    return {s: v if isinstance(v, float) and v - v == 0 else str(v) for s, v in pair.run.items()}


def values_of(pair: Pair) -> list[tuple[float, float]]:
    """Return (observed, golden) at the steps of the golden; what is missing is nan."""
    found = []
    for step, golden in steps_of(pair.repeats[-1]).items():
        value = pair.run.get(step)
        found.append((value if isinstance(value, float) else float("nan"), golden))
    return found
