from __future__ import annotations

import pytest

from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.model import Golden, series_of


@pytest.mark.parametrize(
    ("metric", "num_steps", "off", "is_passed"),
    [
        pytest.param("lm loss", 100, 6e-4, False, id="a-loss"),
        pytest.param("params-norm", 100, 6e-4, True, id="parameters-drift"),
        pytest.param("params-norm", 100, 1.5e-3, False, id="parameters-shift"),
        pytest.param("params-norm", 400, 2.2e-3, False, id="a-long-mean"),
    ],
)
def test_the_norm_of_the_parameters_may_be_off_in_the_mean_by_more_than_a_loss(
    metric: str, num_steps: int, off: float, *, is_passed: bool
) -> None:
    values = {step: 100.0 + step for step in range(1, num_steps + 1)}
    shifted = {s: v * (1 + off) if s > num_steps // 10 else v for s, v in values.items()}
    golden = Golden(path="g.json", metrics={metric: series_of({**values})})
    (found,) = compare(golden, {metric: series_of({**shifted})}, metrics=[metric])
    assert found.passed is is_passed


def test_a_long_norm_of_the_parameters_parts_at_single_steps_as_a_loss_does() -> None:
    values = {step: 100.0 + step for step in range(1, 401)}
    wavy = {s: v * (1 + (2e-2 if s % 2 else -2e-2) * (s > 100)) for s, v in values.items()}
    golden = Golden(path="g.json", metrics={"params-norm": series_of({**values})})
    (found,) = compare(golden, {"params-norm": series_of({**wavy})}, metrics=["params-norm"])
    assert found.passed
