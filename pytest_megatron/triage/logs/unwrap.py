"""Take off what other programs put around every line of a log: learned from the log, not listed.

Collectors, runners and launchers put a time, a host, a pod or a rank in front of each line, or the
line into a field of a record. What they share is that the texts that are known to begin a line
stand behind something that other lines have too, and that is what is looked for.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import without_colours
from pytest_megatron.triage.logs.lines import parse_iteration, parse_line
from pytest_megatron.triage.logs.scan import read_from
from pytest_megatron.triage.logs.traceback import HEADER
from pytest_megatron.triage.rank_log import LogFile

_HEAD_BYTES = 1 << 15
_TAIL_BYTES = 1 << 16
_MOST_ROUNDS = 4  # of one wrapping within another
_MOST = 0.8  # of the lines have what is taken for a wrapping without a traceback in it
_MOST_TO_FRAME = 30  # lines from the header of a traceback to its first frame, with other ranks'
_MOST_PREFIX = 200
_MOST_SHAPES = 8
_MOST_BYTE = 255

_STAMP = (
    r"(?:(?:\d{4}[-/])?\d\d[-/]\d\d(?:T|_|,? )\d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"(?: ?(?:Z|UTC|[+-]\d\d:?\d\d)\b)?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?|\d\d:\d\d:\d\d(?:[.,]\d+)?|\d{10}\.\d+)"
)
_LEVEL = r"(?:TRACE|DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL)"
_IS_LEVEL = re.compile(_LEVEL)
_ISO = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)\D{1,2}(\d\d:\d\d:\d\d)(?:[.,](\d+))?")
_FRAME = '  File "'
# What begins a line wherever a program of ours, torch or NCCL wrote it, and no logger's record.
_RAW = (
    rf'{re.escape(HEADER)}|  File "[^"]+", line \d+, in |\[(?:rank|default)\d+\]:'
    r"|\[?\b[EWIF]\d{3,4} \d\d:\d\d:\d\d\.\d"
    r"|(?<![\w.-])[\w.-]+:\d+:\d+ \[\d+\] (?:\S+ )?NCCL (?:INFO|WARN) |Fatal Python error: "
    r"|={3,} (?:test session starts|short test summary info|.* in [\d.]+s\b.*) ={3,}$"
)
_START = re.compile(
    rf"(?P<raw>{_RAW})|(?<=[ :>|]) iteration +\d+/ *\d+ \||^ iteration "
    r"|\[(?:before|after) [a-z ]+\] datetime: |\b(?:srun|slurmstepd): error: "
    r'|\{"|\b(?:time|ts|timestamp|level)=\S+ \w+='  # records
)
# What needs no such proof: a time, with what collectors put around it; or the label of a rank.
_LEAD = re.compile(
    rf"(?:[^\t\n]{{1,{_MOST_PREFIX}}}\t|\[[^\[\]]*\] |\([^()]*\) )*[\[(]?{_STAMP}[\])]?"
    r"(?: std(?:out|err) [FP](?= |$)| \d\d[OE](?=[ +])\+?| \|| [\w.-]+ [\w./@-]+\[\d+\]:)?"
    r"| *\d+:(?= |$)"
)
_OF_DAEMON = re.compile(r" [\w.-]+ \S+(?:\[\d+\])?: ")
_TOKEN = re.compile(
    rf"(?P<stamp>{_STAMP})|(?P<part>std(?:out|err) [FP]\b)|(?P<level>\b{_LEVEL}\b)"
    r"|(?P<word>[\w.@-]*\w[\w.@-]*)|(?P<space> +)|(?P<other>.)",
    re.DOTALL,
)
_RANK = re.compile(
    r"\b(?i:(?:mpi|global_?|local_?)?rank)[ _=:#]*(\d+)|,(\d+)\]<|^ *(\d+): *$|^\[(\d+)\] *$"
    r"|\[(?!node)[A-Za-z_]+(\d+)\]: *$"
)
_LOGFMT = re.compile(
    r'(?P<key>[\w.@/-]+)=(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s"]*))(?: |$)'
)
_RANK_KEYS = ("rank", "global_rank", "local_rank")

_Record: TypeAlias = "Mapping[tuple[str, ...], str]"


class WrappedLine(NamedTuple):
    """A line on its way.

    Attributes:
        number: Of the line of the log that it comes from, counted from 1.
        stamp: When it was written, as `parse_line` reads it, or empty.
        rank: That it is said to be of, or None.
    """

    number: int
    stamp: str
    rank: int | None
    text: str


# Takes one thing off the lines that have it, and keeps what it says of time and rank.
Wrapping: TypeAlias = "Callable[[Iterable[WrappedLine]], Iterator[WrappedLine]]"


def take_prefix(pattern: re.Pattern[str], pieces: Iterable[WrappedLine]) -> Iterator[WrappedLine]:
    """Yield lines without what stands in front of them.

    Args:
        pattern: Matches it; `part` in it tells of a line that goes on in the next of its stream.
        pieces: Lines as they are.
    """
    held: dict[str, WrappedLine] = {}
    for piece in pieces:
        found = pattern.match(piece.text)
        if found is None:
            yield piece
            continue
        named = found.groupdict("")
        part, said = named.get("part", ""), _RANK.search(found[0])
        before = held.pop(part[:-2], None)
        new = WrappedLine(
            number=piece.number if before is None else before.number,
            stamp=piece.stamp or _iso(named.get("stamp", "")),
            rank=piece.rank if said is None else int(said[said.lastindex or 0]),
            text=("" if before is None else before.text) + piece.text[found.end() :],
        )
        if part.endswith("P"):
            held[part[:-2]] = new
        else:
            yield new
    yield from held.values()


def take_field(
    path: tuple[str, ...], pieces: Iterable[WrappedLine], *, has_newlines: bool
) -> Iterator[WrappedLine]:
    """Yield the lines in a field of records.

    Args:
        path: Where the text is.
        pieces: Lines as they are.
        has_newlines: Whether a text without a newline at its end goes on in the next record.
    """
    held = ""
    for piece in pieces:
        record = _record(piece.text)
        if record is None or path not in record:
            yield piece
            continue
        held += record[path]
        if has_newlines and not held.endswith("\n"):
            continue
        traces = [value for other, value in record.items() if other != path and HEADER in value]
        said = "\n".join([held.removesuffix("\n"), *traces])
        held = ""
        if "\n" in said and not said.startswith(HEADER):  # of a logger, which may have caught it
            levels = (value.upper() for value in record.values())
            said = f"{next(filter(_IS_LEVEL.fullmatch, levels), '')} {said}".lstrip(" ")
        stamp = piece.stamp or next(filter(None, map(_iso, record.values())), "")
        ranks = {key[-1].lower(): value for key, value in record.items() if value.isdigit()}
        rank = next((int(ranks[key]) for key in _RANK_KEYS if key in ranks), piece.rank)
        for line in said.split("\n"):
            yield WrappedLine(piece.number, stamp, rank, line)
    if held:
        yield WrappedLine(piece.number, piece.stamp, piece.rank, held)


def unwrap(log: LogFile, directory: Path) -> LogFile:
    """Return a log without what was put around its lines; the same one where nothing was.

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
    wrappings = learn((head + tail).decode(errors="replace").split("\n"))
    if not wrappings:
        return log
    copy = directory / f"{len(list(directory.iterdir()))}.log"
    shifts = [(0, 0)]
    with (
        log.path.open(encoding="utf-8", errors="replace", newline="\n") as file,
        copy.open("w", encoding="utf-8", errors="replace", newline="\n") as out,
    ):
        pieces: Iterable[WrappedLine] = (
            WrappedLine(number, "", None, without_colours(line.rstrip("\r\n")))
            for number, line in enumerate(file, start=1)
        )
        for wrapping in wrappings:
            pieces = wrapping(pieces)
        for number, piece in enumerate(pieces, start=1):
            if piece.number - number != shifts[-1][1]:
                shifts.append((number, piece.number - number))
            label = "" if piece.rank is None else f"[default{piece.rank}]:"
            out.write(f"{piece.stamp}{label}{piece.text}\n")
    return replace(log, path=copy, shifts=shifts)


