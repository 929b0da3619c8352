"""Writes the arguments and options of every command into `command-options.md` from the code.

    python docs/reference/command_tables.py

A test compares the page with the commands.
"""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from generated_page import write_tables

from pytest_megatron.cli.main import group

PAGE = Path(__file__).parent / "command-options.md"


def tables() -> str:
    """Return the sections of all commands."""
    return "\n".join(_sections(group, click.Context(group, info_name="pytest-megatron")))


def _sections(parent: click.Group, above: click.Context) -> Iterator[str]:
    for name in parent.list_commands(above):
        command = parent.get_command(above, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=above)
        if isinstance(command, click.Group):
            yield from _sections(command, context)
        else:
            yield from _section(command, context)


def _section(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"\n## {context.command_path.partition(' ')[2]}\n"
    yield " ".join((command.help or "").partition("\n\n")[0].split())
    options = [param for param in command.params if isinstance(param, click.Option)]
    pieces = command.collect_usage_pieces(context)[not options :]
    yield f"\n`{' '.join([context.command_path, *pieces])}`"
    if options:
        yield "\n| option | takes | default | meaning |"
        yield "|---|---|---|---|"
    for option in options:
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        yield f"| {names} | {_takes(option, context)} | {_default(option)} | {_text(option)} |"


def _takes(option: click.Option, context: click.Context) -> str:
    if option.is_flag or option.count:
        return ""
    if isinstance(option.type, click.Choice):
        return ", ".join(f"`{choice}`" for choice in option.type.choices)
    if isinstance(option.type, click.IntRange):
        return f"a whole number from {option.type.min} on"
    name = option.make_metavar(context).replace("|", "\\|")
    return f"`{name}`, repeatable" if option.multiple else f"`{name}`"


def _default(option: click.Option) -> str:
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return option.show_default
    is_shown = isinstance(option.default, str | int) and not isinstance(option.default, bool)
    return f"`{option.default}`" if is_shown and not option.is_flag else ""


def _text(option: click.Option) -> str:
    return (option.help or "").rstrip(".").replace("|", "\\|").replace("*", "\\*")


def main() -> None:
    """Replace the tables of the page."""
    write_tables(PAGE, __file__, tables())


if __name__ == "__main__":
    main()
