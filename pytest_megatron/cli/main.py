"""The `pytest-megatron` command: finds a subcommand's module when it is asked for, not before.

`--help` must stay fast, so nothing but click is imported until a subcommand runs.
"""

from __future__ import annotations

import importlib
import sys

import click
from typing_extensions import override

from pytest_megatron.errors import MegatronError

# name -> (module with a click command named `command`, one line of help)
SUBCOMMANDS = {
    "ci": ("pytest_megatron.cli.ci", "Write files for CI, and make one verdict of many jobs."),
    "expand": ("pytest_megatron.cli.expand", "Print the workloads that recipe files expand to."),
    "flaky": ("pytest_megatron.cli.flaky", "Tell how often items passed only when run again."),
    "golden": ("pytest_megatron.cli.golden", "Compare observed metrics with golden values."),
    "lint": ("pytest_megatron.cli.lint", "Report what is wrong in recipes, cases and goldens."),
    "plan": ("pytest_megatron.cli.plan", "Print what CI runs for labels and an event."),
    "report": ("pytest_megatron.cli.report", "Write pages and pictures of finished runs."),
    "triage": ("pytest_megatron.cli.triage", "Say why a run failed, from its logs."),
}
EXIT_UNUSABLE = 2


class _LazyGroup(click.Group):
    """A group whose commands are imported on first use."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUBCOMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        command = importlib.import_module(SUBCOMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(SUBCOMMANDS.items())])


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pytest-megatron")
def group() -> None:
    """Recipes, goldens and runs of pytest-megatron, outside pytest."""


def main() -> None:
    """Run the command; an error of ours is one line on stderr and exit code 2."""
    try:
        group.main(prog_name="pytest-megatron", standalone_mode=True)
    except MegatronError as error:
        click.echo(f"pytest-megatron: {error}", err=True)
        sys.exit(EXIT_UNUSABLE)
