"""Recipes whose driver compares with a golden of its own, while that golden is made."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from test_script_rows import DRIVER, SCRIPT
from tiny_project import Project, Run

# As Megatron-LM's driver: pytest of its own, which fails where the golden is missing or another.
COMPARES = (
    "cd /opt/megatron-lm\n"
    "GOLDEN=tests/functional_tests/test_cases/{model}/{test_case}/golden_values_{environment}_{platforms}.json\n"
    'grep -q 5.634 "$GOLDEN" || {{\n'
    'echo "E   AssertionError: The following metrics failed: lm loss"\n'
    'echo "FAILED test_pipeline.py::test_it"; exit 3; }}\n'
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("drivers") / "project", gpus=1)
    shutil.copy(DRIVER, project.root / "driver.sh")
    project.row(project.case("new"), script=[SCRIPT + COMPARES], write_golden=False)
    (project.root / ".gitignore").write_text("/run\n/record\n/check\n/state\nsound.jsonl\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.invalid"]
        subprocess.run(["git", *who, *words], cwd=project.root, check=True)  # noqa: S607
    return project


def test_a_first_golden_of_a_driver_that_compares_is_written(project: Project) -> None:
    env = {"REAL_PROJECT": str(project.root)}
    options = ("--golden", "record", "--golden-reason", "the first")
    run = project.run("recipes", *options, run_dir="record", **env)
    assert run.verdict("new") == ("PASSED", "passed")
    summary = str(run.record("new")["summary"])
    said = "AssertionError: The following metrics failed: lm loss"
    assert f"and then the script ended with exit code 3: {said}" in summary
    assert project.golden_path("new").is_file()
    check = project.run("recipes", "--allow-dirty", run_dir="check", **env)
    assert check.verdict("new") == ("PASSED", "passed")  # the driver finds the golden, too


def test_what_a_driver_says_of_sound_trainings_is_a_failure_of_the_script(
    project: Project,
) -> None:
    project.golden("new")
    project.row(project.case("odd"), script=[SCRIPT + "exit 7\n"])
    env = {"REAL_PROJECT": str(project.root)}
    run: Run = project.run("recipes", "-k", "odd", **env)
    assert run.verdict("odd") == ("FAILED", "failed")
    problem = run.problem("odd")
    assert "trained to the end, and then the script ended with exit code 7" in problem
    assert "its metrics agree with the golden" in problem
    project.golden("odd", changes={7: 0.5})
    differs = project.run("recipes", "-k", "odd", run_dir="check2", **env)
    assert "lm loss is off at step 7" in differs.problem("odd")


def test_checkpoints_of_scripts_are_not_shared(project: Project) -> None:
    """Megatron-LM's driver saves and loads in /tmp/checkpoints, whatever the recipe says."""
    (project.root / "saves.sh").write_text(
        "mkdir -p /tmp/checkpoints; touch /tmp/checkpoints/mine\n"
    )
    project.row(project.case("saves"), script=[SCRIPT + "bash /opt/megatron-lm/saves.sh\n"])
    env = {"REAL_PROJECT": str(project.root)}
    run = project.run("recipes", "-k", "saves", run_dir="saved", **env)
    assert run.verdict("saves") == ("PASSED", "passed")
    attempt = run.item_dir("saves") / "repeat_1" / "attempt_1"
    assert (attempt / "checkpoints" / "mine").is_file()
    assert (project.root / "saves.sh").read_text().startswith("mkdir -p /tmp/checkpoints;")
