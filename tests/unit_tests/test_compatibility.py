"""The page of tried releases has what the package says that it supports.

Sessions run with the oldest pytest that the package admits.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from labs import skip
from run_versions import CHECKS, Environment, with_pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/compatibility.md"


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
