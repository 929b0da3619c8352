"""`golden lint` over a small tree, as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_command import run

BESIDE = Path("tests/functional_tests/test_cases/gpt/tp1")
OLD = BESIDE / "golden_values_dev_dgx_h100.json"


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    BESIDE.mkdir(parents=True)
    Path("recipes").mkdir()
    Path("recipes/r.yaml").write_text(
        "type: basic\nformat_version: 1\n"
        "spec: {model: gpt, gpus: 1, platforms: dgx_h100, training_script_path: train.py}\n"
        "products:\n  - test_case: [tp1]\n    products: [{environment: [dev], scope: [mr]}]\n"
    )
    (BESIDE / "model_config.yaml").write_text("TEST_TYPE: regular\nMODEL_ARGS: {}\n")
    values = {str(step): 2 + 1 / step for step in range(1, 31)}
    block = {"start_step": 1, "end_step": 30, "step_interval": 1, "values": values}
    OLD.write_text(json.dumps({"lm loss": block}, indent=4))


def test_lint_prints_findings_and_what_it_looked_at() -> None:
    (BESIDE / "golden_values_dev_dgx_h100_2nd.json").write_text("{}")
    found = run("lint")
    assert found.code == 0
    assert found.out.splitlines() == [
        (
            f"{BESIDE}/golden_values_dev_dgx_h100_2nd.json: warning: no row of the recipes reads "
            "this golden; remove it or add a row [unreachable-golden]"
        ),
        "0 errors, 1 warning",
        "2 goldens; 1 of them read by a row",
    ]
    OLD.write_text("{}")
    found = run("lint", OLD, "--format", "github")
    assert found.code == 1
    assert found.out == (
        f"::error file={OLD},title=golden-unreadable::holds no metric ({{}}), expected an object "
        "of metrics; record it again\n"
    )
    assert run("lint", "nothing").code == 2


def test_lint_says_that_a_recipe_has_errors() -> None:
    Path("recipes/bad.yaml").write_text("products: [")
    assert run("lint").err == (
        "1 recipe with errors, see pytest-megatron lint; so no golden is named as unreachable\n"
    )
