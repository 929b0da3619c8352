"""The section about ranks on fake process groups, on the page of a workload. Pure."""

from __future__ import annotations

from pytest_megatron.base.templates import render
from pytest_megatron.layouts.report import size_text
from pytest_megatron.runs.record import RecordedFakeRank, RecordedWorkload

_BAR = 240  # units of the fullest rank
PARTS = ("parameters", "gradients", "optimizer", "activations")


def section(record: RecordedWorkload) -> str:
    """Return HTML with a table of ranks; "" if none ran on fake process groups."""
    layout = record.layout
    if layout is None:
        return ""
    largest = max((rank.peak for rank in layout.ranks), default=0) or 1
    rows = [
        {
            "rank": rank,
            "peak": size_text(rank.peak),
            "bar": _bar(rank, largest),
            "sizes": [size_text(getattr(rank, part)) for part in PARTS],
            "sent": {size: size_text(number) for size, number in rank.sent.items()},
        }
        for rank in layout.ranks
    ]
    groups = sorted({size for rank in layout.ranks for size in rank.sent}, key=int)
    return render("layout_section.html", layout=layout, rows=rows, groups=groups, width=_BAR)


def _bar(rank: RecordedFakeRank, largest: int) -> list[tuple[float, float]]:
    """Return begin and width of each part of the memory."""
    found, begin = [], 0.0
    for part in PARTS:
        width = _BAR * getattr(rank, part) / largest
        found.append((round(begin, 2), round(width, 2)))
        begin += width
    return found
