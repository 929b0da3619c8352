"""Rules of the package's tree that no linter has."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

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
