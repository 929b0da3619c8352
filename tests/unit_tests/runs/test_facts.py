from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from pytest_megatron.runs.environment import gather_facts, utc_now
from pytest_megatron.runs.record import RecordedRun, to_json


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "is_dirty"),
    [
        pytest.param("file", "1", False, id="nothing changed"),
        pytest.param("file", "2", True, id="a change"),
        pytest.param("new", "", True, id="a new file"),
        pytest.param("golden_values/gpt/g.json", "", False, id="a golden, which comes of the run"),
    ],
)
def test_a_tree_is_dirty_where_it_is_not_its_commit(
    checkout: Path, name: str, text: str, *, is_dirty: bool
) -> None:
    (checkout / name).parent.mkdir(parents=True, exist_ok=True)
    (checkout / name).write_text(text)
    facts = gather_facts(checkout)
    assert (facts.commit, facts.is_dirty) == (git(checkout, "rev-parse", "HEAD"), is_dirty)


def test_a_new_recipe_is_committed_with_its_golden(checkout: Path) -> None:
    (checkout / "recipes").mkdir()
    (checkout / "recipes" / "new.yaml").write_text("rows: []")
    facts = gather_facts(checkout)
    assert (facts.is_dirty, facts.is_uncommitted) == (True, False)
    gather_facts.cache_clear()
    (checkout / "file").write_text("2")
    assert gather_facts(checkout).is_uncommitted


def test_a_folder_without_git_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert gather_facts(tmp_path).commit is None


def test_facts_are_keys_of_a_run_with_versions_and_image(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_MEGATRON_IMAGE", "nvcr.io/x@sha256:1")
    found = to_json(RecordedRun(items={}, **vars(gather_facts(checkout).recorded())))
    assert json.loads(json.dumps(found)) == found
    assert found["image"] == "nvcr.io/x@sha256:1"
    versions = found["versions"]
    assert isinstance(versions, dict)
    assert {"pytest", "torch"} <= versions.keys()


def test_times_are_utc_to_the_second() -> None:
    now = utc_now()
    assert (len(now), now[10], now[-1]) == (20, "T", "Z")


def test_a_workload_on_the_cpu_has_its_instructions_among_its_versions(checkout: Path) -> None:
    """One name of a processor stands for several that round otherwise."""
    gathered = gather_facts(checkout)
    facts = dataclasses.replace(
        gathered, host=dataclasses.replace(gathered.host, instructions="avx2")
    )
    assert facts.versions_on("cpu") == facts.versions | {"cpu": "avx2"}
    assert facts.versions_on("dgx_h100") == facts.versions
