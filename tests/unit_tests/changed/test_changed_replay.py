from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pytest_megatron.base.project import ask_git
from pytest_megatron.cli import group
from pytest_megatron.runs.history import HistoryEntry, append

CODE = "def one():\n    return 1\n\n\ndef two():\n    return 2\n"
TESTS = (
    "import code_of\n\ndef test_one():\n    code_of.one()\n\ndef test_two():\n    code_of.two()\n"
)
ONE, TWO = "test_code.py::test_one", "test_code.py::test_two"


class Repository:
    """Seven commits; `first.z` was recorded three commits before `last.z`, the last one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")
        (root / ".gitignore").write_text(".*\n__pycache__\n*.z\n")
        (root / "test_code.py").write_text(TESTS)
        gone = "\n\ndef gone():\n    return {}\n"
        self.commit("code_of.py", CODE + gone.format(3))
        self.commit("code_of.py", CODE + gone.format(30))
        self.commit("code_of.py", CODE)
        self.record("first.z")
        self.commits = [
            self.commit("code_of.py", CODE.replace("1", "10")),
            self.commit("code_of.py", CODE.replace("1", "10").replace("2", "20")),
            self.commit("README.md", "text\n"),
        ]
        self.record("last.z")

    def git(self, *arguments: str) -> str:
        who = "-c", "user.name=n", "-c", "user.email=e@example.org"
        found = ask_git(self.root, *who, *arguments)
        assert found is not None, arguments
        return found

    def commit(self, name: str, text: str) -> str:
        (self.root / name).write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", f"Change {name}")
        return self.git("rev-parse", "HEAD")

    def record(self, name: str) -> None:
        names = ("PYTEST_", "COV_", "COVERAGE_", "PYTHONDONTWRITEBYTECODE")
        env = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "megatron",
            "--record-changed",
            "-o",
            f"megatron_changed_file={name}",
        ]
        done = subprocess.run(
            command, cwd=self.root, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def replay(self, *arguments: str) -> str:
        done = CliRunner().invoke(group, ["plan", "--replay", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    def replay_json(self, *arguments: str) -> dict[str, Any]:  # type: ignore[explicit-any]
        words = "--format", "json", "--explain"
        found: dict[str, Any] = json.loads(self.replay(*arguments, *words))  # type: ignore[explicit-any]
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return Repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture
def repository(made: Repository, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.chdir(made.root)
    return made


FIRST, LAST = ("--changed-file", "first.z"), ("--changed-file", "last.z")


def entry(node_id: str, commit: str, verdict: str) -> HistoryEntry:
    return HistoryEntry(
        time="2026-01-31T12:00:00Z",
        run="run",
        node_id=node_id,
        kind="test",
        verdict=verdict,
        num_attempts=1,
        causes=(),
        duration_s=4.0,
        commit=commit,
        is_dirty=False,
        platform="cpu x2",
    )


def test_an_item_is_skipped_where_a_record_fits_the_commit_and_the_one_before(
    repository: Repository,
) -> None:
    """Beyond the last change of what an item used, its record proves nothing."""
    changed_one, changed_two, changed_none = repository.replay_json("3", *LAST)["commits"]
    assert changed_none["skipped"] == [ONE, TWO]
    assert changed_two["run"] == {TWO: "code_of.py::two changed"}
    assert changed_two["skipped"] == [ONE]
    assert changed_one["run"] == {ONE: "code_of.py::one changed"}
    assert changed_one["assumed"] == {TWO: "code_of.py::two changed"}
    assert (changed_one["num_skipped"], changed_one["saved"]) == (0, 0)


def test_an_older_record_reaches_where_a_later_one_does_not(repository: Repository) -> None:
    found = repository.replay_json("3", *LAST, *FIRST)
    assert [one["skipped"] for one in found["commits"]] == [[TWO], [ONE], [ONE, TWO]]
    assert (found["num_assumed"], found["num_skipped"], found["num_items"]) == (0, 4, 6)


def test_a_failure_of_a_skipped_item_is_a_false_green(
    repository: Repository, tmp_path: Path
) -> None:
    """A pass judges the skips before it; an item that ran and failed runs again."""
    changed_one, changed_two, changed_none = repository.commits
    history = tmp_path / "history.jsonl"
    entries = [
        *(entry(TWO, changed_one, verdict) for verdict in ("failed", "passed")),
        entry(TWO, changed_two, "failed"),
        entry(ONE, changed_none, "passed"),
    ]
    append(history, entries)
    words = "3", *LAST, *FIRST, "--history", str(history)
    found = repository.replay_json(*words)
    green = {
        "node_id": TWO,
        "commit": changed_one,
        "since": changed_one,
        "is_contradictory": True,
    }
    assert found["false_greens"] == [green]
    assert found["commits"][2]["run"] == {TWO: "it failed last time"}
    assert (found["num_judged"], found["false_green_rate"]) == (3, 1 / 3)
    text = repository.replay(*words)
    assert f"{TWO} failed at {changed_one[:12]}, and passed there as well" in text
    assert "1 failed, false green rate 33.3%" in text


def test_code_that_the_record_does_not_have_is_unknown_and_counts_as_run(
    repository: Repository,
) -> None:
    found = repository.replay_json("9", *LAST)
    reason = "code_of.py::gone changed, and no record has it"
    assert found["commits"][0]["unknown"] == {ONE: reason, TWO: reason}
    assert found["commits"][1]["run"].keys() == {ONE, TWO}
    assert (found["is_short"], found["num_unknown"], found["assuming"]["num_unknown"]) == (
        True,
        2,
        2,
    )
    text = repository.replay("9", *LAST)
    assert "git has 5 of the 9 commits here" in text
    assert "no false green rate: the history has no outcome of a skipped item" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--labels", "a"], "--labels: is for a plan; leave it out beside --replay"),
        (["--changed-file", "none.z"], "none.z: has no record of this version"),
        (["--history", "none"], "none: is not there; runs with workloads"),
    ],
)
@pytest.mark.usefixtures("repository")
def test_what_cannot_be_replayed_is_refused(arguments: list[str], problem: str) -> None:
    done = CliRunner().invoke(group, ["plan", "--replay", "2", *LAST, *arguments])
    assert done.exit_code != 0
    assert problem in f"{done.output}{done.exception}"
