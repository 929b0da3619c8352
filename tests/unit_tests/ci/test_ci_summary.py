"""One verdict of many jobs: what is missing, torn, twice or unfinished is a failure with a name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ci_artifacts import (
    COMMIT,
    FAILURE,
    JUNIT,
    ROW,
    TEST,
    distributed,
    head,
    summary,
    workload,
    write_job,
    write_json,
    write_plan,
    write_run,
)

from pytest_megatron.base.files import JsonValue


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("all").mkdir()


def test_all_passed() -> None:
    write_job(Path("all"), "unit", {TEST: distributed()})
    write_job(Path("all"), "line", {ROW: workload()})
    write_plan(Path("plan.json"), unit=None, line=ROW)
    assert head("all", "--expect", "plan.json") == (
        0,
        [
            "passed: 2 items in 2 jobs",
            "planned: event pull_request, scope L0",
            "passed  line  1 passed, 4.0 s",
            "passed  unit  1 passed, 0.5 s",
        ],
    )


def test_a_job_without_an_artifact_is_a_failure() -> None:
    """The verdict does not fail open."""
    write_job(Path("all"), "unit", {TEST: distributed()})
    write_plan(Path("plan.json"), unit=None, line=ROW)
    code, lines = head("all", "--expect", "plan.json")
    assert (code, lines[0], lines[2:4]) == (
        1,
        "broken: 1 of 2 jobs has a problem",
        [
            "broken  line  no items, 0.0 s",
            "is in the plan and left nothing: it was cancelled, or its artifact was not uploaded",
        ],
    )


@pytest.mark.parametrize(
    ("items", "keys", "problem"),
    [
        pytest.param(
            {TEST: distributed()},
            {"ended": None, "exit_code": None},
            "never finished: it was killed; the last thing that it wrote is of "
            "2026-11-21T12:00:00Z",
            id="killed",
        ),
        pytest.param(
            {TEST: distributed()},
            {"exit_code": 2},
            "pytest was interrupted (exit code 2)",
            id="interrupted",
        ),
        pytest.param(
            {TEST: distributed()},
            {"exit_code": 1},
            "pytest ended with exit code 1, and no item says why; read the job's log",
            id="failed-silently",
        ),
        pytest.param(
            {TEST: distributed()},
            {"exit_code": 1, "on_one_process": ["test_a.py::test_b"]},
            "1 test with process_group or world_size ran on one process, so that nothing between "
            "ranks was tested: test_a.py::test_b; give --ranks N or --gpus N; where one rank is "
            "meant, the mark world_size(1) or controller, or megatron_ranks = 1 in the ini file",
            id="on-one-process",
        ),
        pytest.param(
            {},
            {},
            "ran no workload and nothing on a gang, and left no JUnit XML of other tests",
            id="nothing-ran",
        ),
        pytest.param(
            {}, {"exit_code": 5}, "pytest found no test to run (exit code 5)", id="nothing-chosen"
        ),
        pytest.param(
            None,
            {},
            "left no run.json: it was killed early, or pytest did not start",
            id="never-started",
        ),
    ],
)
def test_a_run_that_did_not_end_well_is_a_failure(
    items: dict[str, JsonValue], keys: dict[str, JsonValue], problem: str
) -> None:
    root = write_job(Path("all"), "unit", None)
    if items is not None:
        write_run(root / "run", items, **keys)
    code, lines = head("all")
    assert (code, lines[0], lines[2]) == (1, "broken: 1 of 1 job has a problem", problem)


def test_a_job_whose_pytest_did_not_start_says_why() -> None:
    root = write_job(Path("all"), "unit")
    (root / "pytest.log").write_text("pytest: error: unrecognized arguments: --no-such\n")
    assert "wrote 'pytest: error: unrecognized arguments: --no-such'" in summary("all").output


def test_junit_alone_does_not_say_that_a_job_came_to_its_end() -> None:
    root = write_job(Path("all"), "unit")
    (root / "junit.xml").write_text(JUNIT.format(name="test_one", child=""))
    code, lines = head("all")
    assert (code, lines[1]) == (1, "broken  unit  1 passed, 0.1 s")
    assert lines[2].startswith("left no run.json")


def test_a_killed_run_names_the_workload_that_was_running() -> None:
    root = write_job(Path("all"), "line", {TEST: distributed()}, ended=None, exit_code=None)
    write_json(
        root / "run" / "tiny-line" / "repeat_1" / "attempt_1" / "plan.json", {"node_id": ROW}
    )
    assert f"it was killed during {ROW};" in summary("all").output


def test_a_workload_that_did_not_run_is_a_failure() -> None:
    """No test is no success."""
    write_job(Path("all"), "line", {TEST: distributed()})
    write_plan(Path("plan.json"), line=ROW)
    code, lines = head("all", "--expect", "plan.json")
    assert (code, lines[3]) == (1, f"did not run {ROW}")


def test_packed_and_empty_artifacts_are_failures() -> None:
    write_job(Path("all"), "unit", {TEST: distributed()})
    Path("all/logs-torn.zip").write_bytes(b"PK")
    Path("all/logs-empty").mkdir()
    code, lines = head("all")
    assert (code, lines[0]) == (1, "broken: 2 of 3 jobs have a problem")
    assert lines[1:3] == ["broken  logs-empty  no items, 0.0 s", "is empty: the job left nothing"]
    assert lines[4] == "is an archive; unpack it, as gh run download does"


def test_a_torn_run_json_and_a_torn_junit_are_failures() -> None:
    root = write_job(Path("all"), "unit", {TEST: distributed()})
    (root / "run" / "run.json").write_text('{"items": {')
    (root / "junit.xml").write_text("<testsuites><testsuite>")
    output = summary("all").output
    assert "run/run.json: is not whole, or is no record of a run" in output
    assert "junit.xml: cannot be read as JUnit XML: no element found" in output


def test_one_damaged_artifact_of_three_costs_its_own_job_alone() -> None:
    """The processes that a workflow starts."""
    for name in ("a", "b", "c"):
        write_job(Path("all"), name, {f"recipes/tiny.yaml::{name}[dev-cpu]": workload()})
    file = next(Path("all").glob("logs-b-*")) / "run" / "run.json"
    file.write_text(file.read_text().replace('"exit_code": 0', '"exit_code": "0"'))
    (Path("all") / "logs-torn-7-1.zip").write_bytes(b"PK torn")
    program = (str(Path(sys.executable).with_name("pytest-megatron")),)
    done = subprocess.run(
        [*program, "ci", "summary", "all", "--output", "out"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "broken  b " in done.stdout
    assert "exit_code: found '0', expected an integer; give the file" in done.stdout
    assert [line.split()[:4] for line in done.stdout.splitlines() if " 1 passed" in line] == [
        ["passed", name, "1", "passed,"] for name in ("a", "c")
    ]
    page = Path("out/pages/index.html").read_text()
    assert "2 passed" in page
    assert ", expected an integer; give the file" in page


def test_a_later_try_of_a_job_counts_and_the_earlier_is_named() -> None:
    """Artifacts of a re-run do not replace others by the order of a listing."""
    write_job(Path("all"), "line", {ROW: workload()}, run_attempt=2)
    write_job(Path("all"), "line", {ROW: workload("failed", problem="bad")}, run_attempt=1)
    code, lines = head("all")
    assert (code, lines[0]) == (0, "passed: 1 item in 1 job")
    assert lines[2] == "note: line: try 1 was failed (all/logs-line-7-11); try 2 counts"


def test_two_artifacts_of_one_try_are_a_failure() -> None:
    """Of two jobs with one name neither is lost."""
    write_job(Path("all"), "line", {ROW: workload("failed", problem="bad")})
    write_job(Path("all"), "line", {ROW: workload()})
    code, lines = head("all")
    assert (code, lines[0]) == (1, "failed: 1 of 2 items, 1 of 1 job has a problem")
    assert lines[2].startswith("2 artifacts say that they are this job, try 1: all/logs-line-7-10")


def test_jobs_of_different_commits_are_a_failure() -> None:
    write_job(Path("all"), "unit", {TEST: distributed()})
    write_job(Path("all"), "line", {ROW: workload()}, commit="d" * 40)
    code, lines = head("all")
    told = f"{'d' * 12} in line; {COMMIT[:12]} in unit"
    assert (code, lines[1]) == (1, f"problem: jobs tested different commits: {told}")


def test_a_job_that_is_not_in_the_plan_is_a_failure() -> None:
    write_job(Path("all"), "line", {ROW: workload()})
    write_job(Path("all"), "unit", {TEST: distributed()})
    write_plan(Path("plan.json"), line=ROW)
    code, lines = head("all", "--expect", "plan.json")
    assert (code, lines[-1]) == (1, "is not in the plan")


@pytest.mark.parametrize(
    ("results", "problem"),
    [
        pytest.param({"unit": "cancelled"}, "ended as 'cancelled'", id="cancelled"),
        pytest.param({"unit": "failure"}, "ended as 'failure'", id="failed"),
        pytest.param(
            {"unit": "skipped"}, "was skipped, and the plan has something for it", id="skipped"
        ),
        pytest.param({"unit": "success", "integration": "skipped"}, None, id="nothing-planned"),
    ],
)
def test_results_of_the_ci_system_count(results: dict[str, str], problem: str | None) -> None:
    """A job that was cancelled or skipped has not passed."""
    write_job(Path("all"), "unit", {TEST: distributed()})
    write_plan(Path("plan.json"), unit=None)
    needs = json.dumps({job: {"result": result, "outputs": {}} for job, result in results.items()})
    code, lines = head("all", "--expect", "plan.json", "--results", needs)
    told = [line for line in lines if line.startswith("problem: ")]
    expected = [] if problem is None else [f"problem: job 'unit' of the workflow {problem}"]
    assert (code, told) == (int(problem is not None), expected)


def test_why_a_workload_failed_and_what_to_type() -> None:
    attempt: JsonValue = {
        "cause": "rank 1 of 2 was killed by SIGSEGV, after iteration 6 of 20",
        "root_rank": 1,
        "signature": "native_crash",
        "is_transient": False,
        "fingerprint": "f",
    }
    advice = "known as native_crash (not transient, so not run again): run with faulthandler"
    headline = "rank 1 of 2 was killed by SIGSEGV, after iteration 6 of 20"
    record = workload("failed", problem=f"{headline}\nmore", advice=advice, attempts=[attempt])
    root = write_job(Path("all"), "line", {ROW: record})
    evidence: JsonValue = {
        "file": "/ci/run/tiny-line/repeat_1/1.log",
        "line": 7,
        "text": "Fatal Python error",
    }
    triage: JsonValue = {"evidence": [evidence]}
    write_json(root / "run" / "tiny-line" / "triage.json", triage)
    write_job(Path("all"), "again", {f"{ROW}2": record})
    assert summary("all").output.split("\n\n")[1].splitlines() == [
        f"failed {ROW}2 (again)",
        f"    {headline}",
        "    started on rank 1",
        f"    {advice}",
        f"    the same in {ROW} (line)",
        f"    reproduce: pytest-megatron repro all/logs-again-7-11/run '{ROW}2'",
    ]
    only = summary(str(root)).output.split("\n\n")[1].splitlines()
    assert only[2:5] == [
        "    started on rank 1, all/logs-line-7-10/run/tiny-line/repeat_1/1.log:7",
        "        Fatal Python error",
        f"    {advice}",
    ]


def test_where_a_distributed_test_failed() -> None:
    bad = distributed("failed", problem="[rank 1] assert 1 == 2")
    dead = distributed("failed", problem="rank 0 of 2 was killed by SIGSEGV")
    late = distributed("failed", problem="rank 1 of 2 did not end in 5 s")
    root = write_job(Path("all"), "unit", {TEST: bad, f"{TEST}2": dead, f"{TEST}3": late})
    (root / "junit.xml").write_text(JUNIT.format(name="test_one", child=FAILURE))
    log = root / "run" / "ranks" / "attempt_1" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("hello\nFatal Python error: Segmentation fault\nCurrent thread\n")
    other = log.parents[1] / "1"
    other.mkdir()
    (other / "stderr.log").touch()
    (other / "stacks.txt").write_text("Current thread\n")
    output = summary("all").output
    assert "    started on rank 1, tests/unit/test_a.py:3\n" in output
    shown = "all/logs-unit-7-10/run/ranks/attempt_1/0/stderr.log:2"
    assert f"    started on rank 0, {shown}\n        Fatal Python error: Seg" in output
    stacks = "all/logs-unit-7-10/run/ranks/attempt_1/1/stacks.txt"
    assert f"    started on rank 1, {stacks}\n    reproduce:" in output  # stderr.log is empty


def test_an_expected_failure_ran() -> None:
    """As a run has them, and JUnit XML."""
    skipped = distributed("skipped", problem="test requires a GPU")
    root = write_job(Path("all"), "unit", {TEST: skipped})
    child = '<skipped type="pytest.xfail" message="known"/>'
    (root / "junit.xml").write_text(JUNIT.format(name="test_two", child=child))
    code, lines = head("all")
    assert (code, lines[1]) == (0, "passed  unit  1 passed, 1 skipped, 0.6 s")


def test_a_link_is_followed_if_it_was_typed_and_not_in_a_folder() -> None:
    """As `runs/latest` is one."""
    write_run(Path("runs/20261123-090147-95bc"), {TEST: distributed()})
    Path("runs/latest").symlink_to("20261123-090147-95bc")
    code, lines = head("runs/latest")
    assert (code, lines[:1]) == (0, ["passed: 1 item in 1 job"])
    assert head("runs")[1][:1] == lines[:1]


def test_records_that_lead_out_of_the_artifact_are_not_followed() -> None:
    Path("ranks").mkdir()
    Path("secret").write_text("Fatal Python error: a secret\n")
    bad = distributed("failed", problem="rank 0 of 2 was killed by SIGSEGV")
    bad["attempts"] = [{"directory": "/x/../.."}]
    root = write_job(
        Path("all"),
        "unit",
        {TEST: bad, f"{TEST}2": distributed("failed", problem="rank 1 of 2 died")},
    )
    place = root / "run" / "ranks" / "attempt_1" / "1"
    place.mkdir(parents=True)
    (place / "stderr.log").symlink_to(Path("secret").resolve())
    assert "a secret" not in summary("all").output


def test_plain_tests_come_from_junit() -> None:
    root = write_job(Path("all"), "unit", {}, exit_code=1)
    (root / "junit.xml").write_text(JUNIT.format(name="test_two[a]", child=FAILURE))
    assert summary("all").output.split("\n\n")[1].splitlines() == [
        "failed tests/unit/test_a.py::test_two[a] (unit)",
        "    assert 1 == 2",
        "    see tests/unit/test_a.py:3",
        "    reproduce: pytest 'tests/unit/test_a.py::test_two[a]'",
    ]


def test_a_module_that_could_not_be_collected_is_named() -> None:
    root = write_job(Path("all"), "unit", {}, exit_code=2)
    error = '<error message="collection failure">ImportError: no module named x</error>'
    text = JUNIT.format(name="tests.unit.test_a", child=error)
    (root / "junit.xml").write_text(text.replace('"tests.unit.test_a" n', '"" n'))
    told = summary("all").output.split("\n\n")[1].splitlines()
    assert told[:2] == ["broken tests/unit/test_a.py (unit)", "    collection failure"]


def test_a_teardown_that_failed_later_fails_an_item_that_had_passed() -> None:
    root = write_job(Path("all"), "unit", {TEST: distributed()}, exit_code=1)
    error = '<error message="teardown failed">boom</error>'
    (root / "junit.xml").write_text(JUNIT.format(name="test_one", child=error))
    assert head("all") == (1, ["broken: 1 of 1 item", "broken  unit  1 broken, 0.5 s"])


def test_flaky_passes_and_quarantine_does_not_count() -> None:
    retried: JsonValue = {
        "cause": "rank 0 of 1 raised OSError",
        "signature": "dns",
        "is_transient": True,
    }
    flaky = workload("flaky", attempts=[retried, {"cause": None}])
    held = workload("failed", problem="bad", quarantine={"holds": True})
    write_job(Path("all"), "line", {ROW: flaky, f"{ROW}2": held}, exit_code=0)
    result = summary("all")
    assert result.exit_code == 0
    assert result.output.split("\n\n")[1].splitlines() == [
        "flaky",
        f"    {ROW}: passed at attempt 2: dns",
        f"    {ROW}2: failed, in quarantine",
    ]


PLANNED: dict[str, JsonValue] = {"n_repeat": 2, "lightweight": False, "compared": True}


def attempts(*repeats: int) -> list[JsonValue]:
    return [{"cause": None, "repeat": repeat, "attempt": 1} for repeat in repeats]


@pytest.mark.parametrize(
    ("record", "options", "problem"),
    [
        pytest.param(
            workload(attempts=attempts(1, 2), compared=False),
            {"golden": "off"},
            f"did not compare {ROW} with its golden, which the plan has",
            id="golden off",
        ),
        pytest.param(
            workload(attempts=attempts(1), compared=True),
            {},
            f"trained {ROW} 1 of 2 times",
            id="fewer repeats",
        ),
        pytest.param(
            workload(attempts=attempts(1), compared=False),
            {"lightweight": True},
            f"ran {ROW} lightweight, the plan has all of it",
            id="lightweight",
        ),
        pytest.param(
            workload("skipped", attempts=[]), {}, f"skipped {ROW}, which the plan has", id="skipped"
        ),
    ],
)
def test_what_ran_otherwise_than_planned_is_a_failure(
    record: JsonValue, options: dict[str, JsonValue], problem: str
) -> None:
    write_job(Path("all"), "line", {ROW: record}, options=options)
    write_plan(Path("plan.json"), PLANNED, line=ROW)
    code, lines = head("all", "--expect", "plan.json")
    assert (code, lines[0]) == (1, "broken: 1 of 1 job has a problem")
    assert problem in lines


def test_what_ran_as_planned_has_passed() -> None:
    record = workload(attempts=attempts(1, 2), compared=True)
    write_job(Path("all"), "line", {ROW: record}, options={"golden_policy": "strict"})
    write_plan(Path("plan.json"), PLANNED, line=ROW)
    assert head("all", "--expect", "plan.json")[0] == 0


def test_an_artifact_of_another_run_is_a_failure() -> None:
    root = write_job(Path("all"), "unit", {TEST: distributed()})
    record = json.loads((root / "job.json").read_text())
    write_json(root / "job.json", {**record, "run_id": "6"})
    write_plan(Path("plan.json"), unit=None)
    code, lines = head("all", "--expect", "plan.json")
    assert code == 1
    assert "is of run 6, the plan is of run 7" in lines


def test_two_policies_in_one_run_are_a_failure() -> None:
    for job, policy in (("line", "strict"), ("other", "megatron")):
        record = workload(attempts=attempts(1, 2), compared=True, policy={"name": policy})
        write_job(Path("all"), job, {f"r.yaml::{job}": record})
    result = summary("all")
    assert result.exit_code == 1
    assert "jobs compared under different policies: strict in line; megatron in other" in (
        result.output
    )


@pytest.mark.parametrize(
    ("texts", "num_groups"),
    [
        (("assert 3 == 4", "assert 128 == 256"), 2),
        (("[rank 1] AssertionError: 3 != 4", "[rank 1] AssertionError: 5 != 6"), 2),
        (("RuntimeError: port 4711 is taken", "RuntimeError: port 4712 is taken"), 1),
    ],
)
def test_assertions_of_different_tests_are_different_causes(
    texts: tuple[str, str], num_groups: int
) -> None:
    items: dict[str, JsonValue] = {
        f"tests/test_a.py::test_{number}": distributed("failed", problem=text)
        for number, text in enumerate(texts)
    }
    write_job(Path("all"), "unit", items)
    found = json.loads(summary("all", "--format", "json").output)
    assert len(found["failures"]) == num_groups
