"""Features can be taken out, and gangs and workloads do not load each other: in real sessions."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from forked_sessions import run_command
from tiny_project import Project

import pytest_megatron
from pytest_megatron.features import FEATURES, Feature, features, load

PACKAGE = Path(pytest_megatron.__file__).parent
CORE = ("gangs", "workloads", "triage")
TESTS = """\
def test_ranks(rank, world_size):
    assert world_size == 2

def test_split(rank):
    assert rank == 0
"""
LOADED = """\
import os, pathlib, sys, pytest

@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    if "RANK" not in os.environ:
        pathlib.Path("loaded.txt").write_text("\\n".join(sys.modules))
"""
MAIN = [sys.executable, "-c", "from pytest_megatron.cli import main; main()"]


def project_in(root: Path) -> Project:
    """A project with a sound row and one that differs from its golden, and tests on ranks."""
    project = Project(root=root)
    project.add("sound")
    project.add("differs")
    project.golden("differs", changes={3: 0.5})
    (root / "test_ranks.py").write_text(TESTS)
    (root / "conftest.py").write_text(LOADED)
    return project


def without(feature: str, site: Path) -> None:
    """Copy the package without a feature and its name in the table."""
    copy = site / "pytest_megatron"
    shutil.copytree(PACKAGE, copy)  # and what is compiled: the files are as old as there
    shutil.rmtree(copy / feature)
    table = copy / "features.py"
    text, count = re.subn(rf'"{feature}",? ?', "", table.read_text())
    assert count == 1
    table.write_text(text)


@pytest.mark.everyday("flaky", "pages", "repro")
@pytest.mark.parametrize("feature", [feature for feature in FEATURES if feature not in CORE])
def test_a_feature_can_be_taken_out(feature: str, tmp_path: Path) -> None:
    without(feature, tmp_path / "site")
    project = project_in(tmp_path / "project")
    env = {"PYTHONPATH": os.fspath(tmp_path / "site")}
    result = project.run("--ranks", "2", "test_ranks.py", "recipes", "-v", **env)
    assert "2 failed, 2 passed" in result.stdout, result.text
    assert "lm loss is off at step 3" in result.stdout
    assert "1 failed" not in result.stderr
    for words in (["--help"], [*MAIN, "--help"]):
        command = words if words[0] != "--help" else project.command("--help", run_dir="")
        done = run_command(command, project.root, project.env(**env))
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    if feature == "repro":
        return
    for item in ("test_ranks.py::test_split", "recipes/tiny.yaml::differs[dev-cpu]"):
        words = [*MAIN, "repro", "run", item]
        done = run_command(words, project.root, project.env(**env))
        assert "1 failed" in done.stdout, done.stdout + done.stderr


def loaded_by(project: Project, *arguments: str) -> set[str]:
    command = project.command(*arguments, run_dir="run")
    done = run_command(command, project.root, project.env())
    assert done.returncode in (0, 1), done.stdout + done.stderr
    names = (project.root / "loaded.txt").read_text().splitlines()
    return {
        name.removeprefix("pytest_megatron.")
        for name in names
        if name.startswith("pytest_megatron.")
        and name.rpartition(".")[2] not in ("feature", "hooks")
    }


def test_tests_on_ranks_load_nothing_of_workloads(tmp_path: Path) -> None:
    loaded = loaded_by(project_in(tmp_path), "--ranks", "2", "test_ranks.py")
    assert "gangs.controller.plugin" in loaded
    assert {name for name in loaded if name.startswith("workloads.")} == set()


def test_workloads_load_of_gangs_the_markers_and_fixtures_of_all_tests(tmp_path: Path) -> None:
    loaded = loaded_by(project_in(tmp_path), "recipes")
    assert "workloads.items.training" in loaded
    assert {name for name in loaded if name.startswith("gangs.")} == {
        *("gangs.fixtures", "gangs.markers", "gangs.start", "gangs.start.environment"),
        "gangs.topology",
    }


def test_what_features_add_is_there() -> None:
    for name, feature in features():
        assert isinstance(feature, Feature)
        for target in (
            *feature.provides.values(),
            *(target for target, _ in feature.commands.values()),
        ):
            assert load(f"{name}.{target}") is not None
