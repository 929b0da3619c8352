"""Fixtures and marks on gangs: pytest's own, and ours."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from gang_suite import Suite

SCOPES = """
    import pytest

    def note(rank, text):
        with open(f"log-{rank}.txt", "a") as file:
            file.write(text + "\\n")

    def scoped(scope):
        @pytest.fixture(scope=scope)
        def fixture(rank, request):
            note(rank, f"{scope} up")
            yield
            note(rank, f"{scope} down")
        return fixture

    session_thing, package_thing = scoped("session"), scoped("package")
    """
FIRST = """
    import pytest
    from conftest import note, scoped

    module_thing, class_thing = scoped("module"), scoped("class")
    function_thing = scoped("function")

    class TestOne:
        def test_a(self, session_thing, package_thing, module_thing, class_thing, function_thing):
            pass
        def test_b(self, class_thing): pass

    class TestTwo:
        def test_c(self, class_thing, module_thing): pass
    """
SECOND = """
    import pytest
    from conftest import note, scoped

    @pytest.fixture(scope="module")
    def module_breaks(rank):
        yield
        if rank == 1:
            raise OSError("module down")

    @pytest.fixture(scope="session")
    def session_breaks():
        yield
        raise OSError("session down")

    def test_d(session_thing, module_breaks, session_breaks, rank):
        note(rank, "d")
    def test_e(rank):
        note(rank, "e")
    """
LAST = """
    def test_f(session_thing): pass
    """


def test_fixtures_are_set_up_once_and_torn_down_in_place(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        conftest=SCOPES,
        test_1=FIRST,
        test_2=SECOND,
        test_3=LAST,
        helper="from conftest import note",
    )
    run = suite.run("-v", "--ranks=2")
    for rank in (0, 1):
        assert suite.read(f"log-{rank}.txt") == [
            *("session up", "package up", "module up", "class up", "function up"),
            *("function down", "class down", "class up", "class down", "module down"),
            *("d", "e", "package down", "session down"),
        ]
    assert [line.partition("::")[2] for line in run.lines] == [
        *("TestOne::test_a PASSED", "TestOne::test_b PASSED", "TestTwo::test_c PASSED"),
        *("test_d PASSED", "test_e PASSED", "test_e ERROR"),
        *("test_f PASSED", "test_f ERROR"),
    ]
    assert "ERROR test_2.py::test_e - [rank 1] OSError: module down" in run.stdout
    assert re.search(r"ERROR test_3.py::test_f - \[rank \d\] OSError: session down", run.stdout)


def test_a_teardown_after_the_report_is_an_error_of_the_last_test(tmp_path: Path) -> None:
    """With -x, and where several gangs share the work, what comes next is not known in time."""
    suite = Suite(tmp_path).write(
        test_late="""
            import pytest

            @pytest.fixture(scope="session", autouse=True)
            def whole(rank):
                yield
                open(f"down-{rank}", "w").close()
                raise OSError("session down")

            def test_fails(): assert 0
            def test_other(): pass
            """,
        test_small="""
            import pytest

            pytestmark = pytest.mark.world_size(1)

            @pytest.fixture(scope="module", autouse=True)
            def whole():
                yield
                raise OSError("module down")

            @pytest.mark.parametrize("n", range(2))
            def test_small(n, shared_tmp_path):
                assert not list(shared_tmp_path.iterdir())
            """,
    )
    run = suite.run("-x", "test_late.py", "--ranks=2", "--junitxml=junit.xml")
    assert (run.returncode, run.summary) == (1, "1 failed, 1 error")
    assert re.search(r"ERROR test_late.py::test_fails - \[rank \d\] OSError: session", run.stdout)
    assert all((tmp_path / f"down-{rank}").exists() for rank in (0, 1))
    assert [case.kinds for case in suite.junit()] in (
        [("failure",), ("error",)],
        [("failure", "error")],
    )
    side_by_side = suite.run("test_small.py", "--ranks=2")
    assert side_by_side.summary in ("2 passed, 2 errors", "2 passed, 1 error")
    assert "OSError: module down" in side_by_side.stdout


OURS = """
    import os
    from pathlib import Path

    import pytest
    import torch
    import torch.distributed as dist

    def gather(value, size):
        found = [None] * size
        dist.all_gather_object(found, value)
        return found

    def test_numbers(rank, local_rank, world_size, device):
        assert (rank, local_rank) == (int(os.environ.get("RANK", "0")),) * 2
        assert world_size == int(os.environ.get("WORLD_SIZE", "1"))
        assert device == torch.device("cpu")

    def test_process_group(process_group, rank, world_size):
        assert dist.get_backend(process_group) == "gloo"
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == world_size == dist.get_world_size()

    def test_process_group_stays(process_group, world_size):
        assert gather("x", world_size) == ["x"] * world_size

    def test_directories(process_group, world_size, tmp_path, shared_tmp_path, tmp_path_factory):
        for mine in (tmp_path, tmp_path_factory.mktemp("mine")):
            assert len(set(gather(str(mine), world_size))) == world_size
            assert mine.is_dir() and not list(mine.iterdir())
        assert len(set(gather(str(shared_tmp_path), world_size))) == 1
        (shared_tmp_path / str(dist.get_rank())).touch()
        dist.barrier()
        assert len(list(shared_tmp_path.iterdir())) == world_size

    def test_shared_directory_is_new(process_group, world_size, shared_tmp_path):
        dist.barrier()
        assert not list(shared_tmp_path.iterdir())
        dist.barrier()
    """


def test_our_fixtures_on_a_gang_in_plain_pytest_and_under_torchrun(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_ours=OURS)
    options = ("-W", "ignore", "-p", "no:cacheprovider")
    gang = suite.run("--ranks=2", "--device=cpu", *options)
    assert (gang.summary, gang.returncode) == ("5 passed", 0)
    plain = suite.run("test_ours.py", *options)
    assert (plain.summary, plain.returncode) == ("5 passed", 0)
    assert "megatron: 5 tests with process_group or world_size ran on one process" in plain.stdout
    assert "one process" not in gang.stdout
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "pytest"]
    with_torchrun = suite.run(
        *("test_ours.py", "-p", "megatron", "-k", "not director"),  # each rank has pytest's own
        *options,
        command=torchrun,
    )
    assert with_torchrun.stdout.count("3 passed") == 2
    assert "one process" not in with_torchrun.stdout


ON_ONE = """
    import pytest

    @pytest.fixture
    def sharded(world_size): return world_size
    def test_uses(sharded): pass
    def test_asks_while_it_runs(request): request.getfixturevalue("world_size")

    @pytest.mark.controller
    def test_of_one(world_size): pass
    @pytest.mark.world_size(1)
    def test_gang_of_one(world_size): pass
    def test_skips(world_size):
        if world_size < 2:
            pytest.skip("needs 2 ranks")
    @pytest.mark.parametrize("world_size", [1])
    def test_has_its_own(world_size): pass
    def test_is_plain(rank): pass