def learn(lines: Iterable[str]) -> tuple[Wrapping, ...]:
    """Return what is around the lines of a log, outermost first; nothing where nothing is.

    Args:
        lines: Of its beginning and its end.
    """
    texts = [text for line in lines if (text := without_colours(line).rstrip()).strip()]
    found: list[Wrapping] = []
    while len(found) < _MOST_ROUNDS and (wrapping := _field(texts) or _prefix(texts)) is not None:
        found.append(wrapping)
        pieces = wrapping(WrappedLine(0, "", None, text) for text in texts)
        texts = [piece.text for piece in pieces if piece.text.strip()]
    return tuple(found)


def _prefix(texts: Sequence[str]) -> Wrapping | None:
    """Return what most lines begin with, or else the lines of some traceback."""
    starts = [_START.search(text) for text in texts]
    shapes: Counter[str] = Counter()
    for text, start in zip(texts, starts, strict=True):
        if start is not None and _may_be_prefix(prefix := text[: start.start()]):
            shapes[_shape(prefix)] += start["raw"] is not None or _LEVEL not in _shape(prefix)
        if (lead := _LEAD.match(text)) is not None and _LEVEL not in (shape := _shape(lead[0])):
            shapes[shape] += _OF_DAEMON.match(text, lead.end()) is None
    seen = [shape for shape, count in shapes.most_common(_MOST_SHAPES) if count]
    is_bare = any(text.startswith((HEADER, _FRAME)) for text in texts)  # of a record of a logger
    patterns = [] if is_bare else [_pattern_of(shape, texts) for shape in seen]
    common = [pattern for pattern in patterns if _share(pattern, texts) >= _MOST]
    if common:
        return partial(take_prefix, max(common, key=lambda pattern: len(pattern.pattern)))
    for index, text in enumerate(texts):
        prefix = text.partition(HEADER)[0]
        if not _may_be_prefix(prefix) or prefix == text:
            continue
        pattern = _pattern_of(_shape(prefix), texts)
        is_told = re.search(r"[\[({<]|\d", prefix) is not None or _share(pattern, texts) >= _MOST
        later = texts[index + 1 :][:_MOST_TO_FRAME]
        if is_told and any(_has_frame(pattern, line) for line in later):
            return partial(take_prefix, pattern)
    return None


