"""A project from nothing through CI, a planted bug, its commit, quarantine and back."""

from __future__ import annotations

import datetime as dt
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    ".gitignore": ".pytest_*\n__pycache__\n",
    "pyproject.toml": """
[tool.pytest.ini_options]
pythonpath = ["."]
addopts = ["-p", "megatron", "--ranks", "2", "--device", "cpu", "-p", "no:cacheprovider"]

[tool.pytest-megatron.ci]
unit_tests = ["tests/unit_tests"]

[tool.pytest-megatron.ci.workflow]
setup = ["python -m pip install -e ."]
plan = ["--shards", "1"]
comments = true
""",
    "schedule/__init__.py": "",
    "schedule/warm_up.py": "def rate(step):\n    return min(step, 10) / 10\n",
    "schedule/ranks.py": "def shard(size, rank, world_size):\n    return size // world_size\n",
    "tests/unit_tests/test_warm_up.py": """
from schedule.warm_up import rate


def test_the_rate_grows(rank):
    assert rate(rank + 1) > rate(rank)
""",
    "tests/unit_tests/test_ranks.py": """
from schedule.ranks import shard


def test_shards_are_even(rank, world_size):
    assert shard(8, rank, world_size) == 4
""",
}
BUG = "def shard(size, rank, world_size):\n    return size // world_size + rank\n"
ITEM = "tests/unit_tests/test_ranks.py::test_shards_are_even"
UNTIL = dt.datetime.now(dt.UTC).date() + dt.timedelta(days=30)
QUARANTINE = f"""
[tool.pytest-megatron.quarantine]
"{ITEM}" = {{ reason = "#7: uneven shards", until = {UNTIL} }}
"""


class Story:
    """A repository in which a person types commands."""

    def __init__(self, root: Path) -> None:
        self.root = root
        own = ("GITHUB", "GITLAB", "CI", "PYTEST", "COV", "GIT")
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(own)}
        self._env |= {f"GIT_{who}_NAME": "a" for who in ("AUTHOR", "COMMITTER")}
        self._env |= {f"GIT_{who}_EMAIL": "a@example.org" for who in ("AUTHOR", "COMMITTER")}

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)

    def types(self, *words: str, code: int = 0) -> str:
        program = str(Path(sys.executable).with_name(words[0]))
        argv = [program if Path(program).exists() else words[0], *words[1:]]
        done = subprocess.run(
            argv, cwd=self.root, env=self._env, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def commits(self, subject: str) -> str:
        self.types("git", "add", "-A")
        self.types("git", "commit", "-qm", subject)
        return self.types("git", "rev-parse", "HEAD").strip()


def test_a_bug_goes_through_ci_bisection_quarantine_and_back(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.types("git", "init", "-qb", "main")
    story.write(FILES)

    # CI for the project.
    assert "wrote .github/workflows/megatron.yml" in story.types("pytest-megatron", "ci", "init")
    good = story.commits("Start")
    assert "2 passed" in story.types("pytest")

    # Work goes on, with a bug in the middle of it.
    commits = {}
    for number in range(1, 8):
        text = BUG if number == 4 else f"# note {number}\n"
        name = "schedule/ranks.py" if number == 4 else f"notes/{number}.md"
        story.write({name: text})
        commits[number] = story.commits(f"Change {number}")

    # The command that CI runs on a pull request finds it.
    plan = ("--event", "pull_request", "--shards", "1", "--format", "json")
    (job,) = json.loads(story.types("pytest-megatron", "plan", *plan))["jobs"]
    output = story.types(*shlex.split(job["command"]), code=pytest.ExitCode.TESTS_FAILED)
    assert f"FAILED {ITEM} - [rank 1]" in output

    # The commit that did it.
    story.types("git", "bisect", "start", "main", good)
    words = ("pytest-megatron", "repro", ".pytest_megatron/runs/latest", ITEM)
    assert f"{commits[4]} is the first bad commit" in story.types("git", "bisect", "run", *words)
    story.types("git", "bisect", "reset")

    # It cannot be repaired today: in quarantine it fails nothing.
    settings = FILES["pyproject.toml"]
    story.write({"pyproject.toml": settings + QUARANTINE})
    assert f"quarantined {ITEM}" in story.types("pytest")

    # Repaired, it leaves quarantine, and CI is green again.
    story.write({"schedule/ranks.py": FILES["schedule/ranks.py"]})
    assert "if that lasts, end its quarantine" in story.types("pytest")
    story.write({"pyproject.toml": settings})
    story.commits("Repair the shards")
    assert "2 passed" in story.types("pytest")
