"""What is seen of a reinforcement-learning run, and what Megatron-LM's comparison lets through."""

from __future__ import annotations

import math

import pytest

from pytest_megatron.workloads.golden.compare.result import ComparisonRule, render
from pytest_megatron.workloads.golden.compare.rl import RlRules, compare_rl
from pytest_megatron.workloads.golden.model import (
    Golden,
    MetricMap,
    Provenance,
    rl_metrics,
    series_of,
)
from pytest_megatron.workloads.golden.policy import ComparisonPolicy

STEPS = range(1, 11)
STRICT = RlRules(policy=ComparisonPolicy.STRICT)
MEGATRON = RlRules(policy=ComparisonPolicy.MEGATRON)
SOUND: MetricMap = {
    "lm loss": series_of({s: 0.01 * (-1) ** s for s in STEPS}, is_full_precision=True),
    "iteration-time": series_of({s: 2.0 for s in STEPS if s > 1}, is_full_precision=True),
    "mem-allocated-bytes": series_of(dict.fromkeys(STEPS, 1000.0), is_full_precision=True),
}
METRICS = rl_metrics(["iteration-time", "mem-allocated-bytes"])


def scaled(metric: str, factor: float, *, at: int | None = None) -> MetricMap:
    values = {
        s: v if at not in (None, s) else v * factor
        for s, v in SOUND[metric].items()
        if isinstance(v, float)
    }
    return {**SOUND, metric: series_of(dict(values), is_full_precision=True)}


def failed(observed: MetricMap, rules: RlRules = STRICT, golden: MetricMap = SOUND) -> list[str]:
    answers = compare_rl(Golden(path="g.json", metrics=golden), observed, METRICS, rules)
    return [f"{a.metric}: {a.rule.value}" for a in answers if not a.passed]


def test_the_loss_is_always_among_what_is_compared() -> None:
    assert rl_metrics(None) == ("lm loss",)
    assert rl_metrics(["iteration-time"]) == ("lm loss", "iteration-time")
    assert rl_metrics(["iteration-time", "lm-loss"]) == ("lm loss", "iteration-time")


@pytest.mark.parametrize("name", ["lm loss", "lm-loss"])
def test_a_loss_that_moved_fails_under_either_name(name: str) -> None:
    """Megatron-LM looks for `lm-loss`, extracts `lm loss`, and never compares the loss."""
    moved = scaled("lm loss", 1.05, at=4)
    observed = {name if k == "lm loss" else k: v for k, v in moved.items()}
    golden = {name if k == "lm loss" else k: v for k, v in SOUND.items()}
    assert failed(observed) == failed(moved, golden=golden) == ["lm loss: band"]
    assert failed(moved, MEGATRON) == []


def test_a_metric_that_the_run_lacks_fails() -> None:
    """In Megatron-LM a listed metric that is absent from the run passes."""
    for name in SOUND:
        without = {k: v for k, v in SOUND.items() if k != name}
        assert failed(without) == [f"{name}: {ComparisonRule.NO_METRIC.value}"]
        assert failed(SOUND, golden=without) == [f"{name}: {ComparisonRule.NO_GOLDEN.value}"]


def test_memory_is_judged_both_ways() -> None:
    """In Megatron-LM memory only has an upper bound."""
    assert failed(scaled("mem-allocated-bytes", 1.11)) == ["mem-allocated-bytes: peak"]
    assert failed(scaled("mem-allocated-bytes", 0.89)) == ["mem-allocated-bytes: peak"]
    assert failed(scaled("mem-allocated-bytes", 0.89), MEGATRON) == []
    assert failed(scaled("mem-allocated-bytes", 1.09)) == []


def test_a_slower_run_fails_and_a_faster_one_passes() -> None:
    assert failed(scaled("iteration-time", 1.2)) == ["iteration-time: median"]
    assert failed(scaled("iteration-time", 0.8)) == []
    assert failed(scaled("iteration-time", 0.8), MEGATRON) == ["iteration-time: median"]


def test_the_warm_up_can_be_left_out_of_the_time() -> None:
    slow_start = {s: 9.0 if s < 7 else 2.0 for s in STEPS if s > 1}
    observed = {**SOUND, "iteration-time": series_of(dict(slow_start), is_full_precision=True)}
    assert failed(observed) == ["iteration-time: median"]
    assert failed(observed, RlRules(policy=ComparisonPolicy.STRICT, start=5)) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, "text"])
def test_a_loss_that_is_no_number_fails(value: float | str) -> None:
    values = dict(SOUND["lm loss"].items()) | {3: value}
    observed = {**SOUND, "lm loss": series_of(values, is_full_precision=True)}
    assert len(failed(observed)) == 1


def test_a_run_that_ends_early_fails() -> None:
    values = {s: v for s, v in SOUND["lm loss"].items() if s < 9}
    observed = {**SOUND, "lm loss": series_of(values, is_full_precision=True)}
    assert failed(observed) == ["lm loss: truncated"]


def test_a_band_learned_from_repeats_widens_what_may_differ() -> None:
    moved = scaled("lm loss", 1.05, at=4)
    learned = Provenance(spread={"lm loss": 0.02})
    golden = Golden(path="g.json", metrics=SOUND, provenance=learned)
    assert all(a.passed for a in compare_rl(golden, moved, METRICS, STRICT))


def test_a_loss_of_zero_stays_zero() -> None:
    zero = {**SOUND, "lm loss": series_of(dict.fromkeys(STEPS, 0.0))}
    wrong = {**SOUND, "lm loss": series_of({s: 0.0 if s != 5 else 0.1 for s in STEPS})}
    assert failed(zero, golden=zero) == []
    (answer, *_) = compare_rl(Golden(path="g.json", metrics=zero), wrong, METRICS, STRICT)
    assert render(answer).startswith("lm loss, step 5: observed 0.1, golden 0")
