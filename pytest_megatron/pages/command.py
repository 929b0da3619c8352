"""`pytest-megatron runs`: the runs that a project keeps, and pages of any run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pytest_megatron.base.command import EXIT_UNUSABLE, PATH, HintingGroup, echo_error, root_option
from pytest_megatron.base.text import counted, printable
from pytest_megatron.errors import ReportError
from pytest_megatron.runs.find import kept_runs, remove_old_runs


@click.group("runs", cls=HintingGroup, context_settings={"help_option_names": ["-h", "--help"]})
def runs() -> None:
    """List and remove the runs below .pytest_megatron/runs; write pages of any."""


@runs.command("list")
@root_option
def list_runs(*, root: Path) -> None:
    """Print the runs of the project, the latest first: when, how it ended, how many items."""
    kept = kept_runs(root)
    for run in kept:
        ended = "not ended" if run.exit_code is None else f"exit code {run.exit_code}"
        click.echo(printable(f"{run.directory.name}  {ended}, {counted(run.num_items, 'item')}"))
    if not kept:
        click.echo("no runs")


@runs.command("prune")
@click.option("--keep", type=click.IntRange(min=1), required=True, metavar="N", help="The latest.")
@root_option
def prune(*, keep: int, root: Path) -> None:
    """Remove all but the latest N runs of the project, with their logs, pages and candidates.

    A run that has not ended is never removed: it may be going on.
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


@runs.command("report")
@click.argument("paths", metavar="RUN...", nargs=-1, required=True, type=PATH)
@click.option(
    "--output",
    metavar="DIR",
    type=PATH,
    help="Where pages go; by default into the run directory, or into ./report.",
)
def report(*, paths: tuple[Path, ...], output: Path | None) -> None:
    """Write pages of runs: run directories, zip and tar artifacts, folders of them.

    Exit code 2: a run could not be read; the pages have all others.
    """
    from pytest_megatron.pages.write import write_report  # noqa: PLC0415 - slow to import

    index, damaged = write_report(paths, output)
    click.echo(index)
    for error in damaged:
        echo_error(f"{error}; all other runs are shown")
    sys.exit(EXIT_UNUSABLE if damaged else 0)
