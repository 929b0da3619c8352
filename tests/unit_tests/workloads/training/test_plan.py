from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from recipe_rows import row_of

from pytest_megatron.errors import CaseError, LaunchError, MegatronError, RecipeError, TraceError
from pytest_megatron.gangs.rank.bootstrap import rank_env
from pytest_megatron.gangs.topology import RankPlace
from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.workloads.recipe.case import read_case
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.phases import (
    Origin,
    find_untraceable,
)
from pytest_megatron.workloads.training.plan.plan import (
    AttemptPlan,
    Replay,
    Setting,
    plan_attempt,
    trace_tools,
)

ROOT = Path(__file__).parents[4]
DIRS = AttemptDirs(root=Path("/run/item/repeat_1/attempt_1"))
SETTING = Setting(
    root=Path("/project"),
    env={"PATH": "/bin"},
    tee_ranks=(0, 3),
    is_lightweight=False,
    python="python",
)


def workload(**changes: str | int) -> Workload:
    return row_of(**{"gpus": 2, "training_script_path": "train.py", **changes})


def plan(tmp_path: Path, text: str, row: Workload, setting: Setting = SETTING) -> AttemptPlan:
    path = tmp_path / "model_config.yaml"
    path.write_text(text)
    return plan_attempt(row, read_case(path), DIRS, setting, repeat=3)


REGULAR = "TEST_TYPE: regular\nMODEL_ARGS: {--train-iters: 50, --seed: '${REPEAT}'}\n"
RESUME = REGULAR.replace("regular", "ckpt-resume")


def test_a_training_runs_under_torchrun_with_logs_of_its_own(tmp_path: Path) -> None:
    (phase,) = plan(tmp_path, REGULAR, workload()).phases
    assert phase.argv == (
        *("python", "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--max-restarts", "0", "--nproc-per-node", "2"),
        *("--log-dir", f"{DIRS.root}/phase_1/logs", "--redirects", "3"),
        *("--tee", "0:3", "train.py", "--train-iters", "50", "--seed", "3"),
        *("--exit-interval", "50"),
    )
    assert phase.last_iteration == 50


@pytest.mark.parametrize(
    ("case", "user", "expected"),
    [("", {}, ""), ("", {"PYTHONPATH": "/user"}, ":/user"), ("PYTHONPATH: /case", {}, ":/case")],
    ids=["root", "user", "case"],
)
def test_ranks_look_for_modules_in_the_project_first(
    tmp_path: Path, case: str, user: dict[str, str], expected: str
) -> None:
    """A program in a folder, such as examples/inference/advanced, imports what lies in the root."""
    text = f"{REGULAR}ENV_VARS: {{{case}}}\n"
    (phase,) = plan(tmp_path, text, workload(), replace(SETTING, env=user)).phases
    assert phase.env["PYTHONPATH"] == f"{SETTING.root}{expected}"


def test_variables_of_a_case_refer_to_directories_and_to_one_another(tmp_path: Path) -> None:
    """Megatron-LM's driver fills in the whole file, HF_HOME: ${DATA_PATH}/hf_home."""
    text = REGULAR + "ENV_VARS: {HF_HOME: '${DATA_PATH}/hf', A: '${HF}/a', HF: b}\n"
    (phase,) = plan(tmp_path, text, workload(data_path="/data")).phases
    assert (phase.env["HF_HOME"], phase.env["A"]) == ("/data/hf", "b/a")
    with pytest.raises(CaseError, match=r"yaml:3: ENV_VARS.HF_HOME: \$\{DATA_PATH\} is not set"):
        plan(tmp_path, text, workload())


def test_variables_of_a_case_are_filled_in_whatever_their_order(tmp_path: Path) -> None:
    variables = "A: '${B}/a', B: '${C}/b', C: '${TENSORBOARD_PATH}/c', P: '/own:${P:-}'"
    (phase,) = plan(
        tmp_path, f"{REGULAR}ENV_VARS: {{{variables}, N: '$NCCL_ALGO'}}\n", workload()
    ).phases
    board = phase.env["TENSORBOARD_PATH"]
    found = [phase.env[name] for name in "ABCPN"]
    assert found == [f"{board}/c/b/a", f"{board}/c/b", f"{board}/c", "/own:", "Ring"]


def test_variables_of_a_case_in_a_circle_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"ENV_VARS: A -> B -> A refer to one another"):
        plan(tmp_path, f"{REGULAR}ENV_VARS: {{A: '$B', B: '$A'}}\n", workload())


