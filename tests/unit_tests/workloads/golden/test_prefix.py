"""A run that is not over: it may be called failed only if no values to come could mend it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.compare.result import (
    Comparison,
    ComparisonRule,
    continued_like,
)
from pytest_megatron.workloads.golden.compare.rl import RlRules, compare_rl
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

Values = dict[int, Value]
Compared = Callable[[Golden, MetricMap], Sequence[Comparison]]
HOME = RunEnvironment(host_class="here", image="i", versions={"torch": "2"})
SCALES = (1e-7, 1e-4, 1e-3, 1e-2, 0.1)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A way to compare, and the golden's curve for it."""

    metric: str = "lm loss"
    num_steps: int = 50
    provenance: Provenance | None = None
    policy: ComparisonPolicy = ComparisonPolicy.STRICT
    nondeterministic: bool = False
    surroundings: RunEnvironment = NOWHERE
    is_rl: bool = False
    is_full_precision: bool = True

    def golden(self) -> Golden:
        curve: Values = {
            s: 2.7 + 2.2 * math.exp(-s / 20) + math.sin(s) / 50
            for s in range(1, self.num_steps + 1)
        }
        if not self.is_full_precision:
            curve = {s: round(v, 5) for s, v in curve.items() if isinstance(v, float)}
        series = series_of(curve, is_full_precision=self.is_full_precision)
        return Golden(path="golden", metrics={self.metric: series}, provenance=self.provenance)

    def failed(self, golden: Golden, observed: MetricMap) -> bool:
        if self.is_rl:
            found = compare_rl(golden, observed, [self.metric], RlRules(policy=self.policy))
        else:
            found = compare(
                golden,
                observed,
                metrics=[self.metric],
                policy=self.policy,
                nondeterministic=self.nondeterministic,
                surroundings=self.surroundings,
            )
        return any(not one.passed and not one.is_golden_to_blame for one in found)


AT_HOME = Provenance(
    deterministic=True,
    repeats=3,
    precision="bf16",
    host_class="here",
    image="i",
    versions={"torch": "2"},
    spread={"lm loss": 0.0},
)
LEARNED = Provenance(repeats=5, precision="bf16", spread={"lm loss": 1e-4}, host_class="here")
MEGATRON = ComparisonPolicy.MEGATRON
SETTINGS = {
    "no-repeats": Setting(),
    "few-steps": Setting(num_steps=12),
    "exact": Setting(provenance=AT_HOME, surroundings=HOME),
    "learned": Setting(provenance=LEARNED),
    "long": Setting(num_steps=240),
    "five-decimals": Setting(is_full_precision=False),
    "grad-norm": Setting(metric="grad-norm"),
    "count": Setting(metric="num-zeros"),
    "time": Setting(metric="iteration-time", provenance=AT_HOME, surroundings=HOME),
    "memory": Setting(metric="mem-allocated-bytes", provenance=AT_HOME, surroundings=HOME),
    "megatron": Setting(policy=MEGATRON, is_full_precision=False),
    "megatron-approximate": Setting(policy=MEGATRON, nondeterministic=True, num_steps=240),
    "megatron-three-steps": Setting(policy=MEGATRON, nondeterministic=True, num_steps=3),
    "megatron-time": Setting(policy=MEGATRON, metric="iteration-time"),
    "rl": Setting(is_rl=True),
    "rl-time": Setting(is_rl=True, metric="iteration-time"),
    "rl-memory": Setting(is_rl=True, metric="mem-allocated-bytes"),
}


def a_run(golden: Values, rng: random.Random) -> Values:
    """Return a run: noise from some step on, maybe with a spike, a frozen part, a hole or nan."""
    noise, start = rng.choice(SCALES), rng.randrange(len(golden))
    shift = rng.choice((0.0, 0.0, 3e-4, 1e-2, -0.2))
    run: Values = {
        s: v * (1 + (s > start) * (shift + rng.gauss(0, noise)))
        for s, v in golden.items()
        if isinstance(v, float)
    }
    step = rng.choice(list(run))
    before = run.get(step - 1, run[step])
    fault = rng.choice(("none", "none", "spike", "nan", "hole", "frozen"))
    if fault == "spike":
        run[step] = 1.05 * float(run[step])
    elif fault == "nan":
        run[step] = rng.choice((math.nan, math.inf))
    elif fault == "hole":
        del run[step]
    elif fault == "frozen":
        run.update(dict.fromkeys(range(step, min(step + 12, len(golden))), before))
    return run


