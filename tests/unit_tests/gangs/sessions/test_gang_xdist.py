"""Gangs in workers of pytest-xdist: each worker has its own."""

from __future__ import annotations

import json
import signal
from contextlib import closing
from pathlib import Path

import pytest
from gang_suite import Suite
from labs import wait_until

from pytest_megatron.gpu.host import Gpu, is_awaited, lease_gpus

pytestmark = pytest.mark.nightly

MIXED = """
    import os
    import unittest
    import warnings

    import pytest

    WORKER = os.environ.get("PYTEST_XDIST_WORKER")

    @pytest.fixture(scope="module", autouse=True)
    def thing(rank):
        with open(f"ran-{WORKER}.txt", "a") as file:
            file.write(f"{os.path.basename(__file__)} {rank}\\n")

    @pytest.mark.parametrize("n", range(4))
    def test_plain(n, rank, world_size):
        assert world_size == int(os.environ["WORLD_SIZE"])
    @pytest.mark.world_size(1)
    def test_one(world_size):
        assert world_size == 1
    @pytest.mark.controller
    def test_controller():
        assert "WORLD_SIZE" not in os.environ
    def test_fails_on_one(rank):
        print("said", rank)
        assert rank == 0
    def test_skips():
        pytest.skip("not today")
    def test_warns():
        warnings.warn("careful")
    def test_subtests(subtests, rank):
        with subtests.test("first", i=1):
            assert rank == 0
    def test_teardown(request):
        request.addfinalizer(lambda: 1 / 0)
    class TestUnit(unittest.TestCase):
        def test_unit(self):
            pass
    """


@pytest.mark.everyday
def test_workers_run_gangs_of_their_own(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_a=MIXED, test_b=MIXED)
    run = suite.run("--ranks=2", "-n", "2", "--dist=loadfile", "--junitxml=junit.xml", "-rA")
    assert run.returncode == 1
    assert run.summary == "6 failed, 18 passed, 2 skipped, 2 warnings, 2 errors"
    assert run.stdout.count("UserWarning: careful") == 2
    assert run.stdout.count("FAILED test_a.py::test_fails_on_one - [rank 1] assert 1 == 0") == 1
    assert "Captured stdout call of rank 1" in run.stdout
    assert len({case.name for case in suite.junit()}) == 24
    files = [set(suite.read(f"ran-gw{n}.txt")) for n in (0, 1)]
    assert sorted(map(sorted, files)) == [
        [f"test_{letter}.py {rank}" for rank in (0, 1)] for letter in "ab"
    ]
    latest = tmp_path / ".pytest_megatron" / "runs" / "latest"
    for worker in ("gw0", "gw1"):
        assert (latest / f"ranks-{worker}" / "attempt_1" / "1" / "stdout.log").exists()
    assert len(list(latest.parent.iterdir())) == 2  # one run, and the link to it


def test_marks_are_enough_under_xdist_too(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        test_marked="""
            import pytest

            @pytest.mark.world_size(2)
            @pytest.mark.parametrize("n", range(4))
            def test_two(n, world_size): assert world_size == 2
            def test_none(world_size): assert world_size == 1

            @pytest.mark.world_size(2)
            def test_bad(rank): assert rank == 0, "<b>"
            """
    )
    run = suite.run("-n", "2", "--run-dir", "run")
    assert (run.returncode, run.summary) == (1, "1 failed, 5 passed")
    assert "megatron: 1 test with process_group or world_size ran on one process" in run.stdout
    items = json.loads((tmp_path / "run" / "run.json").read_text())["items"]
    assert [k.rpartition("::")[2] for k, v in items.items() if v["verdict"] != "passed"] == [
        "test_bad"
    ]
    page = (tmp_path / "run" / "index.html").read_text()
    assert "5 distributed tests: 1 failed, 4 passed" in page
    assert "rank 1: " in page
    assert "&lt;b&gt;" in page
    assert run.stdout.count("megatron: the page of this run: run/index.html") == 1


