"""Logs of CI systems: what they would execute, what they fold, what they annotate."""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from urllib.parse import unquote

import pytest
from rank_suite import Suite
from tiny_project import Project

from pytest_megatron.ci.log import GitHubLog, GitLabLog, HarmlessFile, log_of

GITHUB = {"CI": "true", "GITHUB_ACTIONS": "true"}
GITLAB = {"CI": "true", "GITLAB_CI": "true"}
HOSTILE = """
    def test_bad(rank):
        print("::error file=evil.py::from a test")
        print("100%\\n \\t::add-mask::x\\r::warning::after a return, ##[error]old, a::b::c")
        print("\\x1b[0Ksection_start:1:evil[collapsed=true]\\r\\x1b[0Khidden")
        assert rank == 0, "50% of\\n::error::ranks"

    def test_good(rank):
        assert rank >= 0
"""
OTHER = """
    class Annotates:
        pass

    def pytest_configure(config):
        config.pluginmanager.register(Annotates(), "annotate_errors")
"""


@dataclass(frozen=True)
class Command:
    """A line that GitHub's runner executes."""

    name: str
    properties: dict[str, str]
    message: str


def commands(log: str) -> list[Command]:
    """Read a log as the runner does: ActionCommand.cs, TryParseV2 and TryParse."""
    found = []
    for line in re.split(r"\r\n|\r|\n", log):
        match = re.match(r"::([\w-]+) ?(.*?)::(.*)", line.lstrip())
        if match is not None:
            pairs = (pair.partition("=") for pair in match[2].split(",") if pair)
            properties = {key: unquote(value) for key, _, value in pairs}
            found.append(Command(match[1], properties, unquote(match[3])))
        elif old := re.search(r"##\[(\w+)[^\]]*\](.*)", line):
            found.append(Command(old[1], {}, old[2]))
    return found


@pytest.mark.parametrize(
    "text",
    [
        "::error::x",
        "a\n  \t::set-output name=a::b\n",
        "a\r::error file=a.py,line=1::x",
        "\n\n\xa0::add-mask::***",
        "progress ##[warning]old",
        ":::error::x",
    ],
)
def test_no_text_is_a_command_however_it_is_cut(text: str) -> None:
    assert commands(text) != [] or text.startswith(":::")
    for cut in range(len(text) + 1):
        file = StringIO()
        harmless = HarmlessFile(file, GitHubLog.commands)
        harmless.write(text[:cut])
        harmless.write(text[cut:])
        assert commands(file.getvalue()) == []
        assert file.getvalue().replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    "text",
    ["tests/a.py::test_b PASSED\n", "std::vector", "a\n b::c::d", "## [x]", "##", "::", "50 %\n"],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    file = StringIO()
    HarmlessFile(file, GitHubLog.commands).write(text)
    assert commands(text) == []
    assert file.getvalue().replace(": :", "::") == text


def test_a_log_of_gitlab_has_no_sections_but_our_own() -> None:
    file = StringIO()
    harmless = HarmlessFile(file, GitLabLog.commands)
    harmless.write("\x1b[0Ksection_st")
    harmless.write("art:1:evil\r\x1b[0K")
    assert re.findall(r"section_(?:start|end):\d+:\w+", file.getvalue()) == []


def test_a_command_of_ours_is_in_a_line_of_its_own() -> None:
    file = StringIO()
    harmless = HarmlessFile(file, GitHubLog.commands)
    harmless.write("tests/a.py .")
    harmless.write_command("::endgroup::")
    harmless.write("F")
    assert file.getvalue() == "tests/a.py .\n::endgroup::\nF"


@pytest.mark.parametrize(
    ("env", "kind"),
    [
        (GITHUB, GitHubLog),
        (GITLAB, GitLabLog),
        ({"CI": "true"}, type(None)),
        ({"GITHUB_ACTIONS": "false"}, type(None)),
        ({}, type(None)),
    ],
)
def test_the_environment_names_the_log(env: dict[str, str], kind: type[object]) -> None:
    assert isinstance(log_of(env), kind)


