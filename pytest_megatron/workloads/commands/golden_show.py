"""`pytest-megatron golden show`: contents of goldens."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import click

from pytest_megatron.base.command import (
    EXIT_UNUSABLE,
    PATH,
    echo_error,
)
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import columns, counted, printable
from pytest_megatron.errors import GoldenError
from pytest_megatron.workloads.golden.lint import find_goldens
from pytest_megatron.workloads.golden.model import (
    Generation,
    Series,
    Value,
    parse_provenance,
    provenance_to_json,
    series_of,
)
from pytest_megatron.workloads.golden.store import (
    document_of,
    is_baseline,
    load_object,
    read_text,
)

SPARKS = "▁▂▃▄▅▆▇█"
_GAP = "·"
_SHOWN_TEXT = 16  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSummary:
    """One metric of a golden.

    Attributes:
        steps: First and last, such as `1-100`, or `1-100 by 5` where they are more than one apart.
        spark: The finite values as a curve of at most the width asked for.
    """

    name: str
    num_values: int
    num_finite: int
    steps: str
    first: Value | None
    last: Value | None
    least: float | None
    most: float | None
    precision: str
    spark: str


def summarise(name: str, series: Series, *, width: int) -> MetricSummary:
    """Return the summary of one metric; its curve has at most `width` characters."""
    finite = series.finite().values()
    return MetricSummary(
        name=name,
        num_values=len(series),
        num_finite=len(finite),
        steps=_steps(series.steps),
        first=series.values[0] if len(series) else None,
        last=series.values[-1] if len(series) else None,
        least=min(finite, default=None),
        most=max(finite, default=None),
        precision="full" if series.is_full_precision else "5 decimals",
        spark=sparkline(series.values, width=width),
    )


def sparkline(values: Sequence[Value], *, width: int) -> str:
    """Return a curve of block characters; each stands for the mean of as many values.

    A part without any finite number is a dot; where all are equal, the line is low.
    """
    num_parts = min(width, len(values))
    bounds = [len(values) * i // max(num_parts, 1) for i in range(num_parts + 1)]
    parts = [_mean(values[a:b]) for a, b in pairwise(bounds)]
    finite = [mean for mean in parts if mean is not None]
    least = min(finite, default=0.0)
    height = max(finite, default=0.0) - least
    return "".join(
        _GAP if mean is None else SPARKS[_level((mean - least) / height if height > 0 else 0.0)]
        for mean in parts
    )


def shown(value: Value | None) -> str:
    """Return a value for a cell: text quoted and cut, so that it stays on its line."""
    if value is None:
        return "-"
    return ascii(value[:_SHOWN_TEXT]) if isinstance(value, str) else f"{value:.10g}"


def _level(share: float) -> int:
    return min(int(share * len(SPARKS)), len(SPARKS) - 1)


def _mean(values: Sequence[Value]) -> float | None:
    finite = [v for v in values if isinstance(v, float) and math.isfinite(v)]
    return sum(v / len(finite) for v in finite) if finite else None


def _steps(steps: Sequence[int]) -> str:
    """Describe steps as first, last and distance."""
    if not steps:
        return "-"
    if len(steps) == 1:
        return str(steps[0])
    distances = {b - a for a, b in pairwise(steps[1:])}
    every = f" by {distances.pop()}" if len(distances) == 1 and distances != {1} else ""
    return f"{steps[0]}-{steps[-1]}{every}"


_WIDTH = 24  # of a curve
_COLUMNS = ("metric", "values", "steps", "first", "last", "least", "most", "precision", "curve")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """One file: its kind, rows, notes and provenance."""

    path: Path
    kind: str
    metrics: tuple[MetricSummary, ...]
    notes: tuple[str, ...]
    provenance: Mapping[str, JsonValue]


@click.command("show")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=PATH)
def show(*, paths: tuple[Path, ...]) -> None:
    """Print the content of goldens, one line a metric with its curve.

    PATH is a golden or a directory of goldens. A file that cannot be read is named on stderr, the
    others are shown, and the exit code is 2.
    """
    files = find_goldens(paths)
    pages: list[_Shown] = []
    for file in files:
        try:
            pages.append(_look_at(file))
        except GoldenError as error:
            echo_error(error)
    is_named = len(files) > 1
    if pages:
        blocks = ("\n".join(_as_text(page, is_named=is_named)) for page in pages)
        click.echo(printable("\n\n".join(blocks)))
    sys.exit(EXIT_UNUSABLE if len(pages) < len(files) else 0)


def _look_at(path: Path) -> _Shown:
    """Return what is shown of a file."""
    value, notes = load_object(read_text(path), str(path))
    if is_baseline(value):
        metrics = tuple(_baseline_rows(value))
        return _Shown(
            path=path,
            kind="performance baseline, which no run is compared with",
            metrics=metrics,
            notes=tuple(notes),
            provenance={},
        )
    document = document_of(value, str(path), notes)
    provenance: Mapping[str, JsonValue] = {}
    if document.provenance is not None:
        provenance = provenance_to_json(parse_provenance(document.provenance, str(path)))
    generation = document.generation
    series = document.metrics.items()
    return _Shown(
        path=path,
        kind="series of a training" if generation is None else _generation_kind(generation),
        metrics=tuple(summarise(name, one, width=_WIDTH) for name, one in series)
        if generation is None
        else tuple(_generation_rows(generation)),
        notes=document.notes,
        provenance=provenance,
    )


def _generation_kind(generation: Generation) -> str:
    return f"output of an inference program, {counted(len(generation.requests), 'request')}"


def _generation_rows(generation: Generation) -> Iterator[MetricSummary]:
    """Yield the generated values by position, and the figures of the whole run."""
    for name, request in generation.requests.items():
        rows: dict[str, Sequence[float | str]] = {}
        if request.tokens is not None:
            rows["generated_tokens"] = [float(token) for token in request.tokens]
        rows |= request.logprobs
        if request.text is not None:
            rows["generated_text"] = (request.text,)
        if request.routing is not None:
            rows["routing_indices"] = [str(row) for row in request.routing.values()]
        for metric, row in rows.items():
            yield _row(f"{metric} of {name}", row)
    yield from (
        _row(name, row)
        for name, row in (
            ("throughput", generation.throughput),
            ("mem-max-allocated-bytes", generation.memory_bytes),
            *((name, (count,)) for name, count in generation.counts.items()),
        )
        if row
    )


def _baseline_rows(value: Mapping[str, JsonValue], prefix: str = "") -> Iterator[MetricSummary]:
    """Yield every number of a performance baseline, named by its way there."""
    for name, item in value.items():
        path = f"{prefix}{name}"
        if isinstance(item, dict):
            yield from _baseline_rows(item, f"{path} / ")
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield _row(path, (float(item),))


def _row(name: str, values: Sequence[float | str]) -> MetricSummary:
    series = series_of(dict(enumerate(values, start=1)), is_full_precision=True)
    return summarise(name, series, width=_WIDTH)


def _cells(metric: MetricSummary) -> tuple[str, ...]:
    """Return the cells of a metric's row."""
    num_holes = metric.num_values - metric.num_finite
    is_text = isinstance(metric.first, str) and not metric.num_finite
    values = f"{metric.num_values}" + (
        f", {num_holes} no number" if num_holes and not is_text else ""
    )
    ends = (shown(metric.first), shown(metric.last), shown(metric.least), shown(metric.most))
    return (metric.name, values, metric.steps, *ends, metric.precision, metric.spark)


def _as_text(page: _Shown, *, is_named: bool) -> Iterator[str]:
    """Yield the lines of a file."""
    if is_named:
        yield f"{page.path}: {page.kind}"
    elif not page.kind.startswith("series"):
        yield page.kind
    yield from columns([_COLUMNS, *map(_cells, page.metrics)])
    yield from (f"note: {note}" for note in page.notes)
    if not is_named:
        yield from (f"{key}: {_fact(key, value)}" for key, value in page.provenance.items())


def _fact(key: str, value: JsonValue) -> str:
    """Return a fact of the provenance on one line; of a spread, the largest of each metric."""
    if key == "spread" and isinstance(value, dict):
        largest = {name: _most(spread) for name, spread in value.items()}
        return ", ".join(f"{name} {most}" for name, most in largest.items()) + " at most"
    return value if isinstance(value, str) else json.dumps(value)


def _most(spread: JsonValue) -> float:
    numbers = spread.values() if isinstance(spread, dict) else [spread]
    return max((n for n in numbers if isinstance(n, int | float)), default=0.0)
