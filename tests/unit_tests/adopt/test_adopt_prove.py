"""Outcomes under a launcher and under pytest-megatron: what counts as equal, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.adopt.find import search
from pytest_megatron.adopt.prove import (
    ComparedFile,
    SideRun,
    compare_sides,
    is_proved,
    merge_ranks,
    plan_proofs,
    proof_lines,
)
from pytest_megatron.ci.summary.junit import JUnitCase
from pytest_megatron.errors import AdoptError


def case(outcome: str, message: str = "", name: str = "test_x") -> JUnitCase:
    return JUnitCase(
        classname="tests.test_a",
        name=name,
        outcome=outcome,
        message=message,
        text="",
        duration_s=0.0,
    )


NAME = "tests/test_a.py::test_x"


@pytest.mark.parametrize(
    ("ranks", "merged"),
    [
        (["passed", "passed"], "passed"),
        (["passed", "failed"], "failed"),
        (["passed", "broken"], "failed"),
        (["skipped", "skipped"], "skipped"),
        (["passed", "skipped"], "mixed"),
    ],
)
def test_ranks_have_one_outcome(ranks: list[str], merged: str) -> None:
    assert merge_ranks([[case(one)] for one in ranks])[NAME][0] == merged


def test_a_test_that_a_rank_lacks_is_mixed() -> None:
    assert merge_ranks([[case("passed")], []])[NAME][0] == "mixed"


def test_an_error_in_teardown_makes_a_failure() -> None:
    assert merge_ranks([[case("passed"), case("broken", "boom")]])[NAME] == ("failed", "boom")


def test_without_every_report_only_a_failure_is_known() -> None:
    cases = [case("passed", name="test_a"), case("failed", "no", name="test_b")]
    assert merge_ranks([cases], is_whole=False) == {"tests/test_a.py::test_b": ("failed", "no")}


def side(outcome: str, message: str = "", reason: str = "") -> SideRun:
    outcomes = {NAME: (outcome, message)} if outcome else {}
    return SideRun(outcomes=outcomes, reason=reason, duration_s=1.0)


@pytest.mark.parametrize(
    ("launched", "adopted", "verdict", "reason"),
    [
        (side("passed"), side("passed"), "equal", ""),
        (side("failed", "a"), side("failed", "b"), "equal", "b"),
        (side("passed"), side("failed", "b"), "different", "b"),
        (side("mixed", "odd"), side("failed", "b"), "different", "b"),
        (side("failed", "a"), side("skipped", "b"), "different", "b"),
        (side("skipped", "no GPU"), side("skipped", "no GPU"), "not here", "no GPU"),
        (side("", reason="exit 1"), side("passed"), "not here", "exit 1"),
        (side("passed"), side("", reason="exit 4"), "different", "exit 4"),
        (side("passed"), side(""), "different", "pytest-megatron did not report it"),
    ],
)
def test_a_verdict_is_equal_only_if_the_test_ran_under_both(
    launched: SideRun, adopted: SideRun, verdict: str, reason: str
) -> None:
    (test,) = compare_sides(launched, adopted)
    assert (test.verdict, test.reason) == (verdict, reason)


def test_a_file_without_tests_is_one_that_could_not_run() -> None:
    (test,) = compare_sides(side("", reason="exit 1: No module"), side(""))
    assert (test.verdict, test.reason) == ("not here", "exit 1: No module")


def compared(*pairs: tuple[SideRun, SideRun]) -> list[ComparedFile]:
    return [
        ComparedFile(
            file="tests/test_a.py",
            tests=tuple(compare_sides(*pair)),
            launched_s=1,
            adopted_s=1,
        )
        for pair in pairs
    ]


def test_nothing_is_proved_by_tests_that_did_not_run() -> None:
    equal = (side("passed"), side("passed"))
    skipped = (side("skipped"), side("skipped"))
    other = (side("passed"), side("failed"))
    assert is_proved(compared(equal, skipped))
    assert not is_proved(compared(skipped))
    assert not is_proved(compared(equal, other))


def test_the_sums_name_each_kind() -> None:
    done = compared(
        (side("passed"), side("passed")),
        (side("failed", "x"), side("failed", "x")),
        (side("skipped", "no GPU"), side("skipped", "no GPU")),
        (side("mixed", "odd"), side("failed", "rank 1 skipped")),
    )
    assert list(proof_lines(done, ["b.py"])) == [
        f"different: {NAME}: mixed under the launcher, failed under pytest-megatron:",
        "  rank 1 skipped",
        "could not run here:",
        "  1  no GPU",
        "not tried, as the time was over: 1 file",
        "4 tests: 2 equal (1 failed, 1 passed), 1 different, 1 could not run here",
    ]


def plans(root: Path, script: str, *, ranks: int | None = None) -> tuple[list[object], list[str]]:
    (root / "tests").mkdir(exist_ok=True)
    (root / "tests" / "test_a.py").write_text("")
    (root / "run.sh").write_text(script)
    made, problems = plan_proofs(root, search(root), (), ranks)
    return [(one.files, one.arguments, one.num_ranks) for one in made], problems


def test_a_command_is_cut_to_what_fits(tmp_path: Path) -> None:
    script = "torchrun --nproc-per-node 8 -m pytest tests -k 'a b' --junitxml=x.xml -s\n"
    made, problems = plans(tmp_path, script, ranks=2)
    assert (made, problems) == ([(("tests/test_a.py",), ("-k", "a b", "-s"), 2)], [])


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("mpirun -n 2 pytest tests", "mpi starts other processes than ranks of torch"),
        ("torchrun --nnodes 2 -m pytest tests", "it spans 2 nodes"),
        ("torchrun -m pytest $BUCKET", "only its script knows $BUCKET; name files with --tests"),
        ("torchrun -m pytest tests/none.py -x", "tests/none.py is not here"),
    ],
)
def test_a_command_that_cannot_run_here_has_its_reason(
    tmp_path: Path, script: str, problem: str
) -> None:
    made, problems = plans(tmp_path, script)
    assert (made, problems) == ([], [f"run.sh:1: not run, {problem}"])


def test_tests_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(AdoptError, match=r"^--tests none: is not in"):
        plan_proofs(tmp_path, search(tmp_path), ("none",), None)
