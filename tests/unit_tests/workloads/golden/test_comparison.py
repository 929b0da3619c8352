from __future__ import annotations

import dataclasses
import json
import math

import pytest

from pytest_megatron.runs.record import Deviation, RecordedLayer
from pytest_megatron.workloads.golden.compare.result import (
    Comparison,
    ComparisonRule,
    SeriesSummary,
    StepDifference,
    comparisons_to_json,
    relative,
    render,
    render_layers,
)

DEVIATION = Deviation(
    num_compared=50,
    worst_step=30,
    largest_relative=5.12e-3,
    largest_absolute=0.05,
    mean_signed_relative=-1.2e-4,
)


def failed(rule: ComparisonRule, **fields: object) -> Comparison:
    comparison = Comparison(metric="lm loss", passed=False, rule=rule, golden_path="g.json")
    return dataclasses.replace(comparison, **fields)  # type: ignore[arg-type] # spread out


@pytest.mark.parametrize(
    ("comparison", "text"),
    [
        pytest.param(
            failed(
                ComparisonRule.BAND,
                first=StepDifference(step=25, observed=10.7312, golden=10.6953, tolerance=1e-5),
                deviation=DEVIATION,
                notes=("3 of 50 steps outside, 1 may be",),
            ),
            "lm loss, step 25: observed 10.7312, golden 10.6953, off by 3.4e-03 relative, "
            "tolerance allows 1.0e-05; 3 of 50 steps outside, 1 may be; "
            "largest 5.1e-03 at step 30, mean signed -1.2e-04 over 50 steps; g.json",
            id="band",
        ),
        pytest.param(
            failed(
                ComparisonRule.TAIL,
                first=StepDifference(step=3, observed=1.0, golden=2.0),
                summary=SeriesSummary(
                    name="mean of steps 38 to 50", observed=4.04, golden=4.0, tolerance=5e-4
                ),
            ),
            "lm loss, mean of steps 38 to 50: observed 4.04, golden 4, off by +1.0e-02 relative, "
            "tolerance allows 5.0e-04; first differs at step 3; g.json",
            id="summary",
        ),
        pytest.param(
            failed(
                ComparisonRule.BAND,
                first=StepDifference(step=7, observed=2.00204, golden=2.0, tolerance=1e-3),
            ),
            "lm loss, step 7: observed 2.00204, golden 2, off by 1.02e-03 relative, "
            "tolerance allows 1.00e-03; g.json",
            id="hardly outside",
        ),
        pytest.param(
            failed(ComparisonRule.MISSING, first=StepDifference(step=7, observed=None, golden=4.0)),
            "lm loss, step 7: missing in the run, golden 4; g.json",
            id="missing",
        ),
        pytest.param(
            failed(ComparisonRule.NAN, first=StepDifference(step=7, observed=math.nan, golden=4.5)),
            "lm loss, step 7: observed nan, golden 4.5; g.json",
            id="nan",
        ),
        pytest.param(
            failed(
                ComparisonRule.GOLDEN_UNUSABLE,
                first=StepDifference(step=7, observed=None, golden="nan"),
            ),
            "lm loss, step 7: golden unusable, it has the text 'nan' here; g.json",
            id="unusable",
        ),
        pytest.param(
            failed(ComparisonRule.NO_METRIC), "lm loss: metric not in the run; g.json", id="metric"
        ),
        pytest.param(
            Comparison(
                metric="lm loss",
                passed=True,
                rule=ComparisonRule.BITWISE,
                golden_path="g.json",
                deviation=Deviation(num_compared=50),
                notes=("bitwise equal",),
            ),
            "lm loss: passed, 50 steps; bitwise equal; g.json",
            id="passed",
        ),
    ],
)
def test_a_comparison_reads_as_one_line(comparison: Comparison, text: str) -> None:
    assert render(comparison) == text


def test_json_is_flat_and_has_texts_for_what_is_not_finite() -> None:
    comparison = failed(
        ComparisonRule.NAN,
        first=StepDifference(step=7, observed=math.nan, golden=4.5),
        deviation=Deviation(num_compared=1, worst_step=1, largest_relative=math.inf),
        layers=(RecordedLayer(layer="step 1", passed=False, measured=math.inf, limit=1e-3),),
    )
    written = comparisons_to_json([comparison], "strict")
    json.dumps(written, allow_nan=False)
    assert (written["passed"], written["policy"]) == (False, "strict")
    (found,) = json.loads(json.dumps(written))["comparisons"]
    (layer,) = found.pop("layers")
    assert (found["text"], layer["measured"]) == (render(comparison), "inf")
    told = ("metric", "rule", "judged", "first_step", "first_place", "observed", "golden")
    assert [found[name] for name in told] == ["lm loss", "nan", True, 7, "step 7", "nan", 4.5]
    assert (found["worst_step"], found["largest_relative"]) == (1, "inf")


def test_the_layers_are_two_lines_what_failed_first() -> None:
    layers = (
        RecordedLayer(layer="presence", passed=True, measured=50.0, limit=50.0, unit="steps"),
        RecordedLayer(layer="outlier", passed=False, measured=0.2, limit=0.01, place="step 7"),
    )
    assert render_layers(failed(ComparisonRule.OUTLIER, layers=layers)) == [
        "failed: outlier 2.0e-01 of 1.0e-02 (step 7)",
        "passed: presence 50 of 50 steps",
    ]
    assert render_layers(failed(ComparisonRule.OUTLIER)) == []
    close = RecordedLayer(layer="tail mean", passed=False, measured=1.04e-3, limit=1e-3)
    assert render_layers(failed(ComparisonRule.TAIL, layers=(close,))) == [
        f"failed: {close.layer} 1.04e-03 of 1.00e-03"
    ]


@pytest.mark.parametrize(
    ("observed", "golden", "expected"),
    [(2.0, 2.0, 0.0), (0.0, 0.0, 0.0), (1.0, 0.0, math.inf), (-1.0, 0.0, -math.inf), (1, -2, 1.5)],
)
def test_relative_is_signed_and_defined_over_zero(
    observed: float, golden: float, expected: float
) -> None:
    assert relative(observed, golden) == expected
