from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pytest_megatron.workloads.golden.compare.compare import compare, compare_resume
from pytest_megatron.workloads.golden.compare.result import (
    Comparison,
    ComparisonRule,
    StepDifference,
    render,
)
from pytest_megatron.workloads.golden.model import (
    NOWHERE,
    Golden,
    Provenance,
    RunEnvironment,
    Value,
    series_of,
    to_float32,
)

Values = dict[int, Value]
HOST = "1x H100"


def loss_curve(num_steps: int = 50) -> dict[int, float]:
    return {s: 2.7 + 2.2 * math.exp(-s / 20) for s in range(1, num_steps + 1)}


def judge(
    golden: Values,
    observed: Values,
    *,
    metric: str = "lm loss",
    provenance: Provenance | None = None,
    surroundings: RunEnvironment = NOWHERE,
    is_full_precision: bool = True,
) -> Comparison:
    (comparison,) = compare(
        Golden(
            path="golden.json",
            metrics={metric: series_of(golden, is_full_precision=is_full_precision)},
            provenance=provenance,
        ),
        {metric: series_of(observed, is_full_precision=True)},
        metrics=[metric],
        surroundings=surroundings,
    )
    return comparison


DETERMINISTIC = Provenance(deterministic=True, repeats=2)
LOSS: Values = {**loss_curve()}


def scaled(values: Values, factor: float) -> Values:
    return {s: v * factor for s, v in values.items() if isinstance(v, float)}


def test_an_equal_run_passes_and_is_called_bitwise_equal() -> None:
    comparison = judge(LOSS, LOSS)
    assert (comparison.passed, comparison.rule) == (True, ComparisonRule.BITWISE)
    assert comparison.notes == ("bitwise equal",)


def test_the_shortest_decimal_of_a_float32_is_bitwise_equal_to_it() -> None:
    assert judge({1: 4.8753}, {1: 4.87529993057251}).rule is ComparisonRule.BITWISE


def test_a_golden_of_five_decimals_is_equal_to_a_run_that_rounds_to_it() -> None:
    comparison = judge({1: 4.8753}, {1: 4.8753012}, is_full_precision=False)
    assert comparison.notes == ("equal to five decimals",)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param({25: math.nan}, ComparisonRule.NAN, id="nan"),
        pytest.param({25: math.inf}, ComparisonRule.INF, id="inf"),
        pytest.param({25: "nan"}, ComparisonRule.TEXT, id="text"),
        pytest.param({25: None}, ComparisonRule.MISSING, id="missing"),
        pytest.param({50: None}, ComparisonRule.TRUNCATED, id="truncated"),
        pytest.param({1: None, 50: None}, ComparisonRule.MISSING, id="missing-first-and-last"),
        pytest.param({3: None, 25: math.nan}, ComparisonRule.MISSING, id="first-decides"),
    ],
)
def test_missing_nan_inf_and_text_are_different_failures(
    change: dict[int, Value | None], rule: ComparisonRule
) -> None:
    """Missing, NaN, inf and text are four things, and none equals another."""
    observed: Values = {s: v for s, v in {**LOSS, **change}.items() if v is not None}
    comparison = judge(LOSS, observed)
    step = min(change)
    assert (comparison.passed, comparison.rule) == (False, rule)
    golden = to_float32(loss_curve()[step])
    # As text: nan equals nan in a dataclass up to Python 3.12 only.
    expected = StepDifference(step=step, observed=observed.get(step), golden=golden)
    assert repr(comparison.first) == repr(expected)


@pytest.mark.parametrize("bad", ["nan", math.nan, math.inf], ids=["text", "nan", "inf"])
def test_a_golden_with_a_hole_is_unusable_for_a_loss(bad: Value) -> None:
    golden: Values = {**LOSS, 40: bad}
    assert judge(golden, golden).rule is ComparisonRule.GOLDEN_UNUSABLE


def test_an_empty_golden_block_is_unusable() -> None:
    assert judge({}, LOSS).rule is ComparisonRule.GOLDEN_UNUSABLE


