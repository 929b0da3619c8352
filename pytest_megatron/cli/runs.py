"""`pytest-megatron runs`: the runs that a project keeps, and how to be rid of old ones."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_megatron.base.text import printable
from pytest_megatron.cli.formats import root_option
from pytest_megatron.errors import ReportError
from pytest_megatron.runs.find import kept_runs, remove_old_runs


@click.group("runs", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """List and remove the runs below .pytest_megatron/runs."""


@command.command("list")
@root_option
def list_runs(*, root: Path) -> None:
    """Print the runs of the project, the latest first: when, how it ended, how many items."""
    runs = kept_runs(root)
    for run in runs:
        ended = "not ended" if run.exit_code is None else f"exit code {run.exit_code}"
        items = "1 item" if run.num_items == 1 else f"{run.num_items} items"
        click.echo(printable(f"{run.directory.name}  {ended}, {items}"))
    if not runs:
        click.echo("no runs")


@command.command("prune")
@click.option("--keep", type=click.IntRange(min=1), required=True, metavar="N", help="The latest.")
@root_option
def prune(*, keep: int, root: Path) -> None:
    """Remove all but the latest N runs of the project, with their logs, pages and candidates.

    A run that has not ended is never removed: it may be going on, or be taken over with --attach.
    """
    try:
        removed = remove_old_runs(root, keep)
    except OSError as error:
        raise ReportError(
            str(error.filename or root), f"{error.strerror}; the rest is kept"
        ) from error
    for directory in removed:
        click.echo(f"removed: {directory}")
    if not removed:
        click.echo("nothing to remove")
