"""What pytest itself offers, on gangs as without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from gang_suite import Suite

EVERYTHING = '''
    """A docstring with an example.

    >>> 1 + 1
    2
    """
    import logging
    import os
    import sys
    import unittest
    import warnings

    import pytest


    def twice(number):
        """Double.

        >>> twice(2)
        5
        """
        return 2 * number


    @pytest.fixture(scope="module")
    def module_thing(request):
        request.addfinalizer(lambda: print("module thing down"))
        return "thing"


    @pytest.fixture(params=["a", "b"])
    def letter(request):
        return request.param


    @pytest.fixture
    def number(request):
        return request.param + 1


    @pytest.fixture
    def breaks_down():
        yield
        raise OSError("no teardown")


    @pytest.fixture
    def breaks_up():
        raise OSError("no setup")


    def test_passes(module_thing, letter):
        assert module_thing + letter in ("thinga", "thingb")


    @pytest.mark.parametrize("number", [1, 2], indirect=True)
    def test_indirect(number):
        assert number == 2


    def test_fails():
        assert [1, 2] == [1, 3], "not the same"


    def test_raises():
        raise ValueError("two\\nlines")


    def test_setup_error(breaks_up):
        pass


    def test_teardown_error(breaks_down):
        pass


    def test_fails_and_teardown_error(breaks_down):
        raise KeyError("both")


    def test_skips():
        pytest.skip("not today")


    @pytest.mark.skipif(sys.version_info > (3,), reason="too new")
    def test_skipif():
        raise AssertionError


    def test_importorskip():
        pytest.importorskip("no_such_module")


    @pytest.mark.xfail(reason="known")
    def test_xfail():
        raise ValueError


    @pytest.mark.xfail(raises=KeyError)
    def test_xfail_of_another_kind():
        raise ValueError


    @pytest.mark.xfail
    def test_xpass():
        pass


    @pytest.mark.xfail(strict=True)
    def test_xpass_strict():
        pass


    @pytest.mark.xfail(run=False)
    def test_xfail_not_run():
        os._exit(1)


    def test_xfail_called():
        pytest.xfail("said so")


    def test_properties(record_property):
        record_property("colour", "blue")
        record_property("size", 3)


    def test_capsys(capsys):
        print("seen")
        assert capsys.readouterr().out == "seen\\n"


    def test_capfd(capfd):
        os.write(2, b"seen\\n")
        assert capfd.readouterr().err == "seen\\n"


    def test_caplog(caplog):
        logging.getLogger("x").warning("heard")
        assert caplog.messages == ["heard"]


    ALONE = logging.getLogger("alone")
    ALONE.propagate = False
    MINE = logging.NullHandler()


    def test_logger_that_does_not_propagate(caplog):
        ALONE.error("heard alone")
        ALONE.handlers.clear()
        ALONE.addHandler(MINE)
        assert caplog.messages == ["heard alone"]


    def test_logger_after_its_handlers_were_cleared(caplog):
        ALONE.error("heard again")
        ALONE.propagate = True
        assert ALONE.handlers[0] is MINE
        assert caplog.messages == ["heard again"]
        caplog.handler.setLevel("CRITICAL")


    def test_logger_that_propagates_again(caplog):
        logging.getLogger("alone.new").propagate = False
        ALONE.error("heard once")
        logging.getLogger("x").warning("not heard: the level of the handler was raised")
        assert ALONE.handlers == [MINE]
        assert caplog.messages == []


    def test_output():
        print("printed")
        os.write(1, b"written\\n")
        logging.getLogger("x").error("logged")
        raise RuntimeError("after output")


    def test_monkeypatch(monkeypatch, tmp_path):
        monkeypatch.setenv("A_VARIABLE", "1")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").write_text("")
        assert os.environ["A_VARIABLE"] == "1"


    def test_monkeypatch_is_undone():
        assert "A_VARIABLE" not in os.environ


    def test_warns():
        warnings.warn("careful")
        warnings.warn("old", DeprecationWarning)


    @pytest.mark.filterwarnings("error:careful")
    def test_warning_is_error():
        warnings.warn("careful")


    @pytest.mark.filterwarnings("ignore:careful")
    def test_warning_is_ignored():
        warnings.warn("careful")


    def test_subtests(subtests):
        for i in range(3):
            with subtests.test("case", i=i):
                assert i != 1
        with subtests.test("skipped"):
            pytest.skip("this one")


    class TestClass:
        @pytest.fixture(scope="class")
        def things(self):
            return []

        def test_one(self, things):
            things.append(1)

        def test_two(self, things):
            assert things == [1]


    class TestUnit(unittest.TestCase):
        @classmethod
        def setUpClass(cls):
            cls.numbers = [1]

        def setUp(self):
            self.numbers.append(2)

        def test_state(self):
            self.assertEqual(self.numbers[:2], [1, 2])

        def test_fails(self):
            self.assertEqual(1, 2)

        def test_sub(self):
            for i in range(3):
                with self.subTest(i=i):
                    self.assertNotEqual(i, 1)

        @unittest.skip("unit")
        def test_skip(self):
            pass

        def test_skip_called(self):
            self.skipTest("later")

        @unittest.expectedFailure
        def test_expected(self):
            self.fail()


    class TestBrokenUnit(unittest.TestCase):
        @classmethod
        def tearDownClass(cls):
            raise OSError("class down")

        def test_one(self):
            pass
'''


def test_every_outcome_is_as_in_plain_pytest(tmp_path: Path) -> None:
    """Lines, JUnit, summary and warnings; the two runs differ in nothing but times and ours."""
    suite = Suite(tmp_path).write(
        test_everything=EVERYTHING,
        test_skipped_module="""
            import pytest

            pytest.skip("the whole of it", allow_module_level=True)
            """,
        test_error_after="""
            import pytest

            @pytest.fixture(scope="session", autouse=True)
            def whole():
                yield
                raise OSError("session down")

            def test_last():
                pass
            """,
    )
    options = ("-v", "-rA", "--doctest-modules", "-o", "junit_logging=all")
    plain = suite.run(*options, "--junitxml=plain.xml")
    gang = suite.run(*options, "--junitxml=gang.xml", "--ranks=2")
    # Plain pytest captures its own lines about subtests of unittest.
    lines = [line for line in gang.lines if "::test_sub SUB" not in line]
    assert lines == [line for line in plain.lines if "::test_sub SUB" not in line]
    assert len(gang.lines) == len(lines) + 3 > 50
    assert suite.junit("gang.xml") == suite.junit("plain.xml")
    assert (gang.returncode, gang.summary) == (plain.returncode, plain.summary)
    assert "test_everything.py::test_last" not in gang.stdout


SPLIT = """
    import unittest
    import warnings

    import pytest


    @pytest.fixture
    def skips_one(rank):
        if rank == 1:
            pytest.skip("rank 1 has no data")


    @pytest.mark.xfail(reason="known")
    def test_xfail_on_one(rank):
        assert rank != 1


    @pytest.mark.xfail(strict=True)
    def test_strict_xfail_on_one(rank):
        assert rank != 1


    @pytest.mark.xfail(strict=True)
    def test_strict_xfail_on_none():
        pass


    def test_xfail_called_on_one(rank):
        if rank == 1:
            pytest.xfail("said so")


    @pytest.mark.xfail(raises=ValueError)
    def test_other_failure_on_one(rank):
        if rank == 1:
            raise KeyError("x")
        raise ValueError


    def test_skip_on_one(rank):
        if rank == 1:
            pytest.skip("not here")


    def test_skip_in_setup_on_one(skips_one):
        pass


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


    def test_fails_at_two_lines(rank):
        if rank == 0:
            raise ValueError("zero")
        raise ValueError("one")