def test_steps_after_the_golden_are_reported_only() -> None:
    comparison = judge(LOSS, {**LOSS, 51: 1.0, 52: 1.0})
    assert comparison.passed
    assert comparison.notes[-1] == "2 steps after the golden's last, 50, not compared"


@pytest.mark.parametrize("step", [1, 2, 25, 50])
@pytest.mark.parametrize("change", [1e-3, -1e-3])
def test_one_value_off_by_a_thousandth_fails_a_deterministic_golden(
    step: int, change: float
) -> None:
    """Megatron-LM does not name the first step that differs."""
    observed: Values = {**LOSS, step: loss_curve()[step] + change}
    comparison = judge(LOSS, observed, provenance=DETERMINISTIC)
    assert not comparison.passed
    assert comparison.first is not None
    assert comparison.first.step == step


def test_the_last_digits_of_another_instruction_set_pass_a_deterministic_golden() -> None:
    """In Megatron-LM the fifth decimal fails with every new container."""
    comparison = judge(LOSS, scaled(LOSS, 1 + 3e-6), provenance=DETERMINISTIC)
    assert comparison.passed
    assert comparison.notes[0] == "within the band (largest 3.1e-06)"


def test_without_provenance_a_few_steps_may_leave_the_band() -> None:
    """In Megatron-LM one step of a hundred may be anything."""
    curve = loss_curve()
    noisy: Values = {s: v * (1 + (7e-4 * (-1) ** s if s > 10 else 0.0)) for s, v in curve.items()}
    assert judge(LOSS, {**noisy, 25: curve[25] * 1.005}).passed
    assert (
        judge(LOSS, {**noisy, 25: curve[25] * 1.005, 19: curve[19] * 0.995}).rule
        is ComparisonRule.BAND
    )
    alone = judge(LOSS, {**LOSS, 25: curve[25] * 1.005})
    assert alone.rule is ComparisonRule.OUTLIER
    far = judge(LOSS, {**noisy, 25: curve[25] * 1.02})
    assert (far.rule, far.notes[0]) == (
        ComparisonRule.OUTLIER,
        "1 of 50 steps too far outside the band for any step",
    )


def test_a_shift_of_the_first_step_is_a_rule_of_its_own() -> None:
    assert judge(LOSS, {**LOSS, 1: loss_curve()[1] * 1.0015}).rule is ComparisonRule.STEP_1


def test_a_small_lasting_shift_fails_by_its_mean() -> None:
    """In Megatron-LM a loss that is 4.9 % off at every step passes."""
    assert judge(LOSS, scaled(LOSS, 1.0005)).rule is ComparisonRule.BIAS


def test_a_small_late_shift_fails_by_the_mean_of_the_tail() -> None:
    late: Values = {s: v * (1.0008 if s > 38 else 1) for s, v in loss_curve().items()}
    assert judge(LOSS, late).rule is ComparisonRule.TAIL


def test_a_curve_that_stands_still_is_frozen() -> None:
    curve = {s: 3.0 + 1e-5 * (s % 7) for s in range(1, 51)}
    frozen: Values = {s: v if s < 40 else curve[40] for s, v in curve.items()}
    frozen[37] = curve[37] * (1 + 1e-7)
    comparison = judge({**curve}, frozen, provenance=DETERMINISTIC)
    assert comparison.rule is ComparisonRule.FROZEN
    assert comparison.notes == ("constant from step 40 to 50, where the golden moves",)
    assert comparison.first is not None
    assert comparison.first.step == 40
    assert render(comparison).startswith("lm loss: frozen; constant from step 40 to 50, ")


def test_a_golden_that_stands_still_allows_a_run_that_does() -> None:
    golden: Values = dict.fromkeys(range(1, 21), 0.0)
    assert judge(golden, golden).passed
    constant: Values = dict.fromkeys(range(1, 21), 3.0)
    assert judge(constant, scaled(constant, 1 + 1e-6)).passed


def test_a_learned_band_is_narrow_where_the_repeats_agreed() -> None:
    spread = series_of({1: 0.0, 10: 1e-6, 40: 4e-3})
    provenance = Provenance(repeats=8, deterministic=False, spread={"lm loss": spread})
    early: Values = {**LOSS, 5: loss_curve()[5] * 1.001, 6: loss_curve()[6] * 1.001}
    assert judge(LOSS, early, provenance=provenance).rule is ComparisonRule.EARLY
    assert judge(LOSS, scaled(LOSS, 1.0002)).passed


