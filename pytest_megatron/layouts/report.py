"""Texts about ranks that ran on fake process groups, and a section of a page. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from pytest_megatron.base.text import columns, counted
from pytest_megatron.runs.record import RecordedLayout, RecordedWorkload

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_BAR = 12
_MOST_SHOWN = 24


def headline(layout: RecordedLayout) -> str:
    """Return the result in one line, which begins with the first fault."""
    ranks = f"{len(layout.ranks)} of {counted(layout.world_size, 'rank')} run"
    if layout.faults:
        return layout.faults[0].text
    if layout.undecided:
        return f"not decidable here: {layout.undecided[0].text}"
    left_out = "; ".join(["", *(f"not compared: {text}" for text in layout.left_out[-1:])])
    return f"{ranks}, {counted(layout.num_compared, 'call')} agree{left_out}"


def problem_text(layout: RecordedLayout) -> str | None:
    """Return what is wrong; None where nothing is."""
    if not layout.faults and not layout.undecided:
        return None
    lines = [headline(layout)]
    for number, fault in enumerate((*layout.faults, *layout.undecided)):
        lines += [] if number == 0 else [fault.text]
        lines += [f"    rank {rank}: {line}" for rank, line in fault.lines]
    return "\n".join(lines)


def table(layout: RecordedLayout) -> str:
    """Return a table of the ranks, with a bar for the memory of each."""
    largest = max((rank.peak for rank in layout.ranks), default=0) or 1
    rows = [["rank", "end", "calls", "batches", "peak", "", "weights", "gradients", "optimizer",
             "activations", "a step, by size of group"]]  # fmt: skip
    for rank in layout.ranks[:_MOST_SHOWN]:
        sizes = (rank.parameters, rank.gradients, rank.optimizer, rank.activations)
        rows.append(
            [
                *(str(rank.rank), rank.end, str(rank.num_calls)),
                "+".join(map(str, rank.micro_batches)),
                *(size_text(rank.peak), "#" * round(_BAR * rank.peak / largest)),
                *map(size_text, sizes),
                ", ".join(f"{size}: {size_text(number)}" for size, number in rank.sent.items()),
            ]
        )
    return "\n".join([*columns(rows), *_notes(layout)])


def _notes(layout: RecordedLayout) -> Iterator[str]:
    """Yield what was not shown or not compared."""
    if len(layout.ranks) > _MOST_SHOWN:
        yield f"and {len(layout.ranks) - _MOST_SHOWN} more ranks"
    yield (
        f"{len(layout.ranks)} of {counted(layout.world_size, 'rank')} run, "
        f"{counted(layout.num_compared, 'call')} compared with those of another rank"
    )
    yield from (f"not compared: {text}" for text in layout.left_out)


def size_text(number: float) -> str:
    """Return bytes in the largest unit of which there is one."""
    for unit in _UNITS:
        if number < 1024 or unit == _UNITS[-1]:  # noqa: PLR2004 - binary units
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def section(record: RecordedWorkload) -> str:
    """Return HTML with a table of ranks; "" if none ran on fake process groups."""
    layout = record.layout
    if layout is None:
        return ""
    return f"<h2>Ranks on fake process groups</h2>\n<pre>{escape(table(layout))}</pre>\n"
