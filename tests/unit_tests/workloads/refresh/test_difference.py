"""What a reviewer is told of changed goldens.

Megatron-LM's report is one signed mean over the steps that both have, and skips new files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from staged_run import NUM_STEPS, ORIGIN, curve, metric_map

from pytest_megatron.workloads.golden.model import Golden, MetricMap, Value, parse_generation
from pytest_megatron.workloads.refresh.difference import FileChange, MetricChange, Trend, differ
from pytest_megatron.workloads.refresh.report import (
    MOST_BYTES,
    differences_text,
    markdown,
)


def golden(metrics: MetricMap, **origin: object) -> Golden:
    return Golden(path="g", metrics=metrics, provenance=replace(ORIGIN, **origin))  # type: ignore[arg-type]


def scaled(factors: Mapping[int, float], default: float = 1.0) -> Golden:
    values: dict[int, Value] = {s: float(v) * factors.get(s, default) for s, v in curve().items()}
    return golden(metric_map(values))


OLD = golden(metric_map(curve()))


def test_an_oscillation_is_another_curve_though_its_mean_is_nothing() -> None:
    """In Megatron-LM's report +30 % and -30 % cancel: it says 1.7e-18."""
    new = scaled({s: 1.3 if s % 2 else 0.7 for s in range(1, NUM_STEPS + 1)})
    (metric,) = differ("g", OLD, new).metrics
    assert metric.largest == pytest.approx(0.3)
    assert metric.mean == pytest.approx(0.0, abs=1e-12)
    assert metric.change is MetricChange.CURVE


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        pytest.param({1: 2.0, 2: 4.0}, {1: 1.0, 2: 4.0}, "0.250000", id="half of one step"),
        pytest.param({1: 2.0, 2: 4.0}, {1: 3.0, 2: 4.0}, "-0.250000", id="it grows"),
        pytest.param({1: 1.0}, {1: 1.00005}, "-5.000e-05", id="small"),
        pytest.param({1: 1e-9}, {1: -1.0}, "1.000e+09", id="large"),
        pytest.param({1: 1e-13, 2: 1.0}, {1: 5.0, 2: 1.5}, "-0.500000", id="without zeros"),
        pytest.param({1: 0.0}, {1: 5.0}, "-", id="zeros alone"),
        pytest.param({1: -2.0}, {1: -1.0}, "0.500000", id="negative"),
        pytest.param({1: 2.0, 2: 1.0}, {1: 1.0, 3: 5.0}, "0.500000", id="shared steps"),
        pytest.param({1: 2.0, 2: 1.0}, {1: 1.0, 2: math.inf}, "0.500000", id="finite ones"),
        pytest.param({1: 1.0, 2: 1.0}, {1: 1.5, 2: 0.5}, "0", id="both ways"),
    ],
)
def test_a_mean_is_what_megatrons_script_prints(
    old: dict[int, Value], new: dict[int, Value], shown: str
) -> None:
    page = markdown([differ("g", golden(metric_map(old)), golden(metric_map(new)))])
    (row,) = [line for line in page.splitlines() if "`lm loss`" in line]
    assert row.split(" | ")[3] == shown


@pytest.mark.parametrize(("num_steps", "shown"), [(3, "100 -> 3"), (60, "100 -> 60")])
def test_steps_that_are_lost_are_another_curve(num_steps: int, shown: str) -> None:
    """Megatron-LM's report drops missing steps and metrics, and says 0."""
    found = differ("g", OLD, golden(metric_map(curve(num_steps))))
    (metric,) = found.metrics
    assert (metric.change, metric.first_step) == (MetricChange.CURVE, num_steps + 1)
    assert f"| `g` | **`lm loss`** | {shown} | 0 |" in markdown([found])


def test_values_that_are_no_numbers_are_another_curve() -> None:
    values = {s: math.nan if s > 50 else v for s, v in curve().items()}
    (metric,) = differ("g", OLD, golden(metric_map(values))).metrics
    assert (metric.change, metric.first_step) == (MetricChange.CURVE, 51)


@pytest.mark.parametrize("step", [1, 7, 40])
def test_one_step_outside_the_band_is_another_curve_from_there_on(step: int) -> None:
    (metric,) = differ("g", OLD, scaled({step: 1.01})).metrics
    assert (metric.change, metric.first_step) == (MetricChange.CURVE, step)


def test_digits_of_a_deterministic_golden_of_the_same_platform_are_no_other_curve() -> None:
    """A run would fail for a bit; a reviewer asks whether the curve is another."""
    same = {"deterministic": True, "repeats": 2, "versions": {"torch": "2.13"}}
    old = golden(OLD.metrics, **same)
    (metric,) = differ("g", old, golden(scaled({}, 1.000001).metrics, **same)).metrics
    assert (metric.change, metric.first_step) == (MetricChange.DIGITS, 1)


