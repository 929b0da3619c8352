"""Changed goldens for a reviewer: one table as text or Markdown. Pure.

A comment of GitHub ends at 64 kB, so the page stays below 60 however many goldens there are: the
worst rows come first, and the rest is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pytest_megatron.base.templates import render
from pytest_megatron.base.text import columns, counted, plain
from pytest_megatron.workloads.refresh.difference import (
    FileChange,
    FileDifference,
    MetricChange,
    MetricDifference,
)

MOST_BYTES = 60_000
_COLUMNS = ("golden", "metric", "steps", "mean difference", "largest", "first step", "change")
_WORST_FIRST = list(MetricChange)
_LISTED = (FileChange.NEW, FileChange.UNREADABLE, FileChange.GONE)
_FEWEST, _MOST = 1e-4, 1e4  # shown without an exponent


def differences_text(differences: Sequence[FileDifference]) -> str:
    """Return the table, and the files that are new or gone."""
    rows = _rows(differences)
    lines = [_headline(differences)]
    lines += columns(
        [_COLUMNS, *((path, *_cells(metric)) for path, metric in rows)] if rows else []
    )
    lines += [f"{path}: {state}" for state, paths in _files(differences) for path in paths]
    return plain("\n".join(lines))


def markdown(differences: Sequence[FileDifference]) -> str:
    """Return the page for a pull request, without a final newline."""
    page = render(
        "goldens.md",
        headline=_headline(differences),
        columns=_COLUMNS,
        rows=[(path, metric, _cells(metric)[1:]) for path, metric in _rows(differences)],
        files=[(state.capitalize(), paths) for state, paths in _files(differences)],
    )
    return page.rstrip()


def _headline(differences: Sequence[FileDifference]) -> str:
    """Count the goldens by what became of them, and those with another curve."""
    counts = Counter(d.state for d in differences)
    parts = [f"{counts[state]} {state.value}" for state in FileChange if counts[state]]
    text = f"{counted(len(differences), 'golden')}: {', '.join(parts) or 'none'}"
    num_curves = sum(d.has_other_curve for d in differences)
    return f"{text}; another curve in {num_curves}" if num_curves else text


def _rows(differences: Sequence[FileDifference]) -> list[tuple[str, MetricDifference]]:
    """Return each metric that changes with its golden, the worst first."""
    rows = [(d.path, m) for d in differences if d.state is FileChange.CHANGED for m in d.metrics]
    return sorted(
        rows, key=lambda r: (_WORST_FIRST.index(r[1].change), -r[1].largest, r[0], r[1].metric)
    )


def _cells(metric: MetricDifference) -> tuple[str, ...]:
    """Return the cells of a row, but for the golden."""
    steps = [str(n) for n in dict.fromkeys((metric.num_old, metric.num_new))]
    return (
        metric.metric,
        " -> ".join(steps),
        _mean(metric.mean),
        f"{metric.largest:.1e}" if metric.deviation.num_compared else "-",
        "-" if metric.first_step is None else str(metric.first_step),
        metric.change.value,
    )


def _mean(value: float | None) -> str:
    """Return a mean relative difference as Megatron-LM's script prints it."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.6f}" if _FEWEST <= abs(value) < _MOST else f"{value:.3e}"


def _files(differences: Sequence[FileDifference]) -> list[tuple[str, list[str]]]:
    """Return the paths that have no rows: new, unreadable or gone."""
    found = [(s, sorted(d.path for d in differences if d.state is s)) for s in _LISTED]
    return [(state.value, paths) for state, paths in found if paths]
