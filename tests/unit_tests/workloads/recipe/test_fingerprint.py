from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recipe_texts import read

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.yaml import parse_document
from pytest_megatron.workloads.recipe.case import fingerprint

(ROW,) = read(
    "products: [{test_case: [tp1], products: [{environment: [dev], scope: [mr]}]}]\n"
).workloads
CASE = """
ENV_VARS: {SKIP_PYTEST: 0, OMP_NUM_THREADS: 1}
TEST_TYPE: regular
METRICS: [lm loss]
MODEL_ARGS:
  --train-iters: 50
  --bf16: true
"""


def case(text: str = CASE) -> dict[str, JsonValue]:
    return parse_document(text, Path("model_config.yaml")).value


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("  --bf16: true\n", "  --bf16: true # half\n", id="comment"),
        pytest.param("TEST_TYPE: regular\nMETRICS", "METRICS", id="moved"),
        pytest.param("[lm loss]", "[lm loss, num-zeros]", id="what is compared"),
        pytest.param("SKIP_PYTEST: 0", "SKIP_PYTEST: 1", id="whether it is compared"),
    ],
)
def test_what_is_not_trained_does_not_count(old: str, new: str) -> None:
    text = CASE.replace(old, new)
    text += "TEST_TYPE: regular\n" if "TEST_TYPE" not in text else ""
    assert text != CASE
    assert fingerprint(ROW, case(text)) == fingerprint(ROW, case())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("--train-iters: 50", "--train-iters: 51", id="argument"),
        pytest.param("OMP_NUM_THREADS: 1", "OMP_NUM_THREADS: 2", id="variable"),
        pytest.param("TEST_TYPE: regular", "TEST_TYPE: frozen-start", id="type"),
    ],
)
def test_what_is_trained_counts(old: str, new: str) -> None:
    assert fingerprint(ROW, case(CASE.replace(old, new))) != fingerprint(ROW, case())


def test_the_row_counts_and_a_row_without_a_case_has_a_fingerprint() -> None:
    more = replace(ROW, gpus=ROW.gpus + 1)
    assert fingerprint(more, case()) != fingerprint(ROW, case())
    assert fingerprint(more, None) != fingerprint(ROW, None)
    assert len(fingerprint(ROW, None)) == 16
