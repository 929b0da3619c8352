"""`plan --budget`: prices by the history, what is dropped and why, and where that shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from ci_artifacts import summary, workload, write_job, write_plan
from click.testing import CliRunner

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.findings import Finding
from pytest_megatron.base.project import load_config
from pytest_megatron.ci.budget import check_budgets, item_histories, keep_within, parse_budget
from pytest_megatron.ci.jobs import CiJob, PlanBudget
from pytest_megatron.ci.plan_command import command
from pytest_megatron.ci.table import load_table
from pytest_megatron.errors import ConfigError
from pytest_megatron.runs.history import HistoryEntry, append
from pytest_megatron.workloads.commands.recipes import lint
from pytest_megatron.workloads.recipe.load import load_recipe
from pytest_megatron.workloads.recipe.model import project_words

HOUR_S = 3600.0
ENTRY = HistoryEntry(
    time="2026-01-01T00:00:00Z",
    run="r",
    node_id="r.yaml::a",
    kind="workload",
    verdict="passed",
    num_attempts=1,
    causes=(),
    duration_s=HOUR_S,
    commit=None,
    is_dirty=False,
    platform="dgx_h100",
    num_devices=1,
    attempts_s=HOUR_S,
)


def runs(node_id: str, *verdicts: str, gpus: int = 1) -> list[HistoryEntry]:
    """Return a run of one hour at each commit, c1 and so on."""
    return [
        replace(
            ENTRY,
            node_id=node_id,
            run=f"{node_id}-{number}",
            time=f"2026-01-{number:02}T00:00:00Z",
            commit=f"c{number}",
            verdict=verdict,
            num_devices=gpus,
        )
        for number, verdict in enumerate(verdicts, 1)
    ]


def keep(
    budget: str,
    entries: list[HistoryEntry],
    *names: str,
    n_repeat: int = 1,
    files: Mapping[str, tuple[str, ...]] | None = None,
) -> PlanBudget:
    jobs = [CiJob(id=n, name=n, kind="workload", gpus=1, n_repeat=n_repeat) for n in names]
    histories = item_histories(entries, is_lightweight=False)
    kept, found = keep_within(parse_budget(budget, "--budget"), jobs, files or {}, histories)
    assert {job.name for job in kept} == set(names) - {one.name for one in found.dropped}
    return found


def reasons(found: PlanBudget) -> dict[str, str]:
    return {one.name: one.reason for one in found.dropped}


def test_what_caught_nothing_goes_before_what_did() -> None:
    entries = [*runs("idle", *["passed"] * 9), *runs("finds", *["passed"] * 8, "failed")]
    found = keep("1h", entries, "idle", "finds")
    assert reasons(found) == {"idle": "caught nothing in 9 runs"}
    assert (found.expected_s, found.limit_s) == (HOUR_S, HOUR_S)


def test_of_two_that_fail_together_the_dearer_one_goes() -> None:
    verdicts = ("passed", "failed", "passed", "failed")
    entries = [
        *runs("big", *verdicts, gpus=4),
        *runs("small", *verdicts),
        *runs("other", *verdicts),
    ]
    other = [replace(e, commit=f"{e.commit}-other") for e in entries if e.node_id == "other"]
    found = keep("3h", [*entries[:8], *other], "big", "small", "other")
    assert reasons(found) == {"big": "caught 2 failures in 4 runs, each with small"}


def test_one_of_two_that_fail_together_stays_even_where_others_are_cheaper() -> None:
    verdicts = ("passed", "failed", "passed", "failed")
    entries = [*runs("a", *verdicts), *runs("b", *verdicts), *runs("idle", *["passed"] * 4)]
    assert set(reasons(keep("1h", entries, "a", "b", "idle"))) == {"idle", "a"}


SECOND = runs("a", "passed", "failed")[1]


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(replace(SECOND, verdict="broken"), id="infrastructure"),
        pytest.param(replace(SECOND, verdict="flaky"), id="passed when run again"),
        pytest.param(replace(SECOND, is_quarantined=True), id="quarantine"),
        pytest.param(replace(SECOND, commit="c1"), id="passed at the same commit"),
    ],
)
def test_only_genuine_failures_count(second: HistoryEntry) -> None:
    first, _, third = runs("a", "passed", "failed", "passed")
    entries = [first, second, third]
    history = item_histories(entries, is_lightweight=False)["a", "GPU"]
    assert (history.caught, history.failed) == (frozenset(), frozenset())


def test_a_fault_that_stays_for_several_commits_is_caught_once() -> None:
    entries = runs("a", "passed", "failed", "broken", "failed", "passed", "failed")
    history = item_histories(entries, is_lightweight=False)["a", "GPU"]
    assert history.caught == {"c2", "c6"}
    assert history.failed == {"c2", "c4", "c6"}


def test_a_job_without_history_is_kept_and_named() -> None:
    old = replace(runs("old", "passed")[0], num_devices=None, attempts_s=None)
    found = keep("1h", [*runs("a", "passed"), old], "a", "new", "old")
    assert (found.unknown, found.dropped) == (("new", "old"), ())


def test_the_price_is_that_of_the_planned_repeats() -> None:
    entries = [replace(e, num_repeats=2) for e in runs("a", "passed", "passed")]
    assert keep("9h", entries, "a", n_repeat=5).expected_s == 2.5 * HOUR_S


def test_a_failed_run_that_ended_early_makes_no_price() -> None:
    early = replace(runs("a", "failed")[0], attempts_s=1.0, run="early")
    assert keep("9h", [*runs("a", "passed"), early], "a").expected_s == HOUR_S


def test_shortened_trainings_have_a_price_of_their_own() -> None:
    short = replace(runs("a", "passed")[0], is_lightweight=True, attempts_s=60.0)
    assert keep("9h", [short], "a").unknown == ("a",)
    history = item_histories([short, *runs("a", "passed")], is_lightweight=True)
    assert history["a", "GPU"].price_s == 60.0


def test_files_of_tests_have_the_price_of_all_their_tests() -> None:
    rest = replace(ENTRY, kind="tests", node_id="test_a.py", platform="cuda x2", num_devices=2)
    own = replace(rest, kind="test", node_id="test_a.py::test_x", verdict="failed")
    found = keep("1h", [rest, own], "unit", files={"unit": ("test_a.py",)})
    (dropped,) = found.dropped
    assert (dropped.price_s, dropped.items, dropped.num_caught) == (4 * HOUR_S, ("test_a.py",), 1)
    assert keep("1h", [rest], "unit", files={"unit": ("test_a.py", "test_b.py")}).unknown


def test_a_dropped_job_that_fits_into_the_rest_comes_back() -> None:
    entries = [*runs("cheap", "passed"), *runs("dear", *["passed"] * 3, gpus=9)]
    entries += runs("finds", "passed", "failed", gpus=2)
    assert set(reasons(keep("3h", entries, "cheap", "dear", "finds"))) == {"dear"}


@pytest.mark.parametrize(
    ("text", "device", "seconds"),
    [("2h", "GPU", 7200.0), ("40 GPU-h", "GPU", 144_000.0), ("90 rank-min", "rank", 5400.0)],
)
def test_a_budget_has_a_unit(text: str, device: str, seconds: float) -> None:
    found = parse_budget(text, "--budget")
    assert (found.device, found.seconds) == (device, seconds)


@pytest.mark.parametrize("text", ["2", "h", "-1h", "2 CPU-h", "1d", "nanh", "2h "])
def test_another_text_is_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--budget: found .*, expected GPU time such as 2h"):
        parse_budget(text, "--budget")


RECIPE = """\
type: basic
format_version: 1
spec: {name: "{test_case}", model: gpt, gpus: 1, platforms: dgx_h100, script: "run"}
products:
  - test_case: [finds, idle, new]
    products: [{environment: [dev], scope: [L0]}]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_RUN_ID", raising=False)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/r.yaml").write_text(RECIPE)
    entries = [*runs("finds", "passed", "failed"), *runs("idle", *["passed"] * 3)]
    renamed = (replace(e, node_id=f"recipes/r.yaml::{e.node_id}[dev-dgx_h100]") for e in entries)
    append(tmp_path / ".pytest_megatron/history.jsonl", renamed)
    return tmp_path


