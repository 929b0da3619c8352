"""Other plugins beside gangs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gang_suite import Suite

pytestmark = pytest.mark.nightly

RERUNS = """
    import os
    import pytest

    pytestmark = pytest.mark.xdist_group("one")
    attempts = {}

    def attempt(name):
        attempts[name] = attempts.get(name, 0) + 1
        return attempts[name]

    @pytest.fixture(scope="module")
    def once():
        return attempt("once")

    @pytest.fixture(scope="module")
    def breaks_first(rank):
        if attempt("breaks_first") == 1 and rank == 1:
            raise OSError("first set-up")

    def test_passes_at_the_second(rank, once):
        assert attempt("second") == 2 or rank == 0
        assert once == 1

    def test_never_passes(once):
        attempt("never")
        raise ValueError("always")

    def test_set_up_at_the_second(breaks_first, rank):
        assert attempts["breaks_first"] == (2 if rank == 1 else 1)

    @pytest.mark.flaky(reruns=0)
    def test_is_not_rerun():
        raise ValueError("always")

    def test_subtests(subtests):
        n = attempt("subtests")
        with subtests.test("sub"):
            assert n == 2

    class TestState:
        def test_fresh_object(self):
            assert not hasattr(self, "seen")
            self.seen = True
            assert attempt("object") == 2

    def test_dies_once(rank, shared_tmp_path):
        flag = "died"
        if rank == 1 and not os.path.exists(flag):
            open(flag, "w").close()
            os._exit(3)

    def test_passes(once):
        pass
    """


def test_a_rerun_is_on_all_ranks_and_reported_as_ever(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_reruns=RERUNS)
    run = suite.run("-v", "--reruns=1", "--ranks=2", "-rR", "-omegatron_rank_grace=1")
    assert run.words == {
        "test_passes_at_the_second": "RERUN PASSED",
        "test_never_passes": "RERUN FAILED",
        "test_set_up_at_the_second": "RERUN PASSED",
        "test_is_not_rerun": "FAILED",
        "test_subtests": "RERUN PASSED",
        "test_fresh_object": "RERUN PASSED",
        "test_dies_once": "RERUN PASSED",
        "test_passes": "PASSED",
    }
    assert run.summary == "2 failed, 6 passed, 1 subtests passed, 6 rerun"
    assert run.stdout.count("RERUN test_reruns.py::") == 6


def test_reruns_can_be_chosen_by_the_error(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        test_chosen="""
            import os, signal

            def test_value(): raise ValueError("careful: it broke")
            def test_key(): raise KeyError("x")
            def test_assert(rank): assert rank == 5
            def test_death(rank): rank or os.kill(os.getpid(), signal.SIGKILL)
            """
    )
    run = suite.run(
        *("-v", "--reruns=1", "--ranks=2", "-omegatron_rank_grace=1"),
        *("--only-rerun=ValueError: careful", "--only-rerun=killed by SIGKILL"),
    )
    assert run.words == {
        "test_value": "RERUN FAILED",
        "test_key": "FAILED",
        "test_assert": "FAILED",
        "test_death": "RERUN FAILED",
    }


SLOW = """
    import os
    import threading

    import pytest

    def wait():
        threading.Event().wait(60)

    def test_hangs(rank):
        if rank == 1:
            wait()

    @pytest.mark.timeout(0)
    def test_mark_wins():
        threading.Event().wait(1.5)

    def test_next(): pass

    @pytest.mark.controller
    def test_of_the_controller():
        wait()
    """


@pytest.mark.parametrize("how", ["option", "ini"])
def test_the_limit_of_pytest_timeout_is_the_gangs(tmp_path: Path, how: str) -> None:
    """It stops the test, not the session, and acts itself only on tests of the controller."""
    suite = Suite(tmp_path).write(test_slow=SLOW)
    if how == "ini":
        suite.write(**{"pytest.ini": "[pytest]\ntimeout = 1\n"})
    run = suite.run(
        *("-v", "--ranks=2", "--timeout-method=signal", "-omegatron_rank_grace=1"),
        *(["--timeout=1"] if how == "option" else []),
        *(["--deselect=test_slow.py::test_mark_wins"] if how != "option" else []),
        env={"PYTHONUNBUFFERED": "1"},  # else pytest-timeout writes between a test and its word
    )
    words = {name: run.words.get(name) for name in ("test_hangs", "test_next", "test_mark_wins")}
    assert words == {
        "test_hangs": "FAILED",
        "test_next": "PASSED",
        "test_mark_wins": "PASSED" if how == "option" else None,
    }
    assert "rank 1 did not end in 1 s" in run.stdout
    assert "wait" in run.stdout.partition("stack of rank 1")[2]
    assert run.words["test_of_the_controller"] == "FAILED"
    assert len(re.findall(r"Failed: Timeout \(>1(?:\.0)?s\) from pytest-timeout", run.stdout)) >= 1


FUNC_ONLY = """
    import threading

    import pytest

    def wait(seconds):
        threading.Event().wait(seconds)

    @pytest.fixture
    def slow(rank):
        wait(1.5)
        yield
        wait(1.5 * rank)

    {mark}
    def test_slow_fixtures(slow): pass

    @pytest.mark.timeout(1, func_only=False)
    def test_slow_phases(slow): pass
    """


@pytest.mark.parametrize("how", ["mark", "ini"])
def test_a_limit_of_the_call_alone_does_not_shorten_that_of_fixtures(
    tmp_path: Path, how: str
) -> None:
    mark = "@pytest.mark.timeout(1, func_only=True)" if how == "mark" else ""
    ini = "timeout = 1\ntimeout_func_only = true\n" if how == "ini" else ""
    suite = Suite(tmp_path).write(
        **{"test_slow": FUNC_ONLY.format(mark=mark), "pytest.ini": f"[pytest]\n{ini}"}
    )
    run = suite.run("-v", "--ranks=2", "-omegatron_rank_grace=1")
    assert run.words == {"test_slow_fixtures": "PASSED", "test_slow_phases": "ERROR"}


# Source: pytest-random-order 1.2.0, random_order/plugin.py and xdist.py; pytest-metadata 3.1.1.
WANTS_CONTROLLER = """
    import os
    from pathlib import Path

    import pytest

    RANK = int(os.environ["RANK"])

    def pytest_configure(config):
        if hasattr(config, "workerinput"):
            config.seed = config.workerinput["seed"]

    def pytest_configure_node(node):
        assert node.config.getoption("verbose") == 1
        node.workerinput["seed"] = (7, b"\\xff", {"of": node.workerinput["workerid"]})

    def pytest_sessionfinish(session):
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["ran"] = session.config.workerinput["workerid"]
            Path(session.config.workerinput["workerid"]).touch()
    """


@pytest.mark.parametrize("how", ["auto", "collect"])
def test_ranks_that_collect_are_workers_of_the_controllers_plugins(
    tmp_path: Path, how: str
) -> None:
    suite = Suite(tmp_path, has_torch=False).write(
        conftest=WANTS_CONTROLLER,
        test_a="""
            import os

            def test_seed(pytestconfig, rank):
                assert pytestconfig.seed == (7, b"\\xff", {"of": f"rank{rank}"})
                assert pytestconfig.workerinput["workercount"] == 2
                assert "PYTEST_XDIST_WORKER" not in os.environ

            def test_again(): pass
            """,
    )
    run = suite.run("-v", "-pxdist", "--ranks=2", f"-omegatron_gang_start={how}")
    assert run.words == {"test_seed": "PASSED", "test_again": "PASSED"}
    assert {path.name for path in tmp_path.glob("rank?")} == {"rank0", "rank1"}


def test_dist_without_workers_is_no_distribution(tmp_path: Path) -> None:
    """A project may choose how `-n` distributes, whether or not it is given."""
    suite = Suite(tmp_path).write(test_two="def test_two(world_size): assert world_size == 2")
    suite.write(**{"pytest.ini": "[pytest]\naddopts = --dist loadscope\n"})
    assert suite.run("--ranks=2").summary == "1 passed"


@pytest.mark.parametrize("ends", ["false", "true"])
def test_the_time_limit_of_faulthandler_is_that_of_ranks(tmp_path: Path, ends: str) -> None:
    """The controller only waits for them; a rank that it ends is reported as any that dies."""
    suite = Suite(tmp_path).write(
        test_slow="""
            import threading

            def test_slow():
                threading.Event().wait(2.0)

            def test_next(): pass
            """
    )
    settings = ("faulthandler_timeout=0.5", f"faulthandler_exit_on_timeout={ends}")
    run = suite.run("-v", "--ranks=2", *(word for s in settings for word in ("-o", s)))
    word = "FAILED" if ends == "true" else "PASSED"
    assert run.words == {"test_slow": word, "test_next": "PASSED"}
    assert "Timeout" not in run.stderr
    assert ("exited with code 1" in run.stdout) == (ends == "true")
    logs = [path.read_text() for path in tmp_path.glob(".pytest_megatron/runs/2*/ranks/*/1/*.log")]
    assert "in test_slow" in "".join(logs)
