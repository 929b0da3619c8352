"""The options: their frozen list, their values from command line and ini, and their errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_project import Project

CASE_SECRET, HOST_SECRET = "secretOfTheCase", "secretOfTheHost"
OPTIONS = """\
--allow-dirty
--allow-empty
--bucket
--cadence
--ci-event
--device
--environment
--executor
--executor-config
--fake-ranks
--golden
--golden-policy
--golden-reason
--gpus
--labels
--leaks
--lightweight
--max-attempts
--model
--n-repeat
--nnodes
--node-rank
--pdb-rank
--plan
--platform
--rank-timeout
--ranks
--ranks-per-gpu
--rdzv-endpoint
--rerun-transient
--run-dir
--scope
--tag
--tee-ranks
--tensor-trace
--test-case
"""
SETTINGS = """\
megatron_experimental_tests
megatron_fail_flaky
megatron_gang_start
megatron_history
megatron_max_retries_per_run
megatron_preload
megatron_queue_timeout
megatron_rank_grace
megatron_retry_backoff
megatron_script
megatron_signatures
"""
REMOVED_OPTIONS = [  # a flag, a value beside and after `=`, and settings
    (["--keep-contexts"], "--keep-contexts: was removed, as runs were slower"),
    (["--changed", "main"], "--changed: was removed; write --testmon, as pytest-testmon works"),
    (["--megatron-changed=main"], "--megatron-changed: was removed; write --testmon, as"),
    (["--history=off"], "--history: is a setting now; write -o megatron_history=off, or put"),
    (["-o", "megatron_keep_gangs=30"], "megatron_keep_gangs: was removed; pytest-megatron watch"),
]
GIVEN_SHARING = ("--ranks", "2", "--ranks-per-gpu", "2")
GANG_ERRORS: list[tuple[list[str], str]] = [
    (["--gpus", "0"], "--gpus: '0' is not a count, expected a number from 1 on, or all"),
    (["--gpus", "2", "--ranks", "2"], "--gpus: --ranks is given as well; give one of them"),
    (["--gpus", "2", "--device", "cpu"], "--gpus: --device is cpu; use --ranks for ranks on "),
    (
        [*("--nnodes", "2", "--node-rank", "0"), *("--rdzv-endpoint", "a:1"), *GIVEN_SHARING],
        "--ranks-per-gpu: 2 ranks share a GPU on one node only, --nnodes is 2; drop one of them",
    ),
    (
        [
            *("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "a:1", "--ranks", "2"),
            "--testmon",
        ],
        "--nnodes: pytest-testmon (--testmon) records on one node; drop one of them",
    ),
    (["--device", "gpu"], "--device: 'gpu' is unknown, expected one of auto, cpu, cuda"),
    (["--node-rank", "x"], "--node-rank: 'x' is not a number, expected one from 0 on"),
    (
        ["--nnodes", "2"],
        "--nnodes: 2 nodes run tests on gangs; give --ranks or --gpus, the ranks of each node",
    ),
    (
        ["--nnodes", "2", "--ranks", "2", "--rdzv-endpoint", "a:1"],
        "--node-rank: not given with --nnodes 2, expected the index of this node, 0 to 1",
    ),
    (
        ["--nnodes", "2", "--ranks", "2", "--node-rank", "1", "--rdzv-endpoint", "a"],
        "--rdzv-endpoint: 'a' is no address, expected HOST:PORT of node 0, the same on every node",
    ),
    (
        [
            *("--nnodes", "2", "--ranks", "2", "--node-rank", "0"),
            *("--rdzv-endpoint", "a:1", "-n1"),
        ],
        "--nnodes: pytest-xdist (-n) runs on one node; drop one of them",
    ),
    (["--node-rank", "1"], "--node-rank: 1 of 1 nodes, expected 0 to 0; set --nnodes"),
    (["--rank-timeout", "-1"], "--rank-timeout: '-1' is not a time, expected seconds from 0"),
    (
        ["-o", "megatron_rank_grace=inf"],
        "megatron_rank_grace: 'inf' is not a time, expected seconds from 0 on",
    ),
    (
        ["--gpus", "8"],
        "--gpus: needs 8 GPUs, this host has none; lower the number of ranks, have them ",
    ),
    (
        ["--ranks", "2", "--device", "cuda"],
        "--device: needs 2 GPUs, this host has none; lower the number of ranks, have",
    ),
    (
        ["--ranks", "2", "--pdb-rank", "2"],
        "--pdb-rank: 2 is no rank of a gang, expected 0 to 1; lower it",
    ),
]
# Many sessions in one process: each says nothing but its error.
SESSIONS = """
import json, sys
import pytest
for arguments in json.loads(sys.argv[1]):
    assert pytest.main(["-p", "megatron", *arguments]) == pytest.ExitCode.USAGE_ERROR, arguments
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("options"))
    project.row(
        project.case(
            "resume",
            save_interval=5,
            name="${WANDB_API_KEY}",
            host="${HF_TOKEN:-none}",
            env={"WANDB_API_KEY": CASE_SECRET},
            config={"TEST_TYPE": "ckpt-resume"},
        ),
        time_limit=[77],
    )
    project.row(project.case("off"), scope=["mr-broken"])
    project.row("script", script=["echo {n_repeat} ${{HF_TOKEN}} secretOfTheHost"])
    return project