"""
ALONE = ["test_one.py::test_uses", "test_one.py::test_asks_while_it_runs"]


@pytest.mark.parametrize(
    ("arguments", "env", "alone", "code"),
    [
        pytest.param((), {"CI": ""}, ALONE, 0, id="at a desk"),
        pytest.param((), {"CI": "true"}, ALONE, 1, id="in CI"),
        pytest.param(("--bucket", "test_*.py"), {"CI": ""}, ALONE, 1, id="a job of a plan"),
        pytest.param(("-o", "megatron_ranks=1"), {"CI": "true"}, [], 0, id="one rank is meant"),
    ],
)
def test_ranks_that_are_missing_are_told_and_fail_ci(
    tmp_path: Path, arguments: tuple[str, ...], env: dict[str, str], alone: list[str], code: int
) -> None:
    suite = Suite(tmp_path).write(test_one=ON_ONE)
    run = suite.run(*arguments, "--run-dir", "run", env=env)
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (run.returncode, record["exit_code"]) == (code, code), run.stdout
    assert record["on_one_process"] == alone
    assert ("megatron: 2 tests with process_group or world_size" in run.stdout) is bool(alone)
    assert ("this fails CI" in run.stdout) is bool(code)


MARKS = """
    import os
    import time
    import unittest

    import pytest

    def size(): return int(os.environ.get("WORLD_SIZE", "0"))

    def test_plain(): assert size() == int(os.environ["EXPECTED"])
    @pytest.mark.world_size(3)
    def test_three(world_size): assert size() == world_size == 3
    @pytest.mark.world_size(1, 2)
    def test_both(world_size): assert size() == world_size
    @pytest.mark.world_size([2, 1])
    @pytest.mark.parametrize("x", "ab")
    def test_list(world_size, x): assert size() == world_size
    @pytest.mark.controller
    def test_controller(): assert size() == 0
    @pytest.mark.isolated
    @pytest.mark.world_size(2)
    def test_isolated_one(): os.environ["LEFT_BEHIND"] = "1"
    @pytest.mark.isolated
    @pytest.mark.world_size(2)
    def test_isolated_two(): assert "LEFT_BEHIND" not in os.environ
    @pytest.mark.world_size(2)
    class TestUnit(unittest.TestCase):
        def test_in_class(self): assert size() == 2
    @pytest.mark.timeout(60)
    def test_time_is_enough(): pass
    """


@pytest.mark.parametrize("ranks", [0, 2])
def test_marks_choose_the_gang_with_and_without_options(tmp_path: Path, ranks: int) -> None:
    suite = Suite(tmp_path).write(test_marks=MARKS)
    options = ["--ranks=2"] if ranks else []
    run = suite.run(
        *("-v", "--strict-markers", "-p", "no:timeout", *options), env={"EXPECTED": str(ranks)}
    )
    assert set(run.words.values()) == {"PASSED"}, run.stdout
    assert {name for name in run.words if name.startswith(("test_both", "test_list"))} == {
        *("test_both[world1]", "test_both[world2]"),
        *(
            "test_list[world2-a]",
            "test_list[world1-a]",
            "test_list[world2-b]",
            "test_list[world1-b]",
        ),
    }


WRONG_MARK = """
    import pytest

    @pytest.mark.{mark}
    def test_one(): pass
    def test_two(): pass
    """
WRONG_MARKS = {
    "world_size(2, n=3)": "world_size: 2, n=3 is given, expected numbers of ranks from 1",
    "world_size(1, -2)": "world_size: 1, -2 is given, expected numbers of ranks from 1",
    "isolated(2)": "isolated: 2 is given, expected nothing; use world_size",
    "timeout('soon')": "timeout: 'soon' is not a time, expected seconds from 0 on",
    "timeout(1, func_only='yes')": "timeout: func_only is 'yes', expected True or False",
}
# Many sessions in one process, each with a file of its own.
SESSIONS = """
import sys
import pytest
for file in sys.argv[1:]:
    code = pytest.main(["-p", "megatron", "--ranks=2", file])
    assert code == pytest.ExitCode.USAGE_ERROR, (code, file)
