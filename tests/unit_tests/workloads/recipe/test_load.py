from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from recipe_texts import HEAD

from pytest_megatron.errors import ConfigError, RecipeError
from pytest_megatron.workloads.recipe.load import find_recipes, load_recipe, read_recipe
from pytest_megatron.workloads.recipe.model import project_words

ROWS = "products: [{test_case: [a], products: [{environment: [dev], scope: [mr]}]}]\n"


def test_recipes_are_found_below_directories_once_and_sorted(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("b.yaml", "a/c.yaml", "a/notes.txt")]
    (tmp_path / "a").mkdir()
    for file in files:
        file.touch()
    assert find_recipes([tmp_path, files[0]]) == [files[1], files[0]]
    with pytest.raises(RecipeError, match="no such file or directory"):
        find_recipes([tmp_path / "none"])


def test_a_sound_recipe_gives_its_workloads(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(HEAD + ROWS)
    (workload,) = load_recipe(tmp_path / "r.yaml")
    assert (workload.file, workload.line) == (tmp_path / "r.yaml", 8)


def test_an_error_counts_the_others_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("type: basic\nformat_version: 1\nspec: {model: gpt}\nother: 1\n")
    with pytest.raises(RecipeError) as raised:
        load_recipe(path)
    assert str(raised.value) == (
        f"{path}:1: products: is missing; add it "
        "(and 2 more in this file: see `pytest-megatron lint`)"
    )


def test_a_file_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    (finding,) = read_recipe(tmp_path / "none.yaml").findings
    assert (finding.line, finding.rule, finding.message) == (
        None,
        "unreadable",
        "cannot be read: No such file or directory",
    )


def test_words_of_the_project_are_known(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.pytest-megatron]\nscopes = ["smoke"]\n')
    (tmp_path / "r.yaml").write_text(HEAD + ROWS.replace("mr", "smoke"))
    assert len(load_recipe(tmp_path / "r.yaml", vocabulary=project_words(tmp_path))) == 1
    (tmp_path / "pyproject.toml").write_text("[tool.pytest-megatron]\nscopes = 1\n")
    with pytest.raises(ConfigError):
        project_words(tmp_path)


def test_importing_the_reader_imports_neither_pydantic_nor_torch() -> None:
    code = (
        "import pytest_megatron.workloads.recipe.load, sys; "
        "sys.exit(any(name in sys.modules for name in ('pydantic', 'torch', 'pytest')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