def test_a_time_has_no_curve() -> None:
    def timed(time: float, host_class: str) -> Golden:
        steps = dict.fromkeys(range(1, NUM_STEPS + 1), time)
        return golden(metric_map(curve(), iteration_time=steps), host_class=host_class)

    slower = differ("g", timed(1.0, "a"), timed(2.0, "a"))
    elsewhere = differ("g", timed(1.0, "a"), timed(2.0, "b"))
    changes = [m.change for d in (slower, elsewhere) for m in d.metrics]
    assert changes == [MetricChange.OUTSIDE, MetricChange.NOT_JUDGED]
    assert "another curve" not in markdown([slower])


def test_the_table_of_a_terminal_has_a_row_a_metric() -> None:
    found = [
        differ("worse", OLD, scaled(dict.fromkeys(range(6, NUM_STEPS + 1), 1.01))),
        differ("same", OLD, OLD),
        differ("new", None, OLD),
        differ("digits", OLD, golden(scaled({}, 1.0001).metrics, image="i:2")),
    ]
    assert differences_text(found).splitlines() == [
        "4 goldens: 1 new, 2 changed, 1 unchanged; another curve in 1",
        "golden  metric   steps  mean difference  largest  first step  change",
        "worse   lm loss  100    -0.009500        1.0e-02  6           curve",
        "digits  lm loss  100    -1.000e-04       1.0e-04  1           digits",
        "new: new",
    ]


def test_files_and_metrics_that_are_new_or_gone_are_listed() -> None:
    """Megatron-LM's report skips new files and metrics."""
    two = golden(metric_map(curve(), num_zeros={1: 4.0}))
    found = [
        differ("new.json", None, OLD),
        differ("gone.json", OLD, None),
        differ("same.json", OLD, OLD),
        differ("broken.json", None, OLD, broken="empty"),
        differ("torn.json", OLD, None, broken="empty"),
        differ("more.json", OLD, two),
        differ("less.json", two, OLD),
    ]
    assert [d.state for d in found] == [
        FileChange.NEW,
        FileChange.GONE,
        FileChange.UNCHANGED,
        FileChange.UNREADABLE,
        FileChange.UNREADABLE,
        FileChange.CHANGED,
        FileChange.CHANGED,
    ]
    page = markdown(found)
    for line in ("New (1):", "Gone (1):", "Unreadable (2):"):
        assert line in page.splitlines()
    assert "| `more.json` | `num-zeros` | 0 -> 1 | - | - | 1 | new |" in page
    assert "| `less.json` | **`num-zeros`** | 1 -> 0 | - | - | 1 | gone |" in page


def test_the_output_of_inference_programs_has_a_difference_too() -> None:
    """Megatron-LM's report crashes on goldens of inference."""

    def generated(tokens: list[int], logprob: float, text: str) -> Golden:
        request = {"generated_tokens": tokens, "logprobs": [logprob], "generated_text": text}
        generation = parse_generation({"0": request}, "g")  # type: ignore[dict-item]
        return Golden(path="g", metrics={}, generation=generation, provenance=ORIGIN)

    old = generated([1, 2], -1.0, "a b")
    close = differ("g", old, generated([1, 2], -1.0001, "a b"))
    assert [(m.metric, m.change) for m in close.metrics] == [("logprobs of 0", MetricChange.DIGITS)]
    other = differ("g", old, generated([1, 3], -1.0, "a c"))
    assert {m.metric for m in other.metrics if m.is_outside} == {
        "generated_tokens of 0",
        "generated_text of 0",
    }
    assert "`generated_tokens of 0`" in markdown([other])


def test_the_worst_rows_come_first() -> None:
    pairs = [("a", scaled({}, 1.00001)), ("b", scaled({}, 1.1)), ("c", scaled({}, 1.00002))]
    page = markdown([differ(name, OLD, new) for name, new in pairs])
    rows = [line for line in page.splitlines() if "`lm loss`" in line]
    assert [row[3] for row in rows] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("factor", "trend"), [(1.002, Trend.WORSE), (0.998, Trend.BETTER), (1.00001, Trend.SAME)]
)
def test_a_loss_has_a_trend(factor: float, trend: Trend) -> None:
    assert differ("g", OLD, scaled({}, factor)).trend is trend


def test_the_page_stays_below_the_limit_of_a_comment() -> None:
    """In Megatron-LM a new container changes hundreds of goldens."""
    name = "golden_values/gpt/a_case_with_quite_a_long_name_{}/golden_values_dev_dgx_h100.json"
    changed = [differ(name.format(n), OLD, scaled({}, 1 + n / 1e4)) for n in range(1, 1000)]
    new = [differ(name.format(n), None, OLD) for n in range(1000, 2000)]
    page = markdown([*changed, *new])
    assert len(page.encode()) < MOST_BYTES
    assert "more rows |" in page
    assert "- and " in page


def test_names_in_goldens_cannot_break_out_of_the_page() -> None:
    evil = "<script>|`x`|\n# head"
    values = {evil: next(iter(metric_map({1: 2.0}).values()))}
    page = markdown([differ("g", golden({}), golden(values))])
    assert "\n# head" not in page
    (row,) = [line for line in page.splitlines() if "script" in line and "new" in line]
    assert row.replace("\\|", "").count("|") == 8
