from __future__ import annotations

from pytest_megatron.gangs.start.collector import CollectionDifference, compare, digest_of


def test_equal_tests_in_another_order_have_one_digest() -> None:
    assert digest_of(["a", "b"]) == digest_of(["b", "a"])
    assert digest_of(["a", "b"]) != digest_of(["a"])
    assert digest_of(["a", "b"]) != digest_of(["a", "b", "b"])


def test_equal_tests_do_not_differ() -> None:
    assert compare(["t.py::a", "t.py::b"], ["t.py::b", "t.py::a"], {}) == CollectionDifference()


def test_missing_tests_have_the_reason_of_their_innermost_collector() -> None:
    problems = {"": "all", "d": "folder", "d/t.py": "file", "d/t.py::C": "class"}
    known = ["d/t.py::C::a", "d/t.py::b", "d/u.py::c", "d/t.pyx::d", "e/v.py::e"]
    assert compare(known, [], problems).missing == {
        "d/t.py::C::a": "class",
        "d/t.py::b": "file",
        "d/u.py::c": "folder",
        "d/t.pyx::d": "folder",
        "e/v.py::e": "all",
    }
    assert compare(["t.py::a"], [], {}).missing == {"t.py::a": "collected no such test"}


def test_collectors_that_failed_are_named_once_and_one_that_skipped_is_none() -> None:
    problems = {"t.py": "Traceback\nE  x\ncould not collect t.py: x", "u.py": "skipped u.py: no"}
    found = compare(["t.py::a", "t.py::b", "u.py::c"], [], {**problems, "v.py": "has no test"})
    assert found.missing == {
        "t.py::a": "could not collect t.py: x",
        "t.py::b": "could not collect t.py: x",
        "u.py::c": "skipped u.py: no",
    }
    assert found.failures == {"t.py": problems["t.py"]}


def test_extra_tests_are_named_once() -> None:
    assert compare(["t::a"], ["t::b", "t::a", "t::b"], {}).extra == ("t::b",)
