"""One session of trainings that go wrong, each in its own way, under pytest-xdist.

Megatron-LM's harness passed a run without logs, took NaN, inf and missing for equal, and named two
comma lists of numbers where a metric failed.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tiny_project import Project, Run, read_object

from pytest_megatron.triage.api import triage

RESUME = {"TEST_TYPE": "ckpt-resume"}
HANG_LIMIT_S = 25  # must cover the start of the ranks on a busy machine


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("failing"))
    project.row(project.case("hang", fault=["caught@2:1", "hang@5:1"]), time_limit=[HANG_LIMIT_S])
    project.add("crash", "crash@4:0")
    project.add("kill", "kill@5:1")
    project.add("segfault", "segfault@5:0")
    project.add("drowned", "flood@3:1", "crash@5:1")
    project.add("nan", "nan@3")
    project.add("early", "exit0@6")
    project.add("silent", "silent@0")
    project.add("differs")
    project.golden("differs", changes={7: 5.5 * 1e-3})
    project.add("drift", "drift@0", save_interval=5, config=RESUME)
    project.add("unsaved", save_interval=4, config=RESUME)
    project.row(project.case("no_golden"), write_golden=False)
    project.add("sound")
    return project


@pytest.fixture(scope="module")
def run(project: Project) -> Run:
    return project.run("recipes", "-n", "2", "--junitxml", "junit.xml")


def log(run: Run, case: str, name: str, *, phase: int = 1) -> str:
    """The path of a log as a message names it."""
    root = run.item_dir(case).relative_to(run.directory.parent)
    return f"{root}/repeat_1/attempt_1/phase_{phase}/{name}"


@pytest.mark.parametrize(
    ("case", "cause", "file"),
    [
        pytest.param(
            "crash",
            "rank 0 of 2 raised ValueError: the crash of rank 0 at train.py:N in do, "
            "after iteration 3 of 10",
            "logs/0/stderr.log",
            id="exception",
        ),
        pytest.param(
            "kill",
            "rank 1 of 2 was killed by SIGKILL, after iteration 4 of 10",
            "launcher.log",
            id="SIGKILL",
        ),
        pytest.param(
            "segfault",
            "rank 0 of 2 was killed by SIGSEGV at train.py:N in do, after iteration 4 of 10",
            "logs/0/stderr.log",
            id="SIGSEGV",
        ),
        pytest.param(
            "drowned",
            "rank 1 of 2 raised ValueError: the crash of rank 1 at train.py:N in do, "
            "after iteration 4 of 10",
            "logs/1/stderr.log",
            id="exception after megabytes of output",
        ),
        pytest.param(
            "early",
            "the training ended with exit code 0, but lm loss stops at step 5, "
            "expected it to go on to 10",
            "launcher.log",
            id="exit code 0 too early",
        ),
    ],
)
def test_a_failed_training_names_rank_cause_iteration_and_log(
    run: Run, case: str, cause: str, file: str
) -> None:
    """A failure of any rank counts, not only that of rank 0."""
    assert run.verdict(case) == ("FAILED", "failed")
    first, *others = run.problem(case).splitlines()
    assert re.sub(r"py:\d+", "py:N", first) == cause
    (see,) = [line.removeprefix("see ") for line in others if line.startswith("see ")]
    assert re.sub(r":\d+$", "", see) == log(run, case, file)
    assert Path(run.directory.parent, log(run, case, file)).exists()


def test_the_last_words_of_a_crashed_rank_are_shown(run: Run) -> None:
    lines = run.problem("crash").splitlines()
    assert lines[1] == "what to do: read the traceback from its last line upwards"
    assert lines[2] == "    Traceback (most recent call last):"
    assert lines[-2] == "    ValueError: the crash of rank 0"


def test_the_stack_of_a_segmentation_fault_is_shown(run: Run) -> None:
    text = run.problem("segfault")
    assert "    Fatal Python error: Segmentation fault" in text
    assert "in misbehave" in text


def test_a_hang_ends_at_its_time_limit_and_says_where_each_rank_was(run: Run) -> None:
    assert run.verdict("hang") == ("FAILED", "failed")
    problem = run.problem("hang")
    assert re.fullmatch(
        rf"time limit of {HANG_LIMIT_S} s reached at train.py:\d+ in wait_for_others \(rank 0\), "
        r"train.py:\d+ in hang_for_ever \(rank 1\), after iteration 4 of 10"
        r"(, nothing logged for \d+ s)?",  # unless the start took most of the time
        problem.splitlines()[0],
    )


def test_one_step_off_by_a_thousandth_fails_with_metric_step_values_tolerance_and_file(
    run: Run,
) -> None:
    assert run.verdict("differs") == ("FAILED", "failed")
    line = run.problem("differs").splitlines()[1]
    assert line.startswith(
        "    lm loss, step 7: observed 5.534, golden 5.5395, off by 9.9e-04 relative, "
        "tolerance allows 1.0e-04; 1 of 9 steps outside, none may be"
    )
    assert line.endswith("; golden_values/gpt/differs/golden_values_dev_cpu.json")


def test_a_resume_that_diverges_fails_against_the_first_phase(run: Run) -> None:
    assert run.verdict("drift") == ("FAILED", "failed")
    _, against, line, *_ = run.problem("drift").splitlines()
    assert against == "repeat 1 against the first phase:"
    assert line.startswith("    lm loss, step 6: observed 5.644, golden 5.634, ")
    assert run.problem("drift").endswith("attempt_1/phase_2/metrics.json")


def test_a_resume_without_a_checkpoint_half_way_says_how_to_get_one(run: Run) -> None:
    assert run.verdict("unsaved") == ("FAILED", "failed")
    assert "the training ended with exit code 0, but " in run.problem("unsaved")
    assert run.problem("unsaved").endswith(
        "checkpoints has no iter_0000005 to resume from, found iter_0000004, iter_0000008; "
        "set --save-interval to half of --train-iters"
    )


def test_a_missing_golden_is_an_error_before_anything_runs(run: Run) -> None:
    assert run.verdict("no_golden") == ("ERROR", "broken")
    assert run.problem("no_golden") == (
        "no golden, nothing was run; expected "
        "golden_values/gpt/no_golden/golden_values_dev_cpu.json; write one with `--golden record`, "
        "or run without comparing with `--golden off`"
    )
    assert list(run.directory.glob("*no_golden*")) == []
    ways_back = [line for line in run.stdout.splitlines() if line.startswith("reproduce: ")]
    assert any("::crash[dev-cpu]" in line for line in ways_back)
    assert not any("::no_golden[dev-cpu]" in line for line in ways_back)


@pytest.mark.parametrize(
    ("case", "summary"),
    [
        ("differs", "lm loss is off at step 7"),
        ("crash", "rank 0 of 2 raised "),
        ("no_golden", "no golden, nothing was run"),
    ],
)
def test_the_line_of_the_summary_has_the_reason_within_80_columns(
    run: Run, case: str, summary: str
) -> None:
    lines = run.stdout.partition("short test summary info")[2].splitlines()
    (line,) = [line for line in lines if f"::{case}[dev-cpu]" in line and " - " in line]
    assert line.partition(" - ")[2].startswith(summary)


def test_the_others_do_not_suffer(run: Run) -> None:
    assert run.verdict("sound") == ("PASSED", "passed")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED


def test_nothing_genuine_is_run_again(run: Run) -> None:
    cases = ("hang", "crash", "kill", "segfault", "nan", "early", "silent", "differs", "drift")
    assert {case: len(run.attempts(case)) for case in cases} == dict.fromkeys(cases, 1)


def test_the_record_of_a_failure_names_the_rank_and_every_exit_code(run: Run) -> None:
    (attempt,) = run.attempts("kill")
    kept = ("repeat", "attempt", "exit_codes", "root_rank", "signature", "is_transient")
    assert [attempt[key] for key in kept] == [1, 1, [1], 1, "sigkill", False]


def test_triage_of_a_failure_is_kept(run: Run) -> None:
    kept = read_object(run.item_dir("crash") / "triage.json")
    told = [kept[key] for key in ("family", "transient", "root_rank", "signature")]
    assert told == ["exception", False, 0, "exception"]
    rows = kept["attempts"]
    assert isinstance(rows, list)
    (row,) = rows
    assert isinstance(row, dict)
    known = [row[key] for key in ("attempt", "phase_number", "ended", "returncode")]
    assert known == ["repeat_1/attempt_1", 1, "exited", 1]
    assert not (run.item_dir("sound") / "triage.json").exists()


def test_the_triage_command_says_of_the_run_directory_what_the_run_said(run: Run) -> None:
    """Also of the one that was stopped at its time limit, which no log tells."""
    units = {
        next(part for part in Path(diagnosis.unit).parts if part.startswith("tiny-")): diagnosis
        for group in triage([run.directory]).groups
        for diagnosis in group.diagnoses
    }
    expected = {"crash": 0, "kill": 1, "segfault": 0, "drowned": 1}
    found = {case: units.pop(run.item_dir(case).name).root_rank for case in expected}
    assert found == expected
    assert {item: diagnosis.family for item, diagnosis in units.items()} == {
        run.item_dir("hang").name: "time_limit",
        run.item_dir("nan").name: "nonfinite_loss",
        run.item_dir("differs").name: "golden_mismatch",
        run.item_dir("drift").name: "golden_mismatch",
    }


def test_every_worker_reports_to_one_record(run: Run, project: Project) -> None:
    items = run.json["items"]
    assert isinstance(items, dict)
    assert len(items) == len(project.entries)
    assert [path.name for path in run.directory.glob("*.json")] == ["run.json"]


@pytest.mark.usefixtures("run")
def test_junit_tells_failed_from_broken_and_carries_verdicts(project: Project) -> None:
    suite = ET.parse(project.root / "junit.xml").getroot()  # noqa: S314 - pytest wrote it
    found = {}
    for case in suite.iter("testcase"):
        properties = {str(p.get("name")): p.get("value") for p in case.iter("property")}
        kinds = {child.tag for child in case} - {"properties"}
        name = case.attrib["name"].partition("[")[0]
        found[name] = (kinds, properties["megatron.verdict"], properties["megatron.attempts"])
    assert found["sound"] == (set(), "passed", "1")
    assert found["crash"] == ({"failure"}, "failed", "1")
    assert found["no_golden"] == ({"error"}, "broken", "0")


def test_signatures_that_cannot_be_read_end_the_session_before_anything_runs(
    tmp_path: Path,
) -> None:
    project = Project(root=tmp_path)
    project.add("sound")
    run = project.run("recipes", "-o", "megatron_signatures=no.toml")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"{tmp_path}/no.toml: cannot be read as a table of signatures: " in run.stderr
    assert not run.directory.exists()


def test_every_workload_has_a_page_and_the_index_is_named_once(run: Run) -> None:
    assert run.stdout.count("megatron: the page of this run: run/index.html\n") == 1
    index = (run.directory / "index.html").read_text()
    assert index.index("::crash[") < index.index("::sound[")
    assert "SIGSEGV" in index
    for case in ("crash", "nan", "differs", "sound"):
        assert "::" + case + "[" in (run.item_dir(case) / "curves.html").read_text()
