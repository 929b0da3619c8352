from __future__ import annotations

import pytest
from check_rows import case, row

from pytest_megatron.workloads.recipe.case import ModelArgs
from pytest_megatron.workloads.training.checks.check import findings_of
from pytest_megatron.workloads.training.checks.layout import hits_of
from pytest_megatron.workloads.training.plan.plan import CONNECTIONS_VARIABLE, planned_connections

ALONE = {"--tensor-model-parallel-size": "1", "--context-parallel-size": "1"}
SPLIT = {"--context-parallel-size": "1"}  # TP 2
BY_CONTEXT = {"--tensor-model-parallel-size": "1"}  # CP 2
FSDP = {"--use-megatron-fsdp": "true"}
TORCH_FSDP = {**ALONE, "--use-torch-fsdp2": "true"}
OVERLAP = {"--overlap-moe-expert-parallel-comm": "true"}


@pytest.mark.parametrize(
    ("arguments", "platform", "planned", "wrong"),
    [
        pytest.param(SPLIT, "dgx_h100", "1", {"8": "connections-one"}, id="TP on Hopper"),
        pytest.param(BY_CONTEXT, "dgx_a100", "1", {"2": "connections-one"}, id="CP on Ampere"),
        pytest.param(SPLIT, "dgx_gb200", None, {}, id="TP on Blackwell"),
        pytest.param(SPLIT, "our_cluster", None, {}, id="unknown GPUs"),
        pytest.param(ALONE, "dgx_h100", None, {}, id="DP alone"),
        pytest.param(FSDP, "dgx_h100", None, {"1": "connections-fsdp"}, id="FSDP beside TP"),
        pytest.param(FSDP, "dgx_gb200", None, {"1": "connections-fsdp"}, id="FSDP on Blackwell"),
        pytest.param(TORCH_FSDP, "dgx_h200", None, {"1": "connections-fsdp"}, id="torch's FSDP"),
        pytest.param({**ALONE, **OVERLAP}, "dgx_h100", None, {}, id="EP overlap"),
        pytest.param({**SPLIT, **OVERLAP}, "dgx_h100", None, {}, id="both overlaps"),
        pytest.param(SPLIT, "cpu", None, {}, id="no GPU"),
    ],
)
def test_hardware_and_parallelism_decide(
    arguments: dict[str, str], platform: str, planned: str | None, wrong: dict[str, str]
) -> None:
    workload, some = row(platforms=platform), case(arguments)
    given = ModelArgs(some.arguments)
    assert planned_connections(given, platform, {}).get(CONNECTIONS_VARIABLE) == planned
    assert planned_connections(given, platform, {CONNECTIONS_VARIABLE: "5"}) == {}
    for value in ("1", "2", "8", "32"):
        ids = [
            f.rule.id for f in findings_of(hits_of(workload, some, {CONNECTIONS_VARIABLE: value}))
        ]
        is_wrong = value in wrong or ("connections-one" in wrong.values() and value != "1")
        assert ids == (list(wrong.values()) if is_wrong else []), value


@pytest.mark.parametrize("value", ["0", "33", "one", "", "1.0", "-1"])
def test_a_value_that_cuda_does_not_take_is_refused(value: str) -> None:
    (finding,) = findings_of(hits_of(row(), case(ALONE, env={CONNECTIONS_VARIABLE: value}), {}))
    assert (finding.rule.id, finding.where, finding.is_error) == (
        "connections-number",
        "gpt/model_config.yaml: ENV_VARS",
        True,
    )


def test_the_case_wins_over_the_environment_and_a_script_over_both() -> None:
    env = {CONNECTIONS_VARIABLE: "8"}
    in_script = case(SPLIT, env=env, before_script=f"export {CONNECTIONS_VARIABLE}=1")
    assert [
        [f.where for f in findings_of(hits_of(row(), some, env))]
        for some in (case(SPLIT), case(SPLIT, env={CONNECTIONS_VARIABLE: "1"}), in_script)
    ] == [["the environment"], [], []]
