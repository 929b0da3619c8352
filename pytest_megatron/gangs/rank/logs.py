"""Log files of ranks, in torch's layout: `attempt_<k>/<rank>/{stdout,stderr}.log`.

A rank writes only to its files, never to the terminal; the output of a test is a piece of them. On
a full disk text is lost, but no test fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from typing_extensions import Buffer, override

from pytest_megatron.process.originals import os

STACKS_FILE = "stacks.txt"
FLIGHT_FILE = "nccl_flight_recorder.json"
STANDARD = ("stdin", "stdout", "stderr")
_STREAMS = STANDARD[1:]
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
_MOST_BYTES = 1 << 18  # of one phase in a report; the log has all of it
_CHUNK_BYTES = 1 << 16


class _Lossy(io.FileIO):
    """A log file that drops text if the disk is full."""

    @override
    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return memoryview(data).nbytes


@dataclass(slots=True)
class RankLogs:
    """The standard streams of this process, written to files (effects)."""

    directory: Path
    _ends: list[int] = field(default_factory=lambda: [0, 0])

    def redirect(self) -> None:
        """Redirect stdout and stderr of this process to the log files, and stdin to /dev/null."""
        open_standard_descriptors()
        null = os.open(os.devnull, os.O_WRONLY)
        originals = (sys.__stdout__, sys.__stderr__)  # which a module may keep
        for number, original in enumerate(originals, start=1):
            os.dup2(null, number)
            if isinstance(original, io.TextIOWrapper):
                with contextlib.suppress(OSError, ValueError):  # it is closed
                    original.flush()  # to nowhere: text of the process that was forked
                    original.reconfigure(line_buffering=True)
        os.close(null)
        for name in STANDARD:
            self.reopen(name)

    def reopen(self, name: str) -> None:
        """Open stdin, stdout or stderr of this process anew, whatever became of it."""
        open_standard_descriptors()  # else a file opened here would get one of their numbers
        number = STANDARD.index(name)
        if name == "stdin":
            close_stdin()
            sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115 - lives on
            return
        descriptor = self._open(name)
        os.dup2(descriptor, number)
        os.close(descriptor)
        setattr(sys, name, _text_stream(number))
        self._ends[number - 1] = _end_of(number)

    def new_text(self) -> list[tuple[str, str]]:
        """Return name and new text of each stream that was written since the last call."""
        flush_streams()
        found = []
        for index, stream in enumerate(_STREAMS):
            start = self._ends[index]
            end = self._ends[index] = _end_of(index + 1)
            if end > start:
                found.append((stream, read_piece(self.directory / f"{stream}.log", start, end)))
        return found

    def _open(self, stream: str) -> int:
        """Open a log file of this rank; on a full disk what is written is lost."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            path = self.directory / f"{stream}.log"
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return os.open(os.devnull, os.O_WRONLY)


def close_stdin() -> None:
    """Read from `/dev/null` in place of stdin."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def open_standard_descriptors() -> None:
    """Open `/dev/null` where stdin, stdout or stderr is closed, as by `pytest <&-`.

    Otherwise a socket or pipe could get that number, and be lost when a stream replaces it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one


def file_size(path: Path) -> int:
    """Return the size of a file, 0 if it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_piece(path: Path, start: int, end: int) -> str:
    """Return a piece of a log; of a long one its end, with a reference to the rest."""
    left_out = max(0, end - start - _MOST_BYTES)
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            text = os.pread(descriptor, end - start - left_out, start + left_out).decode(
                errors="replace"
            )
        finally:
            os.close(descriptor)
    except OSError:
        return ""
    return f"[{left_out} bytes more are in {path}]\n{text}" if left_out else text


def flush_streams() -> None:
    """Flush the buffers of Python and C."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001, S112 - a test may have closed or replaced it
            continue
    _LIBC.fflush(None)


_LIBC = ctypes.CDLL(None)


@dataclass(slots=True)
class Tail:
    """Follows the logs of one rank, in the controller."""

    directory: Path
    rank: int
    _positions: dict[str, int] = field(default_factory=dict)
    _rests: dict[str, bytes] = field(default_factory=dict)

    def new_lines(self, *, is_ended: bool = False) -> Iterator[str]:
        """Yield lines written since the last call, as `[rank0]: ...`.

        Args:
            is_ended: Read everything, including an unfinished line; otherwise only the start of a
                long piece, so that a rank that floods its log does not block others.
        """
        for stream in _STREAMS:
            try:
                with (self.directory / f"{stream}.log").open("rb") as file:
                    for line in self._lines(stream, file, is_ended=is_ended):
                        yield f"[rank{self.rank}]: {line.decode(errors='replace')}"
            except OSError:
                continue

    def _lines(self, stream: str, file: BinaryIO, *, is_ended: bool) -> Iterator[bytes]:
        """Yield lines that were appended to a log since the last call."""
        position = self._positions.get(stream, 0)
        end = file.seek(0, os.SEEK_END) if is_ended else position + _CHUNK_BYTES
        file.seek(position)
        rest = self._rests.get(stream, b"")
        while chunk := file.read(min(_CHUNK_BYTES, end - file.tell())):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
            if len(rest) > _CHUNK_BYTES:
                yield rest
                rest = b""
        self._positions[stream] = file.tell()
        if is_ended and rest:
            yield rest
            rest = b""
        self._rests[stream] = rest


def _text_stream(descriptor: int) -> TextIO:
    """Return a stream of text that writes at once."""
    raw = cast("BinaryIO", _Lossy(descriptor, "w", closefd=False))
    return io.TextIOWrapper(  # unbuffered: text before a kill must be kept
        raw, encoding="utf-8", errors="backslashreplace", write_through=True
    )


def _end_of(descriptor: int) -> int:
    """Return the size of a log; 0 if the descriptor is no file."""
    try:
        return os.lseek(descriptor, 0, os.SEEK_END)
    except OSError:
        return 0
