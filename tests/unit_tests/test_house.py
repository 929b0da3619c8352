"""Rules of the package's tree that no linter has."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import pytest_megatron

PACKAGE = Path(pytest_megatron.__file__).parent
MOST_MODULES = 15


def test_a_class_name_has_one_meaning() -> None:
    names: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                where = path.relative_to(PACKAGE).as_posix()
                names.setdefault(node.name.lstrip("_"), []).append(where)
    assert {name: files for name, files in names.items() if len(files) > 1} == {}


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    modules = Counter(
        path.parent.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    )
    assert {folder: count for folder, count in modules.items() if count > MOST_MODULES} == {}


PROGRAMS = sorted(
    path
    for path in (Path(__file__).parents[1]).glob("*/run_*.py")
    if "argparse" in path.read_text(encoding="utf-8")
)


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_an_examination_finds_what_it_imports(program: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(program), "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
