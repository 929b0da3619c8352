from __future__ import annotations

from pathlib import Path

from recipe_texts import read

from pytest_megatron.recipe.places import case_path, golden_paths

ROWS = "products: [{test_case: [tp1], products: [{environment: [dev], scope: [mr]}]}]\n"


def test_a_case_lies_where_megatron_has_it() -> None:
    (workload,) = read(ROWS).workloads
    assert case_path(Path("/p"), workload) == Path(
        "/p/tests/functional_tests/test_cases/gpt/tp1/model_config.yaml"
    )


def test_a_golden_lies_in_our_place_or_beside_the_case() -> None:
    name = "gpt/tp1/golden_values_dev_cpu.json"
    assert golden_paths(
        Path("/p"), model="gpt", test_case="tp1", environment="dev", platform="cpu"
    ) == (
        Path("/p/golden_values") / name,
        Path("/p/tests/functional_tests/test_cases") / name,
    )
