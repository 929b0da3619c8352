"""Find the traceback in a rank's logs that ended it, and its signature.

A traceback that was caught and printed is followed by what the program did next; one that ended
the rank is followed by the noise of an end.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pytest_megatron.base.files import JsonValue, parse_json, read_bytes
from pytest_megatron.errors import TriageError
from pytest_megatron.triage.logs.exits import LITERALS as EXITS
from pytest_megatron.triage.logs.exits import ProcessExit
from pytest_megatron.triage.logs.lines import Line, parse_line
from pytest_megatron.triage.logs.scan import read_from, read_lines
from pytest_megatron.triage.logs.traceback import (
    HEADER,
    Bare,
    Chain,
    ExceptionLink,
    RaisedException,
    bare_errors,
    is_at_end,
    is_continued,
    lines_after,
    read_chain,
)
from pytest_megatron.triage.rank_log import Fatal, LogFile, LogLine, Stream
from pytest_megatron.triage.signatures import (
    LineRole,
    Signature,
    Table,
    is_own_mistake,
    match_line,
    names_another_host,
)

NEEDED = ("short test summary info",)  # texts to look for beside the headers of tracebacks
_TRACE_BYTES = 1 << 20
_BEFORE_BYTES = 1 << 12
_MOST_TRACES = 12  # of a rank that are read, from the last one on
_MOST_BEHIND = 7  # lines that may follow an exception without a traceback that ended a program
_SYNTAX_LINES = 4  # its place, the line, and what points into it
_SYNTAX_PLACE = re.compile(r"  File \"(?P<file>[^\"]+)\", line (?P<line>\d+)$")
_OF_CONNECTIONS = ("network", "http_read", "hf_hub", "service", "dns", "port_in_use")
# So written by torch's hook for uncaught ones alone; without a blank it is the launcher's prefix.
_UNCAUGHT = re.compile(r"\[rank\d+\]: Traceback")
# A traceback behind such a line was caught, if anything follows it: the program lived to log it.
_LOGGED = re.compile(
    r"\b(?:ERROR|WARNING|WARN|CRITICAL|EXCEPTION)\b|(?i:\b(?:caught|retry|handled|ignoring)\b)"
)
_OF_TEXT = re.compile(r" in __(?:str|repr|format)__$")
_HANDLED = re.compile(r"(?i)\b(?:caught|retry\w*|handled|ignor\w+)\b")


def classify_message(table: Table, message: str, frames: Sequence[str] = ()) -> Signature:
    """Return the row for an exception's message and frames; every exception has one."""
    return table.raised(message, frames) or table["exception"]


def find_fatal(
    traces: Sequence[tuple[LogFile, int]],
    table: Table,
    rank: int | None,
    process_exit: ProcessExit | None,
    *,
    is_lone: bool = False,
) -> Fatal | None:
    """Return the exception that ended a rank, None where no traceback did.

    Args:
        traces: Logs and offsets of the headers of its tracebacks, in order.
        table: Says what an exception means.
        rank: Whose lines count in a log of several ranks.
        process_exit: How the launcher saw it end, or None.
        is_lone: Only one that a child or a pipe caused, and that is not the launcher's.
    """
    order = (Stream.STDERR, Stream.BOTH, Stream.LAUNCHER, Stream.STDOUT)
    streams = sorted({log.stream for log, _ in traces}, key=order.index)
    for stream in streams:
        chosen = [(log, at) for log, at in traces if log.stream is stream][-_MOST_TRACES:]
        read = (_read_fatal(log, at, table, rank, process_exit) for log, at in reversed(chosen))
        found = [fatal for fatal in read if fatal is not None]
        if is_lone:
            found = [fatal for fatal in found if fatal.is_lone and not fatal.is_of_agent]
        if found:  # the last one first; what a clean-up raised after it is not why it began
            causes = [fatal for fatal in found if fatal.signature.role is LineRole.CAUSE]
            return _root_of((causes or found)[0], traces, table, rank)
    return None


def _root_of(
    fatal: Fatal,
    traces: Sequence[tuple[LogFile, int]],
    table: Table,
    rank: int | None,
) -> Fatal:
    """Return what a lost connection comes from, where the same run shows it: its own server died.

    A connection to another host does not come from here.
    """
    is_lost = fatal.signature.is_transient and fatal.signature.family in _OF_CONNECTIONS
    if not is_lost or fatal.place is None or names_another_host(fatal.message):
        return fatal
    for log, at in traces[-_MOST_TRACES:]:
        if log == fatal.place.log and at > fatal.place.offset:
            break
        lines, _ = _lines_around(log, at, rank)
        start = _header_at(lines, at)
        if start is None or is_continued(lines, start):
            continue
        was_handled = start > 0 and _HANDLED.search(lines[start - 1].text) is not None
        chain = None if was_handled else read_chain(lines, start)
        if chain is None:
            continue
        raised, signature = classify_chain(chain, table)
        if is_own_mistake(raised.message, raised.frames) or is_genuine(signature):
            return _fatal_of(raised, signature, log, lines)
    return fatal