@pytest.mark.parametrize(
    ("ranks", "gpus", "expected"),
    [
        pytest.param((0, 3), 8, "0:3,3:3", id="given"),
        pytest.param((0, 3), 2, "0:3", id="clipped"),
        pytest.param(None, 2, "0:3,1:3", id="all"),
        pytest.param((), 2, None, id="none"),
    ],
)
def test_chosen_ranks_are_copied(
    tmp_path: Path, ranks: tuple[int, ...] | None, gpus: int, expected: str | None
) -> None:
    setting = replace(SETTING, tee_ranks=ranks)
    argv = plan(tmp_path, REGULAR, workload(gpus=gpus), setting).phases[0].argv
    assert (argv[argv.index("--tee") + 1] if "--tee" in argv else None) == expected


def test_a_resume_goes_back_half_way_and_loads_what_it_saved(tmp_path: Path) -> None:
    first, second = plan(tmp_path, RESUME, workload()).phases
    assert (first.origin, second.origin) == (
        None,
        Origin(checkpoints=DIRS.checkpoints, drop="iter_0000050", back_to=25),
    )
    assert first.env["CHECKPOINT_LOAD_PATH"] == str(DIRS.no_checkpoint)
    assert second.env["CHECKPOINT_LOAD_PATH"] == str(DIRS.checkpoints)
    assert first.env["TENSORBOARD_PATH"] != second.env["TENSORBOARD_PATH"]


@pytest.mark.parametrize("text", [RESUME, RESUME + "ENV_VARS: {ENABLE_LIGHTWEIGHT_MODE: true}\n"])
def test_a_lightweight_run_stops_after_four_iterations(tmp_path: Path, text: str) -> None:
    setting = replace(SETTING, is_lightweight=text == RESUME)
    first, second = plan(tmp_path, text, workload(), setting).phases
    assert first.argv[-4:] == ("--exit-interval", "4", "--save-interval", "2")
    assert second.origin == Origin(checkpoints=DIRS.checkpoints, drop="iter_0000004", back_to=2)
    assert first.last_iteration == 4


@pytest.mark.parametrize(
    ("program", "arguments", "words", "last"),
    [
        ("train.py", "--train-iters: 5", "--train-iters 5 --exit-interval 5", 5),
        ("train.py", "--exit-interval: 7", "--exit-interval 100", 100),
        ("tools/pretrain_vlm.py", "--lr: 1", "--lr 1 --exit-interval 100", 100),
        ("pretrain_gpt.py", "a.b: 1", "a.b=1 --exit-interval 100", 100),
        ("train.py", "--train-iters: 5, a.b: 1", "--train-iters 5 a.b=1 --exit-interval 5", 5),
        ("train.py", "--max_steps: 5", "--max_steps 5", None),
        ("trl sft", "--max_steps: 5", "--max_steps 5", None),
        ("train.py", "trainer.max_epochs: 5", "trainer.max_epochs=5", None),
    ],
)
def test_only_programs_that_are_known_to_take_it_get_an_exit_interval(
    tmp_path: Path, program: str, arguments: str, words: str, last: int | None
) -> None:
    text = f"TEST_TYPE: regular\nMODEL_ARGS: {{{arguments}}}\n"
    (phase,) = plan(tmp_path, text, workload(training_script_path=program)).phases
    command = " ".join(phase.argv)
    assert command.endswith(f" {program} {words}")
    assert phase.last_iteration == last


def test_a_case_may_say_how_its_program_trains_few_steps(tmp_path: Path) -> None:
    setting = replace(SETTING, is_lightweight=True)
    text = "TEST_TYPE: regular\nMODEL_ARGS: {--max_steps: 50, --lr: 1}\n"
    with pytest.raises(CaseError) as caught:
        plan(tmp_path, text, workload(), setting)
    assert str(caught.value) == (
        f"{tmp_path}/model_config.yaml: --lightweight gives a program fewer steps, and 'tp1' has "
        "no stop, nothing was run; add STOP: '--max_steps={steps}', as the program takes it, "
        "or run it without --lightweight"
    )
    text += "STOP: --max_steps {steps}\nLAST_STEP: 49\n"
    (phase,) = plan(tmp_path, text, workload(), setting).phases
    assert phase.argv[-4:] == ("--max_steps", "4", "--lr", "1")
    (whole,) = plan(tmp_path, text, workload()).phases
    assert whole.argv[-4:] == ("--max_steps", "50", "--lr", "1")
    assert whole.last_iteration == 49


