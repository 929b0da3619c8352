"""Which of the tracebacks in a rank's logs ended it, and what it means by the table.

A traceback that was caught and printed is followed by what the program did next; one that ended
the rank is followed by the noise of an end.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from pytest_megatron.triage.exits import Exit
from pytest_megatron.triage.lines import Line, parse_line
from pytest_megatron.triage.scan import read_from
from pytest_megatron.triage.signature import Role, Signature, Table
from pytest_megatron.triage.story import Fatal, Place
from pytest_megatron.triage.trace import (
    HEADER,
    Chain,
    Link,
    Raised,
    is_at_end,
    is_continued,
    read_chain,
)
from pytest_megatron.triage.unit import LogFile, Stream

NEEDED = ("short test summary info",)  # texts to look for beside the headers of tracebacks
_TRACE_BYTES = 1 << 20
_BEFORE_BYTES = 1 << 12
_MOST_TRACES = 12  # of a rank that are read, from the last one on
# A traceback behind such a line was caught: the program lived to log it.
_UNCAUGHT = re.compile(
    r"\[rank\d+\]: ?Traceback"
)  # so written by torch's hook for uncaught ones alone
_LOGGED = re.compile(
    r"\b(?:ERROR|WARNING|WARN|INFO|CRITICAL|DEBUG)\b|(?i:\b(?:caught|retry|handled|ignoring)\b)"
)


def classify_message(table: Table, message: str, frames: Sequence[str] = ()) -> Signature:
    """Return the row for what an exception says, and where; every exception has one."""
    return table.raised(message, frames) or table["exception"]


def find_fatal(
    traces: Sequence[tuple[LogFile, int]],
    table: Table,
    labelled: Collection[LogFile],
    rank: int | None,
    end: Exit | None,
) -> Fatal | None:
    """Return the exception that ended a rank, None where no traceback did.

    Args:
        traces: Logs and offsets of the headers of its tracebacks, in order.
        table: Says what an exception means.
        labelled: The logs whose lines begin with `3: `.
        rank: Whose lines count in a log of several ranks.
        end: How the launcher saw it end, or None.
    """
    order = (Stream.STDERR, Stream.BOTH, Stream.LAUNCHER, Stream.STDOUT)
    streams = sorted({log.stream for log, _ in traces}, key=order.index)
    for stream in streams:
        chosen = [(log, at) for log, at in traces if log.stream is stream][-_MOST_TRACES:]
        found: list[Fatal] = []
        for log, at in reversed(chosen):
            fatal = _read_fatal(log, at, table, rank, end, is_labelled=log in labelled)
            if fatal is not None:
                found.append(fatal)
        if found:
            return _chosen(found)
    return None


def fatal_of_lines(lines: Sequence[Line], table: Table) -> Fatal | None:
    """Return the exception of the traceback that begins first in these lines."""
    starts = [index for index, line in enumerate(lines) if HEADER in line.text]
    chain = read_chain(lines, starts[0]) if starts else None
    if chain is None:
        return None
    raised, signature = classify_chain(chain, table)
    return Fatal(
        signature=signature, message=raised.message, frame=raised.own_frame, frames=raised.frames
    )


def classify_chain(chain: Chain, table: Table) -> tuple[Raised, Signature]:
    """Return the exception of a chain that says most, and its row.

    The last one, unless it only repeats in other words what it was raised from, or follows from
    another rank's end while an earlier one does not.
    """
    last = chain.last
    signature = classify_message(table, last.message, last.frames)
    chosen = last, signature
    for later, earlier in zip(reversed(chain.links), [*reversed(chain.links)][1:], strict=False):
        before = classify_message(table, earlier.message, earlier.frames)
        is_cause = before.role is Role.CAUSE
        if (
            later.link is Link.DIRECT
            and is_cause
            and _is_vague(chosen[1])
            and not _is_vague(before)
        ) or (later.link is Link.DURING and is_cause and chosen[1].role is Role.CASCADE):
            chosen = earlier, before
    return chosen


def _is_vague(signature: Signature) -> bool:
    return signature.id == "exception" or signature.role is Role.CASCADE


def _read_fatal(
    log: LogFile,
    at: int,
    table: Table,
    rank: int | None,
    end: Exit | None,
    *,
    is_labelled: bool,
) -> Fatal | None:
    """Read one traceback; None if the rank lived on."""
    lines, offsets, is_all = _lines_around(log, at, rank, is_labelled=is_labelled)
    starts = [index for index, offset in enumerate(offsets) if offset >= at]
    if not starts or HEADER not in lines[starts[0]].text:
        return None
    start = starts[0]
    if "traceback : " in lines[start].text:  # the launcher's copy of an error file
        return None
    if is_continued(lines, start):  # read with the traceback that it goes on from
        return None
    chain = read_chain(lines, start)
    if chain is None or chain.is_ignored:
        return None
    has_failed = end is not None and end.how != "exit code 0"
    was_logged = start > 0 and _LOGGED.search(lines[start - 1].text) is not None
    is_uncaught = _UNCAUGHT.search(_raw_line(log, at)) is not None
    is_last = is_uncaught or (is_at_end(lines, chain.last.said) and (not was_logged or has_failed))
    if not is_all or not is_last:
        return None
    raised, signature = classify_chain(chain, table)
    return Fatal(
        signature=signature,
        message=raised.message,
        frame=raised.own_frame,
        frames=raised.frames,
        time_s=raised.time_s,
        place=Place(log=log, offset=offsets[raised.said], text=raised.headline),
    )


def _chosen(found: Sequence[Fatal]) -> Fatal:
    """Return one of the tracebacks at the end of a log; the last one comes first in `found`.

    What a clean-up raised after the first one is not why it began.
    """
    causes = [fatal for fatal in found if fatal.signature.role is Role.CAUSE]
    return causes[0] if causes else found[0]


def _lines_around(
    log: LogFile, at: int, rank: int | None, *, is_labelled: bool
) -> tuple[list[Line], list[int], bool]:
    """Return the lines of one rank around an offset, where each begins, and if the log ends there.

    Of a log of one rank's own all lines are its.
    """
    start = max(0, at - _BEFORE_BYTES)
    data = read_from(log.path, start, _TRACE_BYTES)
    is_all = start + len(data) >= _size(log.path)
    lines: list[Line] = []
    offsets: list[int] = []
    offset = start
    for raw in data.split(b"\n"):
        line = parse_line(raw.decode(errors="replace"), is_labelled=is_labelled)
        if log.rank is not None or line.rank == rank:
            lines.append(line)
            offsets.append(offset)
        offset += len(raw) + 1
    return lines, offsets, is_all or log.rank is None


def _raw_line(log: LogFile, at: int) -> str:
    """Return the beginning of a line as it is in the file."""
    return read_from(log.path, at, 200).partition(b"\n")[0].decode(errors="replace")


def _size(path: Path) -> int:
    return path.stat().st_size