def find_bare(
    log: LogFile,
    tail: Sequence[Line],
    table: Table,
    rank: int | None,
    *,
    most_after: int | None,
) -> Fatal | None:
    """Return the error at the end of a log where no traceback is whole.

    Args:
        log: Where it is.
        tail: The end of the log.
        table: Says what an exception means.
        rank: Rank whose lines are read; None reads all.
        most_after: Lines that may follow it; None takes many, unless it is to be run again.
    """
    own = [line for line in tail if rank is None or line.rank in (rank, None)]
    found: list[tuple[Bare, Signature]] = []
    for bare in bare_errors(own):
        signature = classify_message(table, bare.message)
        headline = bare.message.partition("\n")[0]
        is_found = signature.literals or match_line(table, headline)
        if not bare.is_exception and (is_found or any(text in headline for text in EXITS)):
            continue  # what is looked for in every line was found as an event, or as an end
        if not bare.is_exception and signature.id == "exception":
            signature = table["exit_code"]
        most = _MOST_BEHIND if most_after is None and signature.is_transient else most_after
        if most is not None and bare.num_after > most:
            continue  # the program went on
        found.append((bare, signature))
    causes = [(bare, row) for bare, row in found if row.role is LineRole.CAUSE]
    named = [(bare, row) for bare, row in causes if row.id not in ("exception", "exit_code")]
    causes = [(bare, row) for bare, row in causes if row.id == "exception"] or causes
    genuine = [(bare, row) for bare, row in named if not row.is_transient]
    if named and named[0][1].is_transient:
        mistakes = [(bare, row) for bare, row in causes if is_own_mistake(bare.message)]
        named = genuine or mistakes or named
    for bare, signature in (named or causes or found)[:1]:
        line, above = own[bare.index], own[max(0, bare.index - _SYNTAX_LINES) : bare.index]
        headline = bare.message.partition("\n")[0]
        return Fatal(
            signature=signature,
            message=bare.message,
            frame=_place_of_syntax([line.text for line in above]),
            verb="raised" if bare.is_exception else "wrote",
            place=LogLine(log=log, offset=line.offset, text=headline),
            rank=line.rank if log.rank is None else None,
        )
    return None


def _place_of_syntax(above: Sequence[str]) -> str | None:
    """Return `file:line` of a program that cannot be compiled, from the lines above its error."""
    found = next(filter(None, map(_SYNTAX_PLACE.match, above)), None)
    return None if found is None else f"{found['file'].rpartition('/')[2]}:{found['line']}"


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


def classify_chain(chain: Chain, table: Table) -> tuple[RaisedException, Signature]:
    """Return the most telling exception of a chain, and its row.

    The last one, unless it only repeats in other words what it was raised from, or follows from
    another rank's end while an earlier one does not.
    """
    last = chain.last
    signature = classify_message(table, last.message, last.frames)
    chosen = last, signature
    for later, earlier in zip(reversed(chain.links), [*reversed(chain.links)][1:], strict=False):
        before = classify_message(table, earlier.message, earlier.frames)
        is_cause = before.role is LineRole.CAUSE
        if (
            (later.link is ExceptionLink.DURING and _is_about_text(later, earlier))
            or (
                later.link is ExceptionLink.DIRECT
                and is_cause
                and _is_vague(chosen[1])
                and not _is_vague(before)
            )
            or (
                later.link in (ExceptionLink.DURING, ExceptionLink.PART)
                and is_cause
                and chosen[1].role is LineRole.CASCADE
            )
        ):
            chosen = earlier, before
    return _without_false_hope(chain, chosen, table)


def _is_about_text(later: RaisedException, earlier: RaisedException) -> bool:
    """Return true if an exception only says that another one has no text."""
    is_mute = earlier.message.endswith("<exception str() failed>")
    return is_mute and any(map(_OF_TEXT.search, later.frames[-1:]))


def _without_false_hope(
    chain: Chain, chosen: tuple[RaisedException, Signature], table: Table
) -> tuple[RaisedException, Signature]:
    """Return what a transient exception was raised from, where that is the program's own doing.

    `raise ConnectionError from KeyError` is no network's; neither is a hub in offline mode.
    """
    if not chosen[1].is_transient:
        return chosen
    for earlier in chain.links:
        before = classify_message(table, earlier.message, earlier.frames)
        if earlier is chosen[0]:
            break
        if is_own_mistake(earlier.message, earlier.frames) or (
            is_genuine(before) and before.family != chosen[1].family
        ):
            return earlier, before
    return chosen