@pytest.fixture(scope="module")
def help_text(project: Project) -> str:
    return project.run("--help", run_dir="").stdout


def test_the_options_are_these(help_text: str) -> None:
    group = help_text.partition("\ntraining workloads and distributed tests:\n")[2]
    names = re.findall(r"^  (--[\w-]+)", group.partition("\n\n")[0], re.MULTILINE)
    assert sorted(names) == OPTIONS.splitlines()
    assert names[:3] == ["--ranks", "--gpus", "--device"]  # what most people look for


def test_each_option_is_an_ini_option_too(help_text: str) -> None:
    expected = ["megatron_" + name[2:].replace("-", "_") for name in OPTIONS.splitlines()]
    expected += SETTINGS.splitlines()
    assert sorted(re.findall(r"^  (megatron_\w+) ", help_text, re.MULTILINE)) == sorted(expected)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        *REMOVED_OPTIONS,
        (
            ["--golden", "refesh"],
            (
                "--golden: 'refesh' is not a way to use goldens, expected one of check, off, "
                "record, refresh; did you mean 'refresh'?"
            ),
        ),
        (["--golden-policy", "lax"], "--golden-policy: unknown policy 'lax', expected "),
        (["--n-repeat", "0"], "--n-repeat: '0' is not a count, expected a number from 1 on"),
        (["--scope", "L0,,L1"], "--scope: 'L0,,L1' holds an empty word"),
        (["--tee-ranks", "0,x"], "--tee-ranks: '0,x' names no ranks, expected numbers with "),
        (
            ["-o", "megatron_lightweight=maybe"],
            "megatron_lightweight: 'maybe' is neither true nor false",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_value_is_one_clear_line(project: Project, arguments: list[str], error: str) -> None:
    run = project.run("recipes", *arguments, run_dir="bad")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = [x for x in run.stderr.splitlines() if x]
    assert line.startswith(f"ERROR: {error}")
    assert not run.directory.exists()


def test_a_bad_value_for_gangs_is_one_clear_line(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    (tmp_path / "test_python.py").write_text("def test_python():\n    pass\n")
    table = json.dumps([arguments for arguments, _ in GANG_ERRORS])
    done = subprocess.run(
        [sys.executable, "-c", SESSIONS, table],
        cwd=tmp_path,
        env=project.env(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 0, done.stderr
    for (_, error), line in zip(GANG_ERRORS, lines, strict=True):
        assert line.startswith(f"ERROR: {error}")
    assert not (tmp_path / ".pytest_megatron").exists()


def test_the_ini_file_gives_defaults_and_the_command_line_wins(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row(project.case("sound"))
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmegatron_n_repeat = 4\nmegatron_max_attempts = 7\nmegatron_run_dir = there\n"
    )
    run = project.run("recipes", "--plan", "--n-repeat", "3", run_dir="")
    assert "  repeats: 3, each with up to 7 attempts" in run.stdout.splitlines()
    assert f"OUTPUT_PATH={tmp_path}/there/tiny-sound-dev-cpu-" in run.stdout


def test_a_selection_in_the_ini_file_leaves_a_plain_pytest_alone(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row(project.case("sound"))
    project.row(project.case("other"), scope=["L1"])
    (tmp_path / "pytest.ini").write_text("[pytest]\nmegatron_scope = L1\n")
    (tmp_path / "test_python.py").write_text("def test_python():\n    pass\n")
    plain = project.run("--collect-only", "-q", run_dir="")
    asked = project.run("recipes", "--collect-only", "-q", run_dir="")
    found = [[x for x in run.stdout.splitlines() if "::" in x] for run in (plain, asked)]
    assert found == [["test_python.py::test_python"], ["recipes/tiny.yaml::other[dev-cpu]"]]


def test_a_plan_beside_a_malformed_recipe_is_printed_and_starts_nothing(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row(project.case("sound"))
    (tmp_path / "recipes" / "wrong.yaml").write_text("type: basic\n")
    run = project.run("recipes", "--plan", run_dir="plan")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert "recipes/tiny.yaml::sound[dev-cpu]" in run.stdout.splitlines()
    assert not run.directory.exists()


@pytest.fixture(scope="module")
def plan(project: Project) -> list[str]:
    run = project.run("recipes", "--plan", run_dir="plan", HF_TOKEN=HOST_SECRET)
    assert (run.returncode, run.stderr) == (0, "")
    assert not run.directory.exists()
    return run.stdout.splitlines()


def test_a_plan_says_what_would_run(plan: list[str], project: Project) -> None:
    start = plan.index("recipes/tiny.yaml::resume[dev-cpu]")
    golden = project.golden_path("resume")
    assert plan[start + 1 : start + 6] == [
        f"  golden: {golden}",
        "  ranks: 2 on cpu",
        "  time limit: 77 s",
        "  repeats: 1, each with up to 3 attempts",
        f"  directory: {project.root}",
    ]
    commands = [line for line in plan if " -m torch.distributed.run " in line]
    assert len(commands) == 2
    assert all(" --nproc-per-node 2 " in line for line in commands)
    assert commands[0].endswith("--name '***' --host '***' --exit-interval 10")
    assert "  then back to iteration 5, and" in plan
    assert "  REPEAT=1 \\" in plan
    assert "  WANDB_API_KEY='***' \\" in plan


def test_a_plan_tells_no_secret(plan: list[str]) -> None:
    assert "secretOf" not in "\n".join(plan)


def test_a_plan_shows_the_script_of_a_row(plan: list[str]) -> None:
    assert "  | echo 1 ${HF_TOKEN} ***" in plan


def test_a_plan_says_what_is_skipped(plan: list[str]) -> None:
    start = plan.index("recipes/tiny.yaml::off[dev-cpu]")
    assert plan[start + 1 : start + 3] == ["  skipped: scope 'mr-broken' disables the row", ""]


def test_a_program_that_is_not_there_is_an_error_of_plan_and_run(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row(project.case("new"), write_golden=False)
    (tmp_path / "train.py").unlink()
    problem = "there is no such program, nothing was run; write it, or change the recipe's"
    plan = project.run("recipes", "--plan", "--golden", "off")
    assert (plan.returncode, problem in plan.stdout) == (pytest.ExitCode.USAGE_ERROR, True)
    run = project.run("recipes", "--golden", "off")
    assert run.outcomes == {"new": "ERROR"}
    assert problem in run.stdout
