"""Short names of options, which give way to options of the project and of other plugins.

Each option is declared as `--megatron-NAME`, and as `--NAME` where nobody else declares that one:
two options of one name would end pytest with an error, whoever declares it first.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.config.argparsing import Argument

PREFIX = "megatron-"
_GROUP = "pytest-megatron"  # a project may have a group `megatron`
_DECLARING = "pytest_addoption"
_LENIENT = {"nargs": "?", "const": ""}


class ShortNames:
    """Declares options under both names, and withdraws short names that others declare later.

    Attributes:
        taken: Short names that others have, without the dashes in front.
    """

    def __init__(self, parser: pytest.Parser, manager: pytest.PytestPluginManager) -> None:
        self.taken: list[str] = []
        self._parser = parser
        self._group = parser.getgroup(_GROUP, "training workloads and distributed tests")
        self._short: dict[str, Argument] = {}
        self._long: dict[str, tuple[Argument, str]] = {}
        self._lenient: list[str] = []
        self._others = self._names_of_others()
        self._stop = manager.add_hookcall_monitoring(
            lambda hook, *_: self.withdraw() if hook == _DECLARING else None,
            lambda _, hook, *__: self._offer() if hook == _DECLARING else None,
        )

    def declare(self, name: str, dest: str, text: str, settings: Mapping[str, str]) -> None:
        """Declare an option by its long name, and by its short one if nobody has that."""
        add, same = self._group.addoption, {"dest": dest, "default": None, **settings}
        add(f"--{PREFIX}{name}", help=argparse.SUPPRESS, **same)
        self._long[name] = self._group.options[-1], text
        if f"--{name}" in self._others:
            self._give_way(name)
        else:
            # Until all are declared it may be somebody's flag, which no value follows.
            needs_value = "metavar" in settings and "nargs" not in settings
            add(f"--{name}", help=text, **same, **(_LENIENT if needs_value else {}))
            self._short[name] = self._group.options[-1]
            if needs_value:
                self._lenient.append(name)

    def refuse(self, name: str, action: type[argparse.Action]) -> None:
        """Declare an option of earlier versions for `action` to refuse, unless it is somebody's."""
        for option in (f"--{PREFIX}{name}", f"--{name}"):
            if option not in self._others:
                settings = {"action": action, "nargs": "?", "help": argparse.SUPPRESS}
                self._group.addoption(option, dest="megatron_removed", **settings)
                self._short[option.removeprefix("--")] = self._group.options[-1]

    def withdraw(self) -> None:
        """Have pytest accept options of the same names, from a plugin that is loaded now."""
        for name, option in self._short.items():
            action = _action_of(option)
            if action is not None:
                _table_of(action).pop(f"--{name}", None)

    def end(self) -> None:
        """Expect no more plugins that declare options before they are parsed."""
        self._stop()
        for name in self._lenient:
            if name in self._short:
                option = self._short[name]
                action = _action_of(option)
                attributes = vars(option)["_attrs"] if action is None else vars(action)
                attributes.update(dict.fromkeys(_LENIENT))

    def _offer(self) -> None:
        """Undo `withdraw`, except for names that others have by now."""
        others = self._names_of_others()
        for name, option in list(self._short.items()):
            action = _action_of(option)
            if f"--{name}" in others:
                del self._short[name]
                self._group.options.remove(option)
                if action is not None:
                    vars(action)["container"]._remove_action(action)
                self._give_way(name)
            elif action is not None:
                _table_of(action)[f"--{name}"] = action

    def _give_way(self, name: str) -> None:
        """Leave a short name to another plugin."""
        if name not in self._long:  # one that is refused
            return
        self.taken.append(name)
        option, text = self._long[name]
        vars(_action_of(option) or option)["help"] = text

    def _names_of_others(self) -> set[str]:
        """Return the options that others have declared."""
        groups = [*self._parser._groups, self._parser._anonymous]
        options = [o for group in groups if group is not self._group for o in group.options]
        return {name for option in options for name in option.names()}


def _action_of(option: Argument) -> argparse.Action | None:
    """Return what argparse has of an option; None before pytest 9: each parse makes its own."""
    action: argparse.Action | None = vars(option).get("_action")
    return action


def _table_of(action: argparse.Action) -> dict[str, argparse.Action]:
    """Return the table by which argparse finds an option, and an option of the same name."""
    table: dict[str, argparse.Action] = vars(action)["container"]._option_string_actions
    return table
