"""What distributed tests came to: `run.json`, reruns for transient causes, header and summary."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import cast

import pytest
from gang_suite import RecordedSuite, Run

from pytest_megatron.base.files import JsonValue

SUITE = """
    import os, sys, unittest
    from pathlib import Path
    import pytest

    def count(name, rank):
        path = Path(f"{name}-{rank}")
        number = int(path.read_text()) if path.exists() else 0
        path.write_text(str(number + 1))
        return number

    def test_flaky(rank):
        if count("flaky", rank) == 0 and rank == 1:
            raise RuntimeError("bind: Address already in use")

    def test_dies_twice(rank):
        if count("dies", rank) < 2 and rank == 0:
            print("GPU has fallen off the bus", file=sys.stderr)
            os._exit(1)

    def test_only_quotes(rank):
        print("GPU has fallen off the bus", file=sys.stderr)
        assert "Address already in use" == rank

    @pytest.mark.isolated
    @pytest.mark.world_size(1)
    def test_isolated():
        pass

    @pytest.mark.controller
    def test_of_the_controller():
        pass

    @pytest.mark.skip("not today")
    def test_skipped():
        pass

    class TestUnit(unittest.TestCase):
        @unittest.skipUnless(False, "test requires a GPU")
        def test_of_unittest(self):
            pass

    @pytest.mark.xfail
    def test_xfails():
        assert False
