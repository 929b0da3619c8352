"""`pytest-megatron doctor` as its user calls it."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner
from staged_environment import Staged

from pytest_megatron.doctor.checks.machine import check_machine
from pytest_megatron.doctor.checks.project import read_needs
from pytest_megatron.doctor.command import FORMATS, command, examine
from pytest_megatron.doctor.facts import Disk, EnvironmentFacts, MachineFacts, Python
from pytest_megatron.errors import EmptySelectionError, HostError, RecipeError

UNITS = """\
type: basic
format_version: 1
spec: {model: unit-tests, gpus: 2, platforms: cpu}
products:
  - test_case: [tests/unit_tests/**/*.py]
    products: [{environment: [dev], scope: [unit-tests], tag: [latest]}]
"""
RECIPE = """\
type: basic
format_version: 1
spec:
  model: gpt
  nodes: 1
  gpus: 8
  build: mcore-pyt-{environment}
  data_path: data/wiki
  platforms: dgx_h100
  time_limit: 600
  n_repeat: 1
  training_script_path: train.py
products:
  - test_case: [tp3]
    products:
      - environment: [dev]
        scope: [mr]
"""
CASE = """\
ENV_VARS: {}
TEST_TYPE: regular
LAUNCHER: ft_launcher
MODEL_ARGS:
  --tensor-model-parallel-size: 3
  --transformer-impl: transformer_engine
  --train-iters: 10
METRICS: [lm loss]
"""


PYTHON = Python(
    executable=Path(sys.executable),
    version="3.12.1",
    tag="cp312",
    machine="x86_64",
    prefix=Path("/v"),
    paths=(),
)


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    venv.EnvBuilder(symlinks=True, with_pip=False).create(tmp_path / "template")
    return Staged(tmp_path / "template", tmp_path)


def test_unusable_input_is_one_line(tmp_path: Path, staged: Staged) -> None:
    with pytest.raises(RecipeError, match="no such file or directory, expected recipes"):
        read_needs(tmp_path / "absent.yaml", tmp_path)
    staged.places.python.unlink()
    staged.places.python.write_text("not a program")
    with pytest.raises(HostError, match=r"cannot be started: .*, expected the Python of an env"):
        examine(staged.places)
    result = CliRunner().invoke(command, ["--platform", "cpu"])
    assert (result.exit_code, "give --for RECIPE too" in result.output) == (2, True)


def test_rows_of_unit_tests_are_no_trainings(staged: Staged) -> None:
    (staged.project / "recipes").mkdir()
    recipe = staged.project / "recipes/units.yaml"
    recipe.write_text(UNITS)
    with pytest.raises(EmptySelectionError, match="no row is left"):
        read_needs(recipe, staged.project)
    (staged.project / "recipes/gpt.yaml").write_text(RECIPE)
    rows = read_needs(recipe.parent, staged.project).rows
    assert {row.model for row in rows} == {"gpt"}


def test_rows_of_a_recipe_are_compared_with_what_is_here(staged: Staged) -> None:
    (staged.project / "recipes").mkdir()
    recipe = staged.project / "recipes/gpt.yaml"
    recipe.write_text(RECIPE)
    case = staged.project / "tests/functional_tests/test_cases/gpt/tp3"
    case.mkdir(parents=True)
    (case / "model_config.yaml").write_text(CASE)
    staged.torch()
    needs = read_needs(recipe, staged.project)
    found = examine(staged.places, needs=needs, with_collective=False).findings
    texts = [(f.rule.id, f.found) for f in found if f.rule.group in ("Recipe", "Layout")]
    rows = "tp3[dev-dgx_h100]"
    assert texts == [
        ("recipe-gpus", f"{rows}: dgx_h100 needs 8 x H100, this host has no GPU"),
        (
            "recipe-launcher",
            f"{rows}: LAUNCHER is ft_launcher, and nvidia-resiliency-ext is not installed",
        ),
        ("recipe-data", f"{rows}: data_path data/wiki is not there"),
        ("recipe-data", f"{rows}: training_script_path train.py is not there"),
        (
            "recipe-package",
            (
                f"{rows}: --transformer-impl transformer_engine needs transformer-engine-torch, "
                "which is not installed"
            ),
        ),
        (
            "recipe-image",
            f"{rows}: built for the image mcore-pyt-dev, and this is a bare host",
        ),
        ("layout-world-size", "TP 3 = 3 does not divide the 8 ranks (nodes 1 x gpus 8)"),
    ]
    (layout,) = (f.where for f in found if f.rule.group == "Layout")
    assert layout == f"{case / 'model_config.yaml'}:5 ({rows})"
    with pytest.raises(EmptySelectionError, match="expected a platform of dgx_h100"):
        read_needs(recipe, staged.project, ["cpu"])


@pytest.mark.parametrize(("free", "rule"), [(10**8, "disk-full"), (5 * 10**9, None)])
def test_a_full_disk_is_told(free: int, rule: str | None) -> None:
    disk = Disk(use="run directories", path=Path("/data"), free_bytes=free)
    facts = EnvironmentFacts(python=PYTHON, machine=MachineFacts(disks=(disk,)))
    assert [hit.rule for hit in check_machine(facts)] == ([rule] if rule else [])


def test_a_finding_is_printed_with_its_rule(staged: Staged) -> None:
    staged.limits(nofile="256")
    examination = examine(staged.places, with_collective=False)
    text = FORMATS["text"](examination)
    assert "warning: 256 open files are allowed [limit-nofile]\n" in text
    assert examination.exit_code(is_strict=False) == 2  # no torch