def planned(*arguments: str) -> dict[str, JsonValue]:
    found: JsonValue = json.loads(
        CliRunner().invoke(command, [*arguments, "--format", "json"]).output
    )
    assert isinstance(found, dict)
    return found


@pytest.mark.usefixtures("project")
def test_a_plan_names_what_it_dropped_in_text_and_json() -> None:
    text = CliRunner().invoke(command, ["--budget", "5h"]).output
    assert text.endswith(
        "\nbudget 5h: 5.0 GPU-h expected, 1 job not run\n"
        "  without history, so run and not counted: recipes/r.yaml::new[dev-dgx_h100]\n"
        "  not run: recipes/r.yaml::idle[dev-dgx_h100], 5.0 GPU-h: caught nothing in 3 runs\n"
    )
    found = planned("--budget", "5h", "--explain")
    assert [row["id"] for row in rows(found["workloads"])] == [
        "recipes/r.yaml::finds[dev-dgx_h100]",
        "recipes/r.yaml::new[dev-dgx_h100]",
    ]
    budget = found["budget"]
    assert isinstance(budget, dict)
    (dropped,) = rows(budget["dropped"])
    assert (dropped["price_s"], dropped["num_runs"]) == (5 * HOUR_S, 3)
    reason = "budget 5h: caught nothing in 3 runs"
    assert rows(found["left_out"])[-1] == {"id": dropped["name"], "reasons": [reason]}
    assert planned()["budget"] is None