def _may_be_prefix(text: str) -> bool:
    """Return true if a text has a word or a number, and is nothing that is read itself."""
    if not 0 < len(text) <= _MOST_PREFIX or parse_iteration(text) is not None:
        return False
    return re.search(r"\d|\w\w", parse_line(text).text) is not None


def _share(pattern: re.Pattern[str], texts: Sequence[str]) -> float:
    """Return the part of the lines that begin so."""
    return sum(pattern.match(text) is not None for text in texts) / len(texts)


def _has_frame(pattern: re.Pattern[str], text: str) -> bool:
    """Return true if a line is a frame of a traceback behind what is taken for a prefix."""
    found = pattern.match(text)
    return found is not None and text.startswith(_FRAME, found.end())


def _shape(prefix: str) -> str:
    """Return a regular expression for what stands in front of other lines too.

    Numbers, times and levels differ from line to line; names do within brackets alone.
    """
    parts: list[str] = []
    depth = 0
    for token in _TOKEN.finditer(prefix.rstrip(" ")):
        text = token[0]
        match token.lastgroup:
            case "stamp":
                is_first = not any("(?P<stamp>" in part for part in parts)
                parts.append(f"(?P<stamp>{_STAMP})" if is_first else _STAMP)
            case "part":
                parts.append("(?P<part>std(?:out|err) [FP])")
            case "level":
                parts.append(_LEVEL)
            case "word" if text.isdigit():
                parts.append(r"\d+")
            case "word" if re.search(r"\d", text):
                parts.append(r"[\w.@-]*\d[\w.@-]*")
            case "word" if depth:
                parts.append(r"[\w.@-]+")
            case "space":
                parts.append(" +")
            case _:
                depth += (text in "[({<") - (text in "])}>")
                parts.append(re.escape(text))
    return "".join(parts)


def _pattern_of(shape: str, texts: Sequence[str]) -> re.Pattern[str]:
    """Return the pattern of a prefix with the blanks that always follow it: more are the line's."""
    behind = re.compile(rf"(?>{shape})( *)\S")
    blanks = {len(found[found.lastindex or 0]) for text in texts if (found := behind.match(text))}
    return re.compile(rf"{shape}(?:{' ' * min(blanks, default=0)}| *$)")


def _iso(text: str) -> str:
    """Return a time in the form that `parse_line` takes off, with a blank; empty if it is none."""
    found = _ISO.match(text)
    if found is None:
        return ""
    year, month, day, clock, part = found.groups()
    return f"{year}-{month}-{day}T{clock}.{part or '0'}Z "


def _field(texts: Sequence[str]) -> Wrapping | None:
    """Return the field of records that holds the lines: the one that says most of its own."""
    records = [record for text in texts if (record := _record(text)) is not None]
    if not records or len(records) < len(texts) / 2:
        return None
    values: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for record in records:
        for path, value in record.items():
            values[path].append(value)
    sizes = {
        path: sum(map(len, set(said)))
        for path, said in values.items()
        if len(said) >= _MOST * len(records)
        if any(" " in value.strip() and not re.fullmatch(_STAMP, value) for value in said)
    }
    if not sizes:
        return None
    chosen = max(sizes, key=lambda path: sizes[path])
    ends = [value.endswith("\n") for value in values[chosen]]
    return partial(take_field, chosen, has_newlines=sum(ends) >= len(ends) / 2)


def _record(text: str) -> _Record | None:
    """Return the texts of a line that is a record, by their paths; None for every other line."""
    if text.startswith("{"):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return dict(_texts_of(content, ())) if isinstance(content, dict) else None
    fields: dict[tuple[str, ...], str] = {}
    at = 0
    while at < len(text):
        found = _LOGFMT.match(text, at)
        if found is None:
            return None
        at = found.end()
        quoted = found["quoted"]
        fields[(found["key"],)] = found["bare"] if quoted is None else _unquoted(quoted)
    return fields if len(fields) > 1 else None


def _unquoted(text: str) -> str:
    """Return the text within quotes."""
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


def _texts_of(value: JsonValue, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the texts and numbers in a record; bytes, as of journald, are a text."""
    match value:
        case dict():
            for key, inner in value.items():
                yield from _texts_of(inner, (*path, key))
        case str():
            yield path, value
        case list():  # what journald writes where there are colours
            numbers = [number for number in value if isinstance(number, int)]
            if numbers and min(numbers) >= 0 and max(numbers) <= _MOST_BYTE:
                yield path, without_colours(bytes(numbers).decode(errors="replace"))
        case int() if not isinstance(value, bool):
            yield path, str(value)
        case _:
            pass
