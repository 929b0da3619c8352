from __future__ import annotations

from pathlib import Path

from recipe_texts import read

from pytest_megatron.workloads.recipe.case import case_path, golden_paths

ROWS = "products: [{test_case: [tp1], products: [{environment: [dev], scope: [mr]}]}]\n"


def test_a_case_lies_where_megatron_has_it() -> None:
    (workload,) = read(ROWS).workloads
    assert case_path(Path("/p"), workload) == Path(
        "/p/tests/functional_tests/test_cases/gpt/tp1/model_config.yaml"
    )


def test_a_golden_lies_in_our_place_or_beside_the_case() -> None:
    (workload,) = read(ROWS).workloads
    name = "gpt/tp1/golden_values_dev_dgx_a100.json"
    assert golden_paths(Path("/p"), workload) == (
        Path("/p/golden_values") / name,
        Path("/p/tests/functional_tests/test_cases") / name,
    )