"""


def test_ranks_that_differ_make_one_outcome(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_split=SPLIT)
    run = suite.run("-v", "-rA", "--ranks=2", "--junitxml=junit.xml")
    assert run.returncode == 1
    assert run.words == {
        "test_xfail_on_one": "XFAIL",
        "test_strict_xfail_on_one": "XFAIL",
        "test_strict_xfail_on_none": "FAILED",
        "test_xfail_called_on_one": "XFAIL",
        "test_other_failure_on_one": "FAILED",
        "test_skip_on_one": "FAILED",
        "test_skip_in_setup_on_one": "FAILED",
        "test_subtests": "FAILED",
        "test_sub": "PASSED",
        "test_prints": "PASSED",
        "test_warns": "PASSED",
        "test_properties": "PASSED",
        "test_fails_at_two_lines": "FAILED",
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
        "rank 1: skipped: rank 1 has no data",
        "[rank 1] KeyError: 'x'",
        "[rank 1] assert (1, 1) != (1, 1)",
        "Captured stdout call of ranks 0-1",
        "Captured stderr call of rank 0",
        "Captured stderr call of rank 1",
        "failure of rank",
    ):
        assert text in run.stdout
    assert run.stdout.count("UserWarning: the same") == 1
    assert all(f"UserWarning: only {rank}" in run.stdout for rank in (0, 1))
    (properties,) = [c.properties for c in suite.junit() if c.name.endswith("test_properties")]
    assert properties == (("same", "1"), ("rank", "0"), ("rank", "1"))


CHOICE = """
    import os
    import pytest

    def note(name):
        if os.environ["RANK"] == "0":
            with open("ran.txt", "a") as file:
                file.write(name + "\\n")

    def test_a(): note("a")
    def test_b(): note("b"); assert os.path.exists("mended")
    def test_c(): note("c")
    @pytest.mark.controller
    def test_d(): assert "RANK" not in os.environ
    @pytest.mark.slow
    def test_e(): note("e"); assert os.path.exists("mended")
    def test_f(): note("f")
    """


def ran(suite: Suite) -> str:
    """Return what ran since the last call, in order."""
    letters = "".join(suite.read("ran.txt"))
    (suite.root / "ran.txt").unlink(missing_ok=True)
    return letters


def test_choosing_and_stopping(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        test_choice=CHOICE, **{"pytest.ini": "[pytest]\nmarkers = slow\naddopts = --ranks=2 -v\n"}
    )
    first = suite.run("-x")
    assert (ran(suite), first.summary) == ("ab", "1 failed, 1 passed")
    assert "stopping after 1 failures" in first.stdout
    again = suite.run("--lf", "--maxfail=2")
    assert (ran(suite), again.summary) == ("b", "1 failed")
    two = suite.run("--ff", "--maxfail=2")
    assert (ran(suite), list(two.words)) == (
        "bace",
        ["test_b", "test_a", "test_c", "test_d", "test_e"],
    )
    steps = suite.run("--sw")
    assert (ran(suite), list(steps.words)) == ("ab", ["test_a", "test_b"])
    (suite.root / "mended").touch()
    assert suite.run("--sw").summary == "5 passed, 1 deselected"
    assert ran(suite) == "bcef"
    chosen = suite.run(
        *("-k", "not test_f", "-m", "not slow", "--deselect", "test_choice.py::test_c"),
        *("--durations=0", "-vv"),
    )
    assert (ran(suite), chosen.summary) == ("ab", "3 passed, 3 deselected")
    assert "call     test_choice.py::test_b" in chosen.stdout


def test_collecting_starts_no_gang(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_choice=CHOICE)
    tree = suite.run("--co", "--ranks=2", "-p", "no:cacheprovider")
    names = suite.run("--co", "-q", "--ranks=2", "-W", "ignore")
    assert "<Function test_a>" in tree.stdout
    assert names.stdout.splitlines()[:2] == ["test_choice.py::test_a", "test_choice.py::test_b"]
    assert not (suite.root / ".pytest_megatron").exists()


def test_setup_show_shows_the_fixtures_of_rank_0(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        test_shown="""
            import pytest

            @pytest.fixture(scope="module")
            def thing(rank):
                return rank

            def test_one(thing): pass
            def test_two(thing): pass
            """
    )

    def shown(*options: str) -> str:
        text = suite.run("-p", "no:cacheprovider", *options).stdout
        return text.partition("test_shown.py")[2].partition("=====")[0]

    for option in ("--setup-show", "--setup-only", "--setup-plan"):
        assert shown(option, "--ranks=2") == shown(option)
    assert "SETUP    M thing" in shown("--setup-show")


@pytest.mark.parametrize("capture", ["fd", "no", "tee-sys"])
def test_capture_modes(tmp_path: Path, capture: str) -> None:
    suite = Suite(tmp_path).write(
        test_captured="""
            import os, sys
            import pytest

            def test_capsys(capsys):
                print("x"); assert capsys.readouterr().out == "x\\n"
            def test_capfd(capfd):
                os.write(1, b"x"); assert capfd.readouterr().out == "x"
            def test_capteesys(capteesys):
                print("x"); assert capteesys.readouterr().out == "x\\n"
            def test_disabled(capsys):
                with capsys.disabled():
                    print("seen")
            def test_fails():
                print("printed"); print("wrong", file=sys.stderr); assert 0
            """
    )
    run = suite.run("-v", f"--capture={capture}", "--ranks=2")
    assert run.summary == "1 failed, 4 passed"
    assert ("Captured stdout call of rank" in run.stdout) == (capture != "no")
    logs = suite.root / ".pytest_megatron" / "runs" / "latest" / "ranks" / "attempt_1"
    for rank in (0, 1):
        assert (logs / str(rank) / "stdout.log").read_text().splitlines()[-1] == "printed"
        assert "seen" in (logs / str(rank) / "stdout.log").read_text()


def test_sections_that_are_asked_for(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        test_shown="""
            import logging

            def test_one():
                print("printed")
                logging.getLogger("x").warning("logged")
            """
    )
    run = suite.run("-rP", "--ranks=2", "-o", "log_cli=true", "--show-capture=log")
    assert "Captured log call of ranks 0-1" in run.stdout
    assert "Captured stdout" not in run.stdout
    assert run.stdout.count("live log call") == 1


@pytest.mark.parametrize(
    ("ends", "code", "text"),
    [
        pytest.param("pytest.exit('enough', returncode=7)", 7, "Exit: enough", id="exit"),
        pytest.param("raise KeyboardInterrupt", 2, "KeyboardInterrupt: rank ", id="interrupt"),
    ],
)
def test_a_test_may_end_the_session(tmp_path: Path, ends: str, code: int, text: str) -> None:
    suite = Suite(tmp_path).write(
        test_ends=f"""
            import pytest

            @pytest.fixture(scope="session", autouse=True)
            def whole(rank):
                yield
                open(f"down{{rank}}.txt", "w").close()

            def test_before(): pass
            def test_ends(): {ends}
            def test_after(): pass
            """
    )
    run = suite.run("-v", "--ranks=2")
    assert (run.returncode, run.words) == (code, {"test_before": "PASSED"})
    assert text in run.stdout
    assert all((suite.root / f"down{rank}.txt").exists() for rank in (0, 1))


def test_conftest_hooks_run_where_they_belong(tmp_path: Path) -> None:
    """Hooks of phases in every rank, hooks of reports and of the terminal in the controller."""
    suite = Suite(tmp_path).write(
        conftest="""
            import os
            import pytest

            where = lambda: os.environ.get("RANK", "controller")
            seen = []

            def pytest_runtest_setup(item):
                with open(f"setup-{where()}.txt", "a") as file:
                    file.write(item.name + "\\n")

            @pytest.hookimpl(wrapper=True)
            def pytest_runtest_makereport(item, call):
                report = yield
                setattr(item, "report_" + report.when, report)
                report.sections.append(("Added", f"{report.when} by {where()}"))
                return report

            def pytest_runtest_logreport(report):
                seen.append(f"{report.when} {where()}")

            def pytest_terminal_summary(terminalreporter):
                terminalreporter.write_line("seen: " + ", ".join(seen))
            """,
        test_hooks="""
            import pytest

            @pytest.fixture
            def looks_back(request):
                yield
                print("call", request.node.report_call.outcome)

            def test_one(looks_back): pass
            """,
    )
    run = suite.run("-rA", "--ranks=2")
    assert run.returncode == 0
    assert "seen: setup controller, call controller, teardown controller" in run.stdout
    assert "call passed" in run.stdout
    assert [suite.read(f"setup-{where}.txt") for where in ("0", "1", "controller")] == [
        ["test_one"],
        ["test_one"],
        [],
    ]
    assert {"call by 0", "call by 1"} <= set(run.stdout.splitlines())
    assert "by controller" not in run.stdout


def test_warning_options_reach_the_ranks(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        test_warns="""
            import warnings

            def test_one(): warnings.warn("careful")
            def test_two(): warnings.warn("old", DeprecationWarning)
            """
    )
    run = suite.run("-v", "--ranks=2", "-W", "error", "-W", "ignore::DeprecationWarning")
    assert run.words == {"test_one": "FAILED", "test_two": "PASSED"}
