from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from generate_gpt import GenerateArguments
from gpt_arguments import Arguments, make_parser, parse_arguments, parse_with
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
