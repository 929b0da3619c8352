"""Whole-file reads and writes that are never seen half done.

Knows nothing of what is in the files beyond JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"


def write_text_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file with `text`; a reader sees the old file or the new one, whole.

    The bytes are on the disk before the name changes, so that a power cut leaves one of the two.

    Raises:
        OSError: The directory is not there, is read only, or the disk is full; `path` is as it was.
    """
    _stage(path, text).replace(path)


def write_texts_together(texts: Mapping[Path, str]) -> None:
    """Replace several files; none of them unless all can be written.

    Raises:
        OSError: As from `write_text_atomically`; every file is as it was.
    """
    staged: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            staged[path] = _stage(path, text)
        for path, temporary in staged.items():
            temporary.replace(path)
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def _stage(path: Path, text: str) -> Path:
    """Write `text` beside `path` and onto the disk; return the file that waits to be renamed."""
    descriptor, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
    )
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            file.write(text)
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
        OSError: As from `write_text_atomically`.
    """
    descriptor, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
    )
    try:
        with (
            path.open(encoding="utf-8", errors="surrogateescape", newline="") as old,
            os.fdopen(
                descriptor, "w", encoding="utf-8", errors="surrogateescape", newline=""
            ) as new,
        ):
            shutil.copymode(path, temporary)
            new.writelines(map(change, old))
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json_atomically(path: Path, value: JsonValue) -> None:
    """Write `value` as indented JSON with a final newline, keys in the order given."""
    write_text_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    current = os.umask(0)
    os.umask(current)
    return current