def rows(value: JsonValue) -> list[dict[str, JsonValue]]:
    assert isinstance(value, list)
    return [row for row in value if isinstance(row, dict)]


def test_without_a_history_everything_runs_and_that_is_said(project: Path) -> None:
    (project / ".pytest_megatron/history.jsonl").unlink()
    text = CliRunner().invoke(command, ["--budget", "1h"]).output
    assert "budget 1h: 0.0 GPU-s expected, 0 jobs not run\n  without history, so run" in text
    typed = CliRunner().invoke(command, ["--budget", "1h", "--history", "no.jsonl"])
    assert str(typed.exception).startswith("no.jsonl: is not there")


def test_a_budget_that_has_room_for_nothing_is_an_error(project: Path) -> None:
    (project / "recipes/r.yaml").write_text(RECIPE.replace(", new", ""))
    result = CliRunner().invoke(command, ["--budget", "1min"])
    assert result.exit_code == 5
    assert (
        "--budget 1min: has room for none of 2 jobs; the cheapest costs 5.0 GPU-h" in result.stderr
    )


def test_the_summary_shows_what_the_budget_left_out(tmp_path: Path) -> None:
    ran, gone = "r.yaml::a[dev-cpu]", "r.yaml::b[dev-cpu]"
    file = write_plan(tmp_path / "plan.json", job_a=ran)
    entries = [*runs(ran, "passed", "failed"), *runs(gone, "passed")]
    found = keep("1h", entries, ran, gone)
    dropped = [{"name": gone, "items": [gone], "price_s": 3600.0, "num_runs": 1}]
    dropped = [{**one, "num_caught": 0, "reason": reasons(found)[gone]} for one in dropped]
    budget = {"limit": "1h", "device": "GPU", "limit_s": 3600.0, "expected_s": 3600.0}
    text = json.loads(file.read_text())
    file.write_text(json.dumps({**text, "budget": {**budget, "dropped": dropped}}))
    write_job(tmp_path / "jobs/a", "job_a", {ran: workload()})
    result = summary(str(tmp_path / "jobs"), "--expect", str(file))
    assert f"ran nowhere\n    1 test: not run: budget 1h: {gone}\n" in result.output
    assert result.exit_code == 0
    as_json = summary(str(tmp_path / "jobs"), "--expect", str(file), "--format", "json").output
    assert json.loads(as_json)["nowhere"] == {"not run: budget 1h": {gone: 1}}


# GPUs, minutes and number of the nightly jobs of NeMo-RL at the commit before 85e02cca3, as its
# tools/launch counts them: GPUs times the time limit. Its test asserted at most 3928 GPU-h, where
# each job is rounded down to whole hours: 7 hours of the suite are lost so.
# Source: NVIDIA-NeMo/RL tests/test_suites/nightly.txt, tests/unit/test_recipes_and_test_suites.py
NIGHTLY = """
    8x120:13 8x180:13 8x60:11 8x240:9 16x240:6 8x30:7 8x150:5 32x60:4 16x60:4 8x45:4 32x240:3
    16x120:3 16x45:3 16x30:3 32x120:2 32x30:2 64x60:2 80x60:2 128x120:2 8x40:2 8x20:3 16x150:1
    256x60:1 24x60:1 128x90:1 32x65:1 8x72:1 8x50:1 16x85:1 16x180:1 48x90:1 16x35:1 8x48:1
    16x100:1 8x90:1 32x35:1 8x15:1 24x18:1
"""
# What three later commits added, and the figure to which each of them raised the limit by hand.
LOST = 8
ADDED = (("24x240:1", 4024), ("8x60:1 16x60:1", 4048), ("16x240:1 8x240:1", 4139))


