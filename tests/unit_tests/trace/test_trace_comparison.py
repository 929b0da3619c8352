from __future__ import annotations

import dataclasses
import json
import math

from pytest_megatron.trace.equivalence import (
    NotCompared,
    TensorDivergence,
    TraceComparison,
    as_text,
    comparison_to_json,
    headline,
)

_FIRST = TensorDivergence(
    order=7,
    step=1,
    microbatch=0,
    phase="gradient",
    module="decoder.layers.1.input_layernorm",
    tensor="weight",
    parameter="decoder.layers.1.input_layernorm.weight",
    ranks=(0, 1),
    norm_ratio=0.5,
    error=0.5,
    limit=1.2e-6,
)
_DIFFERENT = TraceComparison(
    verdict="different",
    steps=2,
    num_compared=120,
    hint="the gradient is half of the reference's, as without a sum over TP",
    divergences=(_FIRST,) * 50,
    num_divergences=61,
    not_compared=(
        NotCompared(module="rotary", tensor="output.0", phase="forward", reason="no rule"),
    ),
)


def test_error_without_bound_is_null_in_json() -> None:
    one = dataclasses.replace(_FIRST, error=math.inf)
    comparison = TraceComparison(verdict="different", divergences=(one,))
    assert json.loads(json.dumps(comparison_to_json(comparison)))["divergences"][0]["error"] is None


def test_text_names_the_first_difference_and_fits_a_screen() -> None:
    lines = as_text(_DIFFERENT).splitlines()
    assert headline(_FIRST) == (
        "gradient of decoder.layers.1.input_layernorm.weight, step 1, ranks 0-1"
    )
    assert lines[:2] == [
        "its values differ: error 5.0e-01, limit 1.2e-06, norm 0.5 times the reference's",
        "hint: the gradient is half of the reference's, as without a sum over TP",
    ]
    assert lines[-2:] == [
        "61 of 120 tensors differ, 1 not compared, 2 steps",
        "  1 not compared: no rule",
    ]
    assert len(lines) <= 20