def test_nondeterministic_takes_the_wider_band() -> None:
    golden = Golden(
        path="g",
        metrics={"lm loss": series_of(LOSS, is_full_precision=True)},
        provenance=DETERMINISTIC,
    )
    run = {"lm loss": series_of({**LOSS, 20: loss_curve()[20] * 1.0005}, is_full_precision=True)}
    assert not compare(golden, run)[0].passed
    assert compare(golden, run, nondeterministic=True)[0].passed


ZEROS: Values = {s: 1500.0 + 100.0 * (s % 3) for s in range(1, 41)}


def test_zeros_are_judged_by_mean_tail_and_median_not_by_step() -> None:
    rules = {
        "spike": judge(ZEROS, {**ZEROS, 7: 3000.0}, metric="num-zeros"),
        "spikes": judge(ZEROS, {**ZEROS, **dict.fromkeys(range(2, 6), 5600.0)}, metric="num-zeros"),
        "burst": judge(ZEROS, {**ZEROS, **dict.fromkeys(range(2, 6), 20000.0)}, metric="num-zeros"),
        "all": judge(ZEROS, scaled(ZEROS, 1.1), metric="num-zeros"),
        "late": judge(
            ZEROS,
            {**ZEROS, **dict.fromkeys(range(31, 41), 1900.0)},
            metric="num-zeros",
        ),
    }
    assert {name: c.rule for name, c in rules.items()} == {
        "spike": ComparisonRule.BIAS,
        "spikes": ComparisonRule.BIAS,
        "burst": ComparisonRule.OUTLIER,
        "all": ComparisonRule.BIAS,
        "late": ComparisonRule.TAIL,
    }
    assert [c.passed for c in rules.values()] == [True, True, False, False, False]


def test_zeros_over_a_golden_of_zeros() -> None:
    golden: Values = dict.fromkeys(range(1, 21), 0.0)
    assert judge(golden, {**golden, 3: 2.0}, metric="num-zeros").passed
    assert not judge(golden, dict.fromkeys(golden, 50.0), metric="num-zeros").passed


def test_steps_without_an_update_have_no_zeros_to_compare() -> None:
    golden: Values = {**ZEROS, 1: "nan", 2: "nan"}
    comparison = judge(golden, {**ZEROS, 5: 1501.0}, metric="num-zeros")
    assert (comparison.passed, comparison.notes) == (True, ("2 steps not measured, not compared",))


TIMES: Values = {s: 5.0 if s == 1 else 0.2 for s in range(1, 41)}
FROM_HOST = Provenance(host_class=HOST)
HERE = RunEnvironment(host_class=HOST)


@pytest.mark.parametrize(
    ("provenance", "host_class", "note"),
    [
        (None, HOST, "the golden does not say on which class of host it was measured"),
        (FROM_HOST, None, "the golden is from '1x H100', the class of this host is not known"),
        (FROM_HOST, "cpu", "the golden is from '1x H100', this host is 'cpu'"),
    ],
)
@pytest.mark.parametrize("metric", ["iteration-time", "mem-allocated-bytes"])
def test_time_and_memory_are_judged_within_one_class_of_host(
    metric: str, provenance: Provenance | None, host_class: str | None, note: str
) -> None:
    comparison = judge(
        TIMES,
        scaled(TIMES, 9.0),
        metric=metric,
        provenance=provenance,
        surroundings=RunEnvironment(host_class=host_class),
    )
    assert (comparison.passed, comparison.is_judged) == (True, False)
    assert comparison.notes == (note,)


@pytest.mark.parametrize(
    ("factor", "passed"), [(1.09, True), (1.11, False), (0.2, True)], ids=["slow", "slower", "fast"]
)
def test_time_is_judged_by_its_steady_median_upwards_only(factor: float, *, passed: bool) -> None:
    """In Megatron-LM an improvement fails."""
    comparison = judge(
        TIMES,
        scaled(TIMES, factor),
        metric="iteration-time",
        provenance=FROM_HOST,
        surroundings=HERE,
    )
    assert (comparison.passed, comparison.rule) == (passed, ComparisonRule.MEDIAN)


