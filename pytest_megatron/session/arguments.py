"""The arguments of a session: paths among them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Container
from pathlib import Path

import pytest

from pytest_megatron.session.short_names import PREFIX

RECIPES_DIR = "recipes"
RECIPE_SUFFIXES = (".yaml", ".yml")


def refuse_root_of_values(config: pytest.Config, names: Container[str]) -> None:
    """Make sure that no value of an option gave the session another root than the project's.

    pytest looks for the root before any plugin is loaded, when it takes all words for paths of
    tests that are no options: `--executor-config FILE` in two words moves it to where both are.

    Args:
        config: The session's.
        names: Options that take a value.

    Raises:
        pytest.UsageError: One did.
    """
    here, root = config.invocation_params.dir, config.rootpath
    is_above = root in here.parents
    if config.option.rootdir or root == here or (is_above and config.inipath is not None):
        return
    if any(_is_elsewhere(argument, here) for argument in config.args):
        return
    for name, value in itertools.pairwise(map(str, config.invocation_params.args)):
        path = Path(os.path.normpath(here / value))
        if (
            name.removeprefix("--").removeprefix(PREFIX) in names
            and _is_elsewhere(value, here)
            and path.is_relative_to(root)
            and path.exists()
        ):
            raise pytest.UsageError(
                f"{name} {value}: in two words, pytest takes the project's root from this path, "
                f"and found {root}; write {name}={value}"
            )


def _is_elsewhere(argument: str, here: Path) -> bool:
    return not Path(os.path.normpath(here / argument.partition("::")[0])).is_relative_to(here)


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
