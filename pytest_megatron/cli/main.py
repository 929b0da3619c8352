"""The `pytest-megatron` command, which imports the module of a subcommand on its first use.

`--help` must stay fast, so nothing but click is imported until a subcommand runs.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Mapping
from typing import ClassVar

import click
from click.shell_completion import CompletionItem
from typing_extensions import override

from pytest_megatron.base.text import nearest
from pytest_megatron.cli.formats import EXIT_UNUSABLE, echo_error
from pytest_megatron.errors import REMOVED, MegatronError


class HintingGroup(click.Group):
    """A group that names the command which looks most like a wrong word."""

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        is_word = not args[0].startswith("-") and not ctx.resilient_parsing
        if is_word and self.get_command(ctx, args[0]) is None:
            hint = nearest(args[0], self.list_commands(ctx))
            ctx.fail(f"No such command {args[0]!r}{hint or '.'}")
        return super().resolve_command(ctx, args)


class LazyGroup(HintingGroup):
    """A group whose commands are imported on first use, so that `--help` stays fast.

    Attributes:
        lazy: Name to `module:command`, the module in this package, and one line of help.
    """

    lazy: ClassVar[Mapping[str, tuple[str, str]]] = {}

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.lazy, *self.commands})

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            if ctx.parent is None and cmd_name in REMOVED:
                raise MegatronError(cmd_name, REMOVED[cmd_name])
            return super().get_command(ctx, cmd_name)
        module, _, name = self.lazy[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self._texts())

    @override
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        found = [(name, text) for name, text in self._texts() if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=text) for name, text in found), *options]

    def _texts(self) -> list[tuple[str, str]]:
        """Return the names of the commands with their line of help, sorted."""
        own = {name: command.get_short_help_str() for name, command in self.commands.items()}
        return sorted({**own, **{name: text for name, (_, text) in self.lazy.items()}}.items())


SUBCOMMANDS = {
    "changed": ("plan:changed", "Join records of what tests use, for --changed."),
    "ci": ("ci:command", "Write files for CI, and make one verdict of many jobs."),
    "cost": ("plan:cost", "Print what items cost in GPU time, and what got dearer."),
    "culprit": ("culprit:command", "Find the commit from which on an item fails."),
    "demo": ("demo:command", "Write a small project into an empty directory, and run it."),
    "doctor": ("doctor:command", "Check this machine and environment."),
    "expand": ("recipes:expand", "Print the workloads that recipe files expand to."),
    "flaky": ("flaky:command", "Count how often items passed only when run again."),
    "gangs": ("gangs:gangs", "List and stop the processes that --keep-gangs keeps."),
    "golden": ("golden:command", "Compare observed metrics with golden values."),
    "interactive": ("slurm:interactive", "Print how to get a shell of Slurm for a workload."),
    "lint": ("recipes:lint", "Report errors in recipes, cases and goldens."),
    "plan": ("plan:command", "Print the CI jobs for labels and an event."),
    "repro": ("repro:command", "Do a failing item of a run or artifact again, here."),
    "report": ("runs:report", "Write pages and pictures of finished runs."),
    "runs": ("runs:runs", "List and remove the runs that a project keeps."),
    "sbatch": ("slurm:sbatch", "Print the script that runs a workload in Slurm."),
    "schema": ("recipes:schema", "Print the JSON Schema of a kind of file, or its path."),
    "trace": ("trace:command", "Compare and print traces of tensors."),
    "triage": ("triage:command", "Find why a run failed, from its logs."),
    "watch": ("gangs:watch", "Run tests, and again after each edit, on kept gangs."),
}
_NO_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # of a write to a full disk, or a lost one


class _MainCommands(LazyGroup):
    lazy = SUBCOMMANDS


@click.command(cls=_MainCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pytest-megatron")
def group() -> None:
    """Recipes, goldens and runs of pytest-megatron, outside pytest."""


def main() -> None:
    """Run the command; an error of ours is one line on stderr and exit code 2."""
    try:
        group.main(prog_name="pytest-megatron", standalone_mode=True)
    except MegatronError as error:
        echo_error(error)
        sys.exit(EXIT_UNUSABLE)
    except OSError as error:
        if error.errno not in _NO_OUTPUT or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left when it ends
        echo_error(f"standard output: {error.strerror}; make room")
        sys.exit(EXIT_UNUSABLE)
