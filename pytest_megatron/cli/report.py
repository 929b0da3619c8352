"""`pytest-megatron report`: pages and pictures of finished runs."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_megatron.pages.write import write_report


@click.command(name="report")
@click.argument(
    "runs",
    metavar="RUN...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@click.option(
    "--output",
    metavar="DIR|FILE",
    type=click.Path(path_type=Path),
    help="Where to; by default into the run directory, or into ./report.",
)
def command(*, runs: tuple[Path, ...], output: Path | None) -> None:
    """Write pages of runs: run directories, zip and tar artifacts, folders of them."""
    click.echo(write_report(runs, output))