"""


def test_a_wrong_mark_is_one_usage_error(tmp_path: Path) -> None:
    suite = Suite(tmp_path)
    files = {f"test_wrong_{number}": mark for number, mark in enumerate(WRONG_MARKS)}
    suite.write(**{name: WRONG_MARK.format(mark=mark) for name, mark in files.items()})
    suite.write(
        test_unit="""
            import unittest, pytest

            @pytest.mark.world_size(1, 2)
            class TestUnit(unittest.TestCase):
                def test_one(self): pass
            """
    )
    names = [f"{name}.py" for name in (*files, "test_unit")]
    run = suite.run(*names, command=[sys.executable, "-c", SESSIONS])
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line for line in run.stderr.splitlines() if line]
    for (name, mark), line in zip(files.items(), lines[:-1], strict=True):
        assert line.startswith(f"ERROR: {name}.py::test_one: mark {WRONG_MARKS[mark]}")
    assert "this kind of test cannot be parametrised; give one" in lines[-1]
    assert "Traceback" not in run.stdout


GANG = ("--ranks", "2")


@pytest.mark.parametrize(
    ("words", "fixture", "missing"),
    [
        pytest.param((), "process_group", "torch", id="plain"),
        pytest.param(GANG, "process_group", "torch", id="gangs"),
        pytest.param(GANG, "model_parallel", "megatron", id="megatron-core"),
    ],
)
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, words: tuple[str, ...], fixture: str, missing: str
) -> None:
    """What needs no torch runs without one."""
    suite = Suite(tmp_path).write(
        conftest=f"import sys\nsys.modules[{missing!r}] = None",
        test_one=f"def test_needs({fixture}): pass\ndef test_plain(rank): pass",
    )
    run = suite.run("-v", *words)
    assert run.words == {"test_needs": "ERROR", "test_plain": "PASSED"}
    assert re.search(rf"ModuleNotFoundError: .*\b{missing}\b", run.stdout)