def test_a_worker_that_is_killed_takes_its_ranks_along(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        test_killed="""
            import os
            import signal
            import threading

            import pytest

            def test_kills_its_worker(rank):
                open(f"rank-{rank}-{os.getpid()}", "w").close()
                if rank == 0:
                    os.kill(int(os.environ["WORKER_PID"]), signal.SIGKILL)
                threading.Event().wait(120)

            @pytest.mark.parametrize("n", range(3))
            def test_other(n): pass
            """,
        conftest="""
            import os

            os.environ["WORKER_PID"] = str(os.getpid())
            """,
    )
    run = suite.run("--ranks=2", "-n", "1", "--max-worker-restart=1")
    assert run.returncode == 1
    assert "crashed while running 'test_killed.py::test_kills_its_worker'" in run.stdout
    assert run.summary == "1 failed, 3 passed"


PRETEND = """
    import dataclasses

    from pytest_megatron.gpu import host

    gpus = tuple(host.Gpu(index=i, name="GPU", uuid=f"GPU-{i}", memory_bytes=1) for i in range(2))
    here = dataclasses.replace(host.this_host(), gpus=gpus)
    host.this_host = lambda: here  # before anybody else imports it
    """


BOTH = """
    import os
    import pytest

    from pytest_megatron.gangs.controller import plugin as gangs
    from pytest_megatron.gpu.host import lease_gpus

    @pytest.mark.parametrize("n", range(2))
    def test_gang(n, rank):
        assert len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) == 2
        with open(f"ran-{rank}.txt", "a") as file:
            file.write(f"{os.getpid()}\\n")

    @pytest.mark.controller
    def test_needs_the_gpus_itself():
        lease_gpus(gangs.this_host().gpus, 2, print).close()  # what a workload does

    def test_gang_again(rank):
        test_gang(0, rank)
    """


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_idle_gang_lets_go_of_gpus_that_others_wait_for(tmp_path: Path, workers: int) -> None:
    """Also others of the same process; with two workers, each wants both devices."""
    suite = Suite(tmp_path, is_fresh=True).write(conftest=PRETEND, test_both=BOTH)
    run = suite.run(
        *("--gpus=2", f"-n{workers}", "--dist=load" if workers else "--color=no"),
        env={"PYTEST_MEGATRON_LEASES": str(tmp_path / "leases")},
    )
    assert (run.returncode, run.summary) == (0, "4 passed")
    assert [len(suite.read(f"ran-{rank}.txt")) for rank in (0, 1)] == [3, 3]
    if workers == 1:  # the gang that came after is another one
        assert len(set(suite.read("ran-0.txt"))) == 2
    assert sorted(path.name for path in (tmp_path / "leases").iterdir()) == [
        *("GPU-0.lock", "GPU-1.lock", "waiting.lock"),
    ]


def test_a_session_that_waits_for_gpus_says_so_and_can_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run holds one device of two."""
    leases = str(tmp_path / "leases")
    monkeypatch.setenv("PYTEST_MEGATRON_LEASES", leases)
    suite = Suite(tmp_path, is_fresh=True).write(
        conftest=PRETEND, test_waits="def test_two(): pass"
    )
    gpus = [Gpu(index=i, name="GPU", uuid=f"GPU-{i}", memory_bytes=1) for i in range(2)]
    with closing(lease_gpus(gpus, 1, pytest.fail)):
        waiting = suite.start("--gpus=2", PYTEST_MEGATRON_LEASES=leases)
        wait_until(is_awaited, "the session says that it waits")
        waiting.send_signal(signal.SIGINT)
        text, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 2
    assert "waiting for 2 of 2 GPUs; other runs hold the rest" in text
    assert not is_awaited()
    assert suite.run("--gpus=2", env={"PYTEST_MEGATRON_LEASES": leases}).summary == "1 passed"


@pytest.mark.parametrize("dist", ["load", "each"])
def test_workers_with_nothing_left_to_run_end_without_a_word(dist: str, tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_one="def test_one(rank): assert rank < 2")
    run = suite.run("-n", "2", "--dist", dist, "--ranks", "2")
    assert (run.returncode, run.stderr) == (0, ""), run.stdout
