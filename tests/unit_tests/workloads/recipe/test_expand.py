from __future__ import annotations

import pytest
from recipe_texts import read

from pytest_megatron.workloads.recipe.load import Loaded

DEFAULT = ["pr", "nightly", "mergegroup"]


def rows(loaded: Loaded, *keys: str) -> list[tuple[object, ...]]:
    assert [str(error) for error in loaded.errors] == []
    return [tuple(workload.spec.get(key) for key in keys) for workload in loaded.workloads]


def problems(loaded: Loaded) -> list[str]:
    return [str(error) for error in loaded.errors]


def test_rows_are_the_cartesian_product_in_key_order() -> None:
    text = """products:
  - test_case: [a]
    products:
      - environment: [lts, dev]
        scope: [mr]
        platforms: [dgx_h100, dgx_a100]
"""
    assert rows(read(text, "compat"), "environment", "platforms") == [
        ("lts", "dgx_h100"),
        ("lts", "dgx_a100"),
        ("dev", "dgx_h100"),
        ("dev", "dgx_a100"),
    ]


def test_a_row_holds_the_rest_of_spec_then_its_own_keys() -> None:
    text = """products:
  - test_case: [a]
    products:
      - {environment: [dev], gpus: [4], scope: [mr]}
"""
    (workload,) = read(text, "compat").workloads
    assert list(workload.spec.items()) == [
        ("model", "gpt"),
        ("platforms", "dgx_a100"),
        ("training_script_path", "train.py"),
        ("environment", "dev"),
        ("gpus", 4),
        ("scope", "mr"),
        ("test_case", "a"),
        ("cadence", DEFAULT),
    ]


@pytest.mark.parametrize("profile", ["compat", "strict"])
def test_scope_aliases_and_the_cadence_that_they_imply(profile: str) -> None:
    text = """products:
  - test_case: [a]
    products:
      - environment: [dev]
        scope: [nightly, weekly, mr-github, mr-github-slim, mr, mr-broken]
"""
    assert rows(read(text, profile), "scope", "cadence") == [
        ("L2", ["nightly"]),
        ("L3", ["weekly"]),
        ("L1", DEFAULT),
        ("L0", DEFAULT),
        ("mr", DEFAULT),
        ("mr-broken", DEFAULT),
    ]


@pytest.mark.parametrize("profile", ["compat", "strict"])
def test_an_explicit_cadence_wins_the_inner_one_first(profile: str) -> None:
    text = """products:
  - test_case: [a]
    cadence: [pr]
    products:
      - {environment: [dev], scope: [nightly], cadence: [weekly, nightly]}
      - {environment: [lts], scope: [nightly]}
"""
    assert rows(read(text, profile), "cadence") == [(["weekly", "nightly"],), (["pr"],)]


@pytest.mark.parametrize("cadence", ["nightly", "[hourly]"])
def test_a_wrong_cadence_is_an_error_in_both_profiles(cadence: str) -> None:
    text = f"""products:
  - test_case: [a]
    products:
      - {{environment: [dev], scope: [mr], cadence: {cadence}}}
"""
    for profile in ("compat", "strict"):
        (problem,) = problems(read(text, profile))
        assert problem.startswith("r.yaml:11: ")
        assert "cadence" in problem


def test_compat_uses_only_the_first_test_case() -> None:
    text = """products:
  - test_case: [a, b]
    products: [{environment: [dev], scope: [mr]}]
  - test_case: xyz
    products: [{environment: [dev], scope: [mr]}]
"""
    assert rows(read(text, "compat"), "test_case") == [("a",), ("x",)]


def test_compat_drops_an_entry_without_products() -> None:
    text = """products:
  - test_case: [a]
  - test_case: [b]
    products: [{environment: [dev], scope: [mr]}]
"""
    assert rows(read(text, "compat"), "test_case") == [("b",)]


def test_compat_iterates_over_a_bare_string() -> None:
    text = """products:
  - test_case: [a]
    products: [{environment: [dev], scope: mr}]
"""
    assert rows(read(text, "compat"), "scope") == [("m",), ("r",)]


def test_compat_tolerates_a_duplicate_key() -> None:
    text = """products:
  - test_case: [a]
    products: [{environment: [dev], scope: [mr], scope: [nightly]}]
"""
    assert rows(read(text, "compat"), "scope") == [("L2",)]


@pytest.mark.parametrize("profile", ["compat", "strict"])
def test_build_is_filled_in_from_the_final_row(profile: str) -> None:
    text = """\
type: basic
format_version: 1
spec: {model: gpt, gpus: 8, platforms: cpu, build: "i-{environment}-{nemo}-{gpus}"}
products:
  - test_case: [a]
    products: [{environment: [dev], scope: [mr], nemo: [x], gpus: [2]}]
"""
    assert rows(read(text, profile), "build", "nemo") == [("i-dev-x-2", "x")]


@pytest.mark.parametrize("profile", ["compat", "strict"])
def test_a_row_without_environment_breaks_its_file_only_and_says_so(profile: str) -> None:
    text = """\
type: basic
format_version: 1
spec: {model: gpt, gpus: 8, platforms: cpu, build: "i-{environment}"}
products:
  - test_case: [a]
    products: [{scope: [mr]}]
"""
    assert problems(read(text, profile)) == [
        (
            "r.yaml:6: build: 'i-{environment}' uses {environment}, which the row does not have; "
            "add the key, or double the braces"
        )
    ]


@pytest.mark.parametrize("profile", ["compat", "strict"])
def test_a_build_recipe_gives_no_workloads(profile: str) -> None:
    text = "type: build\nformat_version: 1\nspec: {name: i, platforms: [linux/amd64]}\n"
    assert read(text, profile) == Loaded(workloads=(), findings=())


def test_compat_collects_every_problem_of_a_file() -> None:
    text = """products:
  - test_case: []
    products: [{environment: [dev], scope: [mr]}]
  - 3
  - test_case: [a]
    products:
      - {environment: 3}
      - {environment: [dev], scope: [mr], test_case: [b]}
  - test_case: [b]
    products: null
"""
    assert problems(read(text, "compat")) == [
        "r.yaml:9: test_case: found [], expected a list with one test case",
        "r.yaml:11: found 3, expected a mapping",
        "r.yaml:14: environment: found 3, expected a list",
        "r.yaml:15: test_case: stands inside a product, expected it beside 'products'",
        "r.yaml:16: products: found None, expected a list",
    ]
