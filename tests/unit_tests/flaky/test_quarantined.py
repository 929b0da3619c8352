"""Quarantine by mark, row and setting, and the history of what was odd.

In Megatron-LM there is no rerun of a single test and no history, and quarantine is by markers and
scopes that nobody takes back.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from gang_suite import RecordedSuite, Run
from tiny_project import Project

from pytest_megatron.base.files import JsonValue
from pytest_megatron.runs.history import HistoryEntry, append

UNTIL = dt.datetime.now(dt.UTC).date() + dt.timedelta(days=100)
HELD = f'reason="#12: sometimes", until="{UNTIL}"'
SUITE = f"""
    from pathlib import Path
    import pytest

    @pytest.mark.quarantine({HELD})
    def test_held(rank):
        assert rank == 5, "no five"

    @pytest.mark.quarantine({HELD})
    def test_passes(rank):
        pass

    @pytest.mark.quarantine(reason="#3", until="2001-01-01")
    def test_expired(rank):
        assert rank == 5

    @pytest.mark.controller
    @pytest.mark.quarantine({HELD})
    def test_plain():
        assert 1 == 2

    def test_by_pattern(rank):
        raise ValueError("again")

    def test_flaky(rank):
        state = Path(f"state-{{rank}}")
        if not state.exists():
            state.touch()
            raise RuntimeError("bind: Address already in use")

    def test_ordinary(rank):
        pass
"""
SETTING = f"""
[tool.pytest-megatron.quarantine]
"test_it.py::test_by_*" = {{ reason = "#7", until = {UNTIL} }}
"""
SUMMARY = [  # in the order of the names; how each line begins and what it ends with
    (
        "expired     test_it.py::test_expired  was in quarantine until 2001-01-01",
        "counts again: #3",
    ),
    (f"quarantined test_it.py::test_by_pattern  until {UNTIL}: #7; failed: ", "again"),
    (f"quarantined test_it.py::test_held  until {UNTIL}: #12: sometimes; failed: ", "no five"),
    (
        f"quarantined test_it.py::test_passes  until {UNTIL}: ",
        "; if that lasts, end its quarantine",
    ),
    (f"quarantined test_it.py::test_plain  until {UNTIL}: ", "; failed: assert 1 == 2"),
]


@pytest.fixture(scope="module", params=[(), ("-n", "2")], ids=["alone", "xdist"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    suite = RecordedSuite(root=tmp_path_factory.mktemp("held")).write(test_it=SUITE)
    suite.write(**{"pyproject.toml": SETTING})
    more: tuple[str, ...] = request.param
    return suite.run("--ranks=2", "--rerun-transient=1", "--junitxml", "j.xml", "-vv", *more)


def test_a_quarantined_failure_does_not_count_until_it_expires(run: Run) -> None:
    assert run.summary == "1 failed, 3 passed, 3 quarantined"
    assert run.outcomes["test_expired"] == "FAILED"
    assert run.returncode == 1


def test_the_summary_tells_of_every_quarantine(run: Run) -> None:
    start = next(n for n, line in enumerate(run.printed) if line.strip("- ") == "quarantine")
    found = sorted(run.printed[start + 1 : start + 6])
    for text, (start_of_it, end_of_it) in zip(found, SUMMARY, strict=True):
        line = re.sub(r" at test_it\.py:\d+$", "", text)
        assert (line[: len(start_of_it)], line[-len(end_of_it) :]) == (start_of_it, end_of_it)


def test_junit_has_it_as_an_expected_failure_with_its_reason(run: Run) -> None:
    suite = ET.parse(run.directory.parent / "j.xml").getroot()  # noqa: S314 - pytest wrote it
    cases = {case.attrib["name"]: case for case in suite.iter("testcase")}
    skipped = cases["test_held"].find("skipped")
    assert skipped is not None
    assert skipped.attrib["type"] == "pytest.xfail"
    assert skipped.attrib["message"] == f"quarantined until {UNTIL}: #12: sometimes"
    found = {p.attrib["name"] for p in cases["test_held"].iter("property")}
    assert found == {"megatron.quarantine"}


def test_run_json_says_failed_and_why_it_does_not_count(run: Run) -> None:
    held = run.items["test_held"]
    assert (held["verdict"], held["quarantine"]) == (
        "failed",
        {"reason": "#12: sometimes", "until": f"{UNTIL}", "is_expired": False, "holds": True},
    )
    expired = run.items["test_expired"]["quarantine"]
    assert isinstance(expired, dict)
    assert (expired["is_expired"], expired["holds"]) == (True, False)


def test_the_history_has_a_line_for_what_was_odd_and_for_it_from_then_on(run: Run) -> None:
    path = run.directory.parent / ".pytest_megatron" / "history.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (rest,) = [e for e in lines if e["kind"] == "tests"]
    assert (rest["node_id"], rest["num_attempts"]) == ("test_it.py", 1)
    assert rest["duration_s"] > 0
    entries = [e for e in lines if e["kind"] == "test"]
    assert {e["node_id"].partition("::")[2]: e["verdict"] for e in entries} == {
        "test_by_pattern": "failed",
        "test_expired": "failed",
        "test_flaky": "flaky",
        "test_held": "failed",
        "test_passes": "passed",  # in quarantine: a run towards its end
    }
    assert Counter(e["is_quarantined"] for e in entries) == {True: 3, False: 2}
    until = {e["node_id"].partition("::")[2]: e["quarantined_until"] for e in entries}
    assert (until["test_passes"], until["test_expired"]) == (f"{UNTIL}", "2001-01-01")
    (flaky,) = [e for e in entries if e["verdict"] == "flaky"]
    assert (flaky["causes"], flaky["num_attempts"]) == (["port_in_use"], 2)
    suite = RecordedSuite(root=run.directory.parent)
    again = suite.run("--ranks", "2", "-k", "flaky or ordinary")
    assert again.returncode == 0
    added = [json.loads(line) for line in path.read_text().splitlines()[6:]]
    assert {e["kind"]: e["verdict"] for e in added} == {"test": "passed", "tests": "passed"}


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ('reason="x"', "test_it.py::test_a: mark quarantine: until: is missing, expected the last"),
        ('"x"', "test_it.py::test_a: mark quarantine: 'x' is given, expected reason="),
    ],
)
@pytest.mark.parametrize("more", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_mark_that_says_less_is_one_clear_error(
    tmp_path: Path, mark: str, message: str, more: tuple[str, ...]
) -> None:
    text = f"import pytest\n@pytest.mark.quarantine({mark})\ndef test_a(): pass\n"
    run = RecordedSuite(root=tmp_path).write(test_it=text).run("--ranks", "1", *more)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr


def test_a_mark_of_that_name_which_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.quarantine\ndef test_a(): pass\n"
    run = RecordedSuite(root=tmp_path).write(test_it=text).run()
    assert run.summary == "1 passed"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("rows"))
    held: dict[str, JsonValue] = {"reason": "#12", "until": f"{UNTIL}"}
    project.row("fails", script=["exit 3"], quarantine=[held], write_golden=False)
    project.row(project.case("broken"), quarantine=[held], write_golden=False)
    project.row(project.case("new", train_iters=2), write_golden=False)
    return project


def test_a_row_in_quarantine_fails_or_breaks_without_failing_the_run(project: Project) -> None:
    run = project.run("recipes", "-k", "fails or broken", "-o", "megatron_history=past.jsonl")
    assert run.returncode == 0
    assert "2 quarantined" in run.stdout.splitlines()[-1]
    assert [run.record(case)["verdict"] for case in ("fails", "broken")] == ["failed", "broken"]
    past = (project.root / "past.jsonl").read_text().splitlines()
    assert [json.loads(line)["is_quarantined"] for line in past] == [True, True]


def test_no_quarantine_holds_while_goldens_are_written(project: Project) -> None:
    arguments = (
        "-k",
        "fails or new",
        "--golden",
        "record",
        "--allow-dirty",
        "-o",
        "megatron_history=off",
    )
    run = project.run("recipes", *arguments, run_dir="record")
    assert run.returncode == 1
    assert run.outcomes == {"fails": "FAILED", "new": "PASSED"}
    assert "goldens: none written, since not all of this run was clean" in run.stdout
    assert not project.golden_path("new").exists()
    assert not (project.root / ".pytest_megatron" / "history.jsonl").exists()


HISTORY = """
    import pytest

    @pytest.mark.quarantine({held})
    def test_ring(rank):
        assert rank == 5, "no five"

    @pytest.mark.quarantine({held})
    def test_other(rank):
        assert rank == 5
