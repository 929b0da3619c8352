from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from generate_gpt import GenerateArguments
from gpt_arguments import Arguments, check, make_parser, parse_arguments, parse_with
from train_grpo import GrpoArguments

ROOT = Path(__file__).resolve().parents[3]
CASES = ROOT / "tests" / "functional_tests" / "test_cases"
KINDS: dict[str, type[Arguments]] = {
    "pretraining": Arguments,
    "inference": GenerateArguments,
    "rl": GrpoArguments,
}


def test_flags_have_megatrons_names_and_bare_booleans() -> None:
    argv = [
        "--num-layers",
        "4",
        "--bf16",
        "--lr",
        "3e-4",
        "--save",
        "ckpt",
        "--no-check-for-nan-in-loss-and-grad",
    ]
    assert parse_arguments(argv, world_size=1) == Arguments(
        num_layers=4,
        bf16=True,
        lr=3e-4,
        save=Path("ckpt"),
        check_for_nan_in_loss_and_grad=False,
    )


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["--num-layer", "4"], id="abbreviation"),
        pytest.param(["--squared-relu"], id="flag-this-program-lacks"),
        pytest.param(["--bf16", "true"], id="value-for-a-bare-flag"),
        pytest.param(["--tensor-model-parallel-size", "2"], id="layout-larger-than-the-world"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(argv, world_size=1)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "world_size", "message"),
    [
        pytest.param(
            Arguments(context_parallel_size=2), 2, "--context-parallel-size: 2 is not", id="cp"
        ),
        pytest.param(
            Arguments(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
            6,
            "does not divide the 6 ranks that were started; start a multiple of 4",
            id="world",
        ),
        pytest.param(
            Arguments(sequence_parallel=True, tensor_model_parallel_size=2, seq_length=63),
            2,
            "--seq-length: 63 is not a multiple of 2",
            id="sequence-parallel",
        ),
        pytest.param(
            Arguments(num_layers=4, num_layers_per_virtual_pipeline_stage=2),
            1,
            "needs --pipeline-model-parallel-size of at least 2",
            id="virtual-stages-of-no-pipeline",
        ),
        pytest.param(
            Arguments(
                num_layers=6,
                pipeline_model_parallel_size=2,
                num_layers_per_virtual_pipeline_stage=2,
            ),
            2,
            "2 times --pipeline-model-parallel-size 2 does not divide --num-layers 6",
            id="virtual-stages",
        ),
        pytest.param(
            Arguments(
                num_layers=4,
                pipeline_model_parallel_size=2,
                num_layers_per_virtual_pipeline_stage=1,
                global_batch_size=2,
            ),
            2,
            "1 micro batches of a rank are not a multiple of the 2 pipeline stages",
            id="virtual-stages-batches",
        ),
        pytest.param(
            Arguments(recompute_method="uniform"), 1, "belongs to --recompute", id="recompute"
        ),
        pytest.param(
            Arguments(num_query_groups=2, tensor_model_parallel_size=4),
            4,
            "--num-query-groups: 2 is not a multiple of 4",
            id="query-groups",
        ),
        pytest.param(
            Arguments(num_layers=3, pipeline_model_parallel_size=2),
            2,
            "--num-layers: 3 is not a multiple of 2",
            id="layers",
        ),
        pytest.param(
            Arguments(num_experts=4, disable_bias_linear=True, expert_model_parallel_size=4),
            2,
            "--expert-model-parallel-size: 4 does not divide the 2 ranks",
            id="experts",
        ),
        pytest.param(Arguments(num_experts=4), 1, "--disable-bias-linear", id="expert-biases"),
        pytest.param(
            Arguments(global_batch_size=6),
            2,
            "--global-batch-size: 6 is not a multiple of 4",
            id="batch",
        ),
        pytest.param(Arguments(log_interval=0), 1, "--log-interval: 0 is less than 1", id="count"),
        pytest.param(Arguments(save_interval=2), 1, "needs --save DIRECTORY", id="save"),
        pytest.param(Arguments(fault="melt@3"), 1, "KIND of crash, exit0, hang", id="fault"),
    ],
)
def test_values_that_do_not_fit_are_named(
    arguments: Arguments, world_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(arguments, world_size)


@pytest.mark.parametrize(
    "case", sorted(CASES.glob("*/*/model_config.yaml")), ids=lambda path: path.parts[-2]
)
def test_every_case_is_accepted_in_its_world(case: Path) -> None:
    config = yaml.safe_load(case.read_text())
    flags = config["MODEL_ARGS"]
    argv = []
    for name, value in flags.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        argv += [name, *map(str, values)]
    kind = KINDS[config.get("MODE", "pretraining")]
    sizes = {
        axis: int(flags.get(f"--{axis}-model-parallel-size", 1))
        for axis in ("tensor", "pipeline", "expert")
    }
    world_size = sizes["pipeline"] * max(sizes["tensor"], sizes["expert"])
    arguments = parse_with(make_parser(kind), kind, argv, world_size)
    may_differ = config["ENV_VARS"]["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == 1
    assert arguments.deterministic_mode != may_differ


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
def test_every_flag_is_explained_by_help(kind: type) -> None:
    actions = make_parser(kind)._actions
    explained = {one.dest for one in actions if one.help}
    assert {one.name for one in dataclasses.fields(kind)} <= explained
