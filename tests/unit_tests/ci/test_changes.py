"""From changed paths to the label that a pull request should have."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pytest_megatron.ci.decide import PathChange, changes_since, suggest
from pytest_megatron.ci.table import built_in_table
from pytest_megatron.errors import SelectionError

TABLE = built_in_table()
RUN, FUNCTIONAL = "Run tests", "Run functional tests"


def changes(text: str) -> list[PathChange]:
    """Return the changes of lines, each a path with or without its status in front."""
    words = [line.rpartition("\t") for line in text.splitlines()]
    return [PathChange(path=path, status=status or "M") for status, _, path in words]


@pytest.mark.parametrize(
    ("text", "label", "classes"),
    [
        pytest.param("docs/a.png\nREADME.md\nmegatron/core/README.md", None, {"docs"}, id="docs"),
        pytest.param(".github/workflows/ci.yml\ntools/x.py", None, {"ci and tools"}, id="tools"),
        pytest.param("tests/unit_tests/test_a.py", RUN, {"tests"}, id="tests only"),
        pytest.param(
            "A\ttests/functional_tests/test_cases/gpt/x/model_config.yaml",
            FUNCTIONAL,
            {"new test case"},
            id="a new case",
        ),
        pytest.param(
            "M\ttests/functional_tests/test_cases/gpt/x/model_config.yaml",
            RUN,
            {"tests"},
            id="an old case",
        ),
        pytest.param(
            "tests/test_utils/recipes/h100/gpt.yaml", FUNCTIONAL, {"recipes"}, id="re-enabled"
        ),
        pytest.param(
            "golden_values/gpt/x/golden_values_dev_dgx_h100.json",
            FUNCTIONAL,
            {"goldens"},
            id="golden",
        ),
        pytest.param("pyproject.toml\nuv.lock\ndocker/x", RUN, {"dependencies"}, id="dependencies"),
        pytest.param("megatron/core/utils.py", RUN, {"other code"}, id="no numerics"),
        pytest.param(
            "megatron/core/transformer/attention.py", FUNCTIONAL, {"numerics"}, id="numerics"
        ),
        pytest.param(
            "megatron/core/tensor_parallel/layers.py", FUNCTIONAL, {"numerics"}, id="parallelism"
        ),
        pytest.param("pretrain_gpt.py", FUNCTIONAL, {"numerics"}, id="a training program"),
        pytest.param(
            "README.md\nuv.lock\nmegatron/core/optimizer/optimizer.py\ntests/unit_tests/test_a.py",
            FUNCTIONAL,
            {"docs", "dependencies", "numerics", "tests"},
            id="the strongest wins",
        ),
        pytest.param("", None, set(), id="nothing"),
    ],
)
def test_the_label_follows_the_kinds_of_paths(
    text: str, label: str | None, classes: set[str]
) -> None:
    found = suggest(changes(text), TABLE)
    assert (found.label, set(found.classes)) == (label, classes)
    assert found.docs_only == (classes == {"docs"})


def test_the_suggestion_names_the_path_that_asks_for_it() -> None:
    found = suggest(changes("README.md\npretrain_gpt.py\ntrain_rl.py"), TABLE)
    assert found.reason == "numerics changed: pretrain_gpt.py and 1 more"
    assert suggest(changes("README.md"), TABLE).reason == "only docs changed"


def test_lts_is_never_suggested() -> None:
    paths = changes("docker/Dockerfile.ci.lts\nmegatron/core/transformer/mlp.py\nuv.lock")
    assert suggest(paths, TABLE).labels == (FUNCTIONAL,)


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(root), *identity, *arguments]
    subprocess.run(command, check=True, capture_output=True)


def test_changes_since_a_revision_hold_commits_edits_and_new_files(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    for name in ("kept.md", "gone.py", "edited.py"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "1")
    git(tmp_path, "checkout", "-qb", "topic")
    (tmp_path / "edited.py").write_text("2")
    (tmp_path / "gone.py").unlink()
    git(tmp_path, "commit", "-qam", "2")
    (tmp_path / "new file.py").write_text("3")
    assert set(changes_since(tmp_path, "main")) == {
        PathChange(path="edited.py"),
        PathChange(path="gone.py", status="D"),
        PathChange(path="new file.py", status="A"),
    }


@pytest.mark.parametrize(
    ("revision", "error"),
    [
        ("nowhere", "--diff nowhere: git does not know it here, expected a revision"),
        ("--output=x", "--diff --output=x: is no revision, expected a branch"),
    ],
)
def test_a_revision_that_git_does_not_know_is_one_clear_error(
    tmp_path: Path, revision: str, error: str
) -> None:
    git(tmp_path, "init", "-q")
    with pytest.raises(SelectionError) as caught:
        changes_since(tmp_path, revision)
    assert str(caught.value).startswith(error)
