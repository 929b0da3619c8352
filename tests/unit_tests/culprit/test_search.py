"""Decisions of a search, and the judgement of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_megatron.culprit.command import judge
from pytest_megatron.culprit.search import (
    CulpritRun,
    CulpritState,
    Outcome,
    next_position,
    report_of,
)
from pytest_megatron.errors import CulpritError
from pytest_megatron.runs.junit import JUnitCase
from pytest_megatron.runs.record import RecordedExecution, RecordedTest, RecordedVerdict

STATE = CulpritState(
    item="test_a.py::test_x",
    prefix="",
    commits=tuple(f"{number:040x}" for number in range(9)),
    subjects=tuple(f"Change {number}" for number in range(9)),
    flake_rate=0.0,
    argv=("python",),
)


def after(*runs: tuple[int, Outcome], **changes: float) -> CulpritState:
    done = tuple(
        CulpritRun(position=place, outcome=outcome, problem="why") for place, outcome in runs
    )
    return replace(STATE, runs=done, **changes)  # type: ignore[arg-type] # only numbers change


def search(first_bad: int, untestable: set[int]) -> CulpritState:
    """Return a search that is over, of an item that never misleads."""
    state = STATE
    while (place := next_position(state)) is not None:
        judged: Outcome = "failed" if place >= first_bad else "passed"
        run = CulpritRun(position=place, outcome="untestable" if place in untestable else judged)
        state = replace(state, runs=(*state.runs, run))
    return state


@pytest.mark.parametrize("first_bad", range(1, 9))
def test_each_commit_is_found_in_no_more_runs_than_bisection_needs(first_bad: int) -> None:
    state = search(first_bad, set())
    report = report_of(state)
    assert (report.commit, report.subject) == (STATE.commits[first_bad], f"Change {first_bad}")
    assert len(state.runs) <= 2 + 3


def test_a_commit_that_cannot_be_run_is_left_among_the_candidates() -> None:
    report = report_of(search(5, {4}))
    assert report.commit is None
    assert report.candidates == STATE.commits[4:6]


def test_both_ends_are_run_first() -> None:
    assert next_position(STATE) == 0
    assert next_position(after((0, "passed"))) == 8
    assert next_position(after((0, "passed"), (8, "failed"))) == 4


def test_a_broken_run_is_repeated_and_after_three_the_commit_is_given_up() -> None:
    state = after((0, "passed"), (8, "failed"), (4, "broken"), (4, "broken"))
    assert next_position(state) == 4
    assert state.untestable == {}
    broken: tuple[int, Outcome] = (4, "broken")
    state = after((0, "passed"), (8, "failed"), broken, broken, broken)
    assert next_position(state) in (3, 5)
    assert state.untestable == {4: "broken 3 times: why"}


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ([(0, "failed"), (8, "failed")], "--good .*failed in 1 of 1 runs there, expected passes"),
        ([(0, "passed"), (8, "passed")], "--bad .*failed in 0 of 1 runs there, expected failures"),
        ([(0, "untestable")], "--good .*cannot run there: why; give another commit"),
        ([(0, "passed"), (8, "untestable")], "--bad .*cannot run there: why"),
    ],
)
def test_an_end_that_is_not_as_it_has_to_be_is_an_error(
    runs: list[tuple[int, Outcome]], text: str
) -> None:
    with pytest.raises(CulpritError, match=text):
        next_position(after(*runs))


def test_a_failure_at_the_good_end_is_no_error_yet_of_a_flaky_item() -> None:
    assert next_position(after((0, "failed"), (0, "failed"), flake_rate=0.3)) == 0
    with pytest.raises(CulpritError, match="failed in 3 of 3 runs there"):
        next_position(after((0, "failed"), (0, "failed"), (0, "failed"), flake_rate=0.3))


def test_a_search_ends_after_the_largest_number_of_runs_undecided() -> None:
    state = after((0, "passed"), (8, "failed"), (4, "passed"), max_runs=3)
    assert next_position(state) is None
    report = report_of(state)
    assert report.commit is None
    assert report.candidates == STATE.commits[5:]


def a_test(verdict: RecordedVerdict, *, is_transient: bool = False) -> RecordedTest:
    attempts = (RecordedExecution(is_transient=is_transient),)
    return RecordedTest(verdict=verdict, world_size=2, attempts=attempts, problem="no")


def case(outcome: str) -> JUnitCase:
    return JUnitCase(
        classname="test_a", name="test_x", outcome=outcome, message="why", text="", duration_s=0
    )


@pytest.mark.parametrize(
    ("record", "outcome"),
    [
        (a_test("passed"), "passed"),
        (a_test("flaky"), "passed"),
        (a_test("failed"), "failed"),
        (a_test("failed", is_transient=True), "broken"),
        (a_test("broken"), "broken"),
        (a_test("skipped"), "untestable"),
    ],
)
def test_the_verdict_decides(record: RecordedTest, outcome: str) -> None:
    assert judge(1, record, [case("failed")])[0] == outcome


@pytest.mark.parametrize(
    ("returncode", "outcomes", "expected"),
    [
        (0, ["passed"], ("passed", "")),
        (1, ["failed"], ("failed", "why")),
        (1, ["passed", "broken"], ("failed", "why")),
        (0, ["skipped"], ("untestable", "skipped: why")),
        (-11, [], ("failed", "pytest was killed by SIGSEGV")),
        (-9, [], ("broken", "pytest was killed by SIGKILL")),
        (1, [], ("untestable", "pytest left no report of it")),
        (3, [], ("broken", "pytest itself failed")),
        (5, [], ("untestable", "there is no such test here")),
    ],
)
def test_a_test_without_a_gang_is_judged_by_what_pytest_reports(
    returncode: int, outcomes: list[str], expected: tuple[str, str]
) -> None:
    assert judge(returncode, None, list(map(case, outcomes))) == expected
