"""How pytest starts in a rank that collects for itself, and what is said where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from gang_suite import READS_RANK, Suite

from pytest_megatron.gangs.start.environment import num_started

pytestmark = pytest.mark.nightly

TESTS = """
    def test_world(world_size):
        assert world_size == 2


    def test_other(rank):
        assert rank < 2
"""


@pytest.mark.everyday
@pytest.mark.parametrize("start", ["auto", "collect"])
def test_warnings_that_are_errors_do_not_keep_a_rank_from_starting(
    start: str, tmp_path: Path
) -> None:
    suite = Suite(tmp_path).write(conftest=READS_RANK, test_world=TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    run = suite.run("-v", "--ranks", "2", "-o", f"megatron_gang_start={start}")
    assert set(run.words.values()) == {"PASSED"}, run.stdout


@pytest.mark.parametrize(
    ("hook", "statement", "reason", "frames"),
    [
        (
            "configure(config)",
            "raise ValueError('no such rank')",
            "ValueError: no such rank (conftest.py:9)",
            "conftest.py:9: in pytest_configure\n    raise ValueError('no such rank')\n",
        ),
        # pytest shows no frames for these.
        ("sessionstart(session)", "pytest.exit('not here', 3)", "Exit: not here", "="),
        ("cmdline_main(config)", "raise pytest.UsageError('no')", "UsageError: no", "="),
    ],
)
def test_a_rank_in_which_pytest_does_not_start_says_why(
    hook: str, statement: str, reason: str, frames: str, tmp_path: Path
) -> None:
    conftest = f"""
    import os

    import pytest


    def pytest_{hook}:
        if os.environ["RANK"] == "1":
            {statement}
    """
    suite = Suite(tmp_path, has_torch=False).write(conftest=conftest, test_world=TESTS)
    run = suite.run("-v", "--ranks", "2")
    assert (run.returncode, run.summary) == (2, "1 error"), run.stdout
    told = f"rank 1 of 2 could not collect: {reason}\n"
    assert f"\n{told}{frames}" in run.stdout, run.stdout
    assert f"\nERROR rank 1 - {told}" in run.stdout
    assert "site-packages" not in run.stdout.partition("= ERRORS =")[2]


@pytest.mark.everyday
@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}, "torchrun"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun"),
    ],
)
def test_a_session_that_a_launcher_started_several_times_is_refused(
    env: dict[str, str], launcher: str, tmp_path: Path
) -> None:
    suite = Suite(tmp_path).write(test_world=TESTS)
    run = suite.run("--ranks", "2", env=env)
    assert (run.returncode, run.stdout) == (4, "")
    assert run.stderr == (
        f"ERROR: {launcher} started 2 sessions of pytest, and each of them would start ranks and "
        f"run everything; start pytest once, without {launcher}, or drop --ranks and --gpus\n\n"
    )


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WORLD_SIZE": "2", "RANK": "0"},
        {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1"},
        {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"},
        {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"},
        {"OMPI_COMM_WORLD_SIZE": "many"},
    ],
)
def test_a_session_that_was_started_once_is_no_launchers(env: dict[str, str]) -> None:
    assert (num_started(env) or ("", 1))[1] == 1


def test_a_test_may_start_a_session_whoever_launched_it(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        test_nested="""
            import subprocess
            import sys

            def test_nests(rank):
                command = [sys.executable, "-m", "pytest", "-p", "megatron", "--ranks", "2"]
                name = f"inner_{rank}.py"
                with open(name, "w") as file:
                    file.write("def test_inner(world_size): assert world_size == 2")
                done = subprocess.run([*command, name], stdout=subprocess.PIPE, text=True)
                assert done.returncode == 0, done.stdout
        """
    )
    run = suite.run("--ranks", "2")
    assert run.summary == "1 passed", run.stdout


@pytest.mark.parametrize("fixture", ["process_group", "rank"])
def test_ranks_have_torch_from_where_they_are_forked_if_a_test_needs_it(
    fixture: str, tmp_path: Path
) -> None:
    suite = Suite(tmp_path, is_fresh=True).write(
        test_torch=f"""
            import sys
            import pytest

            IS_NEEDED = "{fixture}" == "process_group"

            def test_begins():
                assert ("torch" in sys.modules) == IS_NEEDED

            def test_uses({fixture}):
                pass

            @pytest.mark.controller
            def test_stays():
                assert "torch" not in sys.modules
        """
    )
    run = suite.run("--ranks", "2")
    assert run.summary == "3 passed", run.stdout


def test_a_torch_that_cannot_be_loaded_fails_the_tests_that_load_it(tmp_path: Path) -> None:
    suite = Suite(tmp_path, is_fresh=True).write(
        torch="raise OSError('libtorch_cpu.so: cannot open shared object file')",
        test_torch="""
            def test_loads(device):
                pass

            def test_is_sound(rank):
                assert rank < 2
        """,
    )
    run = suite.run("-v", "--ranks", "2")
    assert run.words == {"test_loads": "ERROR", "test_is_sound": "PASSED"}, run.stdout
    assert "OSError: libtorch_cpu.so: cannot open" in run.stdout
    assert run.stderr == ""
