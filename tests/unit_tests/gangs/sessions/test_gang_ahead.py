"""Ranks go on to the next test by themselves: nothing of it shows when tests end otherwise."""

from __future__ import annotations

from pathlib import Path

from gang_suite import RecordedSuite

WAYS = ("passes", "fails", "passes", "skips", "dies", "late", "passes", "splits", "xfails", "dies")


def test_tests_run_once_in_order_whatever_became_of_those_before_them(tmp_path: Path) -> None:
    ways = [way for number in range(3) for way in (*WAYS[number:], *WAYS[:number], "passes")]
    suite = RecordedSuite(root=tmp_path).write(
        test_many=f"""
        import os
        import signal

        import pytest

        @pytest.fixture(scope="module")
        def kept():
            return []

        @pytest.mark.parametrize("number, way", enumerate({ways}))
        def test_it(number, way, rank, kept, request):
            with open(f"ran.{{rank}}", "a") as file:
                file.write(f"{{number}} {{len(kept)}}\\n")
            kept.append(number)
            if way == "fails":
                raise AssertionError("struck")
            if way == "skips":
                pytest.skip("not now")
            if way == "xfails":
                pytest.xfail("known")
            if way == "splits" and rank:
                pytest.skip("not on this rank")
            if way == "late" and rank:
                request.addfinalizer(lambda: 1 / 0)
            if way == "dies" and rank:
                os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    run = suite.run("--ranks=2", "--device=cpu")
    words = {"passes": "PASSED", "late": "ERROR", "skips": None, "xfails": None}
    expected = {
        f"test_it[{number}-{way}]": word
        for number, way in enumerate(ways)
        if (word := words.get(way, "FAILED")) is not None
    }
    assert run.outcomes == expected
    for rank in (0, 1):
        rows = [line.split() for line in (tmp_path / f"ran.{rank}").read_text().splitlines()]
        assert [int(row[0]) for row in rows] == list(range(len(ways)))
        since = 0
        for way, row in zip(ways, rows, strict=True):
            assert int(row[1]) == since  # the fixture of the module lives as long as the gang
            since = 0 if way == "dies" else since + 1


def test_tests_with_long_names_do_not_fill_what_ranks_have_no_time_to_read(tmp_path: Path) -> None:
    suite = RecordedSuite(root=tmp_path).write(
        test_long="""
        import pytest

        @pytest.mark.parametrize("number", range(40), ids=[f"{n}{'x' * 20_000}" for n in range(40)])
        def test_meets_the_others(number, process_group):
            process_group.barrier().wait()
        """,
    )
    run = suite.run("--ranks=2")
    assert (run.returncode, run.summary) == (0, "40 passed")


def test_a_death_that_is_told_with_many_ends_of_tests_costs_none_of_them(tmp_path: Path) -> None:
    suite = RecordedSuite(root=tmp_path).write(
        test_many="""
        import os
        import pytest

        @pytest.mark.parametrize("number", range(90))
        def test_it(number, rank, process_group):
            process_group.barrier().wait()
            if number in (25, 50) and rank:
                os._exit(1)
        """,
    )
    run = suite.run("--ranks=2", "--rank-timeout=5")
    assert run.summary == "2 failed, 88 passed"
    dead = {name: run.items[name]["problem"] for name in ("test_it[25]", "test_it[50]")}
    assert dead == dict.fromkeys(dead, "rank 1 of 2 exited with code 1")
