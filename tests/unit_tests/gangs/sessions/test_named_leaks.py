"""What tests leave behind in their ranks is named, and nothing else; `tests/leaks` has them."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest
from gang_suite import READS_RANK, Run, Suite

LEAKS = Path(__file__).parents[3] / "leaks"
_LINE = re.compile(r"^megatron: audit: \S+::(\S+): (.*)$", re.MULTILINE)


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def found(run: Run) -> dict[str, str]:
    """Return what `-v` printed of each test that left something."""
    return dict(_LINE.findall(run.stdout))


def expected(file: Path) -> dict[str, str]:
    """Return `LEAKS` of a suite, which this process does not import."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LEAKS":
            leaks: dict[str, str] = ast.literal_eval(node.value)
            return leaks
    raise AssertionError(file)


def test_each_leaker_is_named_with_what_it_left_and_no_other_test(suite: Suite) -> None:
    for file in LEAKS.glob("*.py"):
        shutil.copy(file, suite.root)
    run = suite.run("-v", "--ranks=2", "--device=cpu", "-Wignore", "-pleak_fixtures")
    named = found(run)
    leaks: dict[str, str] = {}
    for file in LEAKS.glob("test_*.py"):
        leaks |= expected(file)
    assert {line.rpartition(" ")[2] for line in run.lines} == {"PASSED"}, run.stdout
    assert sorted(named) == sorted(leaks), run.stdout
    assert {test: text for test, text in leaks.items() if text not in named[test]} == {}, named
    summary = f"megatron: audit: {len(leaks)} of {len(run.lines)} tests left something behind in"
    assert run.stdout.count(summary) == 1


SETTINGS = """
    import os
    import threading

    import pytest


    def test_sets():
        os.environ["LEFT"] = "secret"


    @pytest.mark.audit(allow=["environment"])
    def test_may_set():
        os.environ["EXCUSED"] = "1"


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
"""


def test_a_leak_fails_its_test_where_that_is_asked_for(suite: Suite) -> None:
    suite.write(test_settings=SETTINGS)
    run = suite.run("-v", "--ranks=2", "--audit=fail", "--junitxml=junit.xml")
    assert run.words == {
        "test_sets": "PASSED ERROR",
        "test_may_set": "PASSED",
        "test_fails": "FAILED",
        "test_leaves_nothing": "PASSED",
        "test_uses_a_fixture": "PASSED",
        "test_uses_it_last": "PASSED ERROR",
        "test_of_its_own_processes": "PASSED",
    }, run.stdout
    assert "\nthe test left behind: environment: LEFT set\n" in run.stdout
    text = "1 thread (of-a-fixture), of fixture leaky"
    assert f"\nthe test left behind: {text}\n" in run.stdout
    assert found(run)["test_fails"] == "environment: ALSO set"
    assert "secret" not in run.stdout
    left = {
        c.name.partition("::")[2]: dict(c.properties).get("megatron.left") for c in suite.junit()
    }
    assert left["test_sets"] == "environment: LEFT set"
    assert left["test_leaves_nothing"] is None


@pytest.mark.parametrize("more", [["-pxdist", "-n1"], ["-omegatron_gang_start=fresh"]])
def test_leaks_are_named_in_workers_and_in_ranks_that_collect(
    tmp_path: Path, more: list[str]
) -> None:
    suite = Suite(tmp_path, has_torch=False).write(conftest=READS_RANK, test_settings=SETTINGS)
    run = suite.run("--ranks=2", *more, "-k", "sets or leaves")
    named = "test_settings.py::test_sets (environment: LEFT set)"
    assert f"1 of 2 tests left something behind in their ranks: {named}\n" in run.stdout, run.stdout


def test_nothing_is_looked_for_where_that_is_turned_off(tmp_path: Path) -> None:
    suite = Suite(tmp_path, has_torch=False).write(conftest=READS_RANK, test_settings=SETTINGS)
    run = suite.run("--ranks=2", "-pxdist", "-n1", "-k", "sets or leaves", "--audit=off")
    assert run.summary == "2 passed", run.stdout
    assert "audit" not in run.stdout


FIRST_USES = """
    import functools
    import signal

    import torch


    def test_steps():
        before = torch.manual_seed
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)  # loads torch._dynamo
        weight.sum().backward()
        optimizer.step()
        assert torch.manual_seed is not before


    def test_compiles():
        before = torch.nn.Module.__init__
        torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(2))
        assert torch.nn.Module.__init__ is not before


    def test_loads():
        assert len(list(torch.utils.data.DataLoader([1, 2], num_workers=1))) == 2
        assert signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL


    def test_handles():
        signal.signal(signal.SIGCHLD, lambda *_: None)


    def test_wraps():
        seed = torch.manual_seed

        @functools.wraps(seed)
        def wrapper(value):
            return seed(value)

        torch.manual_seed = wrapper
"""


def test_what_torch_replaces_at_its_first_use_is_no_leak(suite: Suite) -> None:
    """By a compiled module, a loader with workers and an optimizer."""
    suite.write(test_first_uses=FIRST_USES)
    run = suite.run("-v", "--ranks=1", "--device=cpu", "--audit=fail")
    assert found(run).keys() == {"test_handles", "test_wraps"}, run.stdout
    assert found(run)["test_wraps"] == "patched torch.manual_seed"
    assert "handler of SIGCHLD: test_handles." in found(run)["test_handles"]
    assert run.words["test_compiles"] == run.words["test_loads"] == "PASSED", run.stdout
    assert run.words["test_steps"] == "PASSED", run.stdout


def test_a_mark_that_allows_something_unknown_is_a_usage_error(suite: Suite) -> None:
    suite.write(
        test_marks="""
            import pytest

            @pytest.mark.audit
            def test_of_a_project(): ...

            @pytest.mark.audit(allow=["sockets"])
            def test_is_wrong(): ...
        """
    )
    run = suite.run("--ranks=2")
    assert run.returncode == 4, run.stdout
    problem = "mark audit: allow=['sockets'] is given, expected a list of groups, cuda-memory, "
    assert f"test_marks.py::test_is_wrong: {problem}" in run.stdout + run.stderr
    assert suite.run("--ranks=2", "-k", "of_a_project").returncode == 0


def test_tests_that_ran_at_no_size_are_listed_by_reason(suite: Suite) -> None:
    suite.write(
        test_sizes="""
            import pytest

            @pytest.mark.world_size(1, 2)
            def test_of_two(world_size):
                if world_size == 1:
                    pytest.skip("needs 2 ranks")

            @pytest.mark.world_size(1, 2)
            def test_of_four():
                pytest.skip("needs 4 ranks")

            def test_other():
                pass
        """
    )
    run = suite.run("-v", "--ranks=2", "--device=cpu", "-k", "not other")
    assert (
        "\nmegatron: 1 test ran nowhere: needs 4 ranks: test_sizes.py::test_of_four\n" in run.stdout
    )
    by_option = "deselected by -k 'not other'"
    assert f"\nmegatron: 1 test ran nowhere: {by_option}: test_sizes.py::test_other\n" in run.stdout
    assert run.stdout.count("ran nowhere") == 2
