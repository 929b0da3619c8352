"""Determinism audits of real trainings with torch, and traces of them compared afterwards."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_project import Project

from pytest_megatron.base.files import JsonValue
from pytest_megatron.trace.command import command

PROGRAM = Path(__file__).parents[2] / "guests" / "two_layers.py"
METRICS: dict[str, JsonValue] = {"METRICS": ["lm loss"]}
CLAIMED = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def project_of(
    root: Path,
    cases: Mapping[str, Mapping[str, JsonValue]],
    num_ranks: Mapping[str, int],
    *,
    has_agent: bool = False,
) -> Project:
    """Return a project whose cases train two layers; ranks load torch, and maybe their agent."""
    project = Project(root=root, has_torch=has_agent)
    shutil.copy(PROGRAM, root / "train.py")
    for name, arguments in cases.items():
        env = {"TINY_AGENT_ALONE": "1"} | (CLAIMED if name.startswith("claimed") else {})
        project.case(name, config=METRICS, env=env, tensorboard_dir=None, **arguments)
        project.row(name, write_golden=False, gpus=[num_ranks[name]])
    return project


AUDIT = ("recipes", "--audit-determinism", "--golden", "off")
DIFFERENT = "not deterministic"


def test_a_training_that_differs_from_itself_is_named_at_its_tensor(tmp_path: Path) -> None:
    cases: dict[str, dict[str, JsonValue]] = {
        "claimed": {},
        "claimed_gradient": {"disturb": "gradient"},
    }
    run = project_of(tmp_path, cases, {"claimed": 1, "claimed_gradient": 2}).run(*AUDIT)
    assert run.outcomes == {"claimed": "PASSED", "claimed_gradient": "FAILED"}
    sound = {"verdict": "deterministic", "text": "deterministic: 56 tensors of 2 steps"}
    assert run.record("claimed")["audit"] == {**sound, "num_tensors": 56, "steps": 2}
    text = f"{DIFFERENT}: gradient of first.weight, step 1, rank 1"
    different = {"verdict": DIFFERENT, "text": text, "num_tensors": 112, "steps": 2}
    assert run.record("claimed_gradient")["audit"] == different
    first, *block = run.problem("claimed_gradient").splitlines()
    assert first.endswith(text)
    assert block[0] == "    first difference: first.weight, gradient"
    assert "by NVTE_ALLOW_NONDETERMINISTIC_ALGO: 0 in " in block[-1]


def test_an_audit_finds_what_the_seed_of_hash_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where forks would share it, and the user's environment sets one."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    cases: dict[str, dict[str, JsonValue]] = {"order": {"disturb": "order"}}
    project = project_of(tmp_path, cases, {"order": 1}, has_agent=True)
    run = project.run(*AUDIT, "-o", "megatron_workload_start=fork")
    assert run.outcomes == {"order": "PASSED"}
    text = f"{DIFFERENT}: forward of second output.0, step 1, rank 0"
    found = {"verdict": DIFFERENT, "text": text, "num_tensors": 56, "steps": 2}
    assert run.record("order")["audit"] == found
    logs = [path.read_text() for path in run.directory.glob("*/repeat_1/attempt_1/*/launcher.log")]
    assert len(logs) == 3
    assert not any("not forked" in log for log in logs)


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
    assert "    its bits differ: norm 1.5 times the reference's" in lines
