"""The tiers of this repository's tests: what the everyday one leaves out, and what asks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = """\
[pytest]
testpaths = tests
pythonpath = {labs}
strict_markers = true
"""
TESTS = """\
import pytest

def test_plain(): pass

@pytest.mark.nightly
def test_at_night(): pass

@pytest.mark.everyday("b")
@pytest.mark.parametrize("letter", "abc")
def test_matrix(letter): pass
"""
NIGHTLY = """\
import pytest

pytestmark = pytest.mark.nightly

def test_rare(): pass

@pytest.mark.everyday
def test_often(): pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text(SETTINGS.format(labs=ROOT / "tests/labs"))
    (tmp_path / "tests/test_one.py").write_text(TESTS)
    (tmp_path / "tests/test_two.py").write_text(NIGHTLY)
    return tmp_path


def run(project: Path, *words: str) -> tuple[list[str], str]:
    """Run the tests with these words; return which passed, and all that was printed."""
    command = [sys.executable, "-m", "pytest", "-rA", *words]
    ended = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    lines = ended.stdout.splitlines()
    passed = [line.rpartition("::")[2] for line in lines if line.startswith("PASSED ")]
    return sorted(passed), ended.stdout + ended.stderr


def test_the_everyday_tier_is_parallel_and_says_what_waits(project: Path) -> None:
    everyday = ["test_matrix[b]", "test_often", "test_plain"]
    passed, printed = run(project, "--tier", "everyday")
    assert passed == everyday
    assert "workers [3 items]" in printed
    assert "4 tests wait for `python3 dev.py test --all`; everyday took 0." in printed
    assert len(run(project, "--tier", "all")[0]) == len(everyday) + 4


@pytest.mark.parametrize(
    ("words", "those"),
    [
        (["tests/test_two.py"], ["test_often", "test_rare"]),
        (["-k", "at_night"], ["test_at_night"]),
        (["-m", "nightly and not everyday"], ["test_at_night", "test_rare"]),
    ],
)
def test_what_is_named_runs_whatever_its_tier(
    project: Path, words: list[str], those: list[str]
) -> None:
    assert run(project, "--tier", "everyday", *words)[0] == those
