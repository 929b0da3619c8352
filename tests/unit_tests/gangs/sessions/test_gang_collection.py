"""Where ranks come from: one collection for all, or one for each rank."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from gang_suite import READS_RANK, Run, Suite

NOTING = """
    import os
    import pathlib


    def note(session, what):
        kind = "rank" if hasattr(session.config, "workerinput") else "controller"
        pathlib.Path("notes").mkdir(exist_ok=True)
        pathlib.Path("notes", f"{what} {kind} {os.environ['RANK']}").touch(exist_ok=False)


    def pytest_sessionstart(session):
        note(session, "start")


    def pytest_sessionfinish(session):
        note(session, "finish")
"""
# As Megatron-LM's tests/unit_tests/test_utilities.py and conftest.py do it.
MEGATRON_LIKE = """
    import os

    import pytest
    import torch
    import torch.distributed as dist


    class Utils:
        world_size = int(os.environ["WORLD_SIZE"])
        rank = int(os.environ["LOCAL_RANK"])

        @staticmethod
        def initialize_distributed():
            if not dist.is_initialized():
                place = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                dist.init_process_group(
                    "gloo", init_method=place, world_size=Utils.world_size, rank=Utils.rank
                )
                dist.barrier()


    @pytest.fixture(scope="session", autouse=True)
    def cleanup():
        yield
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
"""
UTILS_TESTS = """
    import pytest
    import torch
    import torch.distributed as dist
    from conftest import Utils


    def add_up():
        tensor = torch.ones(1) * (Utils.rank + 1)
        dist.all_reduce(tensor)
        return tensor.item()


    def test_sets_up():
        Utils.initialize_distributed()
        assert add_up() == 3


    def test_finds_it_set_up():
        assert dist.is_initialized()
        assert add_up() == 3


    @pytest.mark.skipif(Utils.world_size < 4, reason="needs 4 ranks")
    def test_skips():
        raise AssertionError


    @pytest.mark.xfail
    def test_is_expected_to_fail():
        assert Utils.rank == -1


    @pytest.mark.parametrize("root", range(Utils.world_size))
    def test_broadcasts(root):
        tensor = torch.full((1,), float(Utils.rank))
        dist.broadcast(tensor, root)
        assert tensor.item() == root


    def test_fails():
        assert Utils.rank == -1
"""
CYCLES = """
    import pytest
    import torch
    import torch.distributed as dist
    from conftest import Utils


    @pytest.mark.parametrize("time", range(3))
    def test_sets_up_and_destroys(time):
        Utils.initialize_distributed()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2
        dist.destroy_process_group()
"""
LAUNCHER = (
    *("-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--redirects", "3", "--log-dir", "logs", "-m", "pytest"),
)
NOTES = [
    f"{what} {where}"
    for what in ("finish", "start")
    for where in ("controller 0", "rank 0", "rank 1")
]


def notes_in(suite: Suite) -> list[str]:
    return sorted(path.name for path in (suite.root / "notes").iterdir())


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def test_a_suite_for_torchrun_has_the_same_outcomes_on_a_gang(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(conftest=MEGATRON_LIKE + NOTING, test_utils=UTILS_TESTS)
    suite.run("-v", "-p", "no:megatron", command=[sys.executable, *LAUNCHER])
    logs = sorted(suite.root.glob("logs/*/attempt_0/*/stdout.log"))
    launched = [Run(returncode=1, stdout=log.read_text(), stderr="").words for log in logs]
    shutil.rmtree(suite.root / "notes")
    expected = {
        "test_sets_up": "PASSED",
        "test_finds_it_set_up": "PASSED",
        "test_skips": "SKIPPED",
        "test_is_expected_to_fail": "XFAIL",
        "test_broadcasts[0]": "PASSED",
        "test_broadcasts[1]": "PASSED",
        "test_fails": "FAILED",
    }
    assert launched == [expected, expected]

    suite.write(test_cycles=CYCLES)
    run = suite.run("-v", "--ranks", "2")

    assert "every rank collects for itself: WORLD_SIZE" not in run.stdout
    assert "every rank collects for itself: LOCAL_RANK in " in run.stdout
    cycles = {f"test_sets_up_and_destroys[{i}]": "PASSED" for i in range(3)}
    assert run.words == expected | cycles, run.stdout
    assert notes_in(suite) == NOTES


GROUP = """
    import torch.distributed as dist


    def build(world_size=-1, rank=-1, address="env://"):
        dist.init_process_group("gloo", address, world_size=world_size, rank=rank)
