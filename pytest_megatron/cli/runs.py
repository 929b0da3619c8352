"""`pytest-megatron runs`, `report` and `flaky`: runs that a project keeps, and their history."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, Protocol, cast

import click

from pytest_megatron.base.files import JsonValue, write_text_atomically
from pytest_megatron.base.templates import render
from pytest_megatron.base.text import columns, counted, printable
from pytest_megatron.cli.formats import EXIT_UNUSABLE, PATH, echo_error, format_option, root_option
from pytest_megatron.errors import ConfigError, ReportError, RunError
from pytest_megatron.pages.chart import chart_svg
from pytest_megatron.pages.model import Chart, PageItem
from pytest_megatron.pages.read import open_runs
from pytest_megatron.pages.write import cannot_write
from pytest_megatron.runs.history import FILE_NAME, HistoryRecord, days_ago, flaky_records, read
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


_SPAN = re.compile(r"(\d+)([hdw])").fullmatch
_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}


@click.command(name="flaky")
@click.option(
    "--history",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path(".pytest_megatron") / FILE_NAME,
    show_default=True,
    help="The file that runs append to.",
)
@click.option("--since", metavar="SPAN", help="Only the last 30d, 12h, 2w; by default everything.")
@click.option(
    "--min-runs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Leave out items that ran less often.",
)
@format_option(
    "text", "json", "markdown", about="markdown is a table for a pull request or an issue."
)
def flaky(path: Path, since: str | None, min_runs: int, form: str) -> None:
    """Print how often each item was flaky, the worst first.

    An item is listed if it passed only when it was run again, or passed and failed at the same
    commit. Lines of the file that cannot be read are named on stderr and skipped.
    """
    if not path.exists():
        raise ConfigError(
            str(path), "is not there; runs with workloads or distributed tests write it"
        )
    try:
        history = read(path)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    for problem in history.problems:
        click.echo(printable(problem), err=True)
    start = "" if since is None else days_ago(_days(since))
    records = flaky_records(history.entries, since=start, min_runs=min_runs)
    text = _FORMATS[form](records)
    click.echo(text if form == "json" else printable(text), nl=False)


def _days(span: str) -> float:
    match = _SPAN(span)
    if match is None:
        raise ConfigError("--since", f"found {span!r}, expected a number with h, d or w, as in 30d")
    return int(match[1]) * _DAYS[match[2]]


def _as_text(records: Sequence[HistoryRecord]) -> str:
    if not records:
        return "no item was flaky\n"
    head = ("flaky", "runs", "share", "failed", "last seen", "item", "causes")
    lines = columns([head, *map(_cells, records)], num_right=4)
    return "".join(f"{line}\n" for line in lines)


def _as_markdown(records: Sequence[HistoryRecord]) -> str:
    return render("flaky.md", rows=[(record, _cells(record)) for record in records])


def _as_json(records: Sequence[HistoryRecord]) -> str:
    rows: list[JsonValue] = [
        {
            "node_id": record.node_id,
            "num_runs": record.num_runs,
            "num_flaky": record.num_flaky,
            "share": round(record.share, 4),
            "num_failed": record.num_bad,
            "causes": dict[str, JsonValue](record.causes),
            "is_contradictory": record.is_contradictory,
            "num_contradictory": record.num_contradictory,
            "first_seen": record.first_seen,
            "last_seen": record.last_seen,
        }
        for record in records
    ]
    return json.dumps(rows, indent=1) + "\n"


_FORMATS = {"text": _as_text, "json": _as_json, "markdown": _as_markdown}


def _cells(record: HistoryRecord) -> tuple[str, ...]:
    causes = [f"{name} {count}" for name, count in record.causes]
    if record.is_contradictory:
        causes.append("passed and failed at one commit")
    return (
        str(record.num_flaky),
        str(record.num_runs),
        f"{record.share:.0%}",
        str(record.num_bad),
        record.last_seen[:10],
        record.node_id,
        ", ".join(causes),
    )
