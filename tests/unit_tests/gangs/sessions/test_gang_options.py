"""Options of pytest that choose, stop, capture and warn, on gangs as without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from gang_suite import Suite

pytestmark = pytest.mark.nightly

CHOICE = """
    import os
    import pytest

    def note(name):
        if os.environ["RANK"] == "0":
            with open("ran.txt", "a") as file:
                file.write(name + "\\n")

    def test_a(): note("a")
    def test_b(): note("b"); assert os.path.exists("fixed")
    def test_c(): note("c")
    @pytest.mark.controller
    def test_d(): assert "RANK" not in os.environ
    @pytest.mark.slow
    def test_e(): note("e"); assert os.path.exists("fixed")
    def test_f(): note("f")
    """


def ran(suite: Suite) -> str:
    """Return what ran since the last call, in order."""
    letters = "".join(suite.read("ran.txt"))
    (suite.root / "ran.txt").unlink(missing_ok=True)
    return letters


@pytest.mark.everyday
def test_choosing_and_stopping(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        test_choice=CHOICE, **{"pytest.ini": "[pytest]\nmarkers = slow\naddopts = --ranks=2 -v\n"}
    )
    first = suite.run("-x")
    assert (ran(suite), first.summary) == ("ab", "1 failed, 1 passed")
    assert "stopping after 1 failures" in first.stdout
    two = suite.run("--ff", "--maxfail=2")
    assert (ran(suite), list(two.words)) == (
        "bace",
        ["test_b", "test_a", "test_c", "test_d", "test_e"],
    )
    steps = suite.run("--sw")
    assert (ran(suite), list(steps.words)) == ("ab", ["test_a", "test_b"])
    (suite.root / "fixed").touch()
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
        plain = shown(option)
        assert "SETUP    M thing" in plain
        assert shown(option, "--ranks=2") == plain


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