def test_a_slow_warm_up_does_not_count() -> None:
    """Megatron-LM judges steps of the warm-up."""
    slow_start: Values = {**TIMES, 1: 50.0, 2: 50.0, 3: 50.0}
    assert judge(
        TIMES, slow_start, metric="iteration-time", provenance=FROM_HOST, surroundings=HERE
    ).passed


def test_times_may_be_placeholders_and_miss_the_first_step() -> None:
    golden: Values = {**TIMES, 1: "nan"}
    observed: Values = {s: v for s, v in TIMES.items() if s > 2}
    assert judge(golden, observed, metric="iteration-time").passed


@pytest.mark.parametrize("odd", [math.nan, math.inf, "nan"], ids=["nan", "inf", "text"])
def test_a_single_time_without_a_number_is_a_note(odd: Value) -> None:
    comparison = judge(TIMES, {**TIMES, 9: odd}, metric="iteration-time")
    assert comparison.passed
    assert "1 step not measured, not compared" in comparison.notes
    two = judge(TIMES, {**TIMES, 9: odd, 10: odd}, metric="iteration-time")
    assert not two.passed
    assert f"2 of {len(TIMES)} steps are {two.rule.value} in the run" in two.notes


def test_a_time_that_is_not_there_is_missing() -> None:
    observed: Values = {s: v for s, v in TIMES.items() if s != 9}
    assert judge(TIMES, observed, metric="iteration-time").rule is ComparisonRule.MISSING


@pytest.mark.parametrize(
    ("change", "rule", "passed"),
    [
        pytest.param({7: 12e9}, ComparisonRule.PEAK, False, id="peak"),
        pytest.param(dict.fromkeys(range(1, 9), 4.05e9), ComparisonRule.MEDIAN, False, id="shift"),
        pytest.param({7: 4.03e9}, ComparisonRule.PEAK, True, id="within"),
        pytest.param({7: 1e9}, ComparisonRule.PEAK, True, id="less"),
    ],
)
def test_memory_is_judged_by_peak_and_median_upwards_only(
    change: Values, rule: ComparisonRule, *, passed: bool
) -> None:
    golden: Values = {**dict.fromkeys(range(1, 11), 4e9), 10: 4.05e9}
    comparison = judge(
        golden,
        {**golden, **change},
        metric="mem-max-allocated-bytes",
        provenance=FROM_HOST,
        surroundings=HERE,
    )
    assert (comparison.passed, comparison.rule) == (passed, rule)


def test_a_metric_that_vanished_fails() -> None:
    golden = Golden(path="g", metrics={"lm loss": series_of(LOSS)})
    assert [c.rule for c in compare(golden, {})] == [ComparisonRule.NO_METRIC]
    assert [c.rule for c in compare(golden, {}, metrics=["x"])] == [ComparisonRule.NO_GOLDEN]


def test_a_metric_never_measured_is_judged_only_when_asked_for() -> None:
    golden = Golden(path="g", metrics={"num-zeros": series_of({1: "nan", 2: "nan"})})
    run = {"num-zeros": series_of({1: 5.0, 2: 5.0})}
    assert [c.rule for c in compare(golden, run)] == [ComparisonRule.NOT_JUDGED]
    assert [c.rule for c in compare(golden, run, metrics=["num-zeros"])] == [
        ComparisonRule.GOLDEN_UNUSABLE
    ]


def test_a_resumed_run_is_compared_after_the_middle_only() -> None:
    first = {
        "lm loss": series_of(LOSS, is_full_precision=True),
        "iteration-time": series_of({**TIMES}, is_full_precision=True),
    }
    late: Values = {s: v for s, v in LOSS.items() if s > 25}
    second = {
        "lm loss": series_of(late, is_full_precision=True),
        "iteration-time": series_of(dict.fromkeys(range(26, 41), 3.0), is_full_precision=True),
    }
    comparisons = compare_resume(first, second, train_iters=50)
    assert [(c.passed, c.rule) for c in comparisons] == [
        (True, ComparisonRule.BITWISE),
        (True, ComparisonRule.NOT_JUDGED),
    ]
    wrong = {**second, "lm loss": series_of({**late, 26: 9.0}, is_full_precision=True)}
    assert not compare_resume(first, wrong, train_iters=50, metrics=["lm loss"])[0].passed


