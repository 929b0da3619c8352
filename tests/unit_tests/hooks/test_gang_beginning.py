"""How pytest starts in a rank that collects for itself, and what is said where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from gang_suite import READS_RANK, Suite

TESTS = """
    def test_world(world_size):
        assert world_size == 2


    def test_other(rank):
        assert rank < 2
"""


@pytest.mark.parametrize("start", ["fork", "fresh"])
def test_warnings_that_are_errors_do_not_keep_a_rank_from_starting(
    start: str, tmp_path: Path
) -> None:
    suite = Suite(tmp_path).write(conftest=READS_RANK, test_world=TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    run = suite.run("-v", "--ranks", "2", "--gang-start", start)
    assert set(run.words.values()) == {"PASSED"}, run.stdout


@pytest.mark.parametrize(
    ("hook", "statement", "reason"),
    [
        ("configure(config)", "raise ValueError('no such rank')", "ValueError: no such rank"),
        ("sessionstart(session)", "pytest.exit('not here', 3)", "Exit: not here"),
        ("cmdline_main(config)", "raise pytest.UsageError('no')", "UsageError: no"),
    ],
)
def test_a_rank_in_which_pytest_does_not_start_says_why(
    hook: str, statement: str, reason: str, tmp_path: Path
) -> None:
    conftest = f"""
    import os

    import pytest


    def pytest_{hook}:
        if os.environ["RANK"] == "1":
            {statement}
    """
    suite = Suite(tmp_path).write(conftest=conftest, test_world=TESTS)
    run = suite.run("-v", "--ranks", "2")
    assert run.returncode == 1, run.stdout
    assert run.words == {"test_world": "FAILED", "test_other": "FAILED"}
    assert f"rank 1 of 2 could not collect: {reason}" in run.stdout
    assert "rank 0: did not run it" in run.stdout
    assert 'conftest.py", line ' in run.stdout