def continuations(golden: Values, prefix: Values, run: Values, rng: random.Random) -> list[Values]:
    """Return what may come after a prefix: the run itself, and what could mend each layer."""
    ahead = [s for s in golden if s not in prefix]
    seen = {s: (v, golden[s]) for s, v in prefix.items() if s in golden}
    off = math.fsum(
        v - g
        for v, g in seen.values()
        if isinstance(v, float) and isinstance(g, float) and math.isfinite(v)
    )
    at = {s: v for s, v in golden.items() if isinstance(v, float)}
    last = list(prefix.values())[-1]
    scale = rng.choice(SCALES)
    parts: list[Values] = [
        {s: v for s, v in run.items() if s not in prefix},
        {s: at[s] for s in ahead},
        {s: at[s] - off / len(ahead) for s in ahead},  # mends a mean
        {s: at[s] - off / min(10, len(ahead)) * (i < 10) for i, s in enumerate(ahead)},
        {s: at[s] * (1 + rng.choice((-1, 1)) * scale) for s in ahead},  # company for an outlier
        {s: at[s] * (1 + scale * (i < 8)) for i, s in enumerate(ahead)},
        dict.fromkeys(ahead, last),  # goes on frozen
        {**{s: at[s] for s in ahead}, len(golden) + 1: 1.0},
        {},
    ]
    return [{**prefix, **part} for part in parts]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_run_that_fails_before_its_end_fails_whatever_follows(setting: Setting) -> None:
    golden = setting.golden()
    values = dict(golden.metrics[setting.metric].items())
    for seed in range(20):
        rng = random.Random(seed)
        run = a_run(values, rng)
        for length in sorted({rng.randrange(1, len(run) + 1) for _ in range(3)}):
            prefix = dict(list(run.items())[:length])
            whole = continued_like(golden.metrics, measured(setting, prefix))
            if not setting.failed(golden, whole) or not prefix.keys() < values.keys():
                continue
            for following in continuations(values, prefix, run, rng):
                assert setting.failed(golden, measured(setting, following)), (seed, length)


def measured(setting: Setting, values: Values) -> MetricMap:
    return {setting.metric: series_of(values, is_full_precision=True)}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_run_that_has_all_steps_fails_exactly_as_at_its_end(setting: Setting) -> None:
    golden = setting.golden()
    values = dict(golden.metrics[setting.metric].items())
    verdicts: set[bool] = set()
    for seed in range(30):
        run = measured(setting, {**values, **a_run(values, random.Random(seed))})
        verdict = setting.failed(golden, run)
        assert setting.failed(golden, continued_like(golden.metrics, run)) == verdict
        verdicts.add(verdict)
    assert True in verdicts or setting.metric in ("iteration-time", "mem-allocated-bytes")


def prefix_comparison(setting: Setting, values: Values) -> Comparison:
    golden = setting.golden()
    (found,) = compare(
        golden,
        continued_like(golden.metrics, measured(setting, values)),
        metrics=[setting.metric],
        policy=setting.policy,
        nondeterministic=setting.nondeterministic,
        surroundings=setting.surroundings,
    )
    return found


def first_steps(setting: Setting, num_steps: int, factor: float = 1.0) -> Values:
    values = setting.golden().metrics[setting.metric].items()
    return {s: v * factor for s, v in values if isinstance(v, float) and s <= num_steps}


