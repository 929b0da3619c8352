"""`run.json` says how its session ended, so that CI can tell a run that was cut short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SUITE = """
import os

def test_one():
    pass

def test_two():
    {body}
"""


@pytest.mark.parametrize(
    ("body", "arguments", "exit_code"),
    [
        pytest.param("pass", [], 0, id="passed"),
        pytest.param("assert False", [], 1, id="failed"),
        pytest.param("raise KeyboardInterrupt", [], 2, id="interrupted"),
        pytest.param("pass", ["-k", "nothing"], 5, id="nothing-chosen"),
    ],
)
def test_plain_tests_leave_a_run_that_says_how_it_ended(
    pytester: pytest.Pytester, body: str, arguments: list[str], exit_code: int
) -> None:
    pytester.makepyfile(SUITE.format(body=body))
    pytester.runpytest_inprocess(
        "-p", "megatron", "--run-dir", "run", *arguments, no_reraise_ctrlc=True
    )
    run = json.loads(Path("run/run.json").read_text())
    assert (run["exit_code"], run["items"], run["ended"] is not None) == (exit_code, {}, True)


def test_without_the_option_nothing_is_written(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE.format(body="pass"))
    pytester.runpytest_inprocess()
    assert not list(Path().glob("**/run.json"))


def test_a_directory_that_holds_a_run_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE.format(body="pass"))
    pytester.runpytest_inprocess("-p", "megatron", "--run-dir", "run")
    again = pytester.runpytest_inprocess("-p", "megatron", "--run-dir", "run")
    again.stderr.fnmatch_lines(["ERROR: --run-dir: run holds an earlier run; give another"])
    assert again.ret == pytest.ExitCode.USAGE_ERROR


def test_collecting_alone_leaves_no_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE.format(body="pass"))
    pytester.runpytest_inprocess("-p", "megatron", "--run-dir", "run", "--collect-only")
    assert not Path("run").exists()
