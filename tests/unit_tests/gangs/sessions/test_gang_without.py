"""Sessions that lack a plugin of pytest's own, and those in which the controller itself fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from gang_suite import READS_RANK, Suite

pytestmark = pytest.mark.nightly

TESTS = """
    import os

    import pytest


    def test_passes(world_size):
        assert world_size == 2


    def test_fails_on_one(rank):
        assert rank == 0


    def test_dies_on_one(rank):
        if rank == 1:
            os._exit(1)
"""
IN_DIRECTORY = """

    @pytest.mark.isolated
    def test_isolated(shared_tmp_path):
        assert shared_tmp_path.is_dir()
"""
WITHOUT_DIRECTORY = """

    @pytest.mark.isolated
    def test_isolated(rank):
        assert rank < 2
"""
KINDS = (("passed",), ("failure",), ("failure",), ("passed",))


@pytest.mark.parametrize(
    ("conftest", "plugins"),
    [
        pytest.param("", ("terminal", "setuponly"), id="forked"),
        pytest.param(READS_RANK, ("capture", "debugging"), id="collecting"),
    ],
)
def test_gangs_do_without_plugins(plugins: tuple[str, ...], conftest: str, tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(conftest=conftest, test_them=TESTS + IN_DIRECTORY)
    without = [f"-pno:{plugin}" for plugin in plugins]
    run = suite.run("--ranks", "2", *without, "--junitxml", "junit.xml")
    assert run.returncode == 1, run.stdout + run.stderr
    found = [tuple(k.split()[0] for k in case.kinds) or ("passed",) for case in suite.junit()]
    assert tuple(found) == KINDS


def test_gangs_do_without_temporary_directories_of_pytest(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_them=TESTS + WITHOUT_DIRECTORY)
    (tmp_path / "temp").mkdir()
    run = suite.run("-v", "--ranks", "2", "-p", "no:tmpdir", env={"TMPDIR": str(tmp_path / "temp")})
    assert list(run.words.values()) == ["PASSED", "FAILED", "FAILED", "PASSED"], run.stdout
    assert not [path.name for path in (tmp_path / "temp").iterdir() if "leases" not in path.name]


LOSES_TERMINAL = """
    def pytest_runtest_logreport(report):
        if report.nodeid.endswith("test_passes") and report.when == "teardown":
            plugin.config.pluginmanager.unregister(name="terminalreporter")


    class plugin:
        config = None


    def pytest_configure(config):
        plugin.config = config
"""


def test_a_session_ends_where_the_controller_fails_while_it_waits(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(conftest=LOSES_TERMINAL, test_them=TESTS + IN_DIRECTORY)
    run = suite.run("--ranks", "2", "-s")
    assert run.returncode == pytest.ExitCode.INTERNAL_ERROR, run.stdout
    assert "get_terminal_writer" in run.stderr