def test_the_environment_is_the_users_without_the_launchers_around_pytest(tmp_path: Path) -> None:
    foreign = {"RANK": "1", "MASTER_ADDR": "x", "TORCHELASTIC_RUN_ID": "x", "PYTEST_ADDOPTS": "-x"}
    own = {"HOME": "/home/me", "NCCL_ALGO": "Tree"}
    setting = replace(SETTING, env={**foreign, **own})
    (phase,) = plan(tmp_path, REGULAR + "ENV_VARS: {A: 1}\n", workload(), setting).phases
    assert not foreign.keys() & phase.env.keys()
    kept = {name: phase.env[name] for name in ("HOME", "NCCL_ALGO", "NCCL_PROTO", "A")}
    assert kept == {**own, "NCCL_PROTO": "simple", "A": "1"}


def test_a_cpu_workload_sees_no_gpu(tmp_path: Path) -> None:
    cpu, gpu = (
        plan(tmp_path, REGULAR, workload(platforms=p)).phases[0] for p in ("cpu", "dgx_h100")
    )
    assert cpu.env["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in gpu.env


def test_the_row_says_how_long_it_may_take(tmp_path: Path) -> None:
    limits = [plan(tmp_path, REGULAR, w).time_limit_s for w in (workload(), workload(time_limit=9))]
    assert limits == [1800, 9]


def test_a_row_that_cannot_be_run_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipes/r\.yaml:7: 'echo \$\{HOME\}' uses \{HOME\}"):
        plan(tmp_path, REGULAR, workload(script="echo ${HOME}"))


def test_a_row_without_a_program_is_named(tmp_path: Path) -> None:
    row = replace(workload(), training_script_path=None)
    with pytest.raises(MegatronError, match="has neither `script` nor `training_script_path`"):
        plan(tmp_path, REGULAR, row)


def test_a_script_is_rendered_and_needs_no_case() -> None:
    row = workload(script="echo {test_case} {assets_dir} {n_repeat} ${{HOME}}")
    planned = plan_attempt(row, None, DIRS, SETTING, repeat=1)
    assert planned.script == f"echo tp1 {DIRS.root}/assets 1 ${{HOME}}"
    assert planned.phases[0].argv == ("bash", f"{DIRS.root}/phase_1/script.sh")


def test_leased_gpus_are_all_that_a_training_sees(tmp_path: Path) -> None:
    setting = replace(SETTING, env={"CUDA_VISIBLE_DEVICES": "5,6,7"}, devices=("GPU-a", "GPU-b"))
    (phase,) = plan(tmp_path, REGULAR, workload(platforms="dgx_h100"), setting).phases
    assert phase.env["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert phase.own_env["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"


def test_the_first_phase_loads_what_the_recipe_names_and_the_second_what_was_saved(
    tmp_path: Path,
) -> None:
    row = workload(checkpoint_load_path="/models/base")
    first, second = plan(tmp_path, RESUME, row).phases
    assert first.env["CHECKPOINT_LOAD_PATH"] == "/models/base"
    assert second.env["CHECKPOINT_LOAD_PATH"] == str(DIRS.checkpoints)


def test_no_rank_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, REGULAR, workload(gpus=0))
    assert str(caught.value) == (
        "recipes/r.yaml:7: gpus is 0, expected at least 1: it is the number of ranks on a node, "
        "on the platform cpu too"
    )


@pytest.mark.parametrize(
    ("is_lightweight", "words", "last"),
    [
        pytest.param(False, ["--recipe", "llama", "train.train_iters=50", "a.b=c"], 50, id="full"),
        pytest.param(
            True, ["--recipe", "llama", "train.train_iters=4", "a.b=c"], 4, id="lightweight"
        ),
    ],
)
def test_a_bridge_recipe_keeps_its_flag_and_counts_its_iterations(
    tmp_path: Path, words: list[str], last: int, *, is_lightweight: bool
) -> None:
    args = "{--recipe: llama, train.train_iters: 50, a.b: c}"
    setting = replace(SETTING, is_lightweight=is_lightweight)
    (phase,) = plan(
        tmp_path, f"TEST_TYPE: regular\nMODEL_ARGS: {args}\n", workload(), setting
    ).phases
    assert (list(phase.argv[-4:]), phase.last_iteration) == (words, last)


FROZEN = "/models/frozen"


def test_a_frozen_start_loads_what_the_recipe_names(tmp_path: Path) -> None:
    text = "TEST_TYPE: frozen-start\nMODEL_ARGS: {--load: '${CHECKPOINT_LOAD_PATH}/base'}\n"
    row = workload(checkpoint_load_path=f"{FROZEN}/{{test_case}}")
    (phase,) = plan(tmp_path, text, row).phases
    assert phase.env["CHECKPOINT_LOAD_PATH"] == f"{FROZEN}/tp1"
    assert phase.frozen_paths == (Path(FROZEN) / "tp1" / "base",)


def test_a_frozen_resume_starts_anew_and_then_from_a_view_of_the_frozen_checkpoint(
    tmp_path: Path,
) -> None:
    text = REGULAR.replace("regular", "frozen-resume")
    first, second = plan(tmp_path, text, workload(checkpoint_load_path="frozen")).phases
    assert first.env["CHECKPOINT_LOAD_PATH"] == str(DIRS.no_checkpoint)
    view = DIRS.frozen_checkpoint
    assert second.origin == Origin(checkpoints=Path("/project/frozen"), back_to=25, view=view)
    assert second.env["CHECKPOINT_LOAD_PATH"] == str(view)
    assert second.env["CHECKPOINT_SAVE_PATH"] != first.env["CHECKPOINT_SAVE_PATH"]


def test_a_lightweight_frozen_resume_stops_at_the_next_multiple_of_four(tmp_path: Path) -> None:
    text = REGULAR.replace("regular", "frozen-resume")
    setting = replace(SETTING, is_lightweight=True)
    planned = plan(tmp_path, text, workload(checkpoint_load_path="frozen"), setting)
    assert [phase.last_iteration for phase in planned.phases] == [4, 28]


CONSISTENCY = """\
TEST_TYPE: checkpoint-consistency
MODEL_ENV_VARS:
  MODEL_ARGS: {GPUS_PER_NODE: 1, SIDE: left}
MODEL_ARGS: {--train-iters: 1}
MODEL_ARGS_5: {--train-iters: 1, --tp: 2}
"""


def test_each_layout_of_a_consistency_has_ranks_variables_and_checkpoints_of_its_own(
    tmp_path: Path,
) -> None:
    planned = plan(tmp_path, CONSISTENCY, workload())
    seen = [(p.name, p.world_size, p.env.get("SIDE"), p.env["RUN_NUMBER"]) for p in planned.phases]
    assert seen == [("MODEL_ARGS", 1, "left", "1"), ("MODEL_ARGS_5", 2, None, "5")]
    first, second = planned.phases
    assert first.argv[-4:] == ("--train-iters", "1", "--exit-interval", "1")
    assert second.argv[second.argv.index("--nproc-per-node") + 1] == "2"
    assert (first.saves, second.saves) == (
        DIRS.phase(1).root / "checkpoints",
        DIRS.phase(2).root / "checkpoints",
    )
    assert planned.world_size == 2


def test_a_layout_with_more_ranks_than_the_row_is_one_clear_error(tmp_path: Path) -> None:
    text = CONSISTENCY.replace("GPUS_PER_NODE: 1", "GPUS_PER_NODE: 3")
    with pytest.raises(CaseError) as caught:
        plan(tmp_path, text, workload())
    assert str(caught.value) == (
        f"{tmp_path / 'model_config.yaml'}: MODEL_ENV_VARS.MODEL_ARGS.GPUS_PER_NODE is 3, and the "
        "row has gpus 2 (recipes/r.yaml:7), expected no more than that; raise gpus"
    )


def test_a_second_phase_has_arguments_of_its_own(tmp_path: Path) -> None:
    text = (
        RESUME
        + "MODEL_ARGS_2: {--train-iters: 50, --lr: 1}\nMODEL_ENV_VARS: {MODEL_ARGS_2: {A: b}}\n"
    )
    first, second = plan(tmp_path, text, workload()).phases
    assert ("--lr" in first.argv, "--lr" in second.argv) == (False, True)
    assert (first.env.get("A"), second.env.get("A")) == (None, "b")


RELEASE = "TEST_TYPE: release\nMODEL_ARGS: {--exit-interval: 51000}\n"


def test_a_release_is_one_start_up_to_its_exit_interval(tmp_path: Path) -> None:
    (phase,) = plan(tmp_path, RELEASE, workload()).phases
    assert phase.last_iteration == 51000
    assert phase.argv[-2:] == ("--exit-interval", "51000")


def test_a_replay_has_one_phase_on_the_ranks_that_were_asked_for(tmp_path: Path) -> None:
    replay = Replay(phase=2, num_ranks=1)
    whole = plan(tmp_path, RESUME, replay.resized(workload(nodes=2)))
    cut = replay.cut(whole, "node")
    (phase,) = cut.phases
    assert (phase.number, phase.world_size) == (2, 1)
    with pytest.raises(LaunchError, match="is 3, and node has 2 phases; expected 1 to 2"):
        Replay(phase=3).cut(whole, "node")
    assert Replay().cut(whole, "node") == whole


@pytest.mark.parametrize(
    ("platform", "case_env", "own_env", "value"),
    [
        pytest.param("dgx_h100", "", {}, "1", id="by the rule"),
        pytest.param("dgx_h100", "8", {}, "8", id="the case's"),
        pytest.param("dgx_h100", "", {"CUDA_DEVICE_MAX_CONNECTIONS": "4"}, "4", id="the user's"),
    ],
)
def test_connections_follow_hardware_and_parallelism_where_nobody_set_them(
    tmp_path: Path, platform: str, case_env: str, own_env: dict[str, str], value: str | None
) -> None:
    text = "TEST_TYPE: regular\nMODEL_ARGS: {--tensor-model-parallel-size: 2}\n"
    text += f"ENV_VARS: {{CUDA_DEVICE_MAX_CONNECTIONS: {case_env}}}\n" if case_env else ""
    setting = replace(SETTING, env={**SETTING.env, **own_env})
    (phase,) = plan(tmp_path, text, workload(platforms=platform), setting).phases
    assert phase.env.get("CUDA_DEVICE_MAX_CONNECTIONS") == value


@pytest.mark.parametrize(
    ("text", "keys", "reason"),
    [
        pytest.param(REGULAR, {}, None, id="pretraining"),
        pytest.param(
            REGULAR,
            {"training_script_path": "nemo llm pretrain"},
            "'nemo' is a command, expected a Python program in training_script_path",
            id="command",
        ),
        pytest.param(f"MODE: inference\n{REGULAR}", {}, "MODE is inference", id="inference"),
        pytest.param(
            REGULAR,
            {"script": "bash run.sh"},
            "a script of the recipe starts its ranks",
            id="script",
        ),
    ],
)
def test_what_cannot_be_traced_is_planned_without_a_trace(
    tmp_path: Path, text: str, keys: dict[str, str], reason: str | None
) -> None:
    row, setting = workload(**keys), replace(SETTING, trace="hash")
    found = plan(tmp_path, text, row, setting)
    assert find_untraceable(row, read_case(tmp_path / "model_config.yaml")) == reason
    is_traced = ["PYTEST_MEGATRON_TRACE" in phase.own_env for phase in found.phases]
    assert is_traced == [reason is None]


def test_a_trace_of_a_resume_leaves_its_phases_as_they_are(tmp_path: Path) -> None:
    plain = plan(tmp_path, RESUME, workload()).phases
    traced = plan(tmp_path, RESUME, workload(), replace(SETTING, trace="full")).phases
    for before, after in zip(plain, traced, strict=True):
        variables = dict(after.own_env)
        settings = json.loads(variables.pop("PYTEST_MEGATRON_TRACE"))
        assert variables == before.own_env
        assert (settings["directory"], settings["steps"]) == (str(before.dirs.trace), 2)


def test_the_flight_recorder_dumps_into_the_phase_and_at_no_exit(tmp_path: Path) -> None:
    row = workload(platforms="dgx_h100")
    (phase,) = plan(tmp_path, REGULAR, row).phases
    assert phase.env["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"].startswith(f"{DIRS.root}/phase_1/flight/")
    assert phase.env["TORCH_NCCL_EXTRA_DUMP_ON_EXEC"] == "0"
    user = replace(SETTING, env={"TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "1"})
    (phase,) = plan(tmp_path, REGULAR, row, user).phases
    assert phase.env["TORCH_NCCL_EXTRA_DUMP_ON_EXEC"] == "1"
    own = REGULAR.replace("{--train", "{--flight-recorder-dump-path: /own, --train")
    (phase,) = plan(tmp_path, own, row).phases
    assert not any(name.startswith("TORCH_NCCL_DEBUG") for name in phase.env)


def test_the_page_names_every_variable_that_is_set(tmp_path: Path) -> None:
    reference = ROOT / "docs" / "reference"
    pages = ("environment-variables.md", "distributed-tests.md")
    page = "".join((reference / name).read_text() for name in pages)
    row = workload(platforms="dgx_h100", data_path="/data")
    leased = replace(SETTING, devices=("GPU-0",), is_lightweight=True)
    (phase,) = plan(tmp_path, REGULAR, row, leased).phases
    script = replace(row, script="true", training_script_path=None)
    (planned,) = plan(tmp_path, REGULAR, script, leased).phases
    place = RankPlace(rank=0, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1)
    names = {*phase.own_env, *planned.own_env, *rank_env(place, 1)}
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_without_the_feature_of_traces_one_error_names_the_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pytest_megatron.features.FEATURES", ("workloads",))
    with pytest.raises(TraceError, match=r"is not there; .* without --tensor-trace"):
        trace_tools()
