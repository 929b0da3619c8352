"""Writes charts as pictures, SVG and PNG (effects: files).

PNG needs the extra `png` (resvg, one wheel without dependencies); nothing else here does.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

from pytest_megatron.base.files import write_text_atomically
from pytest_megatron.errors import ReportError, RunError
from pytest_megatron.pages.chart import chart_svg
from pytest_megatron.pages.model import Chart, PageItem
from pytest_megatron.pages.read import open_runs
from pytest_megatron.pages.write import cannot_write

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
