from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.errors import CaseError
from pytest_megatron.workloads.golden.compare.result import Comparison, ComparisonRule
from pytest_megatron.workloads.golden.model import NOWHERE, Golden, Series, series_of
from pytest_megatron.workloads.golden.policy import Base, ComparisonPolicy, Setting
from pytest_megatron.workloads.recipe.case import read_case
from pytest_megatron.workloads.verdict.compare import compare_in_mode
from pytest_megatron.workloads.verdict.job import metric_names_of

STRICT, MEGATRON = ComparisonPolicy.STRICT, ComparisonPolicy.MEGATRON


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        pytest.param("", "METRICS is missing, expected some of", id="none"),
        pytest.param("METRICS:\n", "METRICS is empty, so nothing would be", id="null"),
        pytest.param("METRICS: []\n", "METRICS is empty, so nothing would be compared", id="empty"),
        pytest.param("METRICS: [lm loss]\n", "'lm loss' is not compared in MODE", id="unknown"),
    ],
)
def test_an_inference_case_must_name_what_is_compared(
    tmp_path: Path, metrics: str, message: str
) -> None:
    """In Megatron-LM METRICS that are null pass, and nothing is compared."""
    file = tmp_path / "model_config.yaml"
    file.write_text(f"MODE: inference\nTEST_TYPE: frozen-start\n{metrics}")
    with pytest.raises(CaseError, match=message):
        metric_names_of(read_case(file))


def series(factor: float = 1.0) -> Series:
    return series_of({step: factor * 10.0 / step for step in range(1, 31)})


def policy_of(**settings: Setting) -> ComparisonPolicy:
    return ComparisonPolicy(base=Base.STRICT, name="own", metrics={"grad-norm": settings})


def compared(
    folder: Path, case: str, *, policy: ComparisonPolicy = STRICT, norm: float | None = 2.0
) -> dict[str, Comparison]:
    """Compare a run whose gradients are `norm` times the golden's, its loss being the same."""
    file = folder / "model_config.yaml"
    file.write_text(f"TEST_TYPE: regular\nMODEL_ARGS: {{--train-iters: 30}}\n{case}")
    read = read_case(file)
    same = {"lm loss": series(), "num-zeros": series()}
    found = compare_in_mode(
        read,
        Golden(path="g", metrics={**same, "grad-norm": series()}),
        same if norm is None else {**same, "grad-norm": series(norm)},
        metrics=metric_names_of(read),
        policy=policy,
        surroundings=NOWHERE,
    )
    return {comparison.metric: comparison for comparison in found}


@pytest.mark.parametrize(
    ("case", "policy", "norm", "rule"),
    [
        pytest.param("", STRICT, 2.0, ComparisonRule.STEP_1, id="no-metrics"),
        pytest.param("", STRICT, None, ComparisonRule.NO_METRIC, id="no-metrics-and-none-logged"),
        pytest.param("", policy_of(judged=False), 2.0, None, id="left-out-by-the-policy"),
        pytest.param("", MEGATRON, 2.0, None, id="megatron"),
        pytest.param("METRICS: [lm loss]\n", STRICT, 2.0, None, id="not-named"),
        pytest.param(
            "METRICS: [lm loss]\n",
            policy_of(judged=True),
            2.0,
            ComparisonRule.STEP_1,
            id="by-the-policy",
        ),
        pytest.param(
            "METRICS: [lm loss, grad-norm]\n", STRICT, 2.0, ComparisonRule.STEP_1, id="named"
        ),
    ],
)
def test_norms_are_judged_where_the_case_does_not_say_what_is(
    tmp_path: Path,
    case: str,
    policy: ComparisonPolicy,
    norm: float | None,
    rule: ComparisonRule | None,
) -> None:
    found = compared(tmp_path, case, policy=policy, norm=norm)
    failed = [c.rule for c in found.values() if not c.passed]
    assert failed == ([] if rule is None else [rule])
