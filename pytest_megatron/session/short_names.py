"""Short names of options, which give way to options of the project and of other plugins.

Each option is declared as `--megatron-NAME` at once, and as `--NAME` where nobody else declares
that one: two options of one name would end pytest with an error, whoever declares it first. So the
short ones follow when the initial conftest files are loaded. Which these are depends on the paths
among the words, and a short name that is not declared yet would leave its value there: until then
it is read as the long one.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Mapping, Sequence

import pytest

PREFIX = "megatron-"
_GROUP = "pytest-megatron"  # a project may have a group `megatron`
_REMOVED = "megatron_removed"


class ShortNames:
    """Declares options under both names, the short ones when all others have declared theirs.

    Attributes:
        taken: Short names that others have, without the dashes in front.
    """

    def __init__(self, parser: pytest.Parser) -> None:
        self.taken: list[str] = []
        self._parser = parser
        self._group = parser.getgroup(_GROUP, "training workloads and distributed tests")
        self._settings: dict[str, dict[str, object]] = {}

    def declare(self, name: str, settings: Mapping[str, object]) -> None:
        """Declare an option by its long name, and remember its short one."""
        self._group.addoption(f"--{PREFIX}{name}", **{**settings, "help": argparse.SUPPRESS})
        self._settings[name] = dict(settings)

    def refuse(self, name: str, action: type[argparse.Action]) -> None:
        """Declare an option of earlier versions for `action` to refuse, unless it is somebody's."""
        hidden = {"nargs": "?", "help": argparse.SUPPRESS}
        self.declare(name, {"action": action, "dest": _REMOVED, **hidden})

    def read(self, early_config: pytest.Config, words: Sequence[str]) -> set[str]:
        """Have pytest know what is typed, with short names that nobody has as ours.

        Returns:
            The names that nobody has.
        """
        free = {name for name in self._settings if f"--{name}" not in self._names_of_others()}
        given = early_config.known_args_namespace
        long = [f"--{PREFIX}{w[2:]}" if w[:2] == "--" and _name(w) in free else w for w in words]
        with contextlib.suppress(pytest.UsageError):  # told when all options are declared
            early_config.known_args_namespace = self._parser.parse_known_args(
                long, namespace=copy.copy(early_config.option)
            )
            early_config.known_args_namespace.confcutdir = given.confcutdir
        return free

    def declare_free(self) -> None:
        """Declare the short names that nobody has."""
        others = self._names_of_others()
        for name, settings in self._settings.items():
            if f"--{name}" not in others:
                self._group.addoption(f"--{name}", **settings)
            elif settings["dest"] != _REMOVED:
                self.taken.append(name)
                self._show(f"--{PREFIX}{name}", settings["help"])

    def withdraw(self) -> None:
        """Have pytest accept options of the same names, from conftest files that it loads later."""
        for option in {f"--{name}" for name in self._settings} - self._names_of_others():
            self._actions().pop(option, None)

    def _show(self, option: str, text: object) -> None:
        """Have `--help` show an option."""
        (declared,) = (one for one in self._group.options if option in one.names())
        vars(self._actions().get(option, declared))["help"] = text

    def _actions(self) -> dict[str, argparse.Action]:
        """Return the options that argparse knows; none before pytest 9, which reads them later."""
        parser = vars(self._parser).get("optparser")
        return {} if parser is None else vars(parser)["_option_string_actions"]

    def _names_of_others(self) -> set[str]:
        """Return the options that others have declared."""
        groups = [*self._parser._groups, self._parser._anonymous]
        options = [o for group in groups if group is not self._group for o in group.options]
        return {name for option in options for name in option.names()}


def _name(word: str) -> str:
    """Return the name of an option in a word of a command line."""
    return word.partition("=")[0].removeprefix("--")
