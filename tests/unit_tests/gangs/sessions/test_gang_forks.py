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
CHILDREN = """
    @pytest.mark.parametrize(
        ("end", "code"),
        [
            (lambda: None, 0),
            (lambda: pytest.fail("in a child"), 1),
            (lambda: sys.exit(3), 3),
            (lambda: sys.exit("text"), 1),
            (lambda: pytest.exit("in a child"), 1),
            (lambda: pytest.skip("in a child"), 1),
        ],
        ids="returns fails exits exits_text ends_pytest skips".split(),
    )
    def test_child(end, code):
        pid = os.fork()
        if pid == 0:
            return end()
        assert code_of(pid) == code

    @pytest.fixture
    def outer():
        owner = os.getpid()
        yield
        assert owner == os.getpid()

    @pytest.fixture
    def fails_to_tear_down(outer):
        yield
        pid = os.fork()
        if pid == 0:
            raise ValueError("in a child")
        assert code_of(pid) != 0
        raise ValueError("in the rank")

    def test_failing_teardown(fails_to_tear_down):
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


def test_children_end_where_they_come_back(tmp_path: Path) -> None:
    """They have the exit codes of a program, and end no fixture of their parent."""
    run = suite_of(tmp_path, test_children=CHILDREN).run("-v", "--ranks=2")
    words = {name: word for name, word in run.words.items() if word != "PASSED"}
    assert words == {"test_failing_teardown": "PASSED ERROR"}, run.stdout


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
