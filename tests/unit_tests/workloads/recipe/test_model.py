from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from recipe_texts import HEAD, read

from pytest_megatron.errors import RecipeError
from pytest_megatron.workloads.recipe.model import Equivalence, Workload

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
        max_windows=None,
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
      - {environment: [dev], scope: [mr], equivalent_to: [KEYS], trace_steps: [3]}
"""


def test_a_row_names_the_layout_that_it_must_agree_with() -> None:
    keys = "{--tensor-model-parallel-size: 1, --bf16: false, --load: null, gpus: 2}"
    equivalence = only(PRODUCT.replace("KEYS", keys)).equivalence
    assert equivalence == Equivalence(
        arguments={"--tensor-model-parallel-size": 1, "--bf16": None, "--load": None},
        num_ranks=2,
        num_steps=3,
    )
    assert equivalence.text == "2 ranks, --tensor-model-parallel-size 1, no --bf16, no --load"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("{tp: 1}", "equivalent_to: unknown key 'tp', expected gpus or flags of MODEL_ARGS"),
        ("{gpus: 0}", "equivalent_to: gpus is 0, expected a number of ranks from 1 on"),
        ("{gpus: true}", "equivalent_to: gpus is True, expected a number of ranks from 1 on"),
        ("{--a: {b: 1}}", "equivalent_to: --a is {'b': 1}, expected one value or a list"),
    ],
)
def test_a_layout_that_is_none_is_an_error_of_its_row(keys: str, message: str) -> None:
    (finding,) = read(PRODUCT.replace("KEYS", keys)).findings
    assert (finding.where, finding.rule) == ("r.yaml:11", "row")
    assert finding.message.startswith(message)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("script: [run], equivalent_to: [{gpus: 1}]", "equivalent_to: the row has a script"),
        ("equivalent_to: [tp1]", "equivalent_to"),
        ("equivalent_to: {--a: 1}", "equivalent_to"),
        ("trace_steps: [0], equivalent_to: [{gpus: 1}]", "trace_steps"),
    ],
)
def test_keys_that_mean_nothing_are_one_error(keys: str, message: str) -> None:
    (finding,) = read(PRODUCT.replace("equivalent_to: [KEYS], trace_steps: [3]", keys)).findings
    assert finding.where == "r.yaml:11"
    assert message in finding.message