"""


def test_a_group_of_a_module_is_one_error_with_its_place(tmp_path: Path) -> None:
    text = "import group\n\ngroup.build({})\n\ndef test_it(): pass\n"
    suite = Suite(tmp_path).write(
        group=GROUP,
        test_a=text.format(""),
        test_b=text.format("address='tcp://localhost:1', world_size=2, rank=0"),
    )

    run = suite.run("--ranks", "2", "--device", "cpu")

    assert run.returncode == 2
    assert "test_a.py:3: in <module>" in run.stdout
    assert "test_b.py:3: in <module>" in run.stdout
    told = "UsageError: group.py:6: a process group of 2 ranks is set up before tests run"
    assert run.stdout.count(f"\nE   pytest.{told}") == 2, run.stdout
    assert "2 errors" in run.summary


def test_a_group_of_a_session_hook_is_an_error_of_one_line(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        group=GROUP,
        conftest="""
            import group


            def pytest_sessionstart():
                group.build()
        """,
        test_a="def test_it():\n    pass\n",
    )

    run = suite.run("--ranks", "2", "--device", "cpu")

    assert run.returncode == 4
    assert "INTERNALERROR" not in run.stdout + run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line]
    assert line.startswith("ERROR: group.py:6: a process group of 2 ranks is set up before tests")


def test_a_group_of_one_process_may_be_set_up_while_tests_are_collected(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        group=GROUP,
        test_a=f"""
            import os

            import group
            import torch.distributed as dist

            group.build(1, 0, f"file://{tmp_path}/store{{os.getpid()}}")
            SIZE = dist.get_world_size()
            dist.destroy_process_group()


            def test_it(process_group):
                assert (SIZE, dist.get_world_size()) == (1, 2)
        """,
    )

    run = suite.run("--ranks", "2", "--device", "cpu", "-v")

    assert run.words == {"test_it": "PASSED"}, run.stdout


def test_tests_that_some_rank_lacks_fail_and_the_others_run(suite: Suite) -> None:
    suite.write(
        conftest=READS_RANK,
        test_import="""
            from conftest import RANK

            if RANK == 1:
                raise RuntimeError("not on rank 1")

            def test_imports():
                pass
        """,
        test_skip="""
            import pytest
            from conftest import RANK

            if RANK == 1:
                pytest.skip("not here", allow_module_level=True)

            def test_skips():
                pass
        """,
        test_parameters="""
            import pytest
            from conftest import RANK

            @pytest.mark.parametrize("i", range(1 + RANK))
            def test_more(i):
                pass

            @pytest.mark.parametrize("i", range(2 - RANK))
            def test_less(i):
                pass

            @pytest.mark.isolated
            def test_alone(rank):
                assert rank == RANK

            def test_same(rank):
                assert rank == RANK
        """,
    )
    going_on = "--continue-on-collection-errors"
    run = suite.run("-v", "--ranks", "2", "--junitxml", "junit.xml", going_on)
    assert run.words == {
        "test_imports": "FAILED",
        "test_skips": "FAILED",
        "test_more[0]": "PASSED",
        "test_less[0]": "PASSED",
        "test_less[1]": "FAILED",
        "test_alone": "PASSED",
        "test_same": "PASSED",
    }, run.stdout
    assert (
        "\nrank 1: could not collect test_import.py: RuntimeError: not on rank 1\n"
        "rank 0: did not run it\n" in run.stdout
    )
    assert "\nrank 1 of 2 skipped test_skip.py: Skipped: not here\n" in run.stdout
    assert "\nrank 1 of 2 collected no such test\n" in run.stdout
    told = "\nrank 1 of 2 collected test_parameters.py::test_more[1], and the session did not: "
    assert told in run.stdout
    assert run.stdout.count("ERROR collecting test_") == 2
    failed = sorted(case.name for case in suite.junit() if case.kinds)
    assert failed == [
        "::test_import",
        "test_import::test_imports",
        "test_parameters::test_less[1]",
        "test_parameters::test_more[1]",
        "test_skip::test_skips",
    ]


def test_what_a_rank_cannot_collect_is_one_error_that_ends_the_run(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)  # there, pytest's summary has all lines of an error
    suite.write(
        conftest=READS_RANK,
        test_import="""
            import pytest
            from conftest import RANK

            if RANK == 1:
                raise RuntimeError("not on rank 1")

            @pytest.mark.parametrize("i", range(20))
            def test_imports(i):
                pass
        """,
    )
    run = suite.run("--ranks", "2", "--junitxml", "junit.xml")
    assert (run.returncode, run.summary) == (2, "1 error"), run.stdout
    assert "Interrupted: 1 error during collection of ranks" in run.stdout
    assert "\nrank 1 of 2 could not collect test_import.py: RuntimeError: not on" in run.stdout
    assert run.stdout.count("not on rank 1") == 4  # source, exception, first line and summary
    assert [case.kinds for case in suite.junit()] == [("error",)]


# As a plugin that reads a setting of the launcher: hooks of a conftest, in ranks alone.
IN_RANKS = """
    IS_RANK = "TORCHELASTIC_RUN_ID" in os.environ
