"""`pytest-megatron flaky`: its three forms and its errors."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_megatron.errors import ConfigError
from pytest_megatron.flaky.command import command
from pytest_megatron.runs.history import HistoryEntry, append

ENTRY = HistoryEntry(
    time="2026-11-20T10:00:00Z",
    run="r1",
    node_id="recipes/r.yaml::a[dev-cpu]",
    kind="workload",
    verdict="flaky",
    num_attempts=2,
    causes=("dns",),
    duration_s=1.5,
    commit="c1",
    is_dirty=False,
    platform="cpu",
)


@pytest.fixture
def history(tmp_path: Path) -> Path:
    path = tmp_path / "history.jsonl"
    other = replace(ENTRY, node_id="test_x.py::test_a", time="2026-11-21T10:00:00Z")
    passed = replace(other, verdict="passed", causes=())
    append(path, [ENTRY, other, passed, replace(passed, verdict="failed")])
    return path


def run(*arguments: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def test_text_has_a_line_for_each_item_the_worst_first(history: Path) -> None:
    assert run("--history", history) == (
        0,
        (
            "flaky  runs  share  failed  last seen   item                        causes\n"
            "    1     1   100%       0  2026-11-20  recipes/r.yaml::a[dev-cpu]  dns 1\n"
            "    1     3    67%       1  2026-11-21  test_x.py::test_a           "
            "dns 1, passed and failed at one commit\n"
        ),
        "",
    )


def test_markdown_is_a_table(history: Path) -> None:
    lines = run("--history", history, "--format", "markdown", "--min-runs", "2")[1].splitlines()
    assert lines[2:] == [
        (
            "| 1 | 3 | 67% | 1 | 2026-11-21 | 2026-11-21 | `test_x.py::test_a` | "
            "dns 1, passed and failed at one commit |"
        )
    ]


def test_json_holds_everything(history: Path) -> None:
    assert json.loads(run("--history", history, "--format", "json")[1])[0] == {
        "node_id": "recipes/r.yaml::a[dev-cpu]",
        "num_runs": 1,
        "num_flaky": 1,
        "share": 1.0,
        "num_failed": 0,
        "causes": {"dns": 1},
        "is_contradictory": False,
        "num_contradictory": 0,
        "first_seen": "2026-11-20T10:00:00Z",
        "last_seen": "2026-11-20T10:00:00Z",
    }


def test_broken_lines_are_named_and_skipped(history: Path) -> None:
    with history.open("a") as file:
        file.write("{\n")
    code, output, errors = run("--history", history)
    assert (code, errors) == (0, f"{history}:5: is no entry of a history, skipped\n")
    assert output.count("\n") == 3


def test_nothing_flaky_says_so(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append(path, [replace(ENTRY, verdict="passed", causes=())])
    assert run("--history", path)[:2] == (0, "no item was flaky\n")
    old = replace(ENTRY, time="2001-01-01T00:00:00Z")
    append(path, [old])
    assert run("--history", path, "--since", "30d")[:2] == (0, "no item was flaky\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--history", "gone"], "gone: is not there; runs with workloads or distributed tests"),
        (["--since", "soon"], "--since: found 'soon', expected a number with h, d or w, as in 30d"),
    ],
)
def test_unusable_input_is_one_clear_error(
    history: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        run("--history", history, *arguments)
    assert str(raised.value).startswith(message)


TABLE = (
    '[tool.pytest-megatron.quarantine]\n"tests/t.py::old" = { reason = "#7", until = 2026-12-01 }\n'
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project with a flaky test, a regression, and one that has healed in quarantine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/t.py").touch()
    (tmp_path / "CODEOWNERS").write_text("* @all\n/tests/ @org/tests\n")
    (tmp_path / "pyproject.toml").write_text(TABLE)
    verdicts = {
        "tests/t.py::new": "pfpppfpp",
        "tests/t.py::regression": "pfppffff",
        "tests/t.py::gone[*]": "pfpppfpp",
        "tests/t.py::old": "pf" * 5 + "p" * 40,
    }
    rows = [
        replace(
            ENTRY,
            kind="test",
            node_id=node_id,
            run=f"run-{number}",
            time=f"2026-10-20T10:00:{number:02}Z",
            verdict={"p": "passed", "f": "failed"}[letter],
            commit=f"{number // 2:040x}",
            causes=(),
            platform="cuda x8",
            page="https://ci.example.com/a(b) |`" if number else "javascript:x",
            quarantined_until="2026-12-01" if number >= 10 else "",
        )
        for node_id, letters in verdicts.items()
        for number, letter in enumerate(letters)
    ]
    append(tmp_path / ".pytest_megatron/history.jsonl", rows)
    return tmp_path


def test_a_proposal_has_evidence_owner_end_and_the_change(project: Path) -> None:
    code, text, _ = run("--propose", "--until", "2027-01-15")
    assert code == 0
    new = text.partition("### Into quarantine")[2].partition("### Out of quarantine")[0]
    assert "#### `tests/t.py::new`\n\n- failed in 2 of 8 runs, 25.0% (95 %: 7.1% to 59.1%)" in new
    revision = (
        f"| `{0:012x}` | `cuda x8` | 1 | 1 | `2026-10-20T10:00:00Z` | `2026-10-20T10:00:01Z` |"
    )
    assert f"{revision} [`run-1`](https://ci.example.com/a%28b%29%20%7C%60) |\n" in new
    assert "javascript" not in text
    assert "```sh\npytest -p megatron --gpus 8 --count 200 tests/t.py::new\n```" in new
    assert "- families of failure: `unknown` 2\n" in new
    assert "- owner: `@org/tests`\n- until 2027-01-15, or until " in new
    assert "regression" not in new
    assert "#### `tests/t.py::old`\n\n- passed in its last 40 runs without a failure" in text
    waiting = text.partition("### Flaky, and not proposed")[2]
    assert "`tests/t.py::regression`, failed in 1 of 4 runs" in waiting
    assert "that may be a regression, which quarantine would hide" in waiting
    assert "`tests/t.py::gone[*]`" in waiting
    assert (project / "pyproject.toml").read_text() == TABLE


def test_the_change_is_made_and_proposed_once(project: Path) -> None:
    _, text, errors = run("--propose", "--write", "--until", "2027-01-15", "--owner", "@you")
    assert (errors[:6], errors[-15:]) == ("wrote ", "pyproject.toml\n")
    row = (
        '"tests/t.py::new" = { reason = "flaky: failed in 2 of 8 runs at revisions that passed; '
        'owner @you", until = 2027-01-15 }'
    )
    changed = f"[tool.pytest-megatron.quarantine]\n{row}\n"
    assert (project / "pyproject.toml").read_text() == changed
    assert f"\n+{row}\n" in text
    assert '\n-"tests/t.py::old" = ' in text
    again = json.loads(run("--propose", "--format", "json")[1])
    assert (again["enter"], again["diff"]) == ([], "")
    assert [one["node_id"] for one in again["stay"]] == ["tests/t.py::new"]
    assert [one["node_id"] for one in again["not_proposed"]] == [
        "tests/t.py::gone[*]",
        "tests/t.py::regression",
    ]


def test_what_is_past_its_end_and_what_never_ran_is_listed(project: Path) -> None:
    (project / "tests/u.py").touch()
    rows = {"tests/t.py::old": "2026-01-31", "tests/u.py::*": "2027-01-01"}
    lines = [f'"{name}" = {{ reason = "#7", until = {until} }}\n' for name, until in rows.items()]
    (project / "pyproject.toml").write_text(f"[tool.pytest-megatron.quarantine]\n{''.join(lines)}")
    _, text, _ = run("--propose", "--clean-runs", "41")
    assert (
        "### Past their end, their failures count\n\n- `tests/t.py::old`, until 2026-01-31" in text
    )
    assert "- `tests/t.py::old`: 40 of 41 runs without a failure, since `2026-10-20" in text
    assert "### In quarantine, and in no run of this history\n\n- `tests/u.py::*`\n" in text


def test_names_in_a_proposal_are_inert(project: Path) -> None:
    evil = "tests/t.py::e[`|<img src=x> @all ```\n# heading\n![a](http://e)]"
    rows = [
        replace(
            ENTRY, node_id=evil, run=f"{evil}{n}", platform=evil, verdict=verdict, causes=(evil,)
        )
        for n, verdict in enumerate(("passed", "failed", "passed"))
    ]
    timed = [replace(row, time=f"2026-11-20T10:00:0{n}Z") for n, row in enumerate(rows)]
    append(project / ".pytest_megatron/history.jsonl", timed)
    _, text, _ = run("--propose", "--owner", "<b> `@all`\n# x")
    outside = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", text)
    outside = re.sub(r"(?s)(`+)(?!`).*?(?<!`)\1(?!`)", "", outside)
    assert not re.search(r"[<>]|!\[|@\w", outside)
    titles = [line for line in outside.splitlines() if re.match("##? ", line)]
    assert titles == ["## Quarantine: 2 in, 1 out"]
    run("--propose", "--write")
    table = tomllib.loads((project / "pyproject.toml").read_text())
    assert evil in table["tool"]["pytest-megatron"]["quarantine"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--write"], "--write: is given without --propose"),
        (["--propose", "--until", "soon"], "--until: found 'soon', expected the last day"),
        (
            ["--propose", "--until", "2099-01-01"],
            "--until: found 2099-01-01, expected a day within",
        ),
    ],
)
def test_a_wrong_proposal_is_one_clear_error(
    project: Path, arguments: list[str], message: str
) -> None:
    assert project.exists()
    with pytest.raises(ConfigError) as raised:
        run(*arguments)
    assert str(raised.value).startswith(message)
