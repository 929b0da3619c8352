"""`pytest-megatron flaky`: its two forms and its errors."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_megatron.base.project import today
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
            "\nlines of pyproject.toml that put them into quarantine:\n\n"
            "[tool.pytest-megatron.quarantine]\n"
            '"test_x.py::test_a" = { reason = "flaky: 1 failure at commits at which it also '
            f'passed", until = {today() + dt.timedelta(days=30)} }}\n'
        ),
        "",
    )


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