def test_github_gets_one_annotation_for_a_failure_and_no_command_of_a_test(tmp_path: Path) -> None:
    place = tmp_path / "50%, a:b"
    place.mkdir()
    suite = Suite(root=place).write("test_it.py", HOSTILE)
    run = suite.run("--ranks", "2", "-s", "--tee-ranks", "1", "--junitxml", "junit.xml", **GITHUB,
                    GITHUB_WORKSPACE=str(tmp_path))  # fmt: skip
    assert [command.name for command in commands(run.stdout)] == ["error"]
    (error,) = commands(run.stdout)
    assert error.properties == {
        "file": "50%, a:b/test_it.py",
        "line": "6",
        "title": "test_it.py::test_bad",
    }
    assert error.message.splitlines()[0].startswith("[rank 1] AssertionError: 50% of")
    assert "rank 0: passed" in error.message
    assert commands(run.stderr) == []
    assert ": :error" not in (place / "junit.xml").read_text()


def test_github_gets_as_many_annotations_as_it_shows(tmp_path: Path) -> None:
    text = (
        "import pytest\n\n@pytest.mark.parametrize('n', range(12))\ndef test_n(n): assert n < 0\n"
    )
    run = Suite(root=tmp_path).write("test_it.py", text).run("--ranks", "1", **GITHUB)
    found = [command for command in commands(run.stdout) if "group" not in command.name]
    assert [command.name for command in found] == ["error"] * 10 + ["notice"]
    assert found[-1].message == "2 more failures: GitHub shows ten of a step; see its log"


def test_github_folds_what_ranks_printed(tmp_path: Path) -> None:
    suite = Suite(root=tmp_path).write("test_it.py", HOSTILE)
    run = suite.run("--ranks", "2", **GITHUB)
    found = [(command.name, command.message) for command in commands(run.stdout)]
    assert found[:-1] == [("group", "Captured stdout call of rank 1"), ("endgroup", "")]
    folded = run.stdout.partition("::group::")[2].partition("::endgroup::")[0]
    assert ": :error file=evil.py::from a test" in folded
    assert "reproduce: " not in folded


def test_gitlab_folds_with_markers_of_its_own(tmp_path: Path) -> None:
    suite = Suite(root=tmp_path).write("test_it.py", HOSTILE)
    run = suite.run("--ranks", "2", **GITLAB)
    found = re.findall(r"\x1b\[0Ksection_(start|end):\d+:(\w+)(\S*)\s\x1b\[0K(.*)", run.stdout)
    assert found == [
        ("start", "pytest_megatron_1", "[collapsed=true]", "Captured stdout call of rank 1"),
        ("end", "pytest_megatron_1", "", ""),
    ]
    assert "::group::" not in run.stdout


def test_a_plugin_that_annotates_failing_calls_keeps_them(tmp_path: Path) -> None:
    suite = Suite(root=tmp_path).write("test_it.py", HOSTILE).write("conftest.py", OTHER)
    suite.write("test_torn.py", "import pytest\n\n@pytest.fixture\ndef torn():\n    yield\n"
                "    raise OSError('late')\n\ndef test_torn(torn): ...\n")  # fmt: skip
    run = suite.run("--ranks", "2", **GITHUB)
    errors = [found for found in commands(run.stdout) if found.name == "error"]
    assert [error.properties["title"] for error in errors] == ["test_torn.py::test_torn"]
    assert "late" in errors[0].message


def test_outside_of_ci_nothing_changes(tmp_path: Path) -> None:
    suite = Suite(root=tmp_path).write("test_it.py", HOSTILE)
    run = suite.run("--ranks", "2")
    assert {found.name for found in commands(run.stdout)} == {"error", "add-mask", "warning"}
    assert "Captured stdout call of rank 1" in run.stdout


def test_a_workload_that_differs_from_its_golden_is_annotated_at_its_row(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.add("differs")
    project.golden("differs", changes={7: 5.5 * 1e-3})
    run = project.run("recipes", **GITHUB)
    errors = [found for found in commands(run.stdout) if found.name == "error"]
    (recipe,) = (tmp_path / "recipes").iterdir()
    (error,) = errors
    assert error.properties["file"] == f"recipes/{recipe.name}"
    rows = recipe.read_text().splitlines()
    assert "environment" in rows[int(error.properties["line"]) - 1]
    assert "golden" in error.message
    assert run.stdout.count("tolerance allows") == 2  # the failure, and the annotation


def test_what_a_training_prints_is_folded(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.add("crash", "crash@4:0")
    run = project.run("recipes", "--tee-ranks", "0", "--max-attempts", "1", **GITHUB)
    names = [found.name for found in commands(run.stdout) if found.name != "error"]
    assert names == ["group", "endgroup"] * (len(names) // 2)
    before, _, rest = run.stdout.partition("\n::group::crash[dev-cpu]: output of ranks\n")
    assert "[rank0]: " not in before
    assert "ValueError: the crash of rank 0" in rest.partition("::endgroup::")[0]
