"""The paths among the arguments of a session."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

RECIPES_DIR = "recipes"
RECIPE_SUFFIXES = (".yaml", ".yml")


def findable(arguments: Sequence[str], directory: str) -> list[str]:
    """Return arguments without the directory where pytest would take its name for a node id's.

    Without arguments, pytest names the directory in full; it splits at `::` and `[` before it looks
    for a file.
    """
    if "::" not in directory and "[" not in directory:
        return list(arguments)
    start = f"{directory}{os.sep}"
    return ["." if a == directory else a.removeprefix(start) for a in arguments]


def are_recipes_asked_for(config: pytest.Config) -> bool:
    """Return true if an argument names a recipe or a folder of recipes.

    A plain `pytest` must not start trainings because a folder happens to hold recipes.
    """
    is_typed = config.args_source in (config.ArgsSource.ARGS, config.ArgsSource.TESTPATHS)
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.partition("::")[0])
        parts = parts_below(path, config.rootpath)
        is_folder = is_typed and path.name == RECIPES_DIR  # it may be the root itself
        if path.suffix in RECIPE_SUFFIXES or is_folder or RECIPES_DIR in parts:
            return True
    return False


def parts_below(path: Path, root: Path) -> tuple[str, ...]:
    """Return the parts of a path under `root`; all of them where it is elsewhere."""
    return path.relative_to(root).parts if path.is_relative_to(root) else path.parts
