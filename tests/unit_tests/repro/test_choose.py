"""Which item of a run is meant, and what ran before it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from recorded_runs import ROW, TEST, a_row, a_test, execution, write_run

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import ReproError, RunError
from pytest_megatron.repro.choose import choose, find_plan, read_own_run
from pytest_megatron.runs.layout import item_dirs
from pytest_megatron.runs.record import read_run


def test_the_only_failure_is_taken_with_what_its_gang_ran_before(tmp_path: Path) -> None:
    items = {
        "test_a.py::later": a_test("passed", attempts=[execution(4)]),
        TEST: a_test(),
        "test_a.py::first": a_test("passed", attempts=[execution(1)]),
        "test_a.py::elsewhere": a_test("passed", attempts=[execution(2, gang=2)]),
        "test_a.py::second": a_test("skipped", attempts=[execution(2)]),
    }
    run = read_run(write_run(tmp_path, items))
    chosen = choose({tmp_path: run}, None)
    assert (chosen.node_id, chosen.before) == (TEST, ("test_a.py::first", "test_a.py::second"))


def test_a_rerun_has_the_order_of_its_own_gang(tmp_path: Path) -> None:
    executions = [execution(2), execution(3, gang=2)]
    items = {
        TEST: a_test("flaky", attempts=list(executions)),
        "test_a.py::first": a_test("passed", attempts=[execution(1)]),
    }
    runs = {tmp_path: read_run(write_run(tmp_path, items))}
    assert choose(runs, None).before == ()
    first = choose(runs, TEST, attempt=1)
    assert (first.before, first.has_failed) == (("test_a.py::first",), True)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            None,
            r"2 items failed; name one:\n  test_a.py::test_x\n  recipes/a.yaml::line\[dev-cpu\]",
        ),
        ("tset_x", r"tset_x: is no item of the run; nearest:\n  test_a.py::test_x"),
        ("a", r"a: fits 2 items, expected one:"),
    ],
)
def test_what_is_not_one_item_is_told_with_the_choices(
    tmp_path: Path, wanted: str | None, message: str
) -> None:
    run = read_run(write_run(tmp_path, {TEST: a_test(), ROW: a_row()}))
    with pytest.raises(ReproError, match=message):
        choose({tmp_path: run}, wanted)


@pytest.mark.parametrize(
    ("wanted", "node_id"),
    [
        ("test_mean", "test_mean.py::test_mean"),
        ("test_sum", "test_mean.py::test_sum[a-b]"),
        ("test_sum[c]", "test_mean.py::test_sum[c]"),
        ("test_mean.py", "test_mean.py::test_sum[a-b]"),
        ("_sum", "test_mean.py::test_sum[a-b]"),
    ],
)
def test_a_name_goes_before_a_part_and_a_failure_before_a_pass(
    tmp_path: Path, wanted: str, node_id: str
) -> None:
    items = {
        "test_mean.py::test_mean": a_test("passed"),
        "test_mean.py::test_mean_of_none": a_test("passed"),
        "test_mean.py::test_sum[a-b]": a_test(),
        "test_mean.py::test_sum[c]": a_test("passed"),
    }
    run = read_run(write_run(tmp_path, items))
    assert choose({tmp_path: run}, wanted).node_id == node_id


def test_a_run_without_a_failure_lists_what_it_has(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {TEST: a_test("passed")}))
    with pytest.raises(ReproError, match="nothing failed in it; name what is to run again:"):
        choose({tmp_path: run}, None)


def test_an_attempt_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {ROW: a_row()}))
    with pytest.raises(ReproError, match="no such attempt, expected repeat 1 attempt 1"):
        choose({tmp_path: run}, None, attempt=2)


def test_a_plan_of_another_item_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, {ROW: a_row()})
    plan = item_dirs(run, ROW).attempt(repeat=1, attempt=1).plan
    plan.write_text(plan.read_text().replace("line", "lime"))
    with pytest.raises(ReproError, match=r"is of 'recipes/a\.yaml::lime\[dev-cpu\]', expected"):
        find_plan(run, ROW, 1, 1)


@pytest.mark.parametrize(
    "node_id",
    [
        "--basetemp=/home/user::x",
        "@arguments.txt::x",
        "../outside/test_a.py::x",
        "/etc/test_a.py::x",
        "test_a.py",
        "test_a.py::x\n--pdb",
        "test_a.py::\x1b[2J",
        "a\\..\\test_a.py::x",
    ],
)
def test_a_name_that_is_no_test_of_the_project_is_refused(tmp_path: Path, node_id: str) -> None:
    run_dir = write_run(tmp_path, {node_id: a_test()})
    with pytest.raises(ReproError, match="is no node id of a test in the project; refused"):
        read_own_run(run_dir)


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"commit": "HEAD; rm -rf ~"}, "commit"),
        ({"commit": "--upload-pack=x"}, "commit"),
        ({"env": {"A=B; C": "1"}}, "env"),
        ({"patch": {"file": "../../.bashrc"}}, "patch.file"),
        ({"seeds": {"randomly_seed": 1}}, "seeds.randomly_seed"),
        ({"options": {"rank_grace": -5}}, "options.rank_grace"),
        ({"options": {"rank_timeout": -1}}, "options.rank_timeout"),
    ],
)
def test_a_record_with_a_value_that_none_has_is_refused(
    tmp_path: Path, more: dict[str, JsonValue], place: str
) -> None:
    run_dir = write_run(tmp_path, {TEST: a_test()}, **more)
    with pytest.raises(RunError, match=re.escape(f"run.json: {place}")):
        read_own_run(run_dir)
