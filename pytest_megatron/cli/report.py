"""`pytest-megatron report`: pages and pictures of finished runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from pytest_megatron.base.text import printable
from pytest_megatron.cli.formats import PATH
from pytest_megatron.errors import ReportError, RunError
from pytest_megatron.pages.pictures import write_pictures
from pytest_megatron.pages.write import write_report

EXIT_UNUSABLE = 2


@click.command(name="report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=PATH)
@click.option(
    "--output",
    metavar="DIR|FILE",
    type=PATH,
    help="Where pages go; by default into the run directory, or into ./report.",
)
@click.option(
    "--svg",
    "pictures",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write a picture of each metric into a directory, and no pages.",
)
@click.option("--png", "is_png", is_flag=True, help="PNG beside SVG; needs the extra 'png'.")
@click.option("--metric", "metrics", multiple=True, help="Only this one in pictures (repeatable).")
@click.option("--failed", "is_failed_only", is_flag=True, help="Pictures of what failed only.")
def command(
    *,
    runs: tuple[Path, ...],
    output: Path | None,
    pictures: Path | None,
    is_png: bool,
    metrics: tuple[str, ...],
    is_failed_only: bool,
) -> None:
    """Write pages of runs: run directories, zip and tar artifacts, folders of them.

    Exit code 2: a run could not be read; the pages have all others.
    """
    if pictures is None:
        if is_png or metrics or is_failed_only:
            raise ReportError(
                "--png, --metric, --failed", "are for pictures; give their directory by --svg"
            )
        index, damaged = write_report(runs, output)
        click.echo(index)
        _end(damaged)
    if output is not None:
        raise ReportError("--output", "is for pages, --svg for pictures; give one of them")
    written, damaged = write_pictures(
        runs, pictures, metrics=metrics, is_png=is_png, is_failed_only=is_failed_only
    )
    for path in written:
        click.echo(path)
    if not written:
        raise ReportError(", ".join(map(str, runs)), "there is no such curve to draw")
    _end(damaged)


def _end(damaged: Sequence[RunError]) -> NoReturn:
    for error in damaged:
        click.echo(printable(f"pytest-megatron: {error}; all other runs are shown"), err=True)
    sys.exit(EXIT_UNUSABLE if damaged else 0)
