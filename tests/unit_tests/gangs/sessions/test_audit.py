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
    root: Path, cases: Mapping[str, Mapping[str, JsonValue]], **keys: JsonValue
) -> Project:
    """Return a project whose cases train two layers."""
    project = Project(root=root, has_torch=True)
    shutil.copy(PROGRAM, root / "train.py")
    for name, arguments in cases.items():
        env = CLAIMED if name.startswith("claimed") else {}
        project.case(name, config=METRICS, env=env, tensorboard_dir=None, **arguments)
        project.row(name, write_golden=False, **keys)
    return project


CASES: dict[str, dict[str, JsonValue]] = {
    "claimed": {},
    "claimed_forward": {"disturb": "forward"},
    "gradient": {"disturb": "gradient"},
    "order": {"disturb": "order"},
}
FORWARD = "not deterministic: forward of second output.0, step 1, rank 1"
AUDITS: dict[str, dict[str, JsonValue]] = {
    "claimed": {"verdict": "deterministic", "text": "deterministic: 112 tensors of 2 steps"},
    "claimed_forward": {"verdict": "not deterministic", "text": FORWARD},
    "gradient": {
        "verdict": "not deterministic",
        "text": "not deterministic: gradient of first.weight, step 1, rank 0",
        "num_tensors": 56,
    },
    "order": {
        "verdict": "not deterministic",
        "text": "not deterministic: forward of second output.0, step 1, rank 0",
        "num_tensors": 56,
    },
}


@pytest.mark.parametrize(
    ("start", "gpus", "cases"),
    [
        ("fork", 2, ["claimed", "claimed_forward"]),
        ("fresh", 1, ["gradient"]),
        ("fork", 1, ["order"]),
    ],
)
def test_a_training_that_differs_from_itself_is_named_at_its_tensor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: str,
    gpus: int,
    cases: list[str],
) -> None:
    """Also where forks would share the seed of `hash()`, and the user's environment sets one."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    project = project_of(tmp_path, {name: CASES[name] for name in cases}, gpus=[gpus])
    run = project.run(
        *(
            "recipes",
            "--audit-determinism",
            "--golden",
            "off",
            "-o",
            f"megatron_workload_start={start}",
        )
    )
    found = {name: "FAILED" if name == "claimed_forward" else "PASSED" for name in cases}
    assert run.outcomes == found
    for name in cases:
        assert run.record(name)["audit"] == {"num_tensors": 112, "steps": 2} | AUDITS[name]
    if "claimed_forward" in cases:
        first, *block = run.problem("claimed_forward").splitlines()
        assert first.endswith(FORWARD)
        assert block[0] == "    first difference: second, forward, output.0"
        assert "by NVTE_ALLOW_NONDETERMINISTIC_ALGO: 0 in " in block[-1]
    logs = [path.read_text() for path in run.directory.glob("*/repeat_1/attempt_1/*/launcher.log")]
    assert len(logs) == 3 * len(cases)
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
    project = project_of(tmp_path, {"line": {}})
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
