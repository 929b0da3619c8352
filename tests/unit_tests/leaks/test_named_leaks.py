"""With `--leaks`, tests fail for what they leave behind in a rank; `tests/leaks` has them."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest
from gang_suite import READS_RANK, Run, Suite

pytestmark = pytest.mark.nightly

LEAKS = Path(__file__).parents[2] / "leaks"
_LEFT = re.compile(r"ERROR at teardown of (\S+) _+\n(?:.*\n)?.*the test left behind: (.*)")


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def found(run: Run) -> dict[str, str]:
    """Return what each test left by its error."""
    return dict(_LEFT.findall(run.stdout))


def expected(file: Path) -> dict[str, str]:
    """Return `LEAKS` of a suite, which this process does not import."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LEAKS":
            leaks: dict[str, str] = ast.literal_eval(node.value)
            return leaks
    raise AssertionError(file)


@pytest.mark.everyday
def test_each_leaker_fails_with_what_it_left_and_no_other_test(suite: Suite) -> None:
    for file in LEAKS.glob("*.py"):
        shutil.copy(file, suite.root)
    run = suite.run("-v", "--ranks=2", "--device=cpu", "-Wignore", "-pleak_fixtures", "--leaks")
    named, leaks = found(run), expected(LEAKS / "test_leaks.py")
    assert sorted(named) == sorted(leaks), run.stdout
    assert {test: text for test, text in leaks.items() if text not in named[test]} == {}, named
    words = {test.rpartition("::")[2]: words for test, words in run.words.items()}
    assert {test for test, words in words.items() if words != "PASSED"} == leaks.keys(), run.stdout
    assert {words[test] for test in leaks} == {"PASSED ERROR"}, run.stdout


SETTINGS = """
    import os
    import threading

    import pytest


    def test_sets():
        os.environ["LEFT"] = "secret"


    def test_fails():
        os.environ["ALSO"] = "1"
        raise AssertionError


    def test_leaves_nothing():
        pass


    @pytest.mark.isolated
    def test_of_its_own_processes():
        os.environ["OWN"] = "1"


    @pytest.fixture(scope="module")
    def leaky():
        threading.Thread(target=threading.Event().wait, name="of-a-fixture", daemon=True).start()


    def test_uses_a_fixture(leaky):
        pass


    def test_uses_it_last(leaky):
        pass


    def test_of_one_rank(rank):
        if rank:
            os.environ["OF_RANK_1"] = "1"
"""


def test_a_leak_fails_its_test_and_names_the_ranks(suite: Suite) -> None:
    suite.write(test_settings=SETTINGS)
    run = suite.run("-v", "--ranks=2", "--leaks")
    assert run.words == {
        "test_sets": "PASSED ERROR",
        "test_fails": "FAILED",
        "test_leaves_nothing": "PASSED",
        "test_uses_a_fixture": "PASSED",
        "test_uses_it_last": "PASSED",
        "test_of_one_rank": "PASSED ERROR",
        "test_of_its_own_processes": "PASSED",
    }, run.stdout
    assert "\nERROR test_settings.py::test_sets - [rank " in run.stdout
    assert "] the test left behind: environment: LEFT set at test_settings.py:8\n" in run.stdout
    of_fixture = "1 thread (of-a-fixture)"
    left = {0: of_fixture, 1: f"{of_fixture}; environment: OF_RANK_1 set"}
    for rank, text in left.items():
        assert f"\nrank {rank}: failed: the test left behind: {text}\n" in run.stdout
    assert "secret" not in run.stdout


@pytest.mark.parametrize("more", [["-pxdist", "-n1"], ["-omegatron_gang_start=collect"]])
def test_leaks_fail_tests_of_workers_and_of_ranks_that_collect(
    tmp_path: Path, more: list[str]
) -> None:
    suite = Suite(tmp_path, has_torch=False).write(conftest=READS_RANK, test_settings=SETTINGS)
    run = suite.run("--ranks=2", *more, "-k", "sets or leaves", "--leaks")
    assert run.summary.replace(" 5 deselected,", "") == "2 passed, 1 error", run.stdout
    assert found(run) == {"test_sets": "environment: LEFT set"}, run.stdout


def test_nothing_is_looked_for_by_default(tmp_path: Path) -> None:
    suite = Suite(tmp_path, has_torch=False).write(
        test_settings=SETTINGS,
        test_modules="""
            import sys

            def test_z(rank):
                assert not {"pytest_megatron.leaks.look"} & {*sys.modules}
        """,
    )
    run = suite.run("--ranks=2", "-k", "not fails")
    assert run.summary == "7 passed, 1 deselected", run.stdout
