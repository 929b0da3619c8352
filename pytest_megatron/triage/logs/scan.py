"""Finds literal texts in logs of any size, fast and in little memory.

Reads a file in pieces, once. Knows nothing of signatures: it gives places, the caller reads lines.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ahocorasick_rs

from pytest_megatron.triage.logs.lines import Line, parse_line

_PIECE_BYTES = 4 << 20
_MOST_AT_ONCE = 62  # up to 64 are searched with vector instructions: three times faster
_KEPT = 300  # first and last hits of a text in a file; a flood of one message is told by few lines
_MOST_LINE_BYTES = 4096


@dataclass(slots=True)
class _Kept:
    """The first and the last places of one text."""

    first: list[int] = field(default_factory=list)
    last: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add(self, offset: int) -> None:
        """Keep the place of a text, the first and the last ones."""
        if len(self.first) < _KEPT:
            self.first.append(offset)
        else:
            self.last.append(offset)


class Scanner:
    """Searches for a fixed set of texts.

    Args:
        literals: What to look for, in UTF-8. One that holds another one is never reported: the
            shorter one is found in its place.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        texts = sorted({text.encode() for text in literals})
        least = [t for t in texts if not any(other != t and other in t for other in texts)]
        num_groups = (
            math.ceil(len(least) / _MOST_AT_ONCE) or 1
        )  # of one size: faster than with a rest
        size = math.ceil(len(least) / num_groups) or 1
        groups = [least[i : i + size] for i in range(0, len(least), size)]
        self._overlap = max((len(text) for text in least), default=1) - 1
        self._automata = [
            ahocorasick_rs.BytesAhoCorasick(group, matchkind=ahocorasick_rs.MatchKind.LeftmostFirst)
            for group in groups
        ]

    def find(self, path: Path) -> tuple[int, ...]:
        """Return the offsets of hits in bytes, ascending.

        Of a text that is there very often only the first and the last hits are returned. Memory
        does not grow with the file.

        Raises:
            OSError: The file cannot be read.
        """
        kept: dict[tuple[int, int], _Kept] = {}
        with path.open("rb", buffering=0) as file:
            start, rest = 0, b""
            while piece := file.read(_PIECE_BYTES):
                data = rest + piece
                self._find(data, start - len(rest), kept, min_end=len(rest))
                start += len(piece)
                rest = data[-self._overlap :] if self._overlap else b""
        offsets = {offset for found in kept.values() for offset in (*found.first, *found.last)}
        return tuple(sorted(offsets))

    def _find(
        self, data: bytes, base: int, kept: dict[tuple[int, int], _Kept], *, min_end: int
    ) -> None:
        """Take in the hits of a piece that end behind what an earlier piece already had."""
        for number, automaton in enumerate(self._automata):
            for index, at, end in automaton.find_matches_as_indexes(data):
                if end > min_end:
                    kept.setdefault((number, index), _Kept()).add(base + at)


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line of a log as it is there.

    Attributes:
        start: Offset of its first byte.
        end: Offset behind its last byte, that of the newline.
    """

    start: int
    end: int
    text: str


def lines_at(path: Path, offsets: Sequence[int]) -> tuple[RawLine, ...]:
    """Return the lines that hold these bytes, each once, in order; of long ones the start."""
    found: list[RawLine] = []
    with path.open("rb", buffering=0) as file:
        for offset in offsets:
            if not found or offset >= found[-1].end:
                found.append(_line_at(file.fileno(), offset))
    return tuple(found)


def _line_at(descriptor: int, offset: int) -> RawLine:
    """Read the line around an offset; a line of megabytes is taken from near the offset on."""
    before = os.pread(descriptor, min(offset, _MOST_LINE_BYTES), max(0, offset - _MOST_LINE_BYTES))
    start = offset - len(before) + before.rfind(b"\n") + 1
    data = os.pread(descriptor, offset - start + _MOST_LINE_BYTES, start)
    newline = data.find(b"\n", offset - start)
    data = data if newline < 0 else data[:newline]
    # A progress bar rewrites its line: what is shown last is what counts around the offset.
    carriage = data.rfind(b"\r", 0, offset - start) + 1
    text = data[carriage:].partition(b"\r")[0].decode(errors="replace")
    return RawLine(start=start + carriage, end=start + len(data), text=text)


def line_number(path: Path, offset: int) -> int:
    """Return the number of the line that holds a byte, counted from 1."""
    number = 1
    with path.open("rb", buffering=0) as file:
        while offset > 0 and (piece := file.read(min(_PIECE_BYTES, offset))):
            number += piece.count(b"\n")
            offset -= len(piece)
    return number


def read_from(path: Path, offset: int, num_bytes: int) -> bytes:
    """Return up to so many bytes from an offset on."""
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), num_bytes, max(0, offset))


def read_lines(path: Path, offset: int, num_bytes: int) -> list[Line]:
    """Return the lines in so many bytes from an offset on; the last may be cut off."""
    lines: list[Line] = []
    for raw in read_from(path, offset, num_bytes).split(b"\n"):
        lines.append(parse_line(raw.decode(errors="replace"), offset))
        offset += len(raw) + 1
    return lines
