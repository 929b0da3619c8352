"""Phases and checks of a row that is compared with another layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from check_rows import FILE, case, row

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import LaunchError, RecipeError
from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.workloads.recipe.case import CaseMode, TestType, WorkloadCase
from pytest_megatron.workloads.recipe.model import Equivalence, Workload
from pytest_megatron.workloads.training.checks.check import findings_of, hits_of
from pytest_megatron.workloads.training.plan.phases import PhaseRole, reference_of
from pytest_megatron.workloads.training.plan.plan import AttemptPlan, Replay, Setting, plan_attempt

TP, PP, EP = (f"--{name}-model-parallel-size" for name in ("tensor", "pipeline", "expert"))
DIRS = AttemptDirs(root=Path("/run/item/repeat_1/attempt_1"))
SETTING = Setting(
    root=Path("/project"), env={"PATH": "/bin"}, tee_ranks=(0,), is_lightweight=True, python="py"
)
ALONE = {TP: 1, PP: 1, "--context-parallel-size": 1, "--sequence-parallel": None}


def equivalent(
    arguments: Mapping[str, JsonValue], *, gpus: int | None = None, steps: int = 2
) -> Workload:
    """Return a row of 2 x 8 ranks that is compared with a layout."""
    named = Equivalence(arguments=arguments, num_ranks=gpus, num_steps=steps)
    return replace(row(), equivalence=named)


def plan(workload: Workload, found: WorkloadCase) -> AttemptPlan:
    return plan_attempt(workload, found, DIRS, SETTING, repeat=1)


def words(plan: AttemptPlan, number: int) -> list[str]:
    """Return the program's arguments in a phase, each with its value."""
    argv = list(plan.phases[number - 1].argv)
    return argv[argv.index("train.py") + 1 :]


def test_the_reference_its_noise_and_the_row_train_one_after_the_other() -> None:
    made = plan(equivalent(ALONE), case({"--save": "there", "--save-interval": "5"}))
    assert [phase.name for phase in made.phases] == ["reference", "noise", "candidate"]
    assert [phase.world_size for phase in made.phases] == [1, 1, 16]
    assert [phase.num_nodes for phase in made.phases] == [1, 1, 2]
    assert {phase.role for phase in made.phases} == {PhaseRole.EQUIVALENCE}
    assert {phase.last_iteration for phase in made.phases} == {2}
    assert words(made, 1) == words(made, 2)
    for number, size in ((1, "1"), (3, "2")):
        found = words(made, number)
        assert found[found.index(TP) + 1] == size
        assert found[-2:] == ["--exit-interval", "2"]
        assert not {"--save", "--save-interval"} & set(found)
    assert "--sequence-parallel" in words(made, 3)
    assert "--sequence-parallel" not in words(made, 1)


def test_all_phases_start_with_the_weights_of_the_reference() -> None:
    made = plan(equivalent(ALONE), case())
    settings = [json.loads(phase.env["PYTEST_MEGATRON_TRACE"]) for phase in made.phases]
    weights = str(DIRS.initial_weights)
    assert [one["weights_to"] for one in settings] == [weights, None, None]
    assert [one["weights_from"] for one in settings] == [None, weights, weights]
    assert [one["noise_seed"] is None for one in settings] == [True, False, True]
    assert len({one["directory"] for one in settings}) == 3
    assert {(one["steps"], one["values"]) for one in settings} == {(2, "full")}


@pytest.mark.parametrize(
    ("changes", "num_ranks"),
    [
        ({}, 8),  # TP 2 x PP 2 x CP 2, as the case
        ({TP: 1}, 4),
        ({EP: 4, "--num-experts": 4}, 16),  # ETP 2 x EP 4 x PP 2
        ({EP: 4, "--num-experts": 4, "--expert-tensor-parallel-size": 1}, 8),
    ],
)
def test_the_reference_has_the_fewest_ranks_that_its_sizes_need(
    changes: Mapping[str, JsonValue], num_ranks: int
) -> None:
    assert reference_of(row(), case(), Equivalence(arguments=changes)).num_ranks == num_ranks


def test_ranks_that_are_typed_count() -> None:
    assert plan(equivalent(ALONE, gpus=4), case()).phases[0].world_size == 4


@pytest.mark.parametrize(
    ("workload", "found", "message"),
    [
        (equivalent({TP: 2}, gpus=16), case(), "is the layout of the case itself"),
        (
            equivalent({EP: 1}, gpus=16),
            case(),
            "is the layout of the case itself",
        ),
        (equivalent({TP: 32}), case(), "needs 128 ranks, and the row has 2 x 8"),
        (equivalent({TP: 1}, gpus=12), case(), "needs 12 ranks, and the row has 2 x 8"),
        (equivalent({TP: "${TP}"}), case(), "its sizes are no numbers"),
        (equivalent(ALONE, steps=200), case(), "trace_steps is 200, and --train-iters 100"),
        (
            equivalent(ALONE),
            replace(case(), test_type=TestType.CKPT_RESUME),
            "has TEST_TYPE ckpt-resume and MODE pretraining, expected regular and pretraining",
        ),
        (equivalent(ALONE), case(mode=CaseMode.RL), "TEST_TYPE regular and MODE rl, expected"),
        (
            replace(equivalent(ALONE), training_script_path="nemo llm pretrain"),
            case(),
            "'nemo' is a command, expected a Python program",
        ),
        (equivalent(ALONE), case({"trainer.max_steps": "3"}), "key=value, expected flags"),
    ],
)
def test_a_row_that_cannot_be_compared_is_refused(
    workload: Workload, found: WorkloadCase, message: str
) -> None:
    with pytest.raises(RecipeError, match="equivalent_to: ") as error:
        plan(workload, found)
    assert error.value.where == "recipes/r.yaml:7"
    assert message in error.value.problem


def test_a_reference_that_its_sizes_do_not_fit_is_found_at_the_row() -> None:
    workload = equivalent({**ALONE, PP: 3})
    (finding,) = findings_of(hits_of(workload, case(), {}))
    assert (finding.rule.id, finding.where) == ("layout-layers", "recipes/r.yaml:7")
    assert finding.found.startswith("8 layers")
    assert str(FILE) not in (finding.where or "")


def test_one_of_its_phases_is_not_run_alone() -> None:
    made = plan(equivalent(ALONE), case())
    with pytest.raises(LaunchError, match="are compared with one another"):
        Replay(phase=3).cut(made, "item")
