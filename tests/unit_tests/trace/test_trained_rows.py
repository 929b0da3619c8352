"""Rows that are trained twice, or against another, and traces of runs compared afterwards."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tiny_project import Project

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import TraceError
from pytest_megatron.trace.command import command

pytestmark = pytest.mark.nightly

PROGRAM = Path(__file__).parents[1] / "guests" / "two_layers.py"
METRICS: dict[str, JsonValue] = {"METRICS": ["lm loss"]}


def project_of(
    root: Path,
    cases: Mapping[str, Mapping[str, JsonValue]],
    num_ranks: Mapping[str, int],
) -> Project:
    """Return a project whose cases train two layers."""
    project = Project(root=root)
    shutil.copy(PROGRAM, root / "train.py")
    for name, arguments in cases.items():
        env = {"TINY_AGENT_ALONE": "1"}
        project.case(name, config=METRICS, env=env, tensorboard_dir=None, **arguments)
        project.row(name, write_golden=False, gpus=[num_ranks[name]])
    return project


def trace(project: Project, monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    """Call `trace` in a project."""
    monkeypatch.chdir(project.root)
    for name, value in project.env().items():
        monkeypatch.setenv(name, value)
    return CliRunner().invoke(command, words, catch_exceptions=False)


def row(name: str) -> str:
    return f"recipes/tiny.yaml::{name}[dev-cpu]"


def test_a_training_that_differs_from_itself_is_named_at_its_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: dict[str, dict[str, JsonValue]] = {"sound": {}, "gradient": {"disturb": "gradient"}}
    project = project_of(tmp_path, cases, {"sound": 1, "gradient": 2})
    done = trace(project, monkeypatch, "repeat", row("sound"))
    assert (done.exit_code, done.stdout) == (
        0,
        f"equal: {row('sound')}, phase 1: 40 tensors of 2 steps\n",
    )
    assert list((tmp_path / ".pytest_megatron" / "trace").iterdir()) == []
    done = trace(project, monkeypatch, "repeat", row("gradient"), "--format", "json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["verdict"]) == (1, "different")
    text = "gradient of first.weight, step 1, rank 1"
    assert found["traces"][0]["text"] == f"different: {row('gradient')}, phase 1: {text}"


@pytest.mark.everyday
def test_a_repetition_finds_what_the_seed_of_hash_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the user's environment sets one."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    cases: dict[str, dict[str, JsonValue]] = {"order": {"disturb": "order"}}
    project = project_of(tmp_path, cases, {"order": 1})
    done = trace(project, monkeypatch, "repeat", row("order"))
    assert done.exit_code == 1
    text = "forward of second output.0, step 1, rank 0"
    assert done.stdout.startswith(f"different: {row('order')}, phase 1: {text}\n")


def test_two_rows_are_compared_with_the_weights_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: dict[str, dict[str, JsonValue]] = {"alone": {}, "two": {}, "wrong": {"scale": 1.5}}
    project = project_of(tmp_path, cases, {"alone": 1, "two": 2, "wrong": 2})
    done = trace(project, monkeypatch, "compare", row("alone"), row("two"))
    assert done.exit_code == 0
    done = trace(project, monkeypatch, "compare", row("alone"), row("wrong"))
    assert done.exit_code == 1


@pytest.mark.parametrize("words", [("repeat", "none.yaml"), ("compare", "none.yaml", "none.yaml")])
def test_a_row_that_cannot_be_trained_is_an_error_with_the_words_of_pytest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    project = project_of(tmp_path, {}, {})
    with pytest.raises(TraceError) as error:
        trace(project, monkeypatch, *words)
    assert "none.yaml: pytest ended with exit code 4 and left no trace; " in str(error.value)


def commit(root: Path) -> str:
    """Commit all files; return the commit."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(root)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "train.py", "tests", "recipes"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "Train"], check=True)
    done = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_module_that_a_commit_changed_is_found_in_traces_of_two_runs(tmp_path: Path) -> None:
    project = project_of(tmp_path, {"line": {}}, {"line": 2})
    words = ("recipes", "--tensor-trace", "hash", "--golden", "off")
    commits = [commit(tmp_path)]
    assert project.run(*words, run_dir="before").outcomes == {"line": "PASSED"}
    program = tmp_path / "train.py"
    program.write_text(program.read_text().replace("* self.factor", "* self.factor * 1.5"))
    commits.append(commit(tmp_path))
    assert project.run(*words, run_dir="after").outcomes == {"line": "PASSED"}
    runs = [str(tmp_path / name) for name in ("before", "after")]
    done = CliRunner().invoke(command, ["diff", *runs], catch_exceptions=False)
    lines = done.output.splitlines()
    assert done.exit_code == 1
    assert f"commit: {commits[0]} and {commits[1]}" in lines
    found = "forward of second output.0, step 1, ranks 0-1"
    assert f"different: recipes/tiny.yaml::line[dev-cpu], phase 1: {found}" in lines
    assert "  its bits differ: norm 1.5 times the reference's" in lines
