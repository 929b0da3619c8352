from __future__ import annotations

import pytest
from recipe_texts import HEAD, read


def found(text: str) -> list[str]:
    return [f"{finding} [{finding.rule}]" for finding in read(text).findings]


GOOD = "{environment: [dev], scope: [mr]}"


@pytest.mark.parametrize(
    ("entry", "finding"),
    [
        pytest.param(
            "{test_case: [a]}",
            "r.yaml:9: products[0].products: is missing; add it [no-products]",
            id="no products",
        ),
        pytest.param(
            f"{{test_case: abc, products: [{GOOD}]}}",
            "r.yaml:9: products[0].test_case: found 'abc', expected a list; write [abc] "
            "[bare-string]",
            id="test case is no list",
        ),
        pytest.param(
            "{test_case: [a], products: [{environment: [dev], scope: [mr], nemo_model: llama}]}",
            "r.yaml:9: nemo_model: found 'llama', expected a list; write [llama] [row]",
            id="extra key is no list",
        ),
        pytest.param(
            "{test_case: [a], products: [{environment: [dev], scope: [mr], gpus: [eight]}]}",
            "r.yaml:9: products[0].products[0].gpus[0]: found 'eight', expected an integer >= 0 "
            "[schema]",
            id="row value of the wrong type",
        ),
        pytest.param(
            f"{{test_case: [a], cadense: [pr], products: [{GOOD}]}}",
            "r.yaml:9: products[0].cadense: unknown key, expected one of cadence, products, "
            "test_case; did you mean 'cadence'? [schema]",
            id="unknown key of an entry",
        ),
        pytest.param(
            f"{{test_case: [a], products: [{GOOD}, {GOOD}]}}",
            "r.yaml:9: a in dev on dgx_a100 for mr is also on line 9, expected it once; remove one "
            "[duplicate-row]",
            id="duplicate row",
        ),
        pytest.param(
            "{test_case: [a], products: [{environment: [dev], scope: [mr], scope: [nightly]}]}",
            "r.yaml:9: key 'scope' is also on line 9, expected it once; remove one [duplicate-key]",
            id="duplicate key",
        ),
        pytest.param(
            "{test_case: [a], products: [{scope: [mr]}]}",
            "r.yaml:9: environment: the row has none, expected a string; add it to the product or "
            "to spec [row]",
            id="no environment",
        ),
        pytest.param(
            "{test_case: [a, b], products: [{environment: [dev], scope: [mr], test_case: [c]}]}",
            "r.yaml:9: test_case: stands inside a product, expected it beside 'products' [row]",
            id="test case inside a product",
        ),
    ],
)
def test_what_would_drop_or_mangle_a_row_is_an_error(entry: str, finding: str) -> None:
    assert finding in found(f"products:\n  - {entry}\n")


@pytest.mark.parametrize(
    ("product", "message"),
    [
        (
            "{environment: [dev], scope: [mr], platforms: ['dg  x_h100']}",
            (
                "platforms: unknown word 'dg  x_h100', expected one of cpu, dgx_a100, dgx_gb200, "
                "dgx_h100, dgx_h200; did you mean 'dgx_h100'?"
            ),
        ),
    ],
)
def test_an_unknown_word_is_an_error_with_the_nearest_one(product: str, message: str) -> None:
    text = f"products:\n  - test_case: [a]\n    products:\n      - {product}\n"
    assert found(text) == [f"r.yaml:11: {message} [unknown-word]"]


def test_an_unknown_scope_is_named_a_disabled_one_is_known() -> None:
    text = """products:
  - test_case: [a]
    products:
      - environment: [dev]
        scope: [mr-broken, mr-github-temp-disabled, flaky, L0-smoke,
                nigthly]
"""
    (finding,) = read(text).findings
    assert (finding.line, finding.rule) == (13, "unknown-word")
    assert finding.message.startswith("scope: unknown word 'nigthly', expected one of L0, ")
    assert finding.message.endswith("; did you mean 'nightly'?")


def test_every_element_of_test_case_runs_with_a_warning() -> None:
    """Megatron-LM runs only the first test case of a list."""
    loaded = read(f"products:\n  - test_case: [a, b]\n    products: [{GOOD}]\n")
    assert [workload.test_case for workload in loaded.workloads] == ["a", "b"]
    (warning,) = loaded.findings
    assert (warning.is_error, str(warning)) == (
        False,
        "r.yaml:9: test_case: Megatron-LM runs only 'a' and drops b; give each an entry of its own",
    )


def test_one_bad_product_leaves_the_others_of_its_file() -> None:
    text = f"""products:
  - test_case: [a]
    products: [{GOOD}, {{environment: dev}}]
  - test_case: [b]
  - test_case: [c]
    products: [{GOOD}]
"""
    loaded = read(text)
    assert [workload.test_case for workload in loaded.workloads] == ["a", "c"]
    assert [error.line for error in loaded.errors] == [10, 11]


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("gpus: 8", "gpus: '8'", "r.yaml:5: spec.gpus: found '8', expected an integer >= 0"),
        ("version: 1", "version: 2", "r.yaml:2: format_version: found 2, expected 1"),
        (
            "type: basic",
            "type: basic\nspecs: {}",
            (
                "r.yaml:2: specs: unknown key, expected one of format_version, loggers, "
                "maintainers, products, spec, type; did you mean 'spec'?"
            ),
        ),
    ],
)
def test_a_wrong_head_leaves_no_rows(old: str, new: str, finding: str) -> None:
    text = f"{HEAD.replace(old, new)}products:\n  - test_case: [a]\n    products: [{GOOD}]\n"
    loaded = read(text)
    assert (loaded.workloads, [str(error) for error in loaded.findings]) == ((), [finding])


def test_an_extra_spec_key_is_a_placeholder_one_like_a_known_key_a_warning() -> None:
    head = HEAD + "  nemo_model: llama\n  time_limits: 5\n"
    loaded = read(f"{head}products:\n  - test_case: [a]\n    products: [{GOOD}]\n")
    assert loaded.workloads[0].spec["nemo_model"] == "llama"
    assert [(str(finding), finding.is_error) for finding in loaded.findings] == [
        (
            "r.yaml:9: spec.time_limits: is a placeholder of its own; did you mean 'time_limit'?",
            False,
        )
    ]


def test_a_misspelt_key_that_rows_need_is_missing_and_named() -> None:
    head = HEAD.replace("platforms", "platfroms")
    loaded = read(f"{head}products:\n  - test_case: [a]\n    products: [{GOOD}]\n")
    assert loaded.workloads == ()
    assert [(one.rule, one.line, one.is_error) for one in loaded.findings] == [
        ("similar-key", 6, False),
        ("row", 10, True),
    ]


def test_a_key_of_a_product_that_looks_like_a_known_one_is_a_warning() -> None:
    product = "{environment: [dev], scope: [mr], time_limits: [5]}"
    loaded = read(f"products:\n  - test_case: [a]\n    products: [{product}]\n")
    assert len(loaded.workloads) == 1
    assert [(str(finding), finding.is_error) for finding in loaded.findings] == [
        (
            (
                "r.yaml:10: products[0].products[0].time_limits: is a placeholder of its own; did "
                "you mean 'time_limit'?"
            ),
            False,
        )
    ]
