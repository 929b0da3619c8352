"""Tests that ran nowhere: few node ids stand for many tests, and what ran elsewhere counts."""

from __future__ import annotations

import json

from pytest_megatron.runs.nowhere import NowhereGroup, fold_deselected, ran_nowhere

SLOW, OTHER, BUCKET = "deselected by -m 'not slow'", "deselected by -k moe", "outside --bucket"


def test_one_node_id_stands_for_tests_of_one_reason() -> None:
    deselected = [
        ("t/test_a.py::test_x[world2]", SLOW),
        ("t/test_a.py::test_x[world8]", SLOW),
        ("t/test_a.py::TestB::test_y[a-1]", SLOW),
        ("t/test_b.py::TestC::test_one[a]", SLOW),
        ("t/test_b.py::TestC::test_one[b]", SLOW),
        ("t/test_b.py::TestC::test_two", OTHER),
        ("t/test_c.py::test_sizes[world8]", SLOW),
        ("t/test_c.py::test_part[a-world8]", SLOW),
    ]
    kept = ["t/test_c.py::test_sizes[world2]", "t/test_c.py::test_part[b-world8]"]
    assert fold_deselected(deselected, kept, {"t/test_d.py": BUCKET}) == {
        SLOW: {
            "t/test_a.py": 2,
            "t/test_b.py::TestC::test_one": 2,
            "t/test_c.py::test_part[a]": 1,
        },
        OTHER: {"t/test_b.py::TestC::test_two": 1},
        BUCKET: {"t/test_d.py": 0},
    }


def test_ten_thousand_tests_of_many_files_stay_small() -> None:
    tests = [
        (f"tests/unit_tests/test_{file}.py::TestLayers::test_{n % 10}[{n}-bf16]", SLOW)
        for file in range(100)
        for n in range(100)
    ]
    kept = ["tests/unit_tests/test_0.py::TestLayers::test_0[new]"]
    folded = fold_deselected(tests, kept, {})
    assert sum(folded[SLOW].values()) == len(tests)
    assert len(json.dumps(folded)) < 10_000


def test_what_another_run_collected_counts_test_by_test() -> None:
    whole_file = {SLOW: {"test_a.py": 4, "test_b.py": 3}, BUCKET: {"test_c.py": 0, "test_d.py": 0}}
    parts = {OTHER: {"test_a.py::test_y": 1, "test_a.py::test_p[b]": 1, "test_c.py": 2}}
    ran = [
        ("test_a.py::test_x", None),
        ("test_a.py::test_p[a]", None),
        ("test_a.py::test_z", "needs 8 GPUs"),
        ("test_d.py::test_w[world2]", None),
    ]
    assert ran_nowhere(ran, [whole_file, parts]) == (
        NowhereGroup(
            reason=OTHER,
            tests={"test_a.py::test_y": 1, "test_a.py::test_p[b]": 1, "test_c.py": 2},
        ),
        NowhereGroup(reason=SLOW, tests={"test_b.py": 3}),
        NowhereGroup(reason="needs 8 GPUs", tests={"test_a.py::test_z": 1}),
    )


def test_a_test_that_one_run_deselected_and_another_ran_is_not_listed() -> None:
    folded = {SLOW: {"test_a.py::test_x": 2, "test_a.py::test_y[a]": 1}}
    ran = [("test_a.py::test_x[a]", None), ("test_a.py::test_y[world4-a]", None)]
    assert ran_nowhere(ran, [folded, folded]) == ()


def test_files_and_tests_are_counted_apart() -> None:
    group = NowhereGroup(reason=BUCKET, tests={"test_a.py": 0, "test_b.py": 3, "test_c.py::t": 1})
    assert (group.amount, group.names(2)) == (
        "4 tests, 1 file",
        "test_a.py, test_b.py (3 tests) and 1 more",
    )