"""


def _entry(number: int, *, is_bad: bool) -> HistoryEntry:
    return HistoryEntry(
        time=f"2026-01-01T00:{number:02}:00Z",
        run="r",
        node_id="test_it.py::test_ring",
        kind="test",
        verdict="failed" if is_bad else "passed",
        num_attempts=1,
        causes=(),
        duration_s=1.0,
        commit=f"{number:040}",
        is_dirty=False,
        platform="cpu x2",
        quarantined_until=f"{UNTIL}",
    )


@pytest.mark.parametrize("prefix", ["", "megatron-"])
def test_a_file_outside_does_not_move_the_root(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "project").mkdir()
    suite = RecordedSuite(root=tmp_path / "project").write(test_it=HISTORY.format(held=HELD))
    (tmp_path / "slurm.yaml").touch()
    run = suite.run("--ranks", "2", f"--{prefix}executor-config", "../slurm.yaml")
    assert run.returncode == 4
    assert f"write --{prefix}executor-config=../slurm.yaml" in run.stderr
    run = suite.run("--ranks", "2", "-o", "megatron_history=../past.jsonl")
    assert (run.returncode, run.summary) == (0, "2 quarantined")
    assert '"test_it.py::test_ring"' in (tmp_path / "past.jsonl").read_text()


@pytest.mark.parametrize("more", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_an_item_that_fails_ever_again_counts(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Every eighth run failed, and then 15 in a row: that is no flakiness of before."""
    suite = RecordedSuite(root=tmp_path).write(test_it=HISTORY.format(held=HELD))
    path = tmp_path / "past.jsonl"
    append(path, [_entry(n, is_bad=n % 8 == 3 or n >= 24) for n in range(39)])
    options = ("--ranks", "2", "-o", "megatron_history=past.jsonl", *more)
    run = suite.run(*options)
    assert (run.returncode, run.summary) == (1, "1 failed, 1 quarantined")
    since = f"{24:040}"[:12]
    text = (
        f"may be a regression: failed 16 times in a row, since {since}; before, 3 of 24 runs "
        "failed; fix it, or find its commit with git bisect run pytest-megatron repro"
    )
    said = f"counts      test_it.py::test_ring  in quarantine until {UNTIL}: #12: sometimes; {text}"
    assert said in run.printed
    held = run.items["test_ring"]
    assert held["advice"] == text
    quarantine = held["quarantine"]
    assert isinstance(quarantine, dict)
    assert (quarantine["holds"], quarantine["is_expired"]) == (False, False)
    lines = [json.loads(line) for line in path.read_text().splitlines()[-2:]]
    assert {line["node_id"][-4:]: line["is_quarantined"] for line in lines} == {
        "ring": False,
        "ther": True,
    }
    assert suite.run("--ranks", "2", "-o", "megatron_history=off").returncode == 0
