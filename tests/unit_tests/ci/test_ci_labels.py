"""`--labels` and `--ci-event`: the workloads that CI would run, as often and as short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_project import Project

import pytest_megatron.ci.table
import pytest_megatron.workloads.items.plugin
import pytest_megatron.workloads.recipe.load  # noqa: F401 - pydantic's types do not outlive a re-import
from pytest_megatron.base.files import JsonValue


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """Make a project with a row for each tier, one that is switched off, and one for lts."""
    project = Project(root=pytester.path)
    rows: dict[str, dict[str, JsonValue]] = {
        "slim": {"scope": ["mr-github-slim"]},
        "full": {"scope": ["mr-github"]},
        "once": {"scope": ["mr-github"], "n_repeat": [1]},
        "night": {"scope": ["nightly"]},
        "week": {"scope": ["weekly"]},
        "late": {"scope": ["mr-github"], "cadence": ["nightly"]},
        "old": {"scope": ["mr-github"], "environment": ["lts"]},
        "off": {"scope": ["mr-github-broken"]},
    }
    for name, product in rows.items():
        project.row(project.case(name), write_golden=False, **product)
    return pytester


def planned(pytester: pytest.Pytester, *options: str) -> dict[str, str]:
    """Return how often each workload would be trained, with a `l` where lightweight."""
    result = pytester.runpytest_inprocess(
        "-p", "megatron", "recipes", "--plan", "--golden", "off", *options
    )
    assert result.ret == pytest.ExitCode.OK, result.stdout.str() + result.stderr.str()
    found: dict[str, str] = {}
    name = ""
    for line in result.outlines:
        if match := re.match(r"recipes/tiny\.yaml::(\w+)\[", line):
            name = match[1]
        elif match := re.match(r"  repeats: (\d+),", line):
            found[name] = match[1]
        elif line.endswith(" --exit-interval 4"):
            found[name] += "l"
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            ("--labels", "Run tests"), {"full": "1l", "once": "1l", "late": "1l"}, id="run tests"
        ),
        pytest.param(("--labels", "Run functional tests,container::lts"), {"old": "5"}, id="lts"),
        pytest.param(("--ci-event", "merge_group"), {"full": "1", "once": "1"}, id="merge group"),
        pytest.param(("--ci-event", "schedule", "--cadence", "weekly"), {"week": "5"}, id="weekly"),
        pytest.param(
            ("--labels", "Run functional tests", "--n-repeat", "2", "--scope", "L0"),
            {"slim": "2"},
            id="typed options win",
        ),
    ],
)
def test_a_session_selects_and_repeats_what_ci_would(
    project: pytest.Pytester, options: tuple[str, ...], expected: dict[str, str]
) -> None:
    """Environment, cadence and a row's own repeats count; in Megatron-LM they do not."""
    assert planned(project, *options) == expected


def test_the_header_says_which_rule_decided_and_which_labels_nothing_reads(
    project: pytest.Pytester,
) -> None:
    result = project.runpytest_inprocess(
        "-p", "megatron", "--labels", "Run test,Run MBridge tests", "--collect-only"
    )
    result.stdout.fnmatch_lines(
        [
            "megatron: scope L0, cadence pr, 5 repeats, environment dev; rule 'otherwise': *",
            "megatron: label Run MBridge tests: suite mbridge",
            "megatron: label Run test; did you mean 'Run tests'?: nothing reads it",
        ]
    )


def test_labels_that_select_nothing_are_an_error(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("-p", "megatron", "--labels", "container::lts")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --scope L0 --cadence pr --environment lts: matches none of 8 workloads; *"]
    )


def test_a_table_of_the_project_decides(project: pytest.Pytester) -> None:
    Path(project.path, "pyproject.toml").write_text(
        "[tool.pytest-megatron.ci]\nrepeats = 'exactly'\n[[tool.pytest-megatron.ci.rules]]\n"
        "name = 'all'\nscope = ['L1']\ncadence = ['pr']\nn_repeat = 3\nlightweight = false\n"
    )
    assert planned(project, "--ci-event", "push") == {"full": "3", "once": "3"}
