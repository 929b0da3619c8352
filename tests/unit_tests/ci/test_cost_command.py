"""`pytest-megatron cost`: its units, its comparison, its forms, and lines of earlier versions."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_megatron.ci.plan_command import cost
from pytest_megatron.runs.history import HistoryEntry, append, days_ago

HOURS = 3600.0
ENTRY = HistoryEntry(
    time=days_ago(1),
    run="r1",
    node_id="recipes/r.yaml::a[dev-dgx_h100]",
    kind="workload",
    verdict="flaky",
    num_attempts=2,
    causes=("dns",),
    duration_s=HOURS,
    commit="c1",
    is_dirty=False,
    platform="dgx_h100",
    num_devices=8,
    attempts_s=HOURS,
    scope="L1",
    labels=("smoke", "fp8"),
    owners=("mcore",),
)
CPU = replace(
    ENTRY, node_id="test_x.py", kind="tests", platform="cpu x2", num_devices=2, scope=None
)
OLD = replace(ENTRY, num_devices=None, attempts_s=None, scope=None, labels=(), owners=())
EVIL = "=cmd</td></table><script>alert(1)</script> \x1b[31m"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


def run(path: Path, *arguments: str) -> str:
    words = ["--history", str(path), *arguments]
    return CliRunner().invoke(cost, words, catch_exceptions=False).stdout


def rows(path: Path, *arguments: str) -> dict[str, list[str]]:
    """Return the first word of each row by its name, without the head."""
    table = run(path, "--format", "csv", *arguments).splitlines()
    return {row[0]: row[1:] for row in csv.reader(table[1:])}


def test_devices_count_for_the_time_of_all_attempts(path: Path) -> None:
    append(path, [ENTRY, replace(ENTRY, attempts_s=2 * HOURS)])
    assert re.split(r"\s{2,}", run(path).splitlines()[1]) == [
        *("24.0 GPU-h", "-", "12.0 GPU-h", "-", "2", "3.0 h", ENTRY.node_id)
    ]


def test_gpus_and_processes_of_the_cpu_are_never_added_up(path: Path) -> None:
    append(path, [ENTRY, replace(CPU, scope="L1")])
    found = json.loads(run(path, "--by", "scope", "--format", "json"))["rows"]
    assert [(row["scope"], row["device"], row["device_s"]) for row in found] == [
        ("L1", "GPU", 8 * HOURS),
        ("L1", "rank", 2 * HOURS),
    ]


def test_a_line_without_devices_is_unknown_and_not_nothing(path: Path) -> None:
    append(path, [ENTRY, OLD, replace(OLD, node_id="old")])
    table = run(path)
    assert [line.split()[0] for line in table.splitlines()[1:3]] == [">=", "unknown"]
    assert "2 runs of earlier versions: the number of GPUs is unknown" in table
    assert rows(path, "--by", "owner")["unknown owner"][4] == "2"


def test_old_lines_as_they_were_written_are_read(path: Path) -> None:
    new = (
        "num_devices",
        "attempts_s",
        "num_repeats",
        "is_lightweight",
        "scope",
        "labels",
        "owners",
    )
    line = {key: v for key, v in json.loads(ENTRY.as_line()).items() if key not in new}
    path.write_text(json.dumps({**line, "time": days_ago(1)}) + "\n")
    assert rows(path)[ENTRY.node_id][3:5] == ["1", "1"]


def test_a_change_is_that_of_one_run_and_the_order_can_follow_it(path: Path) -> None:
    dear = replace(ENTRY, node_id="dear", attempts_s=9 * HOURS)
    before = days_ago(10)
    append(path, [dear, replace(dear, time=before), ENTRY, replace(ENTRY, attempts_s=2 * HOURS)])
    append(path, [replace(ENTRY, time=before), replace(ENTRY, node_id="gone", time=days_ago(20))])
    assert {name: row[-1] for name, row in rows(path).items()} == {
        "dear": "0.0",
        ENTRY.node_id: "0.5",
    }
    assert [next(iter(rows(path, "--sort", by))) for by in ("cost", "change")] == [
        "dear",
        ENTRY.node_id,
    ]


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("label", {"smoke", "fp8"}),
        ("scope", {"L1", "no scope"}),
        ("platform", {"dgx_h100", "cpu x2"}),
        ("owner", {"mcore"}),
        ("item", {ENTRY.node_id, "test_x.py (other tests)"}),
    ],
)
def test_costs_are_shown_by_any_key(path: Path, by: str, names: set[str]) -> None:
    append(path, [ENTRY, CPU])
    assert set(rows(path, "--by", by)) == names


def test_hostile_names_stay_text_in_page_table_and_spreadsheet(path: Path) -> None:
    evil = replace(ENTRY, node_id=EVIL, scope=EVIL, labels=(EVIL,), owners=(EVIL,), platform=EVIL)
    append(path, [evil, replace(evil, time=days_ago(10), attempts_s=1.0)])
    page = run(path, "--format", "html")
    assert "<script" not in page
    assert "\x1b" not in page + run(path)
    assert page.count("&lt;script&gt;") == 6  # by each key, and among what got dearer
    assert next(iter(rows(path))).startswith("'=cmd")


def test_nothing_in_the_period_is_said(path: Path) -> None:
    append(path, [replace(ENTRY, time=days_ago(10))])
    assert run(path, "--since", "2d") == "no runs in the last 2d\n"
