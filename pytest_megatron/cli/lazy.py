"""A click group that imports a subcommand's module when it is asked for, not before."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import ClassVar

import click
from typing_extensions import override


class LazyGroup(click.Group):
    """A group whose commands are imported on first use, so that `--help` stays fast.

    Attributes:
        lazy: Name to the module with a click command named `command`, and one line of help.
    """

    lazy: ClassVar[Mapping[str, tuple[str, str]]] = {}

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.lazy, *self.commands})

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        command = importlib.import_module(self.lazy[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = {name: command.get_short_help_str() for name, command in self.commands.items()}
        texts = {**own, **{name: text for name, (_, text) in self.lazy.items()}}
        with formatter.section("Commands"):
            formatter.write_dl(sorted(texts.items()))