def is_genuine(signature: Signature) -> bool:
    """Return true if an unchanged run meets a row's cause again; a refusal may be anyone's."""
    is_named = signature.id != "exception" and signature.family not in _OF_CONNECTIONS
    return is_named and signature.role is LineRole.CAUSE and not signature.is_transient


def _is_vague(signature: Signature) -> bool:
    return signature.id == "exception" or signature.role is LineRole.CASCADE


def _read_fatal(
    log: LogFile,
    at: int,
    table: Table,
    rank: int | None,
    process_exit: ProcessExit | None,
) -> Fatal | None:
    """Read one traceback; None if the rank lived on."""
    lines, is_all = _lines_around(log, at, rank)
    start = _header_at(lines, at)
    # Neither the launcher's copy of an error file, nor one that was read with its beginning.
    if start is None or "traceback : " in lines[start].text or is_continued(lines, start):
        return None
    chain = read_chain(lines, start)
    if chain is None or chain.is_ignored:
        return None
    has_failed = process_exit is not None and process_exit.how != "exit code 0"
    was_logged = start > 0 and _LOGGED.search(lines[start - 1].text) is not None
    raw = read_from(log.path, at, 200).partition(b"\n")[0].decode(errors="replace")
    is_uncaught = _UNCAUGHT.search(raw) is not None
    said = chain.last.said
    num_after = lines_after(lines, said)
    ended = has_failed or not was_logged or num_after == 0
    # Two streams in one file come in any order: what follows tells of ranks of unknown end.
    is_uncaught = is_uncaught and (has_failed or num_after is not None)
    is_last = is_uncaught or (is_at_end(lines, said) and ended)
    if not is_all or not is_last:
        return None
    return _fatal_of(*classify_chain(chain, table), log, lines)


def _fatal_of(
    raised: RaisedException, signature: Signature, log: LogFile, lines: Sequence[Line]
) -> Fatal:
    """Return the end of a rank by an exception."""
    return Fatal(
        signature=signature,
        message=raised.message,
        frame=raised.own_frame,
        frames=raised.frames,
        time_s=raised.time_s,
        place=LogLine(log=log, offset=lines[raised.said].offset, text=raised.headline),
    )


def _lines_around(log: LogFile, at: int, rank: int | None) -> tuple[list[Line], bool]:
    """Return the lines of one rank around an offset, and whether the log ends in them.

    Of a log of one rank's own all lines are its.
    """
    start = max(0, at - _BEFORE_BYTES)
    is_all = start + _TRACE_BYTES >= log.path.stat().st_size
    lines = read_lines(log.path, start, _TRACE_BYTES)
    own = [line for line in lines if log.rank is not None or line.rank == rank]
    return own, is_all or log.rank is None


def _header_at(lines: Sequence[Line], at: int) -> int | None:
    """Return the index of the header whose line holds a byte, None if it is another rank's.

    Before it on that line there may be anything, such as a hole in the file.
    """
    holding = bisect.bisect_right(lines, at, key=lambda line: line.offset) - 1
    for index in (holding, holding + 1):
        if 0 <= index < len(lines) and HEADER in lines[index].text:
            return index
    return None


_MOST_BYTES = 1 << 20


def read_error_file(path: Path | None, table: Table) -> Fatal | None:
    """Return the exception of an error file; None where it is of another make.

    Raises:
        OSError: It cannot be read.
        TriageError: It is no JSON: torn, or not what torch writes.
    """
    if path is None:
        return None
    text = read_bytes(path, _MOST_BYTES).decode("utf-8", errors="replace")
    try:
        content = parse_json(text, is_lenient=True)
    except ValueError as error:
        raise TriageError(str(path), f"is no JSON that can be read: {error}") from None
    found = content.get("message") if isinstance(content, dict) else None
    if isinstance(found, str):
        return Fatal(signature=classify_message(table, found), message=found)
    if not isinstance(found, dict) or not isinstance(found.get("message"), str):
        return None
    extra = found.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    message = str(found["message"])
    stack = str(extra.get("py_callstack", ""))
    of_stack = fatal_of_lines([parse_line(text) for text in stack.split("\n")], table)
    fatal = of_stack or Fatal(signature=classify_message(table, message), message=message)
    return replace(fatal, message=message, epoch_s=_seconds(extra.get("timestamp")))


def _seconds(value: JsonValue) -> float | None:
    """Return a time in seconds, None if it is none."""
    try:
        seconds = float(str(value))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None
