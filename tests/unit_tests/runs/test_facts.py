from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from pytest_megatron.runs.environment import gather_facts, tree_at_start, utc_now
from pytest_megatron.runs.record import Result, to_json
from pytest_megatron.runs.tree import read_tree


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def shell(root: Path, line: str) -> None:
    """Run a line with an identity for commits."""
    names = {
        f"GIT_{who}_{what}": "t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    subprocess.run(["/bin/sh", "-c", line], check=True, cwd=root, env={**os.environ, **names})


def uncommitted(root: Path) -> tuple[str, ...]:
    """Return what a session that began now would find beside its commit."""
    for cached in (tree_at_start, gather_facts):
        cached.cache_clear()
    return gather_facts(root).uncommitted


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
    assert (gather_facts(checkout).is_dirty, uncommitted(checkout)) == (True, ())
    (checkout / "recipes" / "train.py").write_text("")
    (checkout / "file").write_text("2")
    assert uncommitted(checkout) == ("file", "recipes/train.py")


# As `git submodule add` leaves it, but for a file that says where it comes from.
SUBMODULE = (
    "git init -q part && touch part/a.py && git -C part add -A && git -C part commit -qm a"
    " && git -c advice.addEmbeddedRepo=false add part && git commit -qm part"
)
HIDE = "git update-index --{} file"


@pytest.mark.parametrize(
    ("before", "change", "changed"),
    [
        pytest.param("", "", (), id="nothing"),
        pytest.param("", "echo 2 >file", ("file",), id="an edit"),
        pytest.param("echo 2 >file", "", (), id="an edit before"),
        pytest.param("", "echo 2 >file; echo 1 >file", ("file",), id="taken back"),
        pytest.param("", "git rm -q file", ("file",), id="deleted"),
        pytest.param("", "echo 2 >../top.py", ("../top.py",), id="above the project"),
        pytest.param(
            "", "git checkout -qb b; echo 2 >file; git commit -qam b", ("HEAD", "file"), id="commit"
        ),
        pytest.param(
            HIDE.format("assume-unchanged"), "echo 2 >file", ("file",), id="assume-unchanged"
        ),
        pytest.param(HIDE.format("skip-worktree"), "echo 2 >file", ("file",), id="skip-worktree"),
        pytest.param("touch recipes/a.yml", "echo 2 >recipes/a.yml", ("recipes/a.yml",), id="row"),
        pytest.param("", "touch recipes/a.yml golden_values/a run.log", (), id="output"),
        pytest.param("", "mkdir out; touch out/a.py out/b.json", (), id="directory of output"),
        pytest.param(
            "git config status.showUntrackedFiles no", "touch a.py", ("a.py",), id="new code"
        ),
        pytest.param("", "mkdir a; touch a/__init__.py", ("a/",), id="new package"),
        pytest.param(SUBMODULE, "echo 2 >part/a.py", ("part/a.py",), id="in a submodule"),
        pytest.param(
            f"{SUBMODULE}; git -C part update-index --assume-unchanged a.py",
            "echo 2 >part/a.py",
            ("part/a.py",),
            id="hidden in a submodule",
        ),
        pytest.param(
            SUBMODULE,
            "git -C part commit -q --allow-empty -m b",
            ("part",),
            id="submodule elsewhere",
        ),
    ],
)
def test_a_tree_says_what_is_not_as_it_was(
    tmp_path: Path, before: str, change: str, changed: tuple[str, ...]
) -> None:
    """Without what programs leave beside the code."""
    project = tmp_path / "all" / "project"
    for directory in ("recipes", "golden_values"):
        (project / directory).mkdir(parents=True)
    (project / "file").write_text("1")
    (tmp_path / "all" / "top.py").touch()
    (project / "recipes" / "kept.yaml").touch()
    shell(tmp_path / "all", "git init -q && git add -A && git commit -qm all")
    shell(project, before)
    start = read_tree(project)
    shell(project, change)
    assert tuple(name.partition(",")[0] for name in read_tree(project).since(start)) == changed


def test_a_file_that_git_does_not_look_at_is_looked_at_in_a_clean_tree(checkout: Path) -> None:
    for flag in ("assume-unchanged", "skip-worktree"):
        (checkout / flag).write_text("1")
    shell(checkout, "git add -A && git commit -qm more && cp .git/index ../index")
    for flag in ("assume-unchanged", "skip-worktree"):
        shell(checkout, f"git update-index --{flag} {flag} && echo 2 >{flag}")
    assert git(checkout, "status", "--porcelain") == ""
    assert uncommitted(checkout) == ("assume-unchanged", "skip-worktree")
    (checkout / "skip-worktree").unlink()  # a sparse checkout has none
    shell(checkout, "echo 1 >assume-unchanged && printf 1 >assume-unchanged")
    assert uncommitted(checkout) == ()


def test_a_folder_without_git_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert gather_facts(tmp_path).commit is None


def test_facts_are_keys_of_a_run_with_versions_and_image(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_MEGATRON_IMAGE", "nvcr.io/x@sha256:1")
    found = to_json(Result(items={}, **vars(gather_facts(checkout).recorded())))
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
