"""What a user sees of the checks: a run, a plan, lint and doctor on one project."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from labs import SlurmLab

from pytest_megatron.workloads.commands.recipes import lint
from pytest_megatron.workloads.recipe.case import case_of
from pytest_megatron.workloads.recipe.load import find_recipes, load_recipe
from pytest_megatron.workloads.training.checks.check import lint_row

RECIPE = """\
type: basic
format_version: 1
maintainers: [team]
loggers: [stdout]
spec:
  name: "{test_case}_{environment}_{platforms}"
  model: gpt
  gpus: 2
  training_script_path: train.py
products:
  - test_case: [wrong, right]
    products:
      - environment: [dev]
        scope: [mr]
        platforms: [cpu]
  - test_case: [on_hopper]
    products:
      - environment: [dev]
        scope: [mr]
        platforms: [dgx_h100]
"""
WRONG = """\
ENV_VARS: {SKIP_PYTEST: 1}
TEST_TYPE: regular
MODEL_ARGS:
  --num-layers: 3
  --pipeline-model-parallel-size: 2
  --train-iters: 2
"""
ON_HOPPER = """\
ENV_VARS: {SKIP_PYTEST: 1, CUDA_DEVICE_MAX_CONNECTIONS: 8}
TEST_TYPE: regular
MODEL_ARGS: {--num-layers: 4, --tensor-model-parallel-size: 2}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    cases = {"wrong": WRONG, "right": WRONG.replace("layers: 3", "layers: 4")}
    for name, text in {**cases, "on_hopper": ON_HOPPER}.items():
        directory = tmp_path / "tests/functional_tests/test_cases/gpt" / name
        directory.mkdir(parents=True)
        (directory / "model_config.yaml").write_text(text)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/gpt.yaml").write_text(RECIPE)
    (tmp_path / "train.py").write_text("raise SystemExit('it was started')")
    return tmp_path


CASES = "tests/functional_tests/test_cases/gpt"
LAYERS = f"{CASES}/wrong/model_config.yaml:4: 3 layers cannot be divided over 2 pipeline stages: "


def run_pytest(
    project: Path, *words: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "megatron", *words]
    return subprocess.run(
        command, cwd=project, env=env, check=False, capture_output=True, text=True
    )


def test_a_wrong_workload_is_refused_before_anything_of_it_starts(project: Path) -> None:
    result = run_pytest(project, "recipes", "-k", "wrong")
    assert (result.returncode, "1 error" in result.stdout) == (1, True)
    line = next(line for line in result.stdout.splitlines() if LAYERS in line)
    assert line.endswith("[layout-layers]; nothing was run")
    assert "it was started" not in result.stdout


def test_a_plan_shows_what_would_be_refused_and_goes_on(project: Path) -> None:
    result = run_pytest(project, "recipes", "--platform", "cpu", "--plan")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    first, _, second = result.stdout.partition(f"  error: {LAYERS}")
    assert ("recipes/gpt.yaml::wrong" in first, "recipes/gpt.yaml::right" in second) == (True, True)
    assert "recipes/gpt.yaml::wrong[dev-cpu]: would be refused, see above" in result.stderr


def test_a_plan_of_an_item_shows_what_this_machine_cannot_start(project: Path) -> None:
    item = "recipes/gpt.yaml::on_hopper[dev-dgx_h100]"
    sound = ON_HOPPER.replace(", CUDA_DEVICE_MAX_CONNECTIONS: 8", "")
    (project / CASES / "on_hopper/model_config.yaml").write_text(sound)
    (project / "plan.yaml").write_text(
        "format_version: 1\n"
        "docker: {image: 'train:1', mounts: ['/data:/data:ro'], python: /opt/python}\n"
        "slurm: {partition: short, container: {image: /train.sqsh, mounts: ['/data:/data']},"
        " job_env: {SITE_TOKEN: 'a-secret-of-the-site'}}\n"
    )
    here = run_pytest(project, item, "--plan")
    assert here.returncode == 0
    assert " train.py --num-layers 4 --tensor-model-parallel-size 2" in here.stdout
    assert "\n  skipped: dgx_h100 needs 2 x H100, this host has no GPU\n" in here.stdout
    of_all = run_pytest(project, "recipes", "-k", "hopper", "--plan").stdout
    assert f"{item}\n  skipped: dgx_h100 needs" in of_all
    config = ("--plan", "--executor-config", "plan.yaml", "--run-dir", "run")
    docker = run_pytest(project, item, "--executor", "docker", *config)
    mounts = f"  mount: /data:/data:ro\n  mount: {project}:{project}\n"
    assert (docker.returncode, f"  image: train:1\n{mounts}" in docker.stdout) == (0, True)
    slurm = run_pytest(project, item, "--executor", "slurm", *config)
    assert slurm.returncode == 0
    assert "  image: /train.sqsh\n  mount: /data:/data\n" in slurm.stdout
    assert "a-secret-of-the-site" not in slurm.stdout
    assert "\n  script:\n  | #!/bin/bash\n" in slurm.stdout
    assert "\n  | #SBATCH --partition=short\n" in slurm.stdout
    assert not list(project.glob("run/*/repeat_1"))


def test_what_the_cluster_cannot_take_is_warned_of_and_refused(
    project: Path, slurm_lab: SlurmLab
) -> None:
    (project / "slurm.yaml").write_text(
        "format_version: 1\nslurm: {account: none, partition: short, time_slack: 3}\n"
    )
    words = ("recipes", "--platform", "cpu", "--run-dir", "run")
    slurm = ("--executor", "slurm", "--executor-config", "slurm.yaml")
    result = run_pytest(project, *words, *slurm, env=slurm_lab.env)
    assert (result.returncode, "2 errors" in result.stdout) == (1, True)
    wanted = (
        LAYERS,
        "slurm: sbatch --test-only says: allocation failure: Requested time limit is invalid",
        "Slurm refused it: sbatch: error: Batch job submission failed: Requested time limit is",
    )
    assert [text in result.stdout for text in wanted] == [True, True, True]
    assert not list(project.glob("run/*/repeat_1"))


def test_settings_that_cannot_be_read_are_one_line(project: Path) -> None:
    (project / "slurm.yaml").write_text("slurm: {}\n")
    words = ("--executor", "slurm", "--executor-config", "slurm.yaml")
    result = run_pytest(project, "recipes", "--platform", "cpu", *words)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: slurm.yaml:1: format_version: is missing, expected 1" in result.stderr


def test_our_own_recipes_have_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[4])
    rows = [row for file in find_recipes([Path("recipes")]) for row in load_recipe(file)]
    assert len(rows) > 20
    assert [found for row in rows for found in lint_row(row, case_of(Path(), row))] == []


def test_lint_knows_what_needs_no_machine(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    Path("recipes/gpt.yaml").write_text(RECIPE.replace("[dgx_h100]", "[dgx_h100, dgx_h200]"))
    result = CliRunner().invoke(lint, [])
    found = [line for line in result.output.splitlines() if "layout-" in line or "conn" in line]
    assert [line.partition(": error: ")[0] for line in found] == [
        f"{CASES}/on_hopper/model_config.yaml:1",
        f"{CASES}/on_hopper/model_config.yaml:1",
        f"{CASES}/wrong/model_config.yaml:4",
    ]
    assert result.exit_code == 1
