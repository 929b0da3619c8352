"""`pytest-megatron sbatch`: what a person would submit, and what it does."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from labs import SlurmLab

from pytest_megatron.engines.slurm.command import sbatch
from pytest_megatron.errors import LaunchError

ROOT = Path(__file__).parents[3]
RECIPE = """\
type: basic
format_version: 1
spec:
  model: gpt
  nodes: 1
  gpus: 2
  platforms: cpu
  training_script_path: train.py
products:
  - test_case: [tp2]
    products:
      - {environment: [dev], scope: [mr], platforms: [cpu, dgx_h100]}
  - test_case: [two_nodes]
    products:
      - {environment: [dev], scope: [mr], platforms: [dgx_h100], nodes: [2], segment: [2]}
"""
CASE = "TEST_TYPE: regular\nENV_VARS: {}\nMODEL_ARGS: {--train-iters: 4}\nMETRICS: [lm loss]\n"
CLUSTER = """\
format_version: 1
slurm:
  account: team
  partition: batch
  python: python
  env: {TEXT: "it's $HOME"}
  platforms:
    dgx_h100:
      job_env: {ENROOT_X: "a b"}
      container: {image: dev.sqsh}
      setup: ["module load cuda"]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a recipe and the settings of a cluster, as the current directory."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/gpt.yaml").write_text(RECIPE)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "train.py").touch()
    for name in ("tp2", "two_nodes"):
        case = tmp_path / "tests/functional_tests/test_cases/gpt" / name
        case.mkdir(parents=True)
        (case / "model_config.yaml").write_text(CASE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(*arguments: str, run_dir: str = "run") -> str:
    words = [*arguments, "--executor-config", "cluster.yaml", "--run-dir", run_dir]
    done = CliRunner().invoke(sbatch, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_script_says_where_its_job_writes_and_leaves_a_spec_for_it(project: Path) -> None:
    """The run directory may be beside the project, or behind a link."""
    (project / "out").symlink_to(project.parent / "scratch")
    text = printed("recipes/gpt.yaml::two_nodes[dev-dgx_h100]", run_dir="out/run")
    run = project.parent / "scratch/run"
    lines = text.splitlines()
    assert lines[:2] == ["#!/bin/bash", "# recipes/gpt.yaml::two_nodes[dev-dgx_h100]"]
    assert "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT" in lines
    shown = [line for line in lines if line.startswith("#   ")]
    assert shown[0].startswith("#   python -m torch.distributed.run --nnodes 2 ")
    assert any(" train.py --train-iters 4" in line for line in shown)
    assert f"--container-mounts={project}:{project},{run}:{run} " in text
    spec = run / "engine/spec.json"
    assert f"spec=${{1:-{spec}}}" in lines
    assert stat.S_IMODE(spec.stat().st_mode) == 0o600
    assert json.loads(spec.read_text())["env"] == {"TEXT": "it's $HOME"}
    (run / "engine/outcome.json").write_text("{}")
    with pytest.raises(LaunchError, match="holds an earlier run; give another"):
        printed("recipes/gpt.yaml::two_nodes[dev-dgx_h100]", run_dir="out/run")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            "recipes/gpt.yaml::tp3[dev-cpu]",
            r"no workload 'tp3\[dev-cpu\]' .* mean 'tp2\[dev-cpu\]'",
        ),
        ("recipes/gpt.yaml::tp2", r"expected one of tp2\[dev-cpu\], tp2\[dev-dgx_h100\]"),
        ("recipes/t5.yaml::tp2[dev-cpu]", "t5.yaml: cannot be read: No such file"),
        ("tp2[dev-cpu]", r"is no node id, expected recipes/FILE.yaml::tp2\[dev-cpu\]"),
    ],
)
def test_an_item_that_is_not_there(project: Path, item: str, message: str) -> None:
    del project
    with pytest.raises(Exception, match=message):
        CliRunner().invoke(sbatch, [item], catch_exceptions=False)


@pytest.mark.nightly
def test_what_sbatch_prints_trains_once(
    slurm_lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a shell in which a launcher has left its variables, which once hung."""
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "a run"
    (tmp_path / "cluster.yaml").write_text("format_version: 1\nslurm: {mode: srun-native}\n")
    item = "recipes/gpt.yaml::tp1_pp1[dev-cpu]"
    text = printed(item, "--project", str(ROOT), "--lightweight", run_dir=str(run_dir))
    script = tmp_path / "job.sh"
    script.write_text(text)
    title = "gpt-tp1_pp1-dev-cpu-d11620"
    left = {"MASTER_ADDR": "203.0.113.1", "MASTER_PORT": "29500", "RANK": "7", "WORLD_SIZE": "8"}
    for end in ("COMPLETED", "FAILED"):
        submitted = slurm_lab.run("sbatch", "--parsable", str(script), cwd=tmp_path, env=left)
        job = int(submitted.stdout)
        state = slurm_lab.wait_for(job, limit_s=180)
        log = (run_dir / f"engine/logs/{title}-{job}.out").read_text()
        assert state == end, log
        assert ("the job was started a second time" in log) is (end == "FAILED")
    outcome = json.loads((run_dir / "engine/outcome.json").read_text())
    assert [(phase["end"], phase["returncode"]) for phase in outcome["ends"]] == [("exited", 0)]
    attempt = run_dir / title / "repeat_1" / "attempt_1"
    assert "iteration        4/" in (attempt / "phase_1/logs/0/stdout.log").read_text()
    assert (attempt / "phase_1/tensorboard").is_dir()


def test_what_the_cluster_would_not_take_is_said_beside_the_script(
    project: Path, slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm_lab.env[name])
    (project / "cluster.yaml").write_text(CLUSTER.replace("batch", "short"))
    words = ["recipes/gpt.yaml::tp2[dev-cpu]", "--executor-config", "cluster.yaml"]
    result = CliRunner().invoke(sbatch, [*words, "--run-dir", "runs"])
    assert result.exit_code == 0
    assert result.stderr == (
        "pytest-megatron: warning: cluster.yaml: slurm: sbatch --test-only says: allocation "
        "failure: Requested time limit is invalid (missing or exceeds some limit): Slurm refuses "
        "the job, or it waits until that is otherwise; change the recipe or this section, unless "
        "nodes are only away for a while [slurm-refuses]\n"
    )
