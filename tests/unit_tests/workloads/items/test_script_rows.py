"""Rows whose script starts something of its own: bash runs it, and its exit code decides."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_project import Project, Run

# What nearly all scripts of Megatron-LM's recipes do first.
HEAD = """\
rm -f "${{HOME}}/.netrc"
set -euo pipefail
cd /opt/megatron-lm
"""
SCRIPTS = {
    "finds": "pwd -P; ls /opt/megatron-lm/recipes; python -c 'import sys; print(sys.prefix)'; "
    "echo $UV_PROJECT_ENVIRONMENT $GPUS_PER_NODE {assets_dir} {n_repeat}",
    "saves": "mkdir -p /tmp/checkpoints; touch /tmp/checkpoints/mine",
    "fails": "exit 7",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("scripts") / "project")
    for name, text in SCRIPTS.items():
        project.row(project.case(name), script=[HEAD + text], write_golden=False)
    return project


@pytest.fixture(scope="module")
def run(project: Project) -> Run:
    (home := project.root / "home").mkdir()
    (home / ".netrc").write_text("the user's\n")
    return project.run("recipes", HOME=str(home))


def test_a_script_finds_the_project_and_pytests_environment(project: Project, run: Run) -> None:
    assert run.verdict("finds") == ("PASSED", "passed")
    attempt = run.item_dir("finds") / "repeat_1" / "attempt_1"
    log = (attempt / "phase_1" / "launcher.log").read_text().splitlines()
    assert log == [
        str(project.root.resolve()),
        "tiny.yaml",
        sys.prefix,
        f"{Path(sys.executable).parents[1]} 2 {attempt}/assets 1",
    ]


def test_its_exit_code_alone_decides_and_that_is_said(run: Run) -> None:
    assert "judged by its exit code alone" in str(run.record("finds")["summary"])
    assert run.verdict("fails") == ("FAILED", "failed")
    assert "the script ended with exit code 7" in run.problem("fails")


def test_what_is_the_users_or_of_all_stays_as_it_is(project: Project, run: Run) -> None:
    """Megatron-LM's scripts delete the .netrc, and save where all of a machine save."""
    assert (project.root / "home" / ".netrc").read_text() == "the user's\n"
    attempt = run.item_dir("saves") / "repeat_1" / "attempt_1"
    assert (attempt / "checkpoints" / "mine").is_file()
