"""Takes secrets out of the files of a run, once nobody writes to them any more (effects: files).

What the ranks print goes through torch's redirection straight to files, so it can only be cleaned
afterwards: of a workload when an attempt has ended and before it is judged, of distributed tests
when the session has ended. A file without a secret is not touched.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from struct import Struct

import ahocorasick_rs

from pytest_megatron.files import rewrite_lines_atomically, write_text_atomically
from pytest_megatron.golden.wire import masked_crc32c
from pytest_megatron.launch.secrets import MARKS, Redactor

# What the training itself saved, in its own format, and never printed; nobody uploads it.
LEFT_ALONE = frozenset(
    ("checkpoints", "data_cache", "no_checkpoint", "frozen_checkpoint", "coverage")
)
_PIECE_BYTES = 16 << 20
_LONGEST_URL = 512
_URL = re.compile(rb"://[^\s/:@'\"]{0,100}:[^\s/@'\"]{1,300}@")
_HEADER = Struct("<QI")
_CRC = Struct("<I")


def redact_tree(root: Path, redactor: Redactor) -> tuple[str, ...]:
    """Take secrets out of every file below a directory.

    Follows no link, and leaves checkpoints and data caches alone.

    Returns:
        What could not be cleaned, and why.
    """
    problems: list[str] = []
    search = _Search(redactor)
    for path in _files(root):
        try:
            if search.finds(path):
                _redact(path, redactor)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
    return tuple(problems)


def redact_file(path: Path, redactor: Redactor) -> None:
    """Take secrets out of one file that a secret may be in.

    Raises:
        OSError: It cannot be read or replaced.
    """
    if stat.S_ISREG(path.lstat().st_mode) and _Search(redactor).finds(path):
        _redact(path, redactor)


def _files(root: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in LEFT_ALONE]
        for name in files:
            path = Path(directory, name)
            if stat.S_ISREG(path.lstat().st_mode):
                yield path


def _redact(path: Path, redactor: Redactor) -> None:
    if "tfevents" in path.name:
        path.write_bytes(_redact_events(path.read_bytes(), redactor))
    elif path.suffix == ".json":
        text = path.read_text(encoding="utf-8", errors="replace")
        write_text_atomically(path, _redact_json(text, redactor))
    elif path.suffix == ".jsonl":
        rewrite_lines_atomically(path, lambda line: _redact_json(line, redactor))
    elif _is_binary(path):
        path.write_bytes(_blank(path.read_bytes(), redactor))
    elif _changes(path, redactor):
        rewrite_lines_atomically(path, redactor.text)


class _Search:
    """Says whether bytes hold a secret, or what one is known by: a gigabyte in a second or two."""

    def __init__(self, redactor: Redactor) -> None:
        words = [word.encode() for word in (*redactor.values, *MARKS) if word != "://"]
        self._longest = max(map(len, words))
        self._words = ahocorasick_rs.BytesAhoCorasick(words)

    def finds(self, path: Path) -> bool:
        """Whether a file has any of it."""
        before = b""
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                data = before + piece
                if self._words.find_matches_as_indexes(data) or _URL.search(data) is not None:
                    return True
                before = data[-max(self._longest, _LONGEST_URL) :]
        return False


def _changes(path: Path, redactor: Redactor) -> bool:
    """Whether any line holds a secret: what a secret may look like is in many files."""
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return any(redactor.text(line) != line for line in file)


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(1 << 16)


def _redact_json(text: str, redactor: Redactor) -> str:
    """Return JSON with its texts redacted and its numbers as they are; other text redacted."""
    try:
        found = json.loads(text)
        changed = redactor.json(found)
    except (ValueError, RecursionError):
        return redactor.text(text)
    if changed == found:
        return text
    is_one_line = "\n" not in text.strip()
    return json.dumps(changed, indent=None if is_one_line else 2) + "\n"


def _blank(data: bytes, redactor: Redactor) -> bytes:
    """Replace secret values by as many stars, so that everything else stays in its place."""
    for value in redactor.values:
        found = value.encode()
        data = data.replace(found, b"*" * len(found))
    return data


def _redact_events(data: bytes, redactor: Redactor) -> bytes:
    """Blank secrets in TensorBoard's records, and make their check sums right again."""
    pieces, at = [], 0
    while at + _HEADER.size <= len(data):
        (length, _) = _HEADER.unpack_from(data, at)
        start = at + _HEADER.size
        payload = data[start : start + length]
        blank = _blank(payload, redactor)
        pieces.append(data[at:start])
        if blank == payload:
            pieces.append(data[start : start + length + _CRC.size])
        else:
            pieces.append(blank + _CRC.pack(masked_crc32c(blank)))
        at = start + length + _CRC.size
    return b"".join((*pieces, data[at:]))
