"""The page of tried releases: in order, and of what the package says that it supports.

Sessions run with the oldest pytest that the package admits.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from labs import skip
from run_versions import CHECKS, HEAD, Environment, with_pytest, with_rows

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/compatibility.md"
ROW = "| 3.12.4 | 2.8.0 | 2.5.5 | 9.2.0 | yes | yes | yes | 2026-11-22 |"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """This environment with the oldest pytest, which comes from the package index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = (d.partition(">=")[2] for d in project["dependencies"] if d.startswith("pytest>"))
    try:
        return with_pytest(tmp_path_factory.mktemp("pytest"), f"{oldest}.*")
    except (OSError, subprocess.CalledProcessError) as error:
        return skip(f"needs the package index and uv of `python3 dev.py setup`: {error}")


@pytest.mark.nightly
@pytest.mark.parametrize("name", CHECKS)
def test_the_oldest_pytest_runs_and_reports_everything(
    name: str, old: Environment, tmp_path: Path
) -> None:
    assert CHECKS[name](old, tmp_path) == ""


def test_every_supported_python_was_tried_and_the_oldest_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tried = re.findall(r"^\| (3\.\d+)\.\S+ \| (\d+\.\d+)", PAGE.read_text(), re.MULTILINE)
    pythons = {words.rpartition(" ")[2] for words in project["classifiers"] if "3." in words}
    oldest = project["optional-dependencies"]["torch"][0].removeprefix("torch>=")
    assert pythons == {python for python, _ in tried}
    assert oldest in {torch for _, torch in tried}


def test_rows_are_put_in_order_and_replace_those_of_the_same_releases() -> None:
    page = f"before\n\n{HEAD}\n|---|\n{ROW}\n{ROW.replace('2.8.0', '2.10.1')}\n\nafter\n"
    newer = ROW.replace("3.12.4", "3.12.9").replace("yes", "no")
    added = ROW.replace("3.12.4", "3.11.7")
    assert with_rows(page, [newer, added]) == page.replace(ROW, f"{added}\n{newer}", 1)


def test_the_page_is_as_the_program_writes_it() -> None:
    assert with_rows(PAGE.read_text(), []) == PAGE.read_text()
