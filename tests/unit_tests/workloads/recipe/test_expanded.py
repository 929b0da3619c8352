"""Rows that an earlier session expanded: the same as those of the file, or read anew."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from recipe_texts import HEAD

from pytest_megatron.errors import RecipeError
from pytest_megatron.workloads.items.plugin import rows_of
from pytest_megatron.workloads.recipe.load import load_recipe
from pytest_megatron.workloads.recipe.model import BUILT_IN_WORDS

ROWS = "products:\n- test_case: [a, b]\n  products:\n  - environment: [dev]\n    scope: [mr]\n"
LIBRARIES = """
import sys
from pathlib import Path
from pytest_megatron.workloads.items.plugin import rows_of
from pytest_megatron.workloads.recipe.model import BUILT_IN_WORDS
print(len(rows_of(Path("r.yaml"), BUILT_IN_WORDS, Path("kept"))))
print(sorted({"pydantic", "yaml"} & set(sys.modules)))
"""


def recipe(directory: Path, text: str = HEAD + ROWS) -> Path:
    path = directory / "r.yaml"
    path.write_text(text)
    return path


def test_a_second_reading_needs_neither_yaml_nor_a_schema(tmp_path: Path) -> None:
    recipe(tmp_path)
    command = [sys.executable, "-c", LIBRARIES]
    said = [subprocess.check_output(command, cwd=tmp_path, text=True) for _ in range(2)]
    assert said == ["2\n['pydantic', 'yaml']\n", "2\n[]\n"]


def test_rows_that_were_kept_are_those_of_the_file(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    expected = load_recipe(path)
    for _ in range(2):
        assert rows_of(path, BUILT_IN_WORDS, tmp_path / "kept") == expected


def test_another_text_of_the_same_size_and_time_is_read(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    before = path.stat()
    rows_of(path, BUILT_IN_WORDS, tmp_path / "kept")
    recipe(tmp_path, HEAD + ROWS.replace("[a, b]", "[a, c]"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    rows = rows_of(path, BUILT_IN_WORDS, tmp_path / "kept")
    assert [row.test_case for row in rows] == ["a", "c"]


def test_words_that_are_no_longer_known_are_an_error(tmp_path: Path) -> None:
    path = recipe(tmp_path, HEAD + ROWS.replace("[dev]", "[ours]"))
    wider = replace(BUILT_IN_WORDS, environments=frozenset({"dev", "lts", "ours"}))
    assert len(rows_of(path, wider, tmp_path / "kept")) == 2
    with pytest.raises(RecipeError, match="ours"):
        rows_of(path, BUILT_IN_WORDS, tmp_path / "kept")


@pytest.mark.parametrize("damage", [b"", b"x" * 20, b"x" * 200])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    path = recipe(tmp_path)
    expected = rows_of(path, BUILT_IN_WORDS, tmp_path / "kept")
    (kept,) = (tmp_path / "kept").iterdir()
    sound = kept.read_bytes()
    kept.write_bytes(damage)
    assert rows_of(path, BUILT_IN_WORDS, tmp_path / "kept") == expected
    assert kept.read_bytes() == sound


def test_rows_are_read_where_nothing_can_be_kept(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    (tmp_path / "kept").write_text("a file in the place of the directory")
    assert len(rows_of(path, BUILT_IN_WORDS, tmp_path / "kept")) == 2
    assert len(rows_of(path, BUILT_IN_WORDS, None)) == 2


def test_a_recipe_that_is_gone_is_an_error(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    rows_of(path, BUILT_IN_WORDS, tmp_path / "kept")
    path.unlink()
    with pytest.raises(RecipeError, match=r"r\.yaml"):
        rows_of(path, BUILT_IN_WORDS, tmp_path / "kept")