def nightly(folder: Path, text: str, limit: int) -> list[Finding]:
    """Return the findings of a suite whose jobs took what their limits are."""
    products: list[str] = []
    entries: list[HistoryEntry] = []
    for job in text.split():
        gpus, minutes, number = map(int, job.replace("x", ":").split(":"))
        for _ in range(number):
            name = f"job-{len(products)}"
            where = f"{{environment: [dev], scope: [nightly], gpus: [{gpus}]}}"
            products.append(f"  - {{test_case: [{name}], products: [{where}]}}\n")
            entry = runs(f"{folder}/r.yaml::{name}[dev-dgx_h100]", "passed", gpus=gpus)[0]
            entries.append(replace(entry, attempts_s=minutes * 60.0))
    (folder / "r.yaml").write_text(RECIPE.partition("  - ")[0] + "".join(products))
    budget = f'[tool.pytest-megatron.ci]\nbudget = {{ nightly = "{limit} GPU-h" }}\n'
    (folder / "pyproject.toml").write_text(f"{budget}{RULE}")
    config = load_config(folder)
    table = load_table(config, project_words(folder))
    rows = load_recipe(folder / "r.yaml")
    assert config.file is not None
    return list(check_budgets(rows, table, entries, config.file))


RULE = """
[[tool.pytest-megatron.ci.rules]]
name = "every night"
scope = ["nightly"]
n_repeat = 1
lightweight = false
"""


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_suite_that_outgrows_its_budget_fails_where_a_hand_raised_it(
    tmp_path: Path, number: int
) -> None:
    limits = [limit + LOST for limit in (3928, *(limit for _, limit in ADDED))]
    suite = " ".join((NIGHTLY, *(added for added, _ in ADDED[: number - 1])))
    assert nightly(tmp_path, suite, limits[number - 1]) == []
    grown = f"{suite} {ADDED[number - 1][0]}"
    (tmp_path / "grown").mkdir()
    (finding,) = nightly(tmp_path / "grown", grown, limits[number - 1])
    assert finding.is_error
    assert f"its budget is {limits[number - 1]} GPU-h; the dearest: " in finding.message
    assert "256.0 GPU-h, " in finding.message.partition("the dearest: ")[2]
    assert nightly(tmp_path / "grown", grown, limits[number]) == []


def capped(project: Path, budget: str) -> tuple[int, str, str]:
    """Return the exit code of lint, its line about the budget, and the last one."""
    table = f"[tool.pytest-megatron.ci]\nbudget = {{ {budget} }}\n"
    (project / "pyproject.toml").write_text(table)
    result = CliRunner().invoke(lint, [])
    lines = result.output.splitlines()
    return result.exit_code, next(line for line in lines if "[budget]" in line), lines[-1]


def test_lint_fails_for_a_scope_above_its_budget_and_names_figures(project: Path) -> None:
    line = (
        "pyproject.toml: error: scope 'L0' is expected to cost 10.0 GPU-h by rule "
        "'otherwise', its budget is 9 GPU-h; the dearest: recipes/r.yaml::finds[dev-dgx_h100] "
        "5.0 GPU-h, recipes/r.yaml::idle[dev-dgx_h100] 5.0 GPU-h; 1 row without history, not "
        "counted: recipes/r.yaml::new[dev-dgx_h100] [budget]"
    )
    assert capped(project, 'L0 = "9 GPU-h"') == (1, line, "1 error, 1 warning")


@pytest.mark.parametrize(
    ("budget", "note"),
    [
        ("11 GPU-h", "10.0 GPU-h of its budget of 11 GPU-h expected; 1 row without history, not"),
        ("1 rank-h", "0.0 rank-s of its budget of 1 rank-h expected; it has no such rows"),
    ],
)
def test_lint_notes_what_it_does_not_know_and_fails_nothing(
    project: Path, budget: str, note: str
) -> None:
    code, line, last = capped(project, f'L0 = "{budget}"')
    assert (code, last) == (0, "0 errors, 1 warning")
    assert line.startswith(f"pyproject.toml: note: scope 'L0': {note}")


def test_without_a_history_no_budget_fails(project: Path) -> None:
    (project / ".pytest_megatron/history.jsonl").unlink()
    code, line, _ = capped(project, 'L0 = "1 GPU-h"')
    assert code == 0
    assert "note: scope 'L0': 0.0 GPU-s of its budget of 1 GPU-h expected; 3 rows without" in line
