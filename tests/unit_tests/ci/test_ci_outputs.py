"""What a summary of CI writes, what it leaves alone, and input that it cannot use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ci_artifacts import (
    FAILURE,
    JUNIT,
    ROW,
    TEST,
    commands,
    distributed,
    head,
    summary,
    workload,
    write_job,
    write_json,
    write_plan,
)

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import CiError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("all").mkdir()


def test_files_for_machines_and_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_job(Path("all"), "unit", {TEST: distributed("failed", problem="[rank 0] x")})
    (root / "junit.xml").write_text(JUNIT.format(name="test_one", child=FAILURE))
    write_plan(Path("plan.json"), unit=None, line=ROW)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "step.md")
    result = summary(
        "all", "--expect", "plan.json", "--output", "out", "--step-summary", "--format", "json"
    )
    told = json.loads(result.output)
    assert (told["verdict"], told["passed"], told["counts"]["failed"]) == ("failed", False, 1)
    assert json.loads(Path("out/summary.json").read_text()) == told
    assert Path("step.md").read_text() == Path("out/summary.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        pytest.param(["nowhere"], "nowhere: no such file or directory", id="no-path"),
        pytest.param(["all"], "all: holds no run, expected run.json,", id="no-run"),
        pytest.param(["a.txt"], "a.txt: is no directory, expected", id="no-directory"),
        pytest.param([], "RUN: nothing was given", id="nothing"),
        pytest.param(["--expect", "a.txt"], "a.txt: cannot be read as a plan: Exp", id="no-plan"),
        pytest.param(
            ["--expect", "b.json"], "b.json: jobs: is missing; expected what", id="no-jobs"
        ),
        pytest.param(
            ["--expect", "p.json", "--results", "[]"],
            "--results: found [], expected a mapping; give",
            id="results",
        ),
    ],
)
def test_unusable_input_is_one_error(arguments: list[str], problem: str) -> None:
    Path("a.txt").write_text("words")
    Path("b.json").write_text("{}")
    write_plan(Path("p.json"), unit=None)
    result = summary(*arguments)
    assert isinstance(result.exception, CiError)
    assert str(result.exception).startswith(problem)


def test_artifacts_of_the_plan_and_of_a_summary_are_no_jobs() -> None:
    write_job(Path("all"), "unit", {TEST: distributed()})
    write_plan(Path("all/plan-7/plan.json"), unit=None)
    assert summary("all", "--output", "all/summary-7-1").exit_code == 0
    assert head("all") == (0, ["passed: 1 item in 1 job", "passed  unit  1 passed, 0.5 s"])


def test_pages_of_the_runs_are_written_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_RUN_ID", "7")
    monkeypatch.setenv("GITHUB_REPOSITORY", "me/it")
    write_job(Path("all"), "unit", {TEST: distributed("failed", problem="[rank 0] x")})
    (write_job(Path("all"), "plain") / "junit.xml").write_text(JUNIT.format(name="a", child=""))
    output = summary("all", "--output", "out").output
    fetch = "gh run download 7 --repo me/it --pattern 'logs-*' --dir all"
    assert f"to have the artifacts at home: {fetch}\n" in output
    assert TEST in Path("out/pages/index.html").read_text()


def test_without_a_run_that_can_be_read_everything_but_its_pages_is_written() -> None:
    (write_job(Path("all"), "unit", {}) / "run/run.json").unlink()
    result = summary("all", "--output", "out")
    assert result.exit_code == 1
    assert "no pages of the runs: RUN: there is none, expected a run directory" in result.output
    assert "left no run.json" in Path("out/comment.md").read_text()


def test_a_plan_in_the_working_directory_is_not_of_a_job_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = write_job(Path("all"), "unit", {})
    (root / "run/run.json").unlink()
    (root / "pytest.log").write_text("ValueError: x\n")
    write_plan(Path("here/plan.json"), unit=TEST)
    monkeypatch.chdir("here")
    result = summary("../all", "--expect", "plan.json")
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)


def test_xml_with_entities_is_refused() -> None:
    root = write_job(Path("all"), "unit")
    (root / "junit.xml").write_text('<!DOCTYPE x [<!ENTITY a "b">]><testsuites>&a;</testsuites>')
    assert "declares entities, expected plain JUnit XML; refused" in summary("all").output


def test_failures_are_annotated_at_the_row_or_at_the_line_of_the_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempt: JsonValue = {"attempt": 1, "duration_s": 30.0, "cause": "lm loss is off"}
    row = workload(
        "failed", problem="lm loss is off", platform="dgx_h100", num_devices=8, attempts=[attempt]
    )
    root = write_job(Path("all"), "line", {ROW: row})
    plan: JsonValue = {
        "schema": 1,
        "node_id": ROW,
        "recipe": "recipes/tiny.yaml:12",
        "world_size": 8,
    }
    write_json(root / "run/tiny-line/repeat_1/attempt_1/plan.json", plan)
    test = write_job(
        Path("all"),
        "unit",
        {
            TEST: distributed("failed", problem="[rank 0] x\ny \x1b[0m<b>", device="cuda"),
            f"{TEST}2": distributed(),
            f"{TEST}[\n::error::x]": distributed("failed", problem="z"),
        },
    )
    (test / "junit.xml").write_text(JUNIT.format(name="test_one", child=FAILURE))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = summary("all")
    assert "cost: 0.067 GPU hours (240 GPU-seconds)" in result.output
    found = {one.message: one.properties for one in commands(result.output)}
    assert {text: (place["file"], place["line"]) for text, place in found.items()} == {
        "lm loss is off": ("recipes/tiny.yaml", "12"),
        "[rank 0] x\ny <b>": ("tests/unit/test_a.py", "3"),
        "z": ("tests/unit/test_a.py", "1"),
    }


def test_github_gets_as_many_annotations_as_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = distributed("failed", problem="::add-mask::x\n##[error]y")
    write_job(Path("all"), "killed", {f"{TEST}{n}": bad for n in range(12)}, ended=None)
    write_job(Path("all"), "whole", {f"{TEST}_x": bad})
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    lines = summary("all").output.splitlines()
    executed = [line for line in lines if line.lstrip().startswith("::") or "##[" in line]
    assert executed[0].startswith("::error title=killed::never finished: it was killed; ")
    assert executed[1] == (
        f"::error file=tests/unit/test_a.py,line=1,title={TEST.replace(':', '%3A')}0::"
        "::add-mask::x%0A##[error]y"
    )
    assert executed[10] == "::notice::4 more failures: the summary of this run has all"
    assert len(executed) == 11
