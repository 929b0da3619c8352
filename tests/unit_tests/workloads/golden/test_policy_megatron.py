from __future__ import annotations

import math
import random

import numpy as np
import pytest

from pytest_megatron.workloads.golden.compare.compare import compare, compare_resume
from pytest_megatron.workloads.golden.compare.result import Comparison, ComparisonRule
from pytest_megatron.workloads.golden.model import Golden, Series, Value, series_of
from pytest_megatron.workloads.golden.policy import ComparisonPolicy

Values = dict[int, Value]


def judge(
    metric: str, golden: Values, observed: Values | Series, *, approximate: bool = False
) -> Comparison:
    """Return our answer for one metric."""
    run = observed if isinstance(observed, Series) else series_of(observed)
    (comparison,) = compare(
        Golden(path="golden.json", metrics={metric: series_of(golden)}),
        {metric: run},
        metrics=[metric],
        policy=ComparisonPolicy.MEGATRON,
        nondeterministic=approximate,
    )
    return comparison


# ---- An oracle of its own, written with numpy from a description of Megatron-LM's rules ----

RTOL = {"lm loss": 0.05, "num-zeros": 0.2, "iteration-time": 0.05, "mem-allocated-bytes": 0.05}


def oracle(metric: str, golden: Values, observed: Values, *, approximate: bool) -> bool:
    """Return the verdict of Megatron-LM's rules, in the order in which it tries them."""
    if not golden:
        return False
    verdicts = []
    if metric in {"lm loss", "num-zeros"} and not approximate:
        verdicts.append(bool(np.all(closeness(golden, observed, list(golden), 0.0))))
    if metric == "iteration-time":
        verdicts.append(oracle_time(golden, observed))
    else:
        close = closeness(golden, observed, list(golden), RTOL[metric])
        n = len(golden)
        k = min(max(n // 100, 1), 50)
        verdicts.append(bool(np.all(close) if n == 1 else np.mean(close) >= 1 - k / n))
    return all(verdicts)


def closeness(golden: Values, observed: Values, steps: list[int], rtol: float) -> list[bool]:
    g = np.array([as_number(golden[s]) for s in steps])
    a = np.array([as_number(observed.get(s, "nan")) for s in steps])
    with np.errstate(invalid="ignore"):
        return [bool(close) for close in np.isclose(a, g, rtol=rtol, atol=0)]


def as_number(value: Value) -> float:
    return float("inf") if isinstance(value, str) else value


def oracle_time(golden: Values, observed: Values) -> bool:
    finite = sorted(s for s, v in golden.items() if not isinstance(v, str) and np.isfinite(v))
    if not finite:
        return False
    low, high = (5, 20) if finite[-1] <= 25 else (30, 45)
    steps = [s for s in finite if low <= s <= high]
    if not steps:
        steps = [s for s in finite if s >= low][:4]
    if not steps:
        return False
    with np.errstate(invalid="ignore"):
        g = np.median([as_number(golden[s]) for s in steps])
        a = np.median([as_number(observed.get(s, "nan")) for s in steps])
        return bool(np.isclose(a, g, rtol=0.05, atol=0))


def random_golden(rng: random.Random) -> Values:
    n = rng.choice([0, 1, 1, 2, 2, 3, 4, 7, 11, 21, 26, 50, 100, 199, 200, 301])
    start, interval = rng.choice([1, 1, 2, 5]), rng.choice([1, 1, 1, 5])
    level = rng.choice([0.0, 1e-3, 0.25, 10.9, 1500.0, -2.5, 6e9])
    odd: list[Value] = ["nan", "inf", "", math.nan, math.inf, -math.inf, 0.0]
    share = rng.choice([0.0, 0.0, 0.02, 0.3, 1.0])
    values: Values = {}
    for i in range(n):
        number = level * (1 + rng.choice([0.0, rng.uniform(-0.3, 0.3)]))
        values[start + i * interval] = rng.choice(odd) if rng.random() < share else number
    return values


def random_run(rng: random.Random, golden: Values) -> Values:
    """Return a run that is the golden but for some steps."""
    share = rng.choice([0.0, 0.005, 0.02, 0.3, 1.0])
    factors = [0.8, 0.95, 0.950001, 1.05, 1.049999, 1.2, 1.2000001, 1 + 1e-12, 1.00001, -1.0, 0.0]
    run: Values = {}
    for step, value in golden.items():
        if rng.random() >= share:
            run[step] = value
            continue
        match rng.randrange(4):
            case 0:
                pass  # missing
            case 1:
                odd: list[Value] = ["nan", math.nan, math.inf, -math.inf, 9999.0, 0.0]
                run[step] = rng.choice(odd)
            case _:
                base = 1.0 if isinstance(value, str) else value
                run[step] = base * rng.choice(factors)
    if rng.random() < 0.2:
        run[10_000] = 1.0
    return run


@pytest.mark.parametrize("seed", range(8))
def test_the_verdict_is_that_of_an_independent_reading_of_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2500):
        metric = rng.choice(sorted(RTOL))
        approximate = rng.random() < 0.6
        golden = random_golden(rng)
        observed = random_run(rng, golden)
        ours = judge(metric, golden, observed, approximate=approximate).passed
        theirs = oracle(metric, golden, observed, approximate=approximate)
        assert ours == theirs, (metric, approximate, golden, observed)


# ---- Edge cases that were measured with Megatron-LM, one by one ----

LOSS: Values = {step: 10.0 - step * 0.01 for step in range(1, 101)}
TIMES: Values = dict.fromkeys(range(1, 101), 0.5)


def changed(values: Values, changes: dict[int, Value]) -> Values:
    return {**values, **changes}


def test_an_exact_mismatch_of_the_fifth_decimal_fails() -> None:
    comparison = judge("lm loss", LOSS, changed(LOSS, {40: 9.60001}))
    assert (comparison.passed, comparison.rule) == (False, ComparisonRule.EXACT)
    assert comparison.first is not None
    assert comparison.first.step == 40


@pytest.mark.parametrize(
    ("golden", "observed"),
    [
        pytest.param("nan", "nan", id="nan-nan"),
        pytest.param("nan", None, id="nan-missing"),
        pytest.param("nan", math.inf, id="nan-inf"),
        pytest.param("nan", "banana", id="nan-any-text"),
        pytest.param("inf", "nan", id="any-text-nan"),
    ],
)
@pytest.mark.parametrize("approximate", [False, True])
def test_text_equals_text_missing_and_inf_even_at_every_step(
    golden: Value, observed: Value | None, *, approximate: bool
) -> None:
    run: Values = {} if observed is None else {1: observed, 2: observed}
    assert judge("lm loss", {1: golden, 2: golden}, run, approximate=approximate).passed


def test_iteration_time_thirty_percent_faster_fails() -> None:
    comparison = judge("iteration-time", TIMES, dict.fromkeys(TIMES, 0.35))
    assert not comparison.passed
    assert comparison.summary is not None
    assert comparison.summary.name == "median of steps 30 to 45"


def test_iteration_time_of_a_resume_is_that_of_its_warm_up() -> None:
    first = {"iteration-time": series_of(TIMES)}
    second = {"iteration-time": series_of({s: 3.0 if s < 55 else 0.5 for s in range(51, 101)})}
    (found,) = compare_resume(
        first, second, train_iters=100, metrics=[*first], policy=ComparisonPolicy.MEGATRON
    )
    assert not found.passed


@pytest.mark.parametrize(
    ("metrics", "rule"),
    [
        pytest.param(["grad-norm"], ComparisonRule.UNKNOWN, id="outside-the-table"),
        pytest.param(["num-zeros"], ComparisonRule.NO_GOLDEN, id="not-in-the-golden"),
        pytest.param(["iteration-time"], ComparisonRule.NO_METRIC, id="not-in-the-run"),
    ],
)
def test_a_metric_that_cannot_be_compared_fails_by_name(
    metrics: list[str], rule: ComparisonRule
) -> None:
    golden = Golden(
        path="golden.json",
        metrics={"lm loss": series_of({1: 1.0}), "iteration-time": series_of({1: 1.0})},
    )
    (comparison,) = compare(
        golden, {"lm loss": series_of({1: 1.0})}, metrics=metrics, policy=ComparisonPolicy.MEGATRON
    )
    assert (comparison.passed, comparison.rule) == (False, rule)


def test_a_run_of_full_precision_is_rounded_as_the_extraction_does() -> None:
    run = series_of({1: 4.87529993057251}, is_full_precision=True)
    assert judge("lm loss", {1: 4.8753}, run).passed


def test_the_extraction_refuses_a_value_that_is_not_finite() -> None:
    run = series_of({1: 1.0, 2: math.nan, 3: 1.0}, is_full_precision=True)
    golden: Values = {1: 1.0, 2: 1.0, 3: 1.0}
    assert not judge("lm loss", golden, run, approximate=True).passed


def test_lm_loss_and_num_zeros_are_the_default() -> None:
    series = series_of({1: 1.0})
    golden = Golden(path="g", metrics={"iteration-time": series, "lm loss": series})
    comparisons = compare(golden, golden.metrics, policy=ComparisonPolicy.MEGATRON)
    assert [c.metric for c in comparisons] == ["lm loss"]
