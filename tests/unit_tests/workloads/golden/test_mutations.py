"""The comparison, tested by mutation: what is known to slip through other rules must not here.

The table that `benchmarks/compare_curves.py` measures on real trainings, on small curves: every
regression on top of the noise of another platform, against every kind of golden.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.model import (
    NOWHERE,
    Golden,
    Provenance,
    RunEnvironment,
    Value,
    series_of,
)

NUM_STEPS = 100
Curve = dict[int, float]
Mutation = Callable[[Curve], dict[int, Value]]


def curve() -> Curve:
    """Return a loss that falls from 10.9 to about 4, as noisy from step to step as real ones."""
    rng = random.Random(1)
    return {s: 4.0 + 6.9 * math.exp(-s / 30) + rng.gauss(0, 0.03) for s in range(1, NUM_STEPS + 1)}


def moved(seed: int = 0, size: float = 2e-4) -> Curve:
    """Return the curve as another platform has it: step 1 the same, then noise that grows."""
    rng = random.Random(seed)
    return {s: v * (1 + rng.gauss(0, size) * min(1, (s - 1) / 40)) for s, v in curve().items()}


def late(fraction: float) -> Mutation:
    return lambda c: {s: v * (1 + fraction * (s > NUM_STEPS // 2)) for s, v in c.items()}


def spike(fraction: float) -> Mutation:
    return lambda c: {**c, 70: c[70] * (1 + fraction)}


def warp(speed: float) -> Mutation:
    """As a lower learning rate: the curve, `speed` times as fast."""
    return lambda c: {s: c[max(1, round(1 + (s - 1) * speed))] for s in c}


def put(value: float, *steps: int) -> Mutation:
    return lambda c: {**c, **dict.fromkeys(steps, value)}


def drop(*steps: int) -> Mutation:
    return lambda c: {s: v for s, v in c.items() if s not in steps}


MUTATIONS: dict[str, Mutation] = {
    "late +0.1 %": late(0.001),
    "late +0.5 %": late(0.005),
    "late +1 %": late(0.01),
    "late +3 %": late(0.03),
    "late -1 %": late(-0.01),
    "ramp to +1 %": lambda c: {s: v * (1 + 0.01 * s / NUM_STEPS) for s, v in c.items()},
    "lr x0.9": warp(0.9),
    "lr x0.5": warp(0.5),
    "off by one step": lambda c: {s: c[max(1, s - 1)] for s in c},
    "spike +2 %": spike(0.02),
    "spike +10 %": spike(0.1),
    "spike x2": spike(1.0),
    "nan at one step": put(math.nan, 70),
    "nan in the last half": put(math.nan, *range(51, 101)),
    "nan everywhere": put(math.nan, *range(1, 101)),
    "inf at one step": put(math.inf, 70),
    "one step missing": drop(70),
    "a tenth missing": drop(*range(5, 101, 10)),
    "truncated at 99 %": drop(100),
    "truncated at 50 %": drop(*range(51, 101)),
    "frozen in the last half": lambda c: {s: c[min(s, 50)] for s in c},
}
HERE = RunEnvironment(host_class="H100", versions={"torch": "2.13"})
BUMPED = RunEnvironment(host_class="H100", versions={"torch": "2.14"})
MADE = {"host_class": HERE.host_class, "versions": HERE.versions, "precision": "bf16"}
LEARNED = series_of({s: 1e-4 * min(1, (s - 1) / 40) for s in range(1, NUM_STEPS + 1)})
# Where the golden is from, where the run was, and by how much its platform moved it.
GOLDENS: dict[str, tuple[Provenance | None, RunEnvironment, float]] = {
    "unknown": (None, NOWHERE, 2e-4),
    "deterministic": (Provenance(deterministic=True, repeats=2), NOWHERE, 5e-6),
    "deterministic-here": (Provenance(deterministic=True, repeats=2, **MADE), HERE, 0.0),  # type: ignore[arg-type] # spread out
    "deterministic-bumped": (Provenance(deterministic=True, repeats=2, **MADE), BUMPED, 2e-4),  # type: ignore[arg-type] # spread out
    "band": (Provenance(repeats=8, spread={"lm loss": LEARNED}), NOWHERE, 1e-4),
}


def has_passed(name: str, run: dict[int, Value]) -> bool:
    provenance, surroundings, _ = GOLDENS[name]
    golden = Golden(
        path="g",
        metrics={"lm loss": series_of({**curve()}, is_full_precision=True)},
        provenance=provenance,
    )
    observed = {"lm loss": series_of(run, is_full_precision=True)}
    return compare(golden, observed, surroundings=surroundings)[0].passed


@pytest.mark.parametrize("golden", sorted(GOLDENS))
@pytest.mark.parametrize("name", MUTATIONS)
def test_strict_detects(name: str, golden: str) -> None:
    assert not has_passed(golden, MUTATIONS[name](moved(size=GOLDENS[golden][2])))


@pytest.mark.parametrize("golden", sorted(GOLDENS))
def test_strict_passes_what_is_only_another_platform(golden: str) -> None:
    """In Megatron-LM 82 % of the changes of container break an exact test."""
    size = GOLDENS[golden][2]
    assert all(has_passed(golden, {**moved(seed, size)}) for seed in range(20))
