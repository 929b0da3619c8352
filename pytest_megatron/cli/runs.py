"""`pytest-megatron runs` and `report`: the runs that a project keeps, and their pages."""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, Protocol, cast

import click

from pytest_megatron.base.files import write_text_atomically
from pytest_megatron.base.text import counted, printable
from pytest_megatron.cli.formats import EXIT_UNUSABLE, PATH, echo_error, root_option
from pytest_megatron.errors import ReportError, RunError
from pytest_megatron.pages.chart import chart_svg
from pytest_megatron.pages.model import Chart, PageItem
from pytest_megatron.pages.read import open_runs
from pytest_megatron.pages.write import cannot_write
from pytest_megatron.runs.prune import kept_runs, remove_old_runs

_UNSAFE = re.compile(r"[^\w.+=-]+", re.ASCII)
_ZOOM = 2  # of a PNG, for screens with small pixels


class _ToPng(Protocol):
    """The function that draws; `zoom` is the number of pixels per unit of the picture."""

    def __call__(self, *, svg_string: str, zoom: int) -> bytes:
        """Return a PNG."""
        ...


def write_pictures(
    paths: Sequence[Path],
    directory: Path,
    *,
    metrics: Sequence[str] = (),
    is_png: bool = False,
    is_failed_only: bool = False,
) -> tuple[list[Path], list[RunError]]:
    """Write a picture of each metric of each workload.

    Returns the pictures, and an error for each run that cannot be read.

    Args:
        paths: Run directories, artifacts, folders of either.
        directory: Is made if it is not there.
        metrics: Only these; all by default.
        is_png: PNG beside SVG.
        is_failed_only: Only metrics of which a comparison failed.

    Raises:
        ReportError: Nothing can be written, or the library for PNG is missing.
        RunError: There is no run, or none can be read.
    """
    to_png = _load_png() if is_png else None
    written: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="pytest-megatron-report-") as workspace:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            readers, damaged = open_runs(paths, Path(workspace))
            for _, reader in readers:
                for item in reader.items():
                    for chart in _chosen(item, metrics, is_failed_only=is_failed_only):
                        name = f"{item.directory}-{_UNSAFE.sub('-', chart.metric).strip('-')}"
                        written += _write(directory / name, chart, item.node_id, to_png)
        except OSError as error:
            raise cannot_write(error) from error
    return written, damaged


def _chosen(item: PageItem, metrics: Sequence[str], *, is_failed_only: bool) -> Iterator[Chart]:
    for chart in item.charts:
        is_drawn = any(len(curve.series) for curve in chart.curves)
        is_wanted = not metrics or chart.metric in metrics
        if is_drawn and is_wanted and not (is_failed_only and chart.passed is not False):
            yield chart


def _write(path: Path, chart: Chart, title: str, to_png: _ToPng | None) -> Iterator[Path]:
    svg = chart_svg(chart, title)
    picture = path.with_name(f"{path.name}.svg")
    write_text_atomically(picture, svg)
    yield picture
    if to_png is not None:
        png = path.with_name(f"{path.name}.png")
        png.write_bytes(to_png(svg_string=svg, zoom=_ZOOM))
        yield png


def _load_png() -> _ToPng:
    try:
        library = importlib.import_module("resvg_py")
    except ImportError:
        raise ReportError(
            "--png", "needs resvg-py, which is not installed; pip install 'pytest-megatron[png]'"
        ) from None
    return cast("_ToPng", library.svg_to_bytes)


@click.group("runs", context_settings={"help_option_names": ["-h", "--help"]})
def runs() -> None:
    """List and remove the runs below .pytest_megatron/runs."""


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


@click.command(name="report")
@click.argument("paths", metavar="RUN...", nargs=-1, required=True, type=PATH)
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
def report(
    *,
    paths: tuple[Path, ...],
    output: Path | None,
    pictures: Path | None,
    is_png: bool,
    metrics: tuple[str, ...],
    is_failed_only: bool,
) -> None:
    """Write pages of runs: run directories, zip and tar artifacts, folders of them.

    Exit code 2: a run could not be read; the pages have all others.
    """
    from pytest_megatron.cli.runs import write_pictures  # noqa: PLC0415 - slow to import
    from pytest_megatron.pages.write import write_report  # noqa: PLC0415

    if pictures is None:
        if is_png or metrics or is_failed_only:
            raise ReportError(
                "--png, --metric, --failed", "are for pictures; give their directory by --svg"
            )
        index, damaged = write_report(paths, output)
        click.echo(index)
        _end(damaged)
    if output is not None:
        raise ReportError("--output", "is for pages, --svg for pictures; give one of them")
    written, damaged = write_pictures(
        paths, pictures, metrics=metrics, is_png=is_png, is_failed_only=is_failed_only
    )
    for path in written:
        click.echo(path)
    if not written:
        raise ReportError(", ".join(map(str, paths)), "there is no such curve to draw")
    _end(damaged)


def _end(damaged: Sequence[RunError]) -> NoReturn:
    for error in damaged:
        echo_error(f"{error}; all other runs are shown")
    sys.exit(EXIT_UNUSABLE if damaged else 0)
