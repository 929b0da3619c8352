"""Recipes that bring a driver of their own, as Megatron-LM's do: run unchanged, judged by us."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tiny_project import Project, Run, loss_of

DRIVER = Path(__file__).parents[2] / "guests" / "driver.sh"
# What such a recipe's script does first, and how it calls its driver.
SCRIPT = """\
rm -f "${{HOME}}/.netrc"
set -euo pipefail
cd /opt/megatron-lm
test "$(pwd -P)" != "$REAL_PROJECT"
ARGUMENTS=(
    "CHECKPOINT_LOAD_PATH={assets_dir}/nothing"
    "CHECKPOINT_SAVE_PATH=/tmp/checkpoints"
    "OUTPUT_PATH={assets_dir}"
    "TENSORBOARD_PATH={assets_dir}/tensorboard"
    "TRAINING_SCRIPT_PATH=train.py"
    "TRAINING_PARAMS_PATH=./tests/functional_tests/test_cases/{model}/{test_case}/model_config.yaml"
    "N_REPEAT={n_repeat}"
)
bash ./driver.sh ${{ARGUMENTS[@]}}
"""
FORGETFUL = "mkdir -p {assets_dir}/logs/1/run/attempt_1/0\n"
RESUME = {"TEST_TYPE": "ckpt-resume"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("scripts") / "project", gpus=1)
    shutil.copy(DRIVER, project.root / "driver.sh")
    faults = {"wrong_loss": "nan@3", "ends_early": "exit0@8", "silent": "silent@0"}
    cases = ("sound", *faults, "restarted", "mismatch", "light")
    for name in cases:
        project.case(name, fault=faults.get(name))
        script = SCRIPT + (FORGETFUL if name == "restarted" else "")
        project.row(name, script=[script])
    project.row(
        project.case("resume", config=RESUME, save_interval=5), script=[SCRIPT], n_repeat=[2]
    )
    project.golden("mismatch", changes={7: 0.5})
    project.row("uncased", script=["exit 0"], write_golden=False)
    subprocess.run(["git", "init", "-q"], cwd=project.root, check=True)  # noqa: S607
    (project.root / ".gitignore").write_text("built\n/run\n/home\n/state\nsound.jsonl\n")
    (project.root / "built").write_text("ignored by git\n")
    subprocess.run(["git", "add", "."], cwd=project.root, check=True)  # noqa: S607
    return project


@pytest.fixture(scope="module")
def run(project: Project) -> Run:
    home = project.root / "home"
    home.mkdir()
    (home / ".netrc").write_text("the user's\n")
    env = {"HOME": str(home), "REAL_PROJECT": str(project.root)}
    return project.run("recipes", **env)


def test_the_script_of_a_container_runs_unchanged_and_is_judged_with_the_golden(run: Run) -> None:
    assert run.verdict("sound") == ("PASSED", "passed")
    attempt = run.item_dir("sound") / "repeat_1" / "attempt_1"
    assert loss_of(attempt / "phase_1" / "metrics.json").steps == tuple(range(1, 11))
    assert (attempt / "project" / "built").read_text() == "ignored by git\n"


def test_nothing_of_the_users_tree_is_rewritten(project: Project, run: Run) -> None:
    """Megatron-LM's driver rewrites the case in place, which poisons later runs."""
    changed = subprocess.run(
        ["git", "diff", "--stat"],  # noqa: S607 - the user's git
        cwd=project.root,
        check=True,
        capture_output=True,
        text=True,
    )
    assert changed.stdout == ""
    assert list(project.root.glob("tests/**/*.tmp")) == []
    assert run.verdict("sound") == ("PASSED", "passed")


def test_a_lightweight_run_poisons_no_later_one(project: Project) -> None:
    """In Megatron-LM a full run compares nothing after a lightweight one."""
    env = {"REAL_PROJECT": str(project.root)}
    light = project.run("recipes", "-k", "light", "--lightweight", run_dir="light", **env)
    assert light.verdict("light") == ("PASSED", "passed")
    project.golden("light", changes={2: 5.0})
    full = project.run("recipes", "-k", "light", run_dir="full", **env)
    assert full.verdict("light") == ("FAILED", "failed")


def test_the_users_netrc_is_not_the_scripts(project: Project, run: Run) -> None:
    """The first line of nearly all recipes of Megatron-LM is `rm -f ~/.netrc`."""
    assert (project.root / "home" / ".netrc").read_text() == "the user's\n"
    assert run.verdict("sound") == ("PASSED", "passed")


def test_a_resumed_training_is_compared_with_the_first(run: Run) -> None:
    """Megatron-LM overrides n_repeat of a recipe."""
    assert run.verdict("resume") == ("PASSED", "passed")
    assert [attempt["repeat"] for attempt in run.attempts("resume")] == [1, 2]
    attempt = run.item_dir("resume") / "repeat_2" / "attempt_1"
    assert loss_of(attempt / "phase_2" / "metrics.json").steps == (6, 7, 8, 9, 10)


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("wrong_loss", "lm loss is nan at step 3, the first that is not finite"),
        ("ends_early", "lm loss stops at step 7, expected it to go on to 10"),
        ("silent", "holds metrics of none, expected those of 1 training(s)"),
        ("mismatch", "lm loss, step 7: observed 5.534, golden 6.034"),
    ],
)
def test_a_script_that_ends_with_0_is_judged_by_what_it_wrote(
    run: Run, case: str, problem: str
) -> None:
    assert run.verdict(case) == ("FAILED", "failed")
    assert problem in run.problem(case)


def test_a_restart_does_not_hide_what_failed_before_it(run: Run) -> None:
    """In Megatron-LM restarts of ft_launcher hide crashes."""
    assert run.verdict("restarted") == ("FAILED", "failed")
    assert "a rank failed and was started again\nsee " in run.problem("restarted")


def test_a_script_without_a_case_is_taken_at_its_exit_code(run: Run) -> None:
    assert run.verdict("uncased") == ("PASSED", "passed")
