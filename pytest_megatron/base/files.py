"""Whole-file reads with limits, and writes that are never seen half done.

Every file that a user or an artifact names is read through here. Knows no format but
JSON.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

MOST_BYTES = 256 << 20
_MOST_DIGITS = 300  # of an integer; the largest float has 309
_LONG_INTEGER = re.compile(rf"(?<![\d.])\d{{{_MOST_DIGITS + 1}}}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; never wait for a FIFO's writer or read a device.

    Raises:
        OSError: It cannot be opened, or is no regular file; `strerror` has the reason.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISREG(mode):
        return file
    file.close()
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = "a FIFO" if stat.S_ISFIFO(mode) else "a device"
    raise OSError(errno.EINVAL, f"is {kind}, expected a regular file", str(path))


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises:
        OSError: It cannot be opened, see `open_regular`, or it is larger.
    """
    with open_regular(path) as file:
        is_large = os.fstat(file.fileno()).st_size > most
        data = b"" if is_large else file.read(most + 1)
    if is_large or len(data) > most:
        raise OSError(errno.EFBIG, f"is larger than {most} bytes", str(path))
    return data


def try_to_write(directory: Path) -> None:
    """Try whether a directory, or the one above it that is there, takes files.

    Raises:
        OSError: It takes none; `filename` is the directory.
    """
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(there)) from error


def read_end(path: Path, most: int) -> bytes:
    """Return the last bytes of a file that may grow, so many at most."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read()


def append_lines(path: Path, text: str) -> int:
    """Add whole lines to the end of a file in one piece, and return its size in bytes.

    A line that a killed writer left unfinished is ended first, so that it costs no other line.

    Raises:
        OSError: It cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
        is_unfinished = size > 0 and file.read(1) != b"\n"
        data = f"{chr(10) * is_unfinished}{text}".encode()
        while data:
            data = data[file.write(data) :]
        return file.seek(0, os.SEEK_END)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a regular file, in hexadecimal digits.

    Raises:
        OSError: It cannot be read, see `read_bytes`.
    """
    return hashlib.sha256(read_bytes(path)).hexdigest()


def read_text(path: Path, *, errors: str = "strict") -> str:
    """Return the UTF-8 text of a regular file.

    Raises:
        OSError: It cannot be read, see `read_bytes`.
        UnicodeDecodeError: It is not UTF-8, and `errors` is strict.
    """
    return read_bytes(path).decode("utf-8", errors)


def read_json(path: Path, *, is_lenient: bool = False) -> JsonValue:
    """Return the JSON value that a regular file holds; `is_lenient` as in `parse_json`.

    Raises:
        OSError: It cannot be read, see `read_bytes`.
        ValueError: It is no JSON, see `parse_json`.
    """
    return parse_json(read_bytes(path), is_lenient=is_lenient)


def parse_json(text: str | bytes, *, is_lenient: bool = False) -> JsonValue:
    """Return a JSON value from outside; a surrogate without its pair becomes U+FFFD.

    Args:
        text: UTF-8.
        is_lenient: Whether numbers that no float holds, NaN and Infinity are None.

    Raises:
        ValueError: It is no JSON, is nested too deeply, or has an integer that no float holds.
    """
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    if not is_lenient and _LONG_INTEGER.search(text) is not None:
        raise ValueError(f"a number has more than {_MOST_DIGITS} digits")
    try:
        value = cast("JsonValue", _LENIENT.decode(text) if is_lenient else json.loads(text))
        return value if _SURROGATE.search(text) is None else encodable(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _integer(text: str) -> int | None:
    return int(text) if len(text) <= _MOST_DIGITS else None


def _number(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _no_number(_: str) -> None:
    """Return None for NaN and Infinity, which are no JSON."""


_LENIENT = json.JSONDecoder(parse_int=_integer, parse_float=_number, parse_constant=_no_number)


def encodable(value: JsonValue) -> JsonValue:
    """Return the value with texts that can be written as UTF-8: U+FFFD for a lone surrogate."""
    match value:
        case str():
            if value.isascii():
                return value
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [encodable(element) for element in value]
        case dict():
            return {str(encodable(key)): encodable(item) for key, item in value.items()}
        case _:
            return value


def write_text_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file with `text`; a reader sees the old file or the new one, whole.

    The bytes are on the disk before the name changes, so that a power cut leaves one of the two.

    Raises:
        OSError: The directory is not there, is read only, or the disk is full; `path` is as it was.
    """
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by a file with `content`, as `write_text_atomically` does.

    Raises:
        OSError: It cannot be written, see `write_text_atomically`.
    """
    _stage(path, content).replace(path)


def write_texts_together(texts: Mapping[Path, str]) -> None:
    """Replace several files, or none of them; a killed process may leave some old and some new.

    Raises:
        OSError: One cannot be written, see `write_text_atomically`, or is no file; every file is
            as it was.
    """
    staged: dict[Path, Path] = {}
    old: dict[Path, bytes | None] = {}
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            old[path] = read_bytes(path) if path.exists() else None
            staged[path] = _stage(path, text.encode())
        for path, temporary in staged.items():
            temporary.replace(path)
    except BaseException:
        for path, temporary in staged.items():
            if not temporary.exists():
                _restore(path, old[path])
        raise
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def _restore(path: Path, content: bytes | None) -> None:
    """Give a file its old content again, None where it was not there."""
    if content is None:
        path.unlink(missing_ok=True)
    else:
        write_bytes_atomically(path, content)


def _stage(path: Path, content: bytes | Iterable[bytes]) -> Path:
    """Write content beside `path` and onto the disk; return the file that waits to be renamed."""
    descriptor, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return Path(temporary)


def rewrite_lines_atomically(path: Path, change: Callable[[str], str]) -> None:
    """Replace `path` by a file with every line changed; bytes that are no UTF-8 stay as they are.

    Nobody else may be writing to the file.

    Raises:
        OSError: It cannot be written, see `write_text_atomically`.
    """
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as old:
        staged = _stage(path, (change(line).encode("utf-8", "surrogateescape") for line in old))
        shutil.copymode(path, staged)
    staged.replace(path)


def write_json_atomically(path: Path, value: JsonValue) -> None:
    """Write `value` as indented JSON with a final newline, keys in the order given."""
    write_text_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    current = os.umask(0)
    os.umask(current)
    return current
