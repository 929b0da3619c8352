"""Tests that fork, and whose child comes back through pytest: it must not answer for the rank."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from gang_suite import READS_RANK, Suite

pytestmark = pytest.mark.nightly

HELPERS = """
    import os
    import signal
    import sys

    import pytest

    def code_of(pid):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
ENDS = {  # what a parent does once its child has come back -> how its rank ends
    "assert False": "FAILED",
    "os.kill(os.getpid(), signal.SIGKILL)": "FAILED",
    "os._exit(3)": "FAILED",
    "sys.exit(3)": "FAILED",
    "pytest.skip('not here')": "SKIPPED",
    "os._exit(0)": "FAILED",
}
RETURNS = """
    def test_end_{number}():
        pid = os.fork()
        if pid == 0:
            return
        assert code_of(pid) == 0
        {end}

    def test_after_{number}():
        pass
"""


def suite_of(root: Path, **files: str) -> Suite:
    texts = {name: dedent(HELPERS) + dedent(text) for name, text in files.items()}
    return Suite(root, has_torch=False).write(**texts)


@pytest.mark.parametrize(("size", "how"), [(1, "forked"), (2, "forked"), (2, "collects")])
def test_the_parent_decides(tmp_path: Path, size: int, how: str) -> None:
    parts = [RETURNS.format(number=n, end=end) for n, end in enumerate(ENDS)]
    suite = suite_of(tmp_path, test_ends="".join(parts))
    if how == "collects":
        suite.write(conftest=READS_RANK)
    run = suite.run("-v", f"--ranks={size}", "-omegatron_rank_grace=3")
    expected = {f"test_end_{n}": word for n, word in enumerate(ENDS.values())}
    expected |= {f"test_after_{n}": "PASSED" for n in range(len(ENDS))}
    assert run.words == expected, run.stdout
    assert run.stdout.count("came back through pytest") >= size


def test_children_of_the_controller_run_no_further_tests(tmp_path: Path) -> None:
    suite = suite_of(
        tmp_path,
        test_controller="""
            @pytest.mark.controller
            def test_forks():
                pid = os.fork()
                if pid:
                    assert code_of(pid) == 0

            @pytest.mark.controller
            def test_of_the_controller():
                print("controller", file=open("ran", "a"))

            def test_of_ranks(rank):
                print("rank", file=open("ran", "a"))
            """,
    )
    run = suite.run("-v", "--ranks=2")
    assert run.summary == "3 passed", run.stdout
    assert sorted(suite.read("ran")) == ["controller", "rank", "rank"]


@pytest.mark.parametrize("how", ["forked", "collects"])
def test_children_of_an_import_run_no_tests(tmp_path: Path, how: str) -> None:
    suite = suite_of(
        tmp_path,
        test_import="""
            pid = os.fork()
            if pid:
                code_of(pid)

            def test_of_ranks(rank):
                print("rank", file=open("ran", "a"))
            """,
    )
    if how == "collects":
        suite.write(conftest=READS_RANK)
    run = suite.run("-v", "--ranks=2")
    assert run.summary == "1 passed", run.stdout
    assert suite.read("ran") == ["rank", "rank"]
