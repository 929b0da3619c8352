"""The arguments of a session: paths among them, and words that no other session may inherit."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Collection, Container, Iterator, Sequence
from pathlib import Path

import pytest

from pytest_megatron.session.options import OPTION_ROWS
from pytest_megatron.session.short_names import PREFIX

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


_ADDOPTS, _PLUGINS = "PYTEST_ADDOPTS", "PYTEST_PLUGINS"
_NAMES = ("megatron", "pytest_megatron.plugin")
_TAKING_ANOTHER = ("-p", "-o", "--override-ini")
_OURS = re.compile(
    rf"-p ?(?:{'|'.join(map(re.escape, _NAMES))})|(?:-o ?|--override-ini[ =])megatron_.*", re.DOTALL
)


def leave_out_of_environment(config: pytest.Config, taken: Collection[str]) -> None:
    """Take what is ours out of the variables of pytest until the session ends.

    Args:
        config: Configuration of a session that has parsed its options.
        taken: Short names of options that others have.
    """
    words = shlex.split(os.environ.get(_ADDOPTS, ""))
    plugins = [name for name in os.environ.get(_PLUGINS, "").split(",") if name]
    asked = [name for name in plugins if name in _NAMES]
    if asked:  # workers of pytest-xdist take the names from here
        config.option.plugins = [*config.option.plugins, *asked]
    others = [name for name in plugins if name not in _NAMES]
    _set(config, _ADDOPTS, shlex.join(_without_ours(words, taken)), is_changed=bool(words))
    _set(config, _PLUGINS, ",".join(others), is_changed=bool(asked))


def _set(config: pytest.Config, name: str, value: str, *, is_changed: bool) -> None:
    """Set a variable until the session ends."""
    if not is_changed:
        return
    before = os.environ[name]

    def restore() -> None:
        os.environ[name] = before

    config.add_cleanup(restore)
    if value:
        os.environ[name] = value
    else:
        del os.environ[name]


def _without_ours(words: Sequence[str], taken: Collection[str]) -> Iterator[str]:
    """Yield words of a command line without the plugin, its options and their values."""
    rows = {f"--{PREFIX}{row.name}": row for row in OPTION_ROWS.values()}
    rows |= {f"--{row.name}": row for row in OPTION_ROWS.values() if row.name not in taken}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, has_value = word.partition("=")[:2]
        value = rest[0] if rest else ""
        if name in rows:
            row = rows[name]
            is_optional = row.kind.bare is not None
            if row.metavar and not has_value and rest and not (is_optional and value[:1] == "-"):
                del rest[0]
        elif word in _TAKING_ANOTHER and _OURS.fullmatch(f"{word} {value}"):
            del rest[0]
        elif not _OURS.fullmatch(word):
            yield word