@pytest.mark.parametrize("shift", [1 << 62, 1 << 63, 10**30])
def test_steps_may_be_of_any_size(shift: int) -> None:
    far = series_of({shift + s: v for s, v in LOSS.items()}, is_full_precision=True)
    spread = {"lm loss": series_of(dict.fromkeys(far.steps, 1e-6), is_full_precision=True)}
    golden = Golden(
        path="g", metrics={"lm loss": far}, provenance=Provenance(repeats=5, spread=spread)
    )
    off = replace(far, values=tuple(v * 1.01 for v in LOSS.values() if isinstance(v, float)))
    (passed,), (failed,) = (compare(golden, {"lm loss": run}) for run in (far, off))
    assert (passed.passed, failed.passed) == (True, False)
    assert failed.first is not None
    assert failed.first.step == shift + 1


@pytest.mark.parametrize(
    ("precision", "host_class", "passed"),
    [
        pytest.param("bf16", "another CPU", True, id="bf16-elsewhere"),
        pytest.param("bf16", HOST, False, id="bf16-here"),
        pytest.param("bf16", None, False, id="bf16-somewhere"),
        pytest.param("fp32", "another CPU", False, id="fp32-elsewhere"),
    ],
)
def test_reduced_precision_rounds_otherwise_on_another_class_of_host(
    precision: str, host_class: str | None, *, passed: bool
) -> None:
    made = Provenance(host_class=HOST, precision=precision, deterministic=True, repeats=5)
    observed = {**LOSS, 23: loss_curve()[23] * (1 + 4e-4)}
    comparison = judge(
        LOSS, observed, provenance=made, surroundings=RunEnvironment(host_class=host_class)
    )
    assert comparison.passed is passed


@pytest.mark.parametrize(
    ("kept", "is_enough"),
    [
        pytest.param(range(1, 2), False, id="only step 1"),
        pytest.param(range(1, 41), False, id="four fifths"),
        pytest.param(range(26, 51), False, id="the second half"),
        pytest.param(range(5, 51, 5), True, id="every fifth step"),
        pytest.param(range(5, 46, 5), True, id="a half-open range of them"),
    ],
)
def test_a_golden_that_holds_little_of_the_run_is_unusable(kept: range, *, is_enough: bool) -> None:
    comparison = judge({step: LOSS[step] for step in kept}, LOSS)
    assert comparison.passed == is_enough
    if not is_enough:
        assert comparison.rule is ComparisonRule.GOLDEN_UNUSABLE
        first, last = min(kept), max(kept)
        assert comparison.notes[0] == (
            f"it has steps {first} to {last}, the run 1 to 50, whose rest would pass unseen; "
            "record it again"
        )


def test_what_megatron_did_not_measure_before_a_time_limit_is_not_compared() -> None:
    """Its release goldens have "nan" up to the end of the schedule: 13 files at d98e8a64dd."""
    golden: Values = {s: LOSS[s] if s <= 45 else "nan" for s in LOSS}
    run = {s: v for s, v in LOSS.items() if s <= 46}
    comparison = judge(golden, run)
    assert (comparison.passed, comparison.deviation.num_compared) == (True, 45)
    assert "5 steps not measured, not compared" in comparison.notes
    shifted = judge(golden, {s: v * 1.01 for s, v in run.items() if isinstance(v, float)})
    assert not shifted.passed
    hidden = judge({s: LOSS[s] if s == 1 else "nan" for s in LOSS}, LOSS)
    assert (hidden.passed, hidden.rule) == (False, ComparisonRule.GOLDEN_UNUSABLE)
    hole = judge({**LOSS, 7: "nan"}, LOSS)
    assert (hole.passed, hole.rule) == (False, ComparisonRule.GOLDEN_UNUSABLE)
