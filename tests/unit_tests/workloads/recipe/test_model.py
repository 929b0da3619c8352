from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from recipe_texts import HEAD, read

from pytest_megatron.errors import RecipeError
from pytest_megatron.workloads.recipe.model import Workload

TEXT = """\
type: basic
format_version: 1
spec:
  name: "{test_case}_{environment}_{tag}"
  model: gpt
  nodes: 2
  gpus: 4
  n_repeat: null
  time_limit: 3600
  platforms: cpu
  script: "run {assets_dir} ${{HOME}} {test_case}"
products:
  - test_case: [a]
    products:
      - {environment: [dev], scope: [mr-broken], tag: [latest], n_repeat: [2]}
"""


def only(text: str) -> Workload:
    (workload,) = read(text).workloads
    return workload


def test_a_row_is_parsed_once_into_typed_fields() -> None:
    workload = only(TEXT)
    assert workload == Workload(
        file=Path("r.yaml"),
        line=15,
        spec=workload.spec,
        model="gpt",
        test_case="a",
        environment="dev",
        platform="cpu",
        scope="mr-broken",
        cadence=("pr", "nightly", "mergegroup"),
        tag="latest",
        nodes=2,
        gpus=4,
        n_repeat=2,
        time_limit_s=3600,
        script="run {assets_dir} ${{HOME}} {test_case}",
        training_script_path=None,
        data_path=None,
        data_cache_path=None,
        checkpoint_load_path=None,
        name="a_dev_latest",
        variant=(),
    )
    assert workload.disabled_reason == "scope 'mr-broken' disables the row"
    assert pickle.loads(pickle.dumps(workload)) == workload


def test_a_name_without_a_template_has_the_usual_parts() -> None:
    workload = only(HEAD + "products: [{test_case: [a], products: [{environment: [dev], "
                    "scope: [mr]}]}]\n")  # fmt: skip
    assert (workload.name, workload.item_name) == ("a_dev_dgx_a100", "a[dev-dgx_a100]")
    assert workload.disabled_reason is None


def test_a_script_is_rendered_with_doubled_braces_and_magic_values() -> None:
    workload = only(TEXT)
    assert workload.script is not None
    assert workload.render(workload.script, assets_dir="/out") == "run /out ${HOME} a"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{none}", "r.yaml:15: '{none}' uses {none}, which the row does not have; add the key"),
        ("${HOME", "r.yaml:15: '${HOME' is no template: expected '}' before end of string"),
        ("{}", "r.yaml:15: '{}' is no template: "),
        ("{model.x}", "r.yaml:15: '{model.x}' is no template: 'str' object has no attribute 'x'"),
    ],
)
def test_a_template_that_cannot_be_filled_in_names_file_and_line(
    template: str, message: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        only(TEXT).render(template)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{tag}", "{tags}", "r.yaml:15: name: '{test_case}_{environment}_{tags}' uses {tags}, "),
        ("gpus: 4", "gpus: x", "r.yaml:15: gpus: found 'x', expected an integer"),
        ("script: ", "script: 3 # ", "r.yaml:15: script: found 3, expected a string"),
        ("  model: gpt\n", "", "r.yaml:14: model: the row has none, expected a string; add it"),
    ],
)
def test_compat_reports_rows_that_it_can_expand_but_not_use(
    old: str, new: str, message: str
) -> None:
    (error,) = read(TEXT.replace(old, new), "compat").errors
    assert str(error).startswith(message)


PRODUCT = """\
products:
  - test_case: [a]
    products:
      - {environment: [dev], scope: [mr], KEYS}
"""


def test_a_row_says_how_many_steps_are_traced() -> None:
    assert only(PRODUCT.replace("KEYS", "trace_steps: [3]")).trace_steps == 3
    (finding,) = read(PRODUCT.replace("KEYS", "trace_steps: [0]")).findings
    assert (finding.where, "trace_steps" in finding.message) == ("r.yaml:11", True)


def test_a_layout_of_an_earlier_version_is_refused_with_the_command() -> None:
    keys = "equivalent_to: [{--tensor-model-parallel-size: 1, gpus: 2}]"
    (finding,) = read(PRODUCT.replace("KEYS", keys)).findings
    assert (finding.where, finding.rule) == ("r.yaml:11", "row")
    assert finding.message.startswith(
        "equivalent_to was removed; write pytest-megatron trace compare ROW ROW"
    )
