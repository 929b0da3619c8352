"""What a reviewer is told of changed goldens.

Megatron-LM's report is one signed mean over the steps that both have, and skips new files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from staged_run import NUM_STEPS, ORIGIN, curve, metric_map

from pytest_megatron.workloads.golden.model import Golden, MetricMap, Value, parse_generation
from pytest_megatron.workloads.refresh.difference import (
    Divergence,
    FileChange,
    Trend,
    bucket_of,
    differ,
)
from pytest_megatron.workloads.refresh.pull_request import (
    MOST_BYTES,
    commit_message,
    interpret,
    markdown,
)
from pytest_megatron.workloads.refresh.text import differences_json, differences_text


def golden(metrics: MetricMap, **origin: object) -> Golden:
    return Golden(path="g", metrics=metrics, provenance=replace(ORIGIN, **origin))  # type: ignore[arg-type]


def scaled(factors: Mapping[int, float], default: float = 1.0) -> Golden:
    values: dict[int, Value] = {s: float(v) * factors.get(s, default) for s, v in curve().items()}
    return golden(metric_map(values))


OLD = golden(metric_map(curve()))


def test_an_oscillation_is_seen_though_its_mean_is_nothing() -> None:
    """In Megatron-LM's report +30 % and -30 % cancel: it says 1.7e-18."""
    new = scaled({s: 1.3 if s % 2 else 0.7 for s in range(1, NUM_STEPS + 1)})
    found = differ("g", OLD, new)
    (metric,) = found.metrics
    assert metric.median == pytest.approx(0.3)
    assert metric.largest == pytest.approx(0.3)
    assert metric.mean_signed == pytest.approx(0.0, abs=1e-12)
    assert metric.histogram() == {(6, -1): 50, (6, 1): 50}
    assert metric.is_outside
    sentences = interpret([found])
    assert any("deviations both ways, which cancel in the signed mean" in s for s in sentences)
    assert any("which needs attention" in s for s in sentences)


@pytest.mark.parametrize(("num_steps", "lost"), [(3, 97), (60, 40)])
def test_steps_that_are_lost_are_counted(num_steps: int, lost: int) -> None:
    """Megatron-LM's report drops missing steps and metrics, and says 0."""
    found = differ("g", OLD, golden(metric_map(curve(num_steps))))
    (metric,) = found.metrics
    assert (metric.num_old, metric.num_new, metric.num_lost) == (100, num_steps, lost)
    assert found.is_outside
    assert "1 metric with fewer steps: less is compared than before." in interpret([found])
    assert f"| 100 -> {num_steps} (+0 -{lost}) |" in markdown([found])


def test_values_that_are_no_numbers_are_counted() -> None:
    values = {s: math.nan if s > 50 else v for s, v in curve().items()}
    found = differ("g", OLD, golden(metric_map(values)))
    assert found.metrics[0].num_not_finite == (0, 50)
    assert "| 0 -> 50 |" in markdown([found])
    assert "0 -> 50 values not finite" in differences_text([found])


@pytest.mark.parametrize(
    ("step", "start", "words"),
    [
        (1, Divergence.STEP_1, "step 1"),
        (7, Divergence.EARLY, "by step 10 (7)"),
        (40, Divergence.LATER, "later"),
    ],
)
def test_where_curves_part_is_told(step: int, start: Divergence, words: str) -> None:
    found = differ("g", OLD, scaled({step: 1.01}))
    assert (found.metrics[0].start, found.metrics[0].first_step) == (start, step)
    assert f"| {words}" in markdown([found])
    assert ("another first step" in " ".join(interpret([found]))) == (step == 1)


def test_noise_at_the_first_step_is_no_other_forward_pass() -> None:
    noise = differ("g", OLD, scaled({}, default=1.0001))
    assert noise.metrics[0].start is Divergence.STEP_1
    assert "another first step" not in " ".join(interpret([noise]))


def test_files_and_metrics_that_are_new_or_gone_are_listed() -> None:
    """Megatron-LM's report skips new files and metrics."""
    two = golden(metric_map(curve(), num_zeros={1: 4.0}))
    found = [
        differ("new.json", None, OLD),
        differ("gone.json", OLD, None),
        differ("same.json", OLD, OLD),
        differ("broken.json", None, OLD, broken="empty"),
        differ("more.json", OLD, two),
        differ("less.json", two, OLD),
    ]
    assert [d.state for d in found] == [
        FileChange.NEW,
        FileChange.GONE,
        FileChange.UNCHANGED,
        FileChange.UNREADABLE,
        FileChange.CHANGED,
        FileChange.CHANGED,
    ]
    page = markdown(found)
    for line in ("New (1):", "Gone (1):", "Unchanged (1):", "Was unreadable (1):"):
        assert line in page.splitlines()
    assert "| `more.json` | `num-zeros` (new) | 0 -> 1" in page
    assert "| `less.json` | **`num-zeros`** (gone) | 1 -> 0" in page


