"""The comparison, tested by mutation: what is known to slip through other rules must not here."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from pytest_megatron.golden.compare import Policy, compare
from pytest_megatron.golden.model import Value, series_of
from pytest_megatron.golden.provenance import Golden, Provenance

NUM_STEPS = 100
Curve = dict[int, float]
Mutation = Callable[[Curve], dict[int, Value]]


def curve() -> Curve:
    """Return a loss that falls from 10.9 to about 4, as noisy from step to step as real ones."""
    rng = random.Random(1)
    return {s: 4.0 + 6.9 * math.exp(-s / 30) + rng.gauss(0, 0.03) for s in range(1, NUM_STEPS + 1)}


def late(fraction: float) -> Mutation:
    return lambda c: {s: v * (1 + fraction * (s > NUM_STEPS // 2)) for s, v in c.items()}


def spike(fraction: float) -> Mutation:
    return lambda c: {**c, 70: c[70] * (1 + fraction)}


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
    "off by one step": lambda c: {s: c[max(1, s - 1)] for s in c},
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
PROVENANCES = {"deterministic": Provenance(deterministic=True, repeats=2), "unknown": None}


@pytest.mark.parametrize("provenance", sorted(PROVENANCES))
@pytest.mark.parametrize("name", MUTATIONS)
def test_strict_detects(name: str, provenance: str) -> None:
    golden = Golden(
        path="g",
        metrics={"lm loss": series_of({**curve()}, is_full_precision=True)},
        provenance=PROVENANCES[provenance],
    )
    run = {"lm loss": series_of(MUTATIONS[name](curve()), is_full_precision=True)}
    (comparison,) = compare(golden, run)
    assert not comparison.passed


def test_megatron_approximate_misses_what_its_rules_let_through() -> None:
    golden = Golden(path="g", metrics={"lm loss": series_of({**curve()})})
    missed = {
        name
        for name, mutate in MUTATIONS.items()
        if compare(
            golden,
            {"lm loss": series_of(mutate(curve()))},
            policy=Policy.MEGATRON,
            nondeterministic=True,
        )[0].passed
    }
    assert missed == {
        *("late +0.1 %", "late +0.5 %", "late +1 %", "late +3 %", "late -1 %", "ramp to +1 %"),
        *("spike +10 %", "spike x2", "nan at one step", "inf at one step", "one step missing"),
        *("truncated at 99 %", "off by one step"),
    }


@pytest.mark.parametrize("seed", range(5))
def test_strict_passes_the_noise_of_a_change_of_container(seed: int) -> None:
    rng = random.Random(seed)
    golden = Golden(path="g", metrics={"lm loss": series_of({**curve()})})
    noisy: dict[int, Value] = {
        s: v * (1 + rng.gauss(0, 2e-4) * (s > 1)) for s, v in curve().items()
    }
    assert compare(golden, {"lm loss": series_of(noisy)})[0].passed
