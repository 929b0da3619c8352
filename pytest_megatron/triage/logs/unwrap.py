"""Take off what other programs put in front of the lines of a log.

Two rules for all of them: a time or the label of a rank, if most lines begin with one; else what
stands in front of the lines of a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_megatron.base.text import without_colours
from pytest_megatron.triage.logs.lines import parse_line
from pytest_megatron.triage.logs.scan import read_from
from pytest_megatron.triage.logs.traceback import HEADER
from pytest_megatron.triage.rank_log import LogFile

_HEAD_BYTES = 1 << 15
_TAIL_BYTES = 1 << 16
_MOST_ROUNDS = 4  # of one prefix behind another
_MOST = 0.8  # of the lines begin with a time or a label that is taken for a prefix
_MOST_TO_FRAME = 30  # lines from the header of a traceback to its first frame, with other ranks'
_MOST_PREFIX = 200

_STAMP = (
    r"(?:(?:\d{4}[-/])?\d\d[-/]\d\d(?:T|_|,? )\d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"(?: ?(?:Z|UTC|[+-]\d\d:?\d\d)\b)?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?|\d\d:\d\d:\d\d(?:[.,]\d+)?|\d{10}\.\d+)"
)
# A time, with what runners and containers write around it; or what srun and mpirun do.
_LEAD = (
    rf"(?:[^\t\n]{{1,{_MOST_PREFIX}}}\t)*[\[(]?{_STAMP}[\])]?"
    r"(?: std(?:out|err) [FP](?= |$)| \d\d[OE](?=[ +])\+?| \|)?"
    r"| *\d+:(?= |$)|\[\d+,\d+\]<std(?:out|err)>:"
)
_ISO = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)\D{1,2}(\d\d:\d\d:\d\d)(?:[.,](\d+))?")
_FRAME = '  File "'
# What differs from line to line in a prefix, and what stands for it.
_TOKEN = re.compile(
    rf"(?P<stamp>{_STAMP})|\b(?P<stream>std(?:out|err))\b"
    r"|\b(?P<level>TRACE|DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b"
    r"|(?P<word>[\w.@-]*\d[\w.@-]*)|.",
    re.DOTALL,
)
_SHAPES = {
    "stamp": _STAMP,
    "stream": "std(?:out|err)",
    "level": "[A-Z]+",
    "word": r"[\w.@-]*\d[\w.@-]*",
}
_RANK = re.compile(
    r"\b(?i:(?:mpi|global_?|local_?)?rank)[ _=:#]*(\d+)|,(\d+)\]<|(?:^|\] ) *(\d+): *$"
    r"|^\[(\d+)\] *$|\[(?!node)[A-Za-z_]+(\d+)\]: *$"
)


def unwrap(log: LogFile, directory: Path) -> LogFile:
    """Return a log without what was put in front of its lines; the same one where nothing was.

    Args:
        log: Of any size; one that cannot be read is for its reader to note.
        directory: Where a copy is written.
    """
    try:
        return _unwrap(log, directory)
    except OSError:
        return log


def _unwrap(log: LogFile, directory: Path) -> LogFile:
    """Return the same.

    Raises:
        OSError: It cannot be read, or the copy cannot be written.
    """
    size = log.path.stat().st_size
    head = read_from(log.path, 0, _HEAD_BYTES)
    tail = read_from(log.path, max(_HEAD_BYTES, size - _TAIL_BYTES), _TAIL_BYTES)
    if size > _HEAD_BYTES + _TAIL_BYTES:  # neither ends nor begins with a part of a line
        head, tail = head[: head.rfind(b"\n") + 1], tail[tail.find(b"\n") + 1 :]
    prefixes = learn((head + tail).decode(errors="replace").split("\n"))
    if not prefixes:
        return log
    copy = directory / f"{len(list(directory.iterdir()))}.log"
    with (
        log.path.open(encoding="utf-8", errors="replace", newline="\n") as file,
        copy.open("w", encoding="utf-8", errors="replace", newline="\n") as out,
    ):
        for line in file:
            out.write(_without(prefixes, line.rstrip("\r\n")) + "\n")
    return replace(log, path=copy)


def _without(prefixes: Sequence[re.Pattern[str]], line: str) -> str:
    """Return a line with time and rank as `parse_line` reads them in place of its prefixes."""
    text, stamp, label = without_colours(line), "", ""
    for prefix in prefixes:
        if (found := prefix.match(text)) is None:
            continue
        text = text[found.end() :]
        stamp = stamp or _iso(found[0])
        if (said := _RANK.search(found[0])) is not None:
            label = f"[default{said[said.lastindex or 0]}]:"
    return f"{stamp}{label}{text}"


def _iso(text: str) -> str:
    """Return the time in a text in the form that `parse_line` takes off; empty if it has none."""
    found = _ISO.search(text)
    if found is None:
        return ""
    year, month, day, clock, part = found.groups()
    return f"{year}-{month}-{day}T{clock}.{part or '0'}Z "


def learn(lines: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    """Return what is in front of the lines of a log, outermost first; nothing where nothing is.

    Args:
        lines: Of its beginning and its end.
    """
    texts = [text for line in lines if (text := without_colours(line).rstrip()).strip()]
    found: list[re.Pattern[str]] = []
    if any(text.startswith((HEADER, _FRAME)) for text in texts):
        return ()
    while len(found) < _MOST_ROUNDS and (prefix := _prefix(texts)) is not None:
        found.append(prefix)
        behind = (text[m.end() :] if (m := prefix.match(text)) else text for text in texts)
        texts = [text for text in behind if text.strip()]
    return tuple(found)


def _prefix(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Return what most lines begin with, or else the lines of some traceback."""
    lead = _followed_by_blanks(f"(?:{_LEAD})", texts)
    if texts and sum(lead.match(text) is not None for text in texts) >= _MOST * len(texts):
        return lead
    for index, text in enumerate(texts):
        before, header, _ = text.partition(HEADER)
        is_own = re.search(r"\d|\w\w", parse_line(before).text) is None  # of torch, or a margin
        if not header or is_own or len(before) > _MOST_PREFIX:
            continue
        prefix = _followed_by_blanks(_TOKEN.sub(_shape_of, before.rstrip(" ")), texts)
        later = texts[index + 1 :][:_MOST_TO_FRAME]
        if any((m := prefix.match(one)) and one.startswith(_FRAME, m.end()) for one in later):
            return prefix
    return None


def _shape_of(token: re.Match[str]) -> str:
    """Return a regular expression for a part of a prefix."""
    return _SHAPES.get(token.lastgroup or "", re.escape(token[0]))


def _followed_by_blanks(shape: str, texts: Sequence[str]) -> re.Pattern[str]:
    """Return the pattern of a prefix with the blanks that always follow it: more are the line's."""
    behind = re.compile(rf"(?>{shape})( *)\S")
    blanks = [len(found[1]) for text in texts if (found := behind.match(text)) is not None]
    return re.compile(rf"{shape}(?:{' ' * min(blanks, default=0)}| *$)")