def test_the_output_of_inference_programs_has_a_difference_too() -> None:
    """Megatron-LM's report crashes on goldens of inference."""

    def generated(tokens: list[int], logprob: float, text: str) -> Golden:
        request = {"generated_tokens": tokens, "logprobs": [logprob], "generated_text": text}
        generation = parse_generation({"0": request}, "g")  # type: ignore[dict-item]
        return Golden(path="g", metrics={}, generation=generation, provenance=ORIGIN)

    old = generated([1, 2], -1.0, "a b")
    close = differ("g", old, generated([1, 2], -1.0001, "a b"))
    assert ([m.metric for m in close.metrics], close.is_outside) == (["logprobs of 0"], False)
    other = differ("g", old, generated([1, 3], -1.0, "a c"))
    assert {m.metric for m in other.metrics if m.is_outside} == {
        "generated_tokens of 0",
        "generated_text of 0",
    }
    assert "`generated_tokens of 0`" in markdown([other])
    assert interpret([differ("g", None, old)]) == ["Nothing that was there changes."]


def test_what_changed_around_goldens_is_one_line_for_all_of_them() -> None:
    new = golden(scaled({}, 1.0001).metrics, image="pytorch:26.02", versions={"torch": "2.13"})
    old = golden(OLD.metrics, image="pytorch:26.01", versions={"torch": "2.12"})
    page = markdown([differ(f"g{n}", old, new) for n in range(3)])
    assert "- `image pytorch:26.01 -> pytorch:26.02`: 3 goldens" in page
    assert "- `torch 2.12 -> 2.13`: 3 goldens" in page


def test_rows_outside_the_band_come_first() -> None:
    pairs = [("a", scaled({}, 1.00001)), ("b", scaled({}, 1.1)), ("c", scaled({}, 1.00002))]
    page = markdown([differ(name, OLD, new) for name, new in pairs])
    rows = [line for line in page.splitlines() if "`lm loss`" in line and "->" in line]
    assert [row[3] for row in rows] == ["b", "c", "a"]


def test_directions_are_counted_and_all_one_way_is_said() -> None:
    found = [differ(f"g{n}", OLD, scaled({}, 1.002)) for n in range(3)]
    assert {d.trend for d in found} == {Trend.WORSE}
    page = markdown(found)
    assert "- All 3 losses that move get worse." in page
    assert "| `lm loss` | 3 | 0 | 0 |" in page


def test_the_page_stays_below_the_limit_of_a_comment() -> None:
    """In Megatron-LM a new container changes hundreds of goldens."""
    name = "golden_values/gpt/a_case_with_quite_a_long_name_{}/golden_values_dev_dgx_h100.json"
    changed = [differ(name.format(n), OLD, scaled({}, 1 + n / 1e4)) for n in range(1, 1000)]
    new = [differ(name.format(n), None, OLD) for n in range(1000, 2000)]
    page = markdown([*changed, *new], reason="x" * 2000)
    assert len(page.encode()) < MOST_BYTES
    assert "more rows |" in page
    assert "- and " in page


def test_names_in_goldens_cannot_break_out_of_the_page() -> None:
    evil = "<script>|`x`|\n# head"
    values = {evil: next(iter(metric_map({1: 2.0}).values()))}
    page = markdown([differ("g", golden({}), golden(values))], reason="<img src=x> @all | ![](x)")
    assert "\n# head" not in page
    assert "<img" not in page.replace("\\<img", "")
    (row,) = [line for line in page.splitlines() if "script" in line and "new" in line]
    assert row.replace("\\|", "").count("|") == 10


def test_the_json_form_is_json_whatever_the_values() -> None:
    old = golden(metric_map({1: 0.0, 2: 1.0}))
    new = golden(metric_map({1: 1.0, 2: math.inf}))
    text = json.dumps(differences_json([differ("g", old, new)]), allow_nan=False)
    metric = json.loads(text)["goldens"][0]["metrics"][0]
    assert (metric["largest"], metric["parts"]) == ("inf", "step 1")


@pytest.mark.parametrize(
    ("deviation", "bucket"),
    [(0.0, 0), (5e-7, 1), (1e-6, 2), (-1e-4, 3), (1e-3, 4), (-1e-2, 5), (0.1, 6), (math.inf, 6)],
)
def test_buckets_are_those_of_the_reports_that_people_know(deviation: float, bucket: int) -> None:
    assert bucket_of(deviation) == bucket


def test_a_commit_message_says_what_where_and_how_much() -> None:
    path = "golden_values/gpt/tp2/golden_values_dev_dgx_h100.json"
    new = golden(scaled({40: 1.01}).metrics, gpu="8x NVIDIA H100", image="i@sha256:1", driver="570")
    new = replace(
        new, provenance=replace(new.provenance or ORIGIN, command=("pytest", "r", "learns faster"))
    )
    assert commit_message([differ(path, OLD, new)], reason="new data").splitlines() == [
        "Refresh the golden of tp2",
        "",
        "new data",
        "",
        "Command: pytest r 'learns faster'",
        "Measured at commit: 1b6a30e",
        "Image: i@sha256:1",
        "GPU: 8x NVIDIA H100",
        "Driver: 570",
        f"Largest relative change: 1.0e-02, lm loss at step 40 of {path}",
    ]
    more_steps = differ(path, golden(metric_map(curve(60))), OLD)
    assert "step None" not in commit_message([more_steps])
    long = [differ(f"g/{'long' * 20}/x.json", None, OLD)]
    assert commit_message(long).splitlines()[0] == "Record 1 golden"
    both = [differ(f"g/c{n}/x.json", OLD if n else None, new) for n in range(2)]
    assert commit_message(both).splitlines()[0] == "Refresh goldens of 2 cases"
