from __future__ import annotations

from recipe_texts import read


def names(products: str, profile: str = "strict") -> list[str]:
    text = f"products:\n  - test_case: [a]\n    products:\n{products}"
    return [workload.item_name for workload in read(text, profile).workloads]


def test_rows_of_other_platforms_and_environments_need_no_variant() -> None:
    product = "      - {environment: [dev, lts], scope: [mr], platforms: [cpu, dgx_h100]}\n"
    expected = ["a[dev-cpu]", "a[dev-dgx_h100]", "a[lts-cpu]", "a[lts-dgx_h100]"]
    assert names(product) == expected


def test_only_keys_that_differ_are_in_the_name() -> None:
    products = """\
      - {environment: [dev], scope: [mr, mr-github], tag: [latest], gpus: [1, 2]}
      - {environment: [lts], scope: [nightly], tag: [legacy]}
"""
    assert names(products) == [
        "a[dev-dgx_a100-mr-1]",
        "a[dev-dgx_a100-mr-2]",
        "a[dev-dgx_a100-L1-1]",
        "a[dev-dgx_a100-L1-2]",
        "a[lts-dgx_a100]",
    ]


def test_rows_that_differ_in_an_explicit_cadence_only_show_it() -> None:
    products = """\
      - {environment: [dev], scope: [mr], cadence: [pr]}
      - {environment: [dev], scope: [mr], cadence: [nightly, weekly]}
"""
    assert names(products) == ["a[dev-dgx_a100-pr]", "a[dev-dgx_a100-nightly+weekly]"]


def test_a_key_that_one_row_overrides_tells_it_from_the_default() -> None:
    products = """\
      - {environment: [dev], scope: [mr]}
      - {environment: [dev], scope: [mr], gpus: [2]}
"""
    assert names(products) == ["a[dev-dgx_a100-8]", "a[dev-dgx_a100-2]"]


def test_compat_numbers_equal_rows() -> None:
    products = "      - {environment: [dev], scope: [mr, mr, mr]}\n"
    assert names(products, "compat") == [
        "a[dev-dgx_a100]",
        "a[dev-dgx_a100-2]",
        "a[dev-dgx_a100-3]",
    ]


def test_values_that_join_to_the_same_text_are_numbered() -> None:
    products = """\
      - {environment: [dev], scope: [mr], x: [a-b], y: [c]}
      - {environment: [dev], scope: [mr], x: [a], y: [b-c]}
"""
    assert names(products) == ["a[dev-dgx_a100-a-b-c]", "a[dev-dgx_a100-a-b-c-2]"]