"""
MANY = """
    import pytest

    @pytest.mark.parametrize("i", range(20))
    def test_is_sound(i):
        pass
"""


@pytest.mark.parametrize(
    ("conftest", "line"),
    [
        pytest.param(
            "    if RANK == 1:\n        import no_such_package\n",
            "rank 1 of 2 could not collect: ModuleNotFoundError: No module named 'no_such_package' "
            "(conftest.py:6)",
            id="a conftest",
        ),
        pytest.param(
            IN_RANKS + "    if IS_RANK:\n        os._exit(3)\n",
            "ranks 0-1 of 2 exited with code 3 while it collected; see ",
            id="deaths",
        ),
        pytest.param(
            "    def pytest_ignore_collect(collection_path):\n        return RANK == 1 or None\n",
            "rank 1 of 2 collected none of these tests: does a hook or a condition depend on ",
            id="no-tests",
        ),
    ],
)
def test_a_plugin_that_fails_on_ranks_is_one_error_with_the_frames_of_the_user(
    suite: Suite, conftest: str, line: str
) -> None:
    suite.write(conftest=READS_RANK + conftest, test_many=MANY)
    run = suite.run("--ranks", "2", "--continue-on-collection-errors")
    assert (run.returncode, run.summary) == (1, "20 failed, 1 error"), run.stdout
    assert f"\n{line}" in run.stdout
    assert "site-packages" not in run.stdout.partition("= ERRORS =")[2]
    assert run.stdout.count("Traceback") == 0


def test_a_rank_that_does_not_end_collecting_is_an_error_with_its_stack(suite: Suite) -> None:
    suite.write(
        conftest=READS_RANK,
        test_hang="""
            import threading
            from conftest import RANK

            if RANK == 1:
                threading.Event().wait()  # the guilty line

            def test_hangs():
                pass
        """,
    )
    run = suite.run("-v", "--ranks", "2", "--rank-timeout", "8")
    assert (run.returncode, run.summary) == (2, "1 error"), run.stdout
    assert "\nrank 1 of 2 did not end collecting test_hang.py in 8 s\n" in run.stdout
    assert 'test_hang.py", line 6 in <module>' in run.stdout


@pytest.mark.nightly
def test_ranks_that_cannot_be_forked_are_replaced_by_new_ones(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        test_threads="""
            import os
            import signal
            import threading

            import pytest

            waiting = threading.Event()
            threading.Thread(target=waiting.wait, name="of a library", daemon=True).start()


            def test_has_its_thread():
                assert "of a library" in [thread.name for thread in threading.enumerate()]


            def test_is_killed(rank):
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)


            def test_has_its_thread_again(process_group):
                assert "of a library" in [thread.name for thread in threading.enumerate()]


            @pytest.mark.controller
            def test_stays():
                assert "RANK" not in os.environ
        """
    )
    run = suite.run("-v", "--ranks", "2")
    assert run.words == {
        "test_has_its_thread": "PASSED",
        "test_is_killed": "FAILED",
        "test_has_its_thread_again": "PASSED",
        "test_stays": "PASSED",
    }, run.stdout
    assert "\nrank 1 of 2 was killed by SIGKILL\n" in run.stdout
    assert "every rank collects for itself: threads run since" in run.stdout


def test_marks_alone_bring_gangs_and_change_nothing_else(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        test_marks="""
            import os
            import pytest


            @pytest.mark.world_size(2)
            def test_on_two(rank, world_size, process_group):
                assert (world_size, process_group.size()) == (2, 2)


            @pytest.mark.isolated
            def test_alone(world_size):
                assert world_size == 1


            def test_stays_here():
                assert [name for name in os.environ if name.startswith("TORCHELASTIC_")] == []
        """
    )
    passed = dict.fromkeys(("test_on_two", "test_alone", "test_stays_here"), "PASSED")
    run = suite.run("-v")
    assert (run.words, "every rank collects for itself" in run.stdout) == (passed, False), (
        run.stdout
    )
