"""Changes of a project's configuration: nothing else moves; an unknown form is left alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pytest_megatron.adopt.find import search
from pytest_megatron.adopt.settings import (
    ConfigChange,
    apply_changes,
    diff_of,
    plan_changes,
    source_of,
    with_plugin,
)
from pytest_megatron.errors import AdoptError


@pytest.mark.parametrize(
    ("name", "section", "before", "after"),
    [
        ("pytest.ini", "pytest", "", "[pytest]\naddopts = -p megatron\n"),
        (
            "pytest.ini",
            "pytest",
            "# all\n[pytest]\n; first\naddopts = -ra  # no\nmarkers =\n    a: b\n",
            "# all\n[pytest]\n; first\naddopts = -p megatron -ra  # no\nmarkers =\n    a: b\n",
        ),
        (
            "setup.cfg",
            "tool:pytest",
            "[x]\naddopts = 0\n[tool:pytest]\naddopts =\n    -ra\n    -v\n\n[y]\na = 1",
            "[x]\naddopts = 0\n[tool:pytest]\naddopts = -p megatron\n    -ra\n    -v\n\n[y]\na = 1",
        ),
        (
            "tox.ini",
            "pytest",
            "[tox]\r\nenvlist = py\r\n[pytest]\r\ntestpaths = a\r\n",
            "[tox]\r\nenvlist = py\r\n[pytest]\r\naddopts = -p megatron\r\ntestpaths = a\r\n",
        ),
        (
            "pyproject.toml",
            "tool.pytest.ini_options",
            "[tool.pytest.ini_options] # a\naddopts = '-ra' #\n[tool.x]\naddopts = 1\n",
            "[tool.pytest.ini_options] # a\naddopts = '-p megatron -ra' #\n[tool.x]\naddopts = 1\n",
        ),
        (
            "pyproject.toml",
            "tool.pytest.ini_options",
            '[tool.pytest.ini_options]\naddopts = [\n  "-ra", # x\n]\nmarkers = ["[a]"]\n',
            (
                '[tool.pytest.ini_options]\naddopts = ["-p", "megatron", \n  "-ra", # x\n]\n'
                'markers = ["[a]"]\n'
            ),
        ),
        (
            "pyproject.toml",
            "tool.pytest.ini_options",
            "[project]\nname = 'a'",
            "[project]\nname = 'a'\n\n[tool.pytest.ini_options]\naddopts = \"-p megatron\"\n",
        ),
        (
            "pyproject.toml",
            "tool.pytest",
            "[tool.pytest]\nminversion = '9'\n",
            '[tool.pytest]\naddopts = ["-p", "megatron"]\nminversion = \'9\'\n',
        ),
    ],
)
def test_the_plugin_is_added_and_all_else_is_as_it_was(
    name: str, section: str, before: str, after: str
) -> None:
    new = with_plugin(before, name, section)
    assert new == after
    assert with_plugin(after, name, section) == after


@pytest.mark.parametrize(
    ("name", "section", "text"),
    [
        ("pyproject.toml", "tool.pytest.ini_options", "tool.pytest.ini_options.addopts = '-ra'\n"),
        (
            "pyproject.toml",
            "tool.pytest.ini_options",
            "[tool]\npytest.ini_options = {addopts = ''}\n",
        ),
    ],
)
def test_a_form_that_is_not_known_is_left_alone(name: str, section: str, text: str) -> None:
    assert with_plugin(text, name, section) is None


def git(root: Path, *arguments: str) -> str:
    words = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(words, cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def test_a(): ...\n")
    (tmp_path / "run.sh").write_text("torchrun --nproc-per-node 4 -m pytest tests\n")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'a'  # kept")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def test_the_diff_is_what_git_applies(project: Path) -> None:
    changes = plan_changes(project, search(project))
    diff = diff_of(changes.files)
    (project / "x.diff").write_text(diff)
    git(project, "apply", "x.diff")
    for change in changes.files:
        assert (project / change.path).read_text() == change.new
    assert plan_changes(project, search(project)).files == ()


def test_the_settings_of_ci_come_from_what_was_found(project: Path) -> None:
    changes = plan_changes(project, search(project))
    (change,) = (one for one in changes.files if one.path == "pyproject.toml")
    assert changes.notes == (
        (
            "pyproject.toml: `setup` of [tool.pytest-megatron.ci.workflow] does not install all: "
            "add lines for pytest-megatron (on no package index yet) and torch, where the line of "
            "the project does not; then run `pytest-megatron ci init`"
        ),
    )
    assert change.new == (
        "[project]\nname = 'a'  # kept\n\n"
        '[tool.pytest.ini_options]\naddopts = "-p megatron"\n\n'
        '[tool.pytest-megatron.ci]\nunit_tests = ["tests"]\n\n'
        "[tool.pytest-megatron.ci.workflow]\n"
        "# Add lines for pytest-megatron (on no package index yet) and torch, where the line of "
        "the project does not.\n"
        'setup = ["python -m pip install -e ."]\n'
        'plan = ["--shards", "1", "--ranks", "4"]\n'
    )


@pytest.mark.parametrize(
    ("direct_url", "requirement"),
    [
        (
            '{"url": "https://example.org/a.git", "vcs_info": {"vcs": "git", "commit_id": "1f"}}',
            "pytest-megatron @ git+https://example.org/a.git@1f",
        ),
        (
            '{"url": "https://example.org/a.whl", "archive_info": {}}',
            "pytest-megatron @ https://example.org/a.whl",
        ),
        ('{"url": "https://me:secret@example.org/a.whl", "archive_info": {}}', None),
        ('{"url": "file:///home/me/a", "dir_info": {"editable": true}}', None),
        ("{", None),
        (None, None),
    ],
)
def test_a_runner_installs_the_source_of_the_installed_package(
    project: Path, direct_url: str | None, requirement: str | None
) -> None:
    assert source_of(direct_url) == requirement
    changes = plan_changes(project, search(project), requirement)
    (change,) = (one for one in changes.files if one.path == "pyproject.toml")
    own = f", \"python -m pip install '{requirement}'\"" if requirement else ""
    assert f'setup = ["python -m pip install -e ."{own}]\n' in change.new
    (note,) = changes.notes
    assert ("lines for torch, " in note) == (requirement is not None)


def test_a_file_that_git_cannot_give_back_is_not_written(project: Path) -> None:
    (project / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    (project / "new.ini").write_text("")
    changes = [
        ConfigChange(path=name, old=(project / name).read_text(), new="x")
        for name in ("pyproject.toml", "new.ini", "run.sh")
    ]
    refused = apply_changes(project, changes)
    reason = (
        "has changes that are not committed, or is not in git; commit it, or apply the diff "
        "yourself"
    )
    assert refused == [f"pyproject.toml {reason}", f"new.ini {reason}"]
    assert git(project, "status", "--porcelain") == " M pyproject.toml\n M run.sh\n?? new.ini\n"


def test_a_project_without_pyproject_gets_no_workflow(project: Path) -> None:
    git(project, "rm", "-qf", "pyproject.toml")
    changes = plan_changes(project, search(project))
    assert [change.path for change in changes.files] == ["pytest.ini"]
    assert changes.notes == (
        (
            "no workflow: its settings are in pyproject.toml, which this project has not; make "
            "one, then `pytest-megatron ci init` writes .github/workflows/megatron.yml"
        ),
    )


@pytest.mark.parametrize(
    ("name", "text"), [("pyproject.toml", "[project\n"), ("setup.cfg", "addopts = 1\n")]
)
def test_a_configuration_that_is_none_is_one_error(project: Path, name: str, text: str) -> None:
    (project / name).write_text(text)
    with pytest.raises(AdoptError, match=rf"^{name}: cannot be read: .*; mend it$"):
        plan_changes(project, search(project))
