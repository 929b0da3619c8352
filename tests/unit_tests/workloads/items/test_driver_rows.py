"""Rows whose script calls Megatron-LM's driver: planned and judged as rows that name a program."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_project import Project, Run, loss_of

from pytest_megatron.workloads.recipe.lint import lint_recipes

SCRIPT = """\
rm -f "${{HOME}}/.netrc"
set -euo pipefail
cd /opt/megatron-lm
export TINY_WORD='said by the script'
MORE
ARGUMENTS=(
    "DATA_PATH=null"
    "DATA_CACHE_PATH={assets_dir}/cache"
    "OUTPUT_PATH={assets_dir}"
    "TENSORBOARD_PATH={assets_dir}/tensorboard"
    "CHECKPOINT_SAVE_PATH=/tmp/checkpoints"
    "CHECKPOINT_LOAD_PATH=/mnt/artifacts"
    "TRAINING_SCRIPT_PATH=train.py"
    "TRAINING_PARAMS_PATH=./tests/functional_tests/test_cases/{model}/{test_case}/model_config.yaml"
    "GOLDEN_VALUES_PATH=./tests/functional_tests/test_cases/{model}/{test_case}/golden_values_{environment}_{platforms}.json"
    "N_REPEAT={n_repeat}"
    "ENABLE_LIGHTWEIGHT_MODE=${{ENABLE_LIGHTWEIGHT_MODE:-}}"
)
bash ./tests/functional_tests/shell_test_utils/run_ci_test.sh ${{ARGUMENTS[@]}}
"""
RANKS = "export GPUS_PER_NODE={gpus}"
YQ = "#!/bin/sh\necho 'yq (https://github.com/mikefarah/yq/) version v4.45.1'\n"


def script(more: str = RANKS) -> str:
    return SCRIPT.replace("MORE", more)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("drivers") / "project")
    for name in ("sound", "mismatch", "light"):
        project.row(project.case(name), script=[script()])
    resume = {"TEST_TYPE": "ckpt-resume"}
    case = project.case("resume", config=resume, save_interval=5)
    project.row(case, script=[script()], n_repeat=[2])
    project.row("absent", script=[script()])
    project.golden("mismatch", changes={7: 0.5})
    beside = project.config_path("sound").with_name("golden_values_dev_cpu.json")
    project.golden_path("sound").rename(beside)
    return project


@pytest.fixture(scope="module")
def run(project: Project) -> Run:
    (home := project.root / "home").mkdir()
    (home / ".netrc").write_text("the user's\n")
    return project.run("recipes", "--max-attempts", "1", HOME=str(home))


def test_a_row_has_ranks_logs_and_the_golden_beside_its_case(project: Project, run: Run) -> None:
    assert run.verdict("sound") == ("PASSED", "passed")
    assert "bitwise equal" in str(run.record("sound")["summary"])
    phase = run.item_dir("sound") / "repeat_1" / "attempt_1" / "phase_1"
    assert sorted(path.name for path in (phase / "logs").iterdir()) == ["0", "1"]
    assert loss_of(phase / "metrics.json").steps == tuple(range(1, 11))
    assert '"TINY_WORD": "said by the script"' in (phase.parent / "plan.json").read_text()
    assert (project.root / "home" / ".netrc").read_text() == "the user's\n"


def test_it_is_judged_as_any_other(run: Run) -> None:
    assert run.verdict("mismatch") == ("FAILED", "failed")
    assert "lm loss, step 7: observed 5.534, golden 6.034" in run.problem("mismatch")


def test_a_resumed_training_and_its_repeats_are_ours(run: Run) -> None:
    assert run.verdict("resume") == ("PASSED", "passed")
    assert [attempt["repeat"] for attempt in run.attempts("resume")] == [1, 2]
    attempt = run.item_dir("resume") / "repeat_2" / "attempt_1"
    assert loss_of(attempt / "phase_2" / "metrics.json").steps == (6, 7, 8, 9, 10)


def test_a_case_that_is_missing_is_an_error_of_its_row_alone(run: Run) -> None:
    assert run.verdict("absent") == ("ERROR", "broken")
    assert "recipes/tiny.yaml:" in run.problem("absent")
    assert "'absent' has no case, expected tests/functional_tests" in run.problem("absent")


def test_the_variable_for_few_steps_counts_and_is_no_pass_of_a_comparison(
    project: Project,
) -> None:
    env = {"ENABLE_LIGHTWEIGHT_MODE": "true"}
    run = project.run("recipes", "--test-case", "light", run_dir="light", **env)
    assert run.verdict("light") == ("PASSED", "passed")
    assert "in 4 iterations, not compared with a golden" in str(run.record("light")["summary"])


def test_ranks_are_as_many_as_the_driver_would_start(project: Project) -> None:
    project.row(project.case("many"), script=[script("ls")], scope=["L1"])
    plan = project.run("recipes", "--plan", "--scope", "L1", run_dir="")
    assert "ranks: 8 on cpu" in plan.stdout
    plan = project.run("recipes", "--plan", "--scope", "L1", run_dir="", GPUS_PER_NODE="3")
    assert "ranks: 3 on cpu" in plan.stdout


@pytest.mark.nightly
def test_bash_runs_what_is_not_known_and_the_header_says_so(tmp_path: Path) -> None:
    project = Project(root=tmp_path / "project", gpus=1)
    project.row(project.case("known"), script=[script("ls")], write_golden=False)
    driver = project.root / "tests/functional_tests/shell_test_utils/run_ci_test.sh"
    driver.parent.mkdir(parents=True)
    said = '"$@" "ranks of a node: $GPUS_PER_NODE"'
    driver.write_text(f"/usr/local/bin/yq; echo {said}; pwd; exit 3\n")
    (tools := tmp_path / "tools").mkdir()
    path = {"PATH": f"{tools}:/usr/bin:/bin"}
    (tools / "yq").write_text("#!/bin/sh\necho 'yq 3.4.3'\n")
    (tools / "yq").chmod(0o755)
    ini = ("-o", "megatron_script=bash")
    without = project.run("recipes", *ini, run_dir="without", **path)
    assert without.returncode == pytest.ExitCode.USAGE_ERROR
    assert without.text.count("needs yq 4") == 1
    (tools / "yq").write_text(YQ)
    found = project.run("recipes", *ini, run_dir="bash", **path)
    assert found.verdict("known") == ("FAILED", "failed")
    assert "bash runs 1 row of recipes/tiny.yaml, and their exit code counts: " in found.stdout
    assert "the script ended with exit code 3" in found.problem("known")
    log = (found.item_dir("known") / "repeat_1/attempt_1/phase_1/launcher.log").read_text()
    assert "DATA_PATH=null" in log
    assert "ranks of a node: 8" in log
    assert "version v4" in log
    assert log.splitlines()[-1] == str(project.root)
    project.row(project.case("odd"), script=[script("touch odd")], write_golden=False)
    odd = project.run("recipes", "--test-case", "odd", run_dir="odd", **path)
    assert odd.verdict("odd") == ("FAILED", "failed")
    assert "their exit code counts: line " in odd.stdout
    assert ": touch odd\n" in odd.stdout
    assert (project.root / "odd").exists()
    (tools / "yq").unlink()
    lacking = project.run("recipes", "--test-case", "odd", run_dir="lacking", **path)
    assert lacking.text.count("needs yq 4") == 1
    assert list(lacking.directory.rglob("plan.json")) == []


def test_a_wrong_script_is_one_error_and_nothing_is_started(tmp_path: Path) -> None:
    project = Project(root=tmp_path / "project", gpus=1)
    wrong = script("CACHE=$(pwd)").replace("{assets_dir}/cache", "$CACHE")
    for name in ("one", "two"):
        project.row(project.case(name), script=[wrong])
    run = project.run("recipes")
    assert "1 error in" in run.stdout
    assert run.stdout.count("\nrecipes/tiny.yaml:") == 1
    assert "the driver is given the output of a command" in run.stdout
    assert list(run.directory.rglob("plan.json")) == []
    (found,) = lint_recipes([project.root / "recipes"], root=project.root)
    assert found.rule == "row"
    assert "the driver is given the output of a command" in found.message
