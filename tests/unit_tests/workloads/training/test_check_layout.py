from __future__ import annotations

import pytest
from check_rows import FILE, SOUND, case, row

from pytest_megatron.workloads.recipe.case import Evaluation, WorkloadCase
from pytest_megatron.workloads.training.checks.check import findings_of, problem_of
from pytest_megatron.workloads.training.checks.layout import hits_of
from pytest_megatron.workloads.training.checks.rules import check_rules

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
FIRST = "--decoder-first-pipeline-num-layers"
COUNTED = "--account-for-loss-in-pipeline-split"

# Rule: arguments that go against it, and arguments that nearly do.
LAYOUTS: dict[str, list[tuple[dict[str, str | None], dict[str, str | None]]]] = {
    "layout-world-size": [({TP: "3"}, {TP: "4"}), ({PP: "8"}, {PP: "4"})],
    "layout-expert-ranks": [
        ({EP: "8", "--num-experts": "8"}, {EP: "8", "--num-experts": "8", ETP: "1"}),
        ({ETP: "16"}, {ETP: "8"}),
    ],
    "layout-layers": [
        ({"--num-layers": "9"}, {"--num-layers": "9", COUNTED: "true"}),
        ({"--num-layers": "9"}, {"--num-layers": "9", FIRST: "4"}),
        ({"--num-layers": "9"}, {"--num-layers": "9", "--hybrid-layer-pattern": "M*M*|M*M*"}),
    ],
    "layout-heads": [({"--num-attention-heads": "1"}, {"--num-attention-heads": "2"})],
    "layout-experts": [
        ({EP: "4", "--num-experts": "6"}, {EP: "4", "--num-experts": "8"}),
    ],
}
PAIRS = [(rule, *pair) for rule, pairs in LAYOUTS.items() for pair in pairs]


def found(some: WorkloadCase, **changes: str | int) -> list[str]:
    return [finding.rule.id for finding in findings_of(hits_of(row(**changes), some, {}))]


@pytest.mark.parametrize(("rule", "wrong", "right"), PAIRS)
def test_a_layout_that_megatron_refuses_is_found_and_its_neighbour_is_not(
    rule: str, wrong: dict[str, str | None], right: dict[str, str | None]
) -> None:
    assert (rule in found(case(wrong)), found(case(right))) == (True, [])


def test_every_rule_of_the_layout_has_its_pair() -> None:
    assert set(LAYOUTS) == {rule for rule in check_rules() if rule.startswith("layout-")}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({TP: "${TP}"}, id="a size that only the shell knows"),
        pytest.param({TP: "3", "--encoder-tensor-model-parallel-size": "1"}, id="encoder"),
        pytest.param({"--num-layers": "9", "--use-checkpoint-args": "true"}, id="checkpoint"),
        pytest.param({"--num-layers": None, "--encoder-num-layers": "7"}, id="encoder layers"),
    ],
)
def test_what_the_arguments_do_not_say_is_left_alone(changes: dict[str, str | None]) -> None:
    assert found(case(changes)) == []


def test_ranks_that_a_script_starts_are_left_alone() -> None:
    assert found(case({PP: "8"}), script="python -m pytest") == []


def test_a_case_that_is_to_fail_is_not_refused() -> None:
    assert found(case({TP: "3"}, evaluation=Evaluation.XPASS)) == []


def test_a_refusal_says_where_and_everything() -> None:
    findings = findings_of(hits_of(row(gpus=4, nodes=1), case({TP: "8", "--num-layers": "9"}), {}))
    problem = problem_of(findings)
    assert problem is not None
    ranks = (
        "TP 8 x PP 2 x CP 2 = 32 does not divide the 4 ranks (nodes 1 x gpus 4): megatron-core "
        "refuses to initialize; correct gpus and nodes of the recipe, or the sizes "
        "[layout-world-size]; nothing was run"
    )
    layers = f"9 layers cannot be divided over 2 pipeline stages: {findings[1].wrong}"
    assert problem == (
        f"{FILE}:{10 + list(SOUND).index(TP)}",
        f"{ranks}\n{FILE}:10: {layers}; {findings[1].fix} [layout-layers]",
    )
