"""The page of tried releases: in order, and of what the package says that it supports."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from run_versions import HEAD, with_rows

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/compatibility.md"
ROW = "| 3.12.4 | 2.8.0 | 2.5.5 | 9.2.0 | yes | yes | yes | 2026-11-22 |"


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
