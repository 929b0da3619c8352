from __future__ import annotations

import pytest
from recipe_texts import read

from pytest_megatron.errors import SelectionError
from pytest_megatron.workloads.recipe.model import Filters, Vocabulary, select

WORKLOADS = read(
    """products:
  - test_case: [alpha]
    products:
      - {environment: [dev, lts], scope: [mr-github], platforms: [dgx_h100]}
  - test_case: [beta]
    products:
      - {environment: [dev], scope: [nightly, mr-github-slim], platforms: [dgx_gb200]}
      - {environment: [dev], scope: [mr-broken], tag: [latest]}
"""
).workloads


def names(selection: Filters) -> list[str]:
    return [w.item_name for w in select(WORKLOADS, selection, Vocabulary())]


def message(selection: Filters) -> str:
    with pytest.raises(SelectionError) as raised:
        select(WORKLOADS, selection, Vocabulary())
    return str(raised.value)


def test_an_empty_selection_is_everything() -> None:
    assert len(names({})) == len(WORKLOADS) == 5


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ({"scope": ("L1",)}, ["alpha[dev-dgx_h100]", "alpha[lts-dgx_h100]"]),
        ({"scope": ("mr-github",), "environment": ("lts",)}, ["alpha[lts-dgx_h100]"]),
        ({"scope": ("L0", "nightly")}, ["beta[dev-dgx_gb200-L2]", "beta[dev-dgx_gb200-L0]"]),
        ({"scope": ("mr-broken",)}, ["beta[dev-dgx_a100]"]),
        ({"platform": ("dgx_gb200",), "cadence": ("pr",)}, ["beta[dev-dgx_gb200-L0]"]),
        ({"tag": ("latest",)}, ["beta[dev-dgx_a100]"]),
        ({"model": ("gpt",), "test_case": ("alpha",), "environment": ("dev",)},
         ["alpha[dev-dgx_h100]"]),
    ],
)  # fmt: skip
def test_each_filter_is_exact_equality(selection: Filters, expected: list[str]) -> None:
    assert names(selection) == expected


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        pytest.param(
            {"test_case": ("alpa",)},
            "--test-case: unknown test case 'alpa', expected one of alpha, beta; "
            "did you mean 'alpha'?",
            id="test case",
        ),
        pytest.param(
            {"cadence": ("daily",)},
            "--cadence: unknown cadence 'daily', expected one of mergegroup, nightly, pr, weekly",
            id="nothing near",
        ),
    ],
)
def test_an_unknown_word_lists_the_choices(selection: Filters, expected: str) -> None:
    assert message(selection) == expected


def test_of_many_choices_only_the_nearest_are_listed() -> None:
    cases = "".join(
        f"  - {{test_case: [gpt_{i}], products: [{{environment: [dev], scope: [mr]}}]}}\n"
        for i in range(20)
    )
    with pytest.raises(SelectionError) as raised:
        select(read(f"products:\n{cases}").workloads, {"test_case": ("gpt_1x",)}, Vocabulary())
    assert str(raised.value) == (
        "--test-case: unknown test case 'gpt_1x', expected one of 20; "
        "the nearest are gpt_1, gpt_18, gpt_19"
    )


def test_a_tag_where_no_workload_has_one_says_so() -> None:
    with pytest.raises(SelectionError, match=r"no workload has a tag; drop the option"):
        select(WORKLOADS[:1], {"tag": ("latest",)}, Vocabulary())


def test_an_empty_result_names_the_filter_to_drop_and_the_nearest_rows() -> None:
    assert message({"scope": ("L1",), "environment": ("dev",), "platform": ("dgx_gb200",)}) == (
        "--scope L1 --environment dev --platform dgx_gb200: matches none of 5 workloads; "
        "1 workload matches without --platform dgx_gb200: alpha[dev-dgx_h100]; "
        "2 workloads match without --scope L1: beta[dev-dgx_gb200-L2], beta[dev-dgx_gb200-L0]"
    )


def test_without_workloads_there_is_nothing_to_match() -> None:
    with pytest.raises(SelectionError, match=r"--scope L1: there are no workloads, expected"):
        select([], {"scope": ("L1",)}, Vocabulary())
