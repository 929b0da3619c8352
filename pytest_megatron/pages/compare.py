"""A page that lays two sets of curves over one another: an old golden and a new one (effects)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytest_megatron.files import write_text_atomically
from pytest_megatron.golden.model import MetricMap
from pytest_megatron.pages.item_page import comparison_page
from pytest_megatron.pages.model import Chart, Curve, Role

_FIRST = "lm loss"


def charts_of_two(
    old: MetricMap, new: MetricMap, *, names: tuple[str, str] = ("old", "new")
) -> tuple[Chart, ...]:
    """Return a chart for each metric of either, what is in one of them only included.

    Args:
        old: What the other is compared with.
        new: The other.
        names: What legends call them.
    """
    charts = []
    for metric in sorted(old.keys() | new.keys(), key=lambda name: (name != _FIRST, name)):
        both = ((names[0], Role.GOLDEN, old), (names[1], Role.RUN, new))
        curves = (
            Curve(name=name, role=role, series=one[metric])
            for name, role, one in both
            if metric in one
        )
        charts.append(Chart(metric=metric, curves=tuple(curves)))
    return tuple(charts)


def write_comparison(
    path: Path,
    title: str,
    *,
    old: MetricMap,
    new: MetricMap,
    names: tuple[str, str] = ("old", "new"),
    notes: Sequence[str] = (),
) -> Path:
    """Write such a page; return its path.

    Raises:
        OSError: It cannot be written.
    """
    charts = charts_of_two(old, new, names=names)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, comparison_page(title, charts, notes=notes))
    return path
