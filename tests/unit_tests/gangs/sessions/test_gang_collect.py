"""Ranks that collect beside the controller, as its files say or `megatron_gang_start = collect`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gang_suite import Suite

pytestmark = pytest.mark.nightly

COLLECT = ("-o", "megatron_gang_start=collect")
# Controller and ranks load this until all three do. A rank notes that it has collected, and the
# controller collects until the ranks have.
CONFTEST = """
    import os
    import time
    from pathlib import Path

    import pytest

    RANK = int(os.environ["RANK"])
    NOTES = Path(os.environ.get("NOTES", "."))
    deadline = time.monotonic() + 120
    if "NOTES" in os.environ:
        (NOTES / f"loads-{os.getpid()}").touch()
    while "NOTES" in os.environ and len(list(NOTES.glob("loads-*"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)


    def pytest_collection_modifyitems(session, config, items):
        if hasattr(config, "workerinput"):
            (NOTES / str(os.getpid())).touch()
            return
        deadline = time.monotonic() + 120
        while "NOTES" in os.environ and len(list(NOTES.glob("[0-9]*"))) < 2:
            assert time.monotonic() < deadline
            config.hook.pytest_make_collect_report(collector=items[0].parent)
            time.sleep(0.01)
"""
TESTS = """
    import pytest

    @pytest.mark.parametrize("number", [1, 2])
    def test_passes(number, world_size):
        assert world_size == 2

    def test_fails(rank):
        assert rank == 0

    @pytest.mark.skip
    def test_is_skipped():
        pass
"""
OUTCOMES = {"test_passes[1]": "PASSED", "test_passes[2]": "PASSED", "test_fails": "FAILED"}
OUTCOMES |= {"test_is_skipped": "SKIPPED"}


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    suite = Suite(tmp_path, has_torch=False).write(conftest=CONFTEST, test_some=TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return suite


@pytest.mark.everyday
def test_ranks_collect_while_the_controller_does_so(suite: Suite, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    run = suite.run("-v", "--ranks=2", "--run-dir=run", env={"NOTES": str(notes)})
    assert (run.words, run.returncode) == (OUTCOMES, 1), run.stdout
    assert re.search(r"every rank collects for itself: RANK in .*conftest.py:8\n", run.stdout)
    failed = suite.run(
        "-v", "--ranks=2", *COLLECT, "--lf", "-k", "fails or skipped", "test_some.py"
    )
    assert failed.words == {"test_fails": "FAILED"}, failed.stdout
    assert "every rank collects for itself: megatron_gang_start=collect" in failed.stdout


def test_a_project_that_reads_the_rank_is_told_of_the_setting(suite: Suite) -> None:
    run = suite.run("-v", "--ranks=2")
    assert run.words == OUTCOMES, run.stdout
    line = "\nmegatron: every rank collects for itself, for RANK in conftest.py:8; if that is"
    line += " always so, write megatron_gang_start = collect into the ini file\n"
    assert line in run.stdout, run.stdout
    assert "into the ini file" not in suite.run("-v", "--ranks=2", *COLLECT).stdout
    suite.write(conftest=CONFTEST.replace('"RANK"', '"".join(["RA", "NK"])'))  # nobody sees that
    late = suite.run("-v", "--ranks=2")
    assert late.words == OUTCOMES, late.stdout
    assert line in late.stdout, late.stdout
    suite.write(conftest="", test_some=TESTS)
    assert "into the ini file" not in suite.run("-v", "--ranks=2").stdout


def test_ranks_are_forked_where_that_is_asked_for(suite: Suite) -> None:
    suite.write(test_some="import conftest\n\ndef test_it(rank): assert conftest.RANK == 0\n")
    fork = ("-o", "megatron_gang_start=fork")
    run = suite.run("-v", "--ranks=2", *fork)
    assert run.words == {"test_it": "PASSED"}, run.stdout
    line = "megatron: ranks are forked, and have what was read for rank 0: RANK in conftest.py:8"
    assert f"\n{line}\n" in run.stdout
    thread = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    suite.write(conftest=f"import threading\n{thread}\n")
    refused = suite.run("-v", "--ranks=2", *fork)
    assert refused.returncode == 4
    text = (
        "megatron_gang_start: fork is given, and this process cannot be forked: threads run since"
    )
    assert text in refused.stdout + refused.stderr


def test_ranks_that_collected_for_nothing_leave_nothing(suite: Suite, tmp_path: Path) -> None:
    suite.write(
        test_some="import pytest\n\n@pytest.mark.world_size(1)\ndef test_alone(rank): ...\n"
    )
    notes = tmp_path / "notes"
    notes.mkdir()
    env = {"NOTES": str(notes)}
    run = suite.run("-v", "--ranks=2", "--run-dir=run", *COLLECT, env=env)
    assert (run.words, run.returncode) == ({"test_alone": "PASSED"}, 0), run.stdout
    for where in ((), ("--run-dir=none",)):
        none = suite.run("--ranks=2", *COLLECT, "-k", "nothing", *where)
    assert (none.returncode, none.summary) == (5, "1 deselected"), none.stdout
    assert not (tmp_path / ".pytest_megatron/runs").exists()
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["run.json"]


def test_a_controller_that_cannot_collect_ends_ranks_that_have_begun(
    suite: Suite, tmp_path: Path
) -> None:
    suite.write(test_wrong="raise ValueError('not here')", test_zero="from test_wrong import x")
    run = suite.run("--ranks=2", *COLLECT)
    assert (run.returncode, run.summary) == (2, "2 errors"), run.stdout
    assert run.stdout.count("ValueError: not here") == 4, run.stdout
    assert not (tmp_path / ".pytest_megatron").exists()


@pytest.mark.everyday
def test_packages_are_imported_once_for_all_ranks(suite: Suite) -> None:
    suite.write(
        conftest="""
            import os
            import sys

            RANK = int(os.environ["RANK"])
            HAD = {"psutil", "xdist"} & {*sys.modules}
        """,
        test_some="""
            import conftest

            def test_it():
                assert conftest.HAD == {"psutil"}
        """,
    )
    run = suite.run("-v", "--ranks=2", *COLLECT, "-omegatron_preload=psutil,not_there.sub")
    assert run.words == {"test_it": "FAILED"}, run.stdout
    assert "AssertionError: assert set() == {'psutil'}" in run.stdout
    run = suite.run("-v", "--ranks=2", *COLLECT, "-omegatron_preload=psutil")
    assert run.words == {"test_it": "PASSED"}, run.stdout


# A rank notes that it loads this file. The controller does so until a number of notes is there.
LOADS = """
    import os
    import time
    from pathlib import Path

    NOTES = Path(os.environ["NOTES"])
    RANK = int(os.environ["RANK"])
    NUM_THREADS, os.environ["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"], "3"
    if "MASTER_PORT" in os.environ:
        (NOTES / f"{RANK}-{os.getpid()}").touch()
    else:
        deadline = time.monotonic() + 120
        while len(list(NOTES.iterdir())) < int(os.environ["NUM_NOTES"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
"""
THREADS = """
    import conftest

    def test_threads(rank):
        assert conftest.NUM_THREADS == "3"
"""


@pytest.mark.parametrize("num_threads", ["3", "1"], ids=["as predicted", "otherwise"])
def test_ranks_load_conftest_files_while_the_controller_does_so(
    suite: Suite, tmp_path: Path, num_threads: str
) -> None:
    suite.write(conftest=LOADS, test_some=THREADS)
    notes = tmp_path / "notes"
    notes.mkdir()
    env = {"NOTES": str(notes), "NUM_NOTES": "2", "OMP_NUM_THREADS": num_threads}
    run = suite.run("-v", "--ranks=2", *COLLECT, env=env)
    assert (run.words, run.returncode) == ({"test_threads": "PASSED"}, 0), run.stdout
    begun = [*"01"] if num_threads == "3" else [*"0011"]
    assert sorted(note.name[0] for note in notes.iterdir()) == begun