"""


@pytest.fixture(scope="module", params=[(), ("-n", "1")], ids=["alone", "xdist"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    suite = RecordedSuite(root=tmp_path_factory.mktemp("results")).write(test_it=SUITE)
    more: tuple[str, ...] = request.param
    return suite.run(
        "--ranks",
        "2",
        "--rerun-transient",
        "2",
        "-o",
        "megatron_rank_grace=1",
        "--junitxml",
        "j.xml",
        *more,
    )


def test_only_transient_failures_run_again(run: Run) -> None:
    assert run.summary == "1 failed, 4 passed, 2 skipped, 1 xfailed"
    assert run.outcomes["test_only_quotes"] == "FAILED"
    start = next(n for n, line in enumerate(run.printed) if line.strip("- ") == "distributed tests")
    assert run.printed[start + 1 : start + 3] == [
        "flaky   test_it.py::test_flaky  passed at rerun 1, after port_in_use",
        "flaky   test_it.py::test_dies_twice  passed at rerun 2, after gpu_lost, gpu_lost",
    ]


def test_junit_has_reruns_as_properties(run: Run) -> None:
    text = (run.directory.parent / "j.xml").read_text()
    found = re.findall(r'name="megatron\.(\w+)" value="(\w+)"', text)
    assert found == [
        ("reruns", "1"),
        ("signature", "port_in_use"),
        ("reruns", "2"),
        ("signature", "gpu_lost"),
    ]


def test_run_json_has_every_test_of_a_gang(run: Run) -> None:
    assert {name: record["verdict"] for name, record in run.items.items()} == {
        "test_flaky": "flaky",
        "test_dies_twice": "flaky",
        "test_only_quotes": "failed",
        "test_isolated": "passed",
        "test_skipped": "skipped",
        "test_of_unittest": "skipped",
        "test_xfails": "passed",
    }
    assert run.items["test_skipped"]["problem"] == "not today"
    assert run.items["test_of_unittest"]["problem"] == "test requires a GPU"
    assert run.items["test_xfails"]["problem"] is None
    failed = run.items["test_only_quotes"]
    ranks = failed["ranks"]
    assert isinstance(ranks, dict)
    assert sorted(ranks) == ["0", "1"]
    assert "assert 'Address already in use' == " in str(failed["problem"])
    told = dict(cast("list[tuple[str, str]]", failed["report"]))
    assert '\n>       assert "Address already in use" == rank\n' in told["traceback"]
    (output,) = [text for title, text in told.items() if title.startswith("Captured stderr call")]
    assert "fallen off" in output
    isolated = run.items["test_isolated"]
    assert [isolated[key] for key in ("world_size", "device", "is_isolated")] == [1, "cpu", True]
    attempts = run.items["test_dies_twice"]["attempts"]
    assert isinstance(attempts, list)
    kept = [attempt for attempt in attempts if isinstance(attempt, dict)]
    assert [(a["end"], a["is_gang_kept"], a["signature"]) for a in kept] == [
        ("died", False, "gpu_lost"),
        ("died", False, "gpu_lost"),
        ("done", True, None),
    ]
    logs = [Path(str(attempt["directory"])) / "0" / "stderr.log" for attempt in kept[:2]]
    assert all("GPU has fallen off" in path.read_text() for path in logs)


def test_nothing_runs_again_unless_it_was_asked_for(tmp_path: Path) -> None:
    suite = RecordedSuite(root=tmp_path).write(test_it=SUITE)
    run = suite.run("--ranks", "2", "-k", "flaky")
    assert run.summary == "1 failed, 7 deselected"
    assert run.items["test_flaky"]["problem"] == (
        "[rank 1] RuntimeError: bind: Address already in use at test_it.py:14"
    )
    again = suite.run(command=suite.command("--ranks", "2", "-k", "flaky"))
    assert (again.returncode, again.stderr.strip()) == (
        pytest.ExitCode.USAGE_ERROR,
        "ERROR: --run-dir: run holds an earlier run; give another",
    )


def test_two_sessions_do_not_share_a_run_dir(tmp_path: Path) -> None:
    suite = RecordedSuite(root=tmp_path).write(
        test_it="""
        import os
        import pathlib
        import subprocess
        import sys

        def test_outer(rank):
            if rank == 0 and "INNER" not in os.environ:
                command = [sys.executable, "-m", "pytest", "-p", "megatron", "--ranks", "1"]
                inner = subprocess.run(
                    [*command, "--run-dir", "run", __file__],
                    env={**os.environ, "INNER": "1"} | {"RANK": "", "WORLD_SIZE": ""},
                    capture_output=True,
                    text=True,
                )
                assert "another session runs in run, or was killed" in inner.stderr
                assert inner.returncode == 4
        """,
    )
    assert suite.run("--ranks", "2").summary == "1 passed"


def test_a_plan_says_which_gangs_would_run_what(tmp_path: Path) -> None:
    suite = RecordedSuite(root=tmp_path).write(test_it=SUITE)
    run = suite.run("--ranks", "2", "--device", "cpu", "--plan")
    assert (run.returncode, run.stderr) == (0, "")
    start = run.printed.index("gangs of 2 ranks on cpu: 6 tests")
    assert run.printed[start + 1 : start + 3] == [
        "gangs of 1 rank on cpu, a gang for each: 1 test",
        "in this process: 1 test",
    ]
    assert not run.directory.exists()
    assert "flaky-0" not in [path.name for path in tmp_path.iterdir()]


def test_a_session_without_gangs_writes_how_it_ended_and_no_items(tmp_path: Path) -> None:
    suite = RecordedSuite(root=tmp_path).write(test_it=SUITE)
    suite.run("--ranks", "2", "-k", "of_the_controller")
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert ([file.name for file in (tmp_path / "run").iterdir()], run["items"]) == (
        ["run.json"],
        {},
    )


def test_distributed_tests_share_the_limit_of_the_run_and_fail_it_when_flaky(
    tmp_path: Path,
) -> None:
    suite = RecordedSuite(root=tmp_path).write(test_it=SUITE)
    chosen = ("-k", "test_flaky or test_isolated", "--ranks", "2", "--rerun-transient", "2")
    run = suite.run(*chosen, "-o", "megatron_fail_flaky=1", "-o", "megatron_max_retries_per_run=1")
    assert (run.summary, run.returncode) == ("2 passed, 6 deselected", 1)
    assert "megatron: 1 item was flaky, and megatron_fail_flaky is set" in run.printed
    suite.write(test_it=SUITE)
    for rank in range(2):
        (tmp_path / f"flaky-{rank}").unlink()
    run = suite.run(*chosen, "-o", "megatron_max_retries_per_run=0")
    assert run.outcomes["test_flaky"] == "FAILED"
    why = next(n for n, line in enumerate(run.printed) if line.strip("- ") == "not run again")
    assert run.printed[why + 1] == "the run's 0 further attempts are used up"


def test_a_line_in_stderr_makes_neither_a_deadlock_nor_an_exception_transient(
    tmp_path: Path,
) -> None:
    """Only a rank that died by itself says there why."""
    suite = RecordedSuite(root=tmp_path).write(
        test_it="""
        import sys
        import threading

        def test_hangs(rank):
            print("RuntimeError: bind: Address already in use", file=sys.stderr)
            if rank == 1:
                threading.Event().wait(1000)

        def test_raises():
            print("RuntimeError: bind: Address already in use", file=sys.stderr)
            raise KeyError("of its own")
        """,
    )
    options = ("--rerun-transient", "1", "--rank-timeout", "2", "-o", "megatron_rank_grace=1")
    run = suite.run("--ranks", "2", *options)
    assert run.summary == "2 failed"
    assert {str(record["verdict"]) for record in run.items.values()} == {"failed"}
    for record in run.items.values():
        assert len(cast("list[JsonValue]", record["attempts"])) == 1
