"""pytest-testmon on gangs: what ranks execute decides which tests a change selects."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from gang_suite import RecordedSuite, Run

pytestmark = pytest.mark.nightly

FILES = {
    "library.py": """\
        def double(n):
            return 2 * n


        def on_rank_1(n):
            return n


        def in_controller():
            return 3


        def unused():
            return 0
        """,
    "conftest.py": """\
        import os

        import pytest

        KIND = os.environ.get("KIND") and os.environ.get("RANK")


        @pytest.fixture
        def number(rank):
            return rank


        def pytest_runtest_logreport(report):
            assert report.nodeid
        """,
    "test_it.py": """\
        import library
        import pytest


        def test_double(rank):
            assert library.double(rank) == 2 * rank


        @pytest.mark.controller
        def test_controller():
            assert library.in_controller() == 3


        def test_on_rank_1(number):
            if number == 1:
                assert library.on_rank_1(number) == 1


        def test_else(rank):
            assert rank >= 0
        """,
}
NAMES = {"test_double", "test_controller", "test_on_rank_1", "test_else"}
TESTMON = ("--testmon", "--ranks", "2", "--device", "cpu")


def suite_in(root: Path) -> RecordedSuite:
    suite = RecordedSuite(root=root)
    for name, text in FILES.items():
        suite.write(**{name: text})
    return suite


def edit(suite: RecordedSuite, name: str, old: str, new: str) -> None:
    path = suite.root / name
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def ran(run: Run, *, failed: Sequence[str] = ()) -> set[str]:
    """Return the tests that ran; only those given may have failed."""
    found = run.outcomes
    assert {name for name, word in found.items() if word != "PASSED"} == set(failed), run.stdout
    assert run.returncode == (1 if failed else 0), run.stdout + run.stderr
    return set(found)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite whose first run recorded every test."""
    suite = suite_in(tmp_path_factory.mktemp("recorded"))
    run = suite.run(*TESTMON)
    assert "new DB" in run.stdout
    assert ran(run) == NAMES
    return suite.root


@pytest.fixture
def suite(recorded: Path, tmp_path: Path) -> RecordedSuite:
    return RecordedSuite(root=Path(shutil.copytree(recorded, tmp_path / "suite")))


@pytest.mark.everyday
@pytest.mark.parametrize(
    ("name", "old", "new", "selected"),
    [
        pytest.param("library.py", "return 2 * n", "return n + n", {"test_double"}, id="library"),
        pytest.param("test_it.py", "rank >= 0", "rank > -1", {"test_else"}, id="test"),
        pytest.param(
            "conftest.py", "return rank", "return +rank", {"test_on_rank_1"}, id="conftest"
        ),
        pytest.param("library.py", "return n\n", "return +n\n", {"test_on_rank_1"}, id="rank-1"),
        pytest.param(
            "library.py", "return 3", "return 1 + 2", {"test_controller"}, id="controller"
        ),
        pytest.param("library.py", "return 0", "return -1", set(), id="unused"),
    ],
)
def test_a_change_selects_the_tests_that_executed_it(
    suite: RecordedSuite, name: str, old: str, new: str, selected: set[str]
) -> None:
    edit(suite, name, old, new)
    run = suite.run(*TESTMON)
    assert ran(run) == selected
    if selected:
        assert run.summary.startswith("1 passed, 3 deselected"), run.stdout


def test_a_test_that_fails_on_one_rank_stays_selected(suite: RecordedSuite) -> None:
    edit(suite, "library.py", "return n\n", "return n + 1\n")
    for _ in range(2):
        assert ran(suite.run(*TESTMON), failed=["test_on_rank_1"]) == {"test_on_rank_1"}
    edit(suite, "library.py", "return n + 1\n", "return n\n")
    assert ran(suite.run(*TESTMON)) == {"test_on_rank_1"}
    assert ran(suite.run(*TESTMON)) == set()


DIES = """
    import os


    def test_dies(rank):
        if rank == 1 and "DIES" in os.environ:
            os._exit(3)


    def test_after(rank):
        pass
"""


def test_ranks_that_collect_for_themselves_record_and_select(tmp_path: Path) -> None:
    """Those that are started in the middle of a session select as at its beginning."""
    suite = suite_in(tmp_path).write(test_later=DIES)
    collect = ("-o", "megatron_gang_start=collect")  # also those of a gang that replaces another
    first = suite.run(*TESTMON, *collect, env={"KIND": "collect", "DIES": "1"})
    assert ran(first, failed=["test_dies"]) == NAMES | {"test_dies", "test_after"}
    edit(suite, "library.py", "return n\n", "return +n\n")
    second = suite.run(*TESTMON, "-v", env={"KIND": "collect"})
    assert "every rank collects for itself: RANK in " in second.stdout
    assert ran(second) == {"test_on_rank_1", "test_dies"}
    assert second.summary == "2 passed, 4 deselected"


LATE = """
    import os

    import pytest


    @pytest.fixture(scope="session")
    def wide(rank):
        yield
        assert "BAD" not in os.environ


    def test_wide(wide):
        pass


    @pytest.mark.isolated
    def test_last(rank):
        pass
"""


def test_a_test_stays_selected_whose_fixture_fails_at_the_end_of_the_session(
    tmp_path: Path,
) -> None:
    suite = RecordedSuite(root=tmp_path).write(test_it=LATE)
    words = (*TESTMON, "-n", "1")
    first = suite.run(*words, env={"BAD": "1"})
    assert first.summary == "2 passed, 1 error"
    assert set(suite.run(*words).outcomes) == {"test_wide", "test_last"}
