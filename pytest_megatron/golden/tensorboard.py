"""Reads scalars from TensorBoard event files with the standard library alone (effects: files).

An event file is a row of TFRecords (length, masked crc32c of the length, payload, masked crc32c
of the payload), each payload one serialised `Event`. A training writes the same tag again and
again, so the bytes of its event before the four of the value repeat; the first event of a kind is
decoded field by field (`wire.py`), the next ones are looked up by those bytes. That makes the
reader several times as fast as TensorBoard's own (`benchmarks/read_tensorboard.py`).

The crc of every length is verified, because a wrong length loses the place in the file. The crc
of the payloads is not: in Python that alone takes twice as long as the reading.
Must not import tensorboard or torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from struct import Struct
from typing import TypeAlias

from pytest_megatron.errors import MetricsError
from pytest_megatron.golden.model import MetricsFile, Observed, series_of
from pytest_megatron.golden.wire import (
    STEP_KEY,
    STEP_KEY_AT,
    VARINT_CONTINUES,
    WALL_TIME_KEY,
    WireError,
    decode_event,
    masked_crc32c,
)

_PATTERN = "events*tfevents*"
_HEADER = Struct("<QI")
_FLOAT = Struct("<f")
_NUM_HEADER_BYTES = 12
_NUM_CRC_BYTES = 4
_STEP_AT = STEP_KEY_AT + 1
_SCALARS: TypeAlias = dict[str, dict[int, float]]


def find_event_files(path: Path) -> list[Path]:
    """Return the event files at `path` (one file, or a directory with all below it), oldest first.

    The order is that of the time in the file names, then of the names.
    """
    found = [path] if path.is_file() else [p for p in path.rglob(_PATTERN) if p.is_file()]
    return sorted(found, key=lambda p: (_time_in_name(p), str(p)))


def read_tensorboard(path: Path) -> Observed:
    """Read every scalar of the event files at `path`, a file or a directory.

    The files of one directory belong to one attempt: give the directory of that attempt. Where two
    files have the same step of the same metric, the later file wins, and a note says so; within
    one file the later event wins. A last record that was not written to its end is dropped with a
    note. Values are float32 widened to float, not rounded.

    Raises:
        MetricsError: There is no event file or no scalar, a file cannot be read, or a record in
            the middle of a file is damaged (with its byte offset).
    """
    paths = find_event_files(path)
    if not paths:
        raise MetricsError(
            str(path), f"no metrics: no file {_PATTERN!r} here or below; did the training start?"
        )
    merged: _SCALARS = {}
    files: list[MetricsFile] = []
    notes: list[str] = []
    for event_file in paths:
        scalars, file = _read_file(event_file)
        files.append(file)
        if file.torn_at is not None:
            notes.append(f"{file.path}: the last record, at byte {file.torn_at}, is torn; dropped")
        notes.extend(_merge(merged, scalars, file.path))
    if not merged:
        num_records = sum(file.num_records for file in files)
        raise MetricsError(
            str(path),
            f"no metrics: {len(files)} event file(s) with {num_records} records and no scalar",
        )
    metrics = {
        tag: series_of(values, is_full_precision=True) for tag, values in sorted(merged.items())
    }
    return Observed(metrics=metrics, files=tuple(files), notes=tuple(notes))


def _merge(merged: _SCALARS, scalars: Mapping[str, dict[int, float]], path: str) -> Iterable[str]:
    """Let `scalars` win over what `merged` has; return a note for each metric that overlaps."""
    notes = []
    for tag, values in sorted(scalars.items()):
        earlier = merged.setdefault(tag, {})
        overlap = earlier.keys() & values.keys()
        if overlap:
            notes.append(
                f"{tag}: {len(overlap)} steps ({min(overlap)} to {max(overlap)}) are in several "
                f"files; {path} wins"
            )
        earlier.update(values)
    return notes


def _read_file(path: Path) -> tuple[_SCALARS, MetricsFile]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MetricsError(str(path), f"cannot be read: {error.strerror}") from error
    scalars: _SCALARS = {}
    num_records, torn_at = _scan(data, scalars, str(path))
    return scalars, MetricsFile(path=str(path), num_records=num_records, torn_at=torn_at)


def _scan(data: bytes, scalars: _SCALARS, where: str) -> tuple[int, int | None]:
    """Walk the records of `data` into `scalars`; return their number and the offset of a torn one.

    This is the hot loop of reading: one dictionary look-up for the length, one for the kind of
    event, no function call but the float's.
    """
    lengths: dict[bytes, int] = {}
    kinds: dict[bytes, dict[int, float]] = {}
    unpack_float = _FLOAT.unpack_from
    at, size, num_records = 0, len(data), 0
    while at < size:
        start = at + _NUM_HEADER_BYTES
        header = data[at:start]
        length = lengths.get(header)
        if length is None:
            if len(header) < _NUM_HEADER_BYTES:
                return num_records, at
            length = lengths[header] = _checked_length(header, f"{where}: byte {at}")
        end = start + length
        if end + _NUM_CRC_BYTES > size:
            return num_records, at
        head = start + _STEP_AT
        if length > _STEP_AT and data[start] == WALL_TIME_KEY and data[head - 1] == STEP_KEY:
            step = data[head]
            head += 1
            if step >= VARINT_CONTINUES:
                step, head = _rest_of_varint(data, step, head)
            values = kinds.get(data[head : end - 4])
        else:
            step, values = 0, None
        if values is not None:
            values[step] = unpack_float(data, end - 4)[0]
        else:
            _decode_slowly(data[start:end], scalars, kinds, f"{where}: byte {at}")
        num_records += 1
        at = end + _NUM_CRC_BYTES
    return num_records, None


def _rest_of_varint(data: bytes, value: int, at: int) -> tuple[int, int]:
    """Return an int64 whose first byte is `value`, and the place after it.

    Bytes that are no varint give some number here; decoding the event then says what is wrong.
    """
    value &= 0x7F
    shift = 7
    for byte in data[at : at + 9]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < VARINT_CONTINUES:
            break
        shift += 7
    return value - (1 << 64) if value >> 63 else value, at


def _checked_length(header: bytes, where: str) -> int:
    length, crc = _HEADER.unpack(header)
    assert isinstance(length, int)
    if masked_crc32c(header[:8]) != crc:
        raise MetricsError(
            where, "damaged event file: the crc of a record's length does not match; train again"
        )
    return length


def _decode_slowly(
    payload: bytes, scalars: _SCALARS, kinds: dict[bytes, dict[int, float]], where: str
) -> None:
    """Decode one event field by field and, if the next of its kind can be looked up, say how."""
    try:
        event = decode_event(payload)
    except WireError as error:
        raise MetricsError(where, f"damaged event file: {error}; train again") from error
    for tag, value in event.scalars:
        scalars.setdefault(tag, {})[event.step] = value
    if event.repeating is not None:
        tag = event.scalars[0][0]
        kinds[event.repeating] = scalars[tag]


def _time_in_name(path: Path) -> int:
    match = re.search(r"tfevents\.(\d+)", path.name)
    return int(match[1]) if match else 0