@pytest.mark.parametrize(
    ("name", "at", "factor", "rule"),
    [
        ("no-repeats", 9, math.nan, ComparisonRule.NAN),
        ("no-repeats", 9, math.inf, ComparisonRule.INF),
        ("no-repeats", 1, 1.01, ComparisonRule.STEP_1),
        ("no-repeats", 4, 1.01, ComparisonRule.EARLY),
        ("no-repeats", 20, 1.02, ComparisonRule.OUTLIER),
        ("exact", 20, 1.00001, ComparisonRule.EXACT),
        ("grad-norm", 20, math.nan, ComparisonRule.NAN),
        ("megatron", 20, 1.00001, ComparisonRule.EXACT),
        ("megatron-approximate", 20, math.nan, ComparisonRule.APPROXIMATE),
    ],
)
def test_one_step_decides(name: str, at: int, factor: float, rule: ComparisonRule) -> None:
    setting = SETTINGS[name]
    values = first_steps(setting, 25)
    assert prefix_comparison(setting, values).passed
    found = prefix_comparison(setting, {**values, at: float(values[at]) * factor})
    assert (found.passed, found.rule) == (False, rule)
    assert found.first is not None
    assert found.first.step == at


def test_as_many_steps_outside_as_none_may_be_decide() -> None:
    setting = SETTINGS["no-repeats"]  # 1 of 50 steps may be outside of its band
    off = {s: 1.003 * float(v) for s, v in first_steps(setting, 25).items()}
    values = first_steps(setting, 20)
    assert prefix_comparison(setting, {**values, 21: off[21]}).passed
    found = prefix_comparison(setting, {**values, 21: off[21], 22: off[22]})
    assert (found.passed, found.rule) == (False, ComparisonRule.BAND)
    assert found.deviation.num_compared == 22


def test_a_window_of_a_long_training_decides_once_it_is_whole() -> None:
    setting = SETTINGS["long"]
    shifted = first_steps(setting, 79, 1.02)
    values = {**shifted, **first_steps(setting, 60)}
    assert prefix_comparison(setting, values).passed
    found = prefix_comparison(setting, {**values, **first_steps(setting, 80, 1.02), **values})
    assert (found.passed, found.rule) == (False, ComparisonRule.WINDOW)


def test_a_run_that_stands_still_may_be_joined_by_its_golden() -> None:
    values: Values = {s: 2.0 + 1e-4 * max(0, 10 - s) for s in range(1, 41)}
    golden = Golden(path="golden", metrics={"lm loss": series_of(values)})
    still: Values = {**values, **dict.fromkeys(range(4, 41), 2.0)}
    early = measured(Setting(), {s: v for s, v in still.items() if s <= 8})
    (found,) = compare(golden, continued_like(golden.metrics, early))
    assert found.passed
    (found,) = compare(golden, measured(Setting(), still))
    assert found.passed


@pytest.mark.parametrize("name", ["count", "time", "memory", "megatron-time", "rl-time"])
def test_averages_decide_nothing_before_all_their_steps_are_there(name: str) -> None:
    setting = SETTINGS[name]
    golden = setting.golden()
    run = measured(setting, first_steps(setting, 44, 3.0))
    assert not setting.failed(golden, continued_like(golden.metrics, run))


def test_a_step_that_is_missing_may_come_late() -> None:
    values = first_steps(Setting(), 25)
    del values[7]
    assert prefix_comparison(Setting(), values).passed


def test_a_metric_that_has_not_come_yet_may_come() -> None:
    golden = Setting().golden()
    (found,) = compare(golden, continued_like(golden.metrics, {}), metrics=["lm loss"])
    assert found.passed


def test_a_golden_that_lacks_the_metric_is_to_blame_not_the_run() -> None:
    golden = Setting().golden()
    found = compare(golden, continued_like(golden.metrics, {}), metrics=["lm loss", "other"])
    assert [one.is_golden_to_blame for one in found] == [False, True]


def test_nan_in_a_golden_of_megatron_lm_is_nothing_that_a_run_lacks() -> None:
    values: Values = {1: 3.0, 2: math.nan, 3: 2.0, 4: "nan", 5: 1.0}
    golden = Golden(path="golden", metrics={"lm loss": series_of(values)})
    run = continued_like(golden.metrics, {"lm loss": series_of({1: 3.0}, is_full_precision=True)})
    assert run["lm loss"].pending == {3, 4, 5}
