"""Ranks of one test that end it in different ways."""

from __future__ import annotations

from pathlib import Path

from gang_suite import Suite

SPLIT = """
    import unittest
    import warnings

    import pytest


    @pytest.mark.xfail(reason="known")
    def test_xfail_on_one(rank):
        assert rank != 1


    @pytest.mark.xfail(strict=True)
    def test_strict_xfail_on_one(rank):
        assert rank != 1


    @pytest.mark.xfail(raises=ValueError)
    def test_other_failure_on_one(rank):
        if rank == 1:
            raise KeyError("x")
        raise ValueError


    def test_skip_on_one(rank):
        if rank == 1:
            pytest.skip("not here")


    def test_subtests(subtests, rank):
        for i in range(3):
            with subtests.test("case", i=i):
                assert (i, rank) != (1, 1)
        with subtests.test("split"):
            if rank == 1:
                pytest.skip("not here")


    class TestUnit(unittest.TestCase):
        def test_sub(self):
            import os

            with self.subTest(i=1):
                self.assertEqual(os.environ["RANK"], "0")


    def test_prints(rank):
        print("the same")
        print(f"only {rank}", file=__import__("sys").stderr)


    def test_warns(rank):
        warnings.warn("the same")
        warnings.warn(f"only {rank}")


    def test_properties(record_property, rank):
        record_property("same", 1)
        record_property("rank", rank)


"""


# What a test and a hook of the user's may make, where only plain pytest has to read it.
ODD_HOOK = """
    import pytest


    class NoText:
        def __str__(self):
            raise RuntimeError("no text")

        __repr__ = __str__


    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport():
        report = yield
        report.object = NoText()
        report.itself = {NoText(): 1}
        report.itself["itself"] = report.itself
        return report
"""
ODD = """
    import warnings

    import pytest


    class NoText(Exception):
        def __str__(self):
            raise RuntimeError("no text")


    class Two(UserWarning):
        def __init__(self, what, instead):
            super().__init__(f"{what} is old")


    class Words(UserWarning):
        def __init__(self, what):
            super().__init__(f"take care: {what}")


    class Made(UserWarning, OSError):
        def __new__(cls, what, more):
            return OSError.__new__(cls, what)

        def __str__(self):
            return "made of two"


    class Last(UserWarning):
        def __init_subclass__(cls):
            raise TypeError("none below")


    def test_has_no_text():
        raise NoText


    def test_warns():
        for warning in (Two("a", 1), Words("b"), Made("c", 1), Last("d")):
            warnings.warn(warning)


    class Label(str):
        def __reduce__(self):
            raise TypeError("not to be pickled")


    def test_skips():
        pytest.skip(Label("later"))
"""


def test_objects_of_the_users_change_no_outcome(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(conftest=ODD_HOOK, test_odd=ODD)
    run = suite.run("-v", "--ranks=2")
    assert run.words == {
        "test_has_no_text": "FAILED",
        "test_warns": "PASSED",
        "test_skips": "SKIPPED",
    }
    assert "test_odd.NoText: <exception str() failed>" in run.stdout
    told = ("Two: a is old", "Words: take care: b", "Made: made of two", "Last: d")
    assert [run.stdout.count(f": {text}\n") for text in told] == [1] * len(told), run.stdout
    assert "/pytest_megatron/" not in run.stdout  # no frame of ours


def test_ranks_that_differ_make_one_outcome(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_split=SPLIT)
    run = suite.run("-v", "-rA", "--ranks=2", "--junitxml=junit.xml")
    assert run.returncode == 1
    assert run.words == {
        "test_xfail_on_one": "XFAIL",
        "test_strict_xfail_on_one": "XFAIL",
        "test_other_failure_on_one": "FAILED",
        "test_skip_on_one": "FAILED",
        "test_subtests": "FAILED",
        "test_sub": "PASSED",
        "test_prints": "PASSED",
        "test_warns": "PASSED",
        "test_properties": "PASSED",
    }
    assert [line for line in run.lines if " SUB" in line] == [
        "test_split.py::test_subtests SUBPASSED[case] (i=0)",
        "test_split.py::test_subtests SUBFAILED[case] (i=1)",
        "test_split.py::test_subtests SUBPASSED[case] (i=2)",
        "test_split.py::test_subtests SUBFAILED[split]",
        "test_split.py::TestUnit::test_sub SUBFAILED(i=1)",
    ]
    for text in (
        "rank 1 skipped, rank 0 did not",
        "rank 1: skipped: not here",
        "[rank 1] KeyError: 'x'",
        "[rank 1] assert (1, 1) != (1, 1)",
        "Captured stdout call of ranks 0-1",
        "Captured stderr call of rank 0",
        "Captured stderr call of rank 1",
    ):
        assert text in run.stdout
    assert run.stdout.count("UserWarning: the same") == 1
    assert all(f"UserWarning: only {rank}" in run.stdout for rank in (0, 1))
    (properties,) = [c.properties for c in suite.junit() if c.name.endswith("test_properties")]
    assert properties == (("same", "1"), ("rank", "0"), ("rank", "1"))
