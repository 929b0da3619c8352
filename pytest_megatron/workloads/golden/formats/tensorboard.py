"""Reader of scalars in TensorBoard event files, by the standard library (effects: files).

An event file is a row of TFRecords (length, masked crc32c of the length, payload, masked crc32c
of the payload), each payload one serialised `Event`. A training writes the same tag again and
again, so the bytes of its event before the four of the value repeat; the first event of a kind is
decoded field by field, the next ones are looked up by those bytes. That makes the
reader several times as fast as TensorBoard's own (`benchmarks/read_tensorboard.py`).

The crc of every length is verified, because a wrong length loses the place in the file. The crc
of the payloads is not: in Python that alone takes twice as long as the reading.
Must not import tensorboard or torch.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import TypeAlias

from pytest_megatron.base.crc32c import masked_crc32c
from pytest_megatron.errors import MetricsError
from pytest_megatron.workloads.golden.formats.curves import Curves, joined, two_values
from pytest_megatron.workloads.golden.model import Disagreements, Observed, is_same

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Field numbers, by message.
_EVENT_STEP, _EVENT_SUMMARY = 2, 5
_SUMMARY_VALUE = 1
_VALUE_TAG, _VALUE_SIMPLE, _VALUE_TENSOR = 1, 2, 8
_TENSOR_DTYPE, _TENSOR_SHAPE = 1, 2
_TENSOR_CONTENTS = (4, 5, 6)  # tensor_content, float_val, double_val
_SHAPE_DIM, _DIM_SIZE = 2, 1
# What every event of a training starts with: keys of wall time (8 bytes) and step.
WALL_TIME_KEY, STEP_KEY, STEP_KEY_AT = 0x09, 0x10, 9
VARINT_CONTINUES = 0x80
_DT_FLOAT, _DT_DOUBLE = 1, 2
_SIGN_BIT = 1 << 63


class WireError(Exception):
    """The bytes are not a serialised event; the text describes the problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedEvent:
    """The content of one event.

    Attributes:
        step: The training iteration.
        scalars: (num_scalars,) tag and value.
        repeating: If the event is wall time, step and one `simple_value` at its very end: the
            bytes between step and value. Another event with the same bytes there, of any step,
            holds another value of the same tag in its last four bytes.
    """

    step: int
    scalars: tuple[tuple[str, float], ...]
    repeating: bytes | None


def decode_event(payload: bytes) -> DecodedEvent:
    """Decode a serialised `Event`.

    Raises:
        WireError: The bytes end in the middle of a field, or a field has an unknown wire type.
    """
    step, after_step = 0, 0
    scalars: list[tuple[str, float]] = []
    num_values, is_last_simple = 0, False
    for field in fields_of(payload):
        if field.number == _EVENT_STEP and field.wire_type == _VARINT:
            step, after_step = field.integer, field.end
        elif field.number == _EVENT_SUMMARY and field.wire_type == _BYTES:
            for value in fields_of(field.content):
                if value.number == _SUMMARY_VALUE and value.wire_type == _BYTES:
                    num_values += 1
                    tag, number, is_last_simple = _decode_value(value.content)
                    if number is not None:
                        scalars.append((tag, number))
    is_repeating = (
        (num_values, len(scalars)) == (1, 1)
        and is_last_simple
        and payload[0] == WALL_TIME_KEY
        and payload[STEP_KEY_AT] == STEP_KEY
        and _ends_with_value(payload, after_step)
    )
    return DecodedEvent(
        step=step - (1 << 64) if step & _SIGN_BIT else step,
        scalars=tuple(scalars),
        repeating=payload[after_step:-4] if is_repeating else None,
    )


@dataclass(frozen=True, slots=True)
class ProtoField:
    """One field: its number, its wire type, its content in one of two forms, where it ends."""

    number: int
    wire_type: int
    integer: int
    content: bytes
    end: int


def fields_of(data: bytes) -> Iterator[ProtoField]:
    """Yield the fields of one message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        integer, length = 0, 0
        if wire_type == _VARINT:
            integer, at = _varint(data, at)
        elif wire_type == _BYTES:
            length, at = _varint(data, at)
        elif wire_type == _FIXED64:
            length = 8
        elif wire_type == _FIXED32:
            length = 4
        else:
            raise WireError(f"unknown wire type {wire_type} in a record")
        if at + length > len(data):
            raise WireError("a field is longer than its record")
        yield ProtoField(number, wire_type, integer, data[at : at + length], at + length)
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a number of variable length; return it and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise WireError("a record ends in the middle of a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < VARINT_CONTINUES:
            return value, at
    raise WireError("a number in a record is too long")


def _decode_value(data: bytes) -> tuple[str, float | None, bool]:
    """Return tag, value and whether the value is the last thing in a `Summary.Value`."""
    tag, number, is_last = "", None, False
    for field in fields_of(data):
        is_last = False
        if field.number == _VALUE_TAG and field.wire_type == _BYTES:
            tag = field.content.decode("utf-8", "replace")
        elif field.number == _VALUE_SIMPLE and field.wire_type == _FIXED32:
            number, is_last = _float(field.content), True
        elif field.number == _VALUE_TENSOR and field.wire_type == _BYTES:
            number = _decode_tensor(field.content)
    return tag, number, is_last


def _decode_tensor(data: bytes) -> float | None:
    """Return the one number of a float or double tensor, or None for any other tensor."""
    dtype, content = 0, b""
    for field in fields_of(data):
        if field.number == _TENSOR_DTYPE:
            dtype = field.integer
        elif field.number == _TENSOR_SHAPE:
            if not _is_one_number(field.content):
                return None
        elif field.number in _TENSOR_CONTENTS:
            content = field.content
    if (dtype, len(content)) == (_DT_FLOAT, 4):
        return _float(content)
    if (dtype, len(content)) == (_DT_DOUBLE, 8):
        (number,) = struct.unpack("<d", content)
        assert isinstance(number, float)
        return number
    return None


def _is_one_number(shape: bytes) -> bool:
    """Return True if a `TensorShapeProto` has no dimension, or only dimensions of size 1."""
    sizes = [
        next((f.integer for f in fields_of(dim.content) if f.number == _DIM_SIZE), 0)
        for dim in fields_of(shape)
        if dim.number == _SHAPE_DIM
    ]
    return math.prod(sizes) == 1


def _ends_with_value(payload: bytes, after_step: int) -> bool:
    """Return True if only the summary, with its one value, follows the step."""
    fields = list(fields_of(payload[after_step:]))
    return len(fields) == 1 and len(list(fields_of(fields[0].content))) == 1


def _float(content: bytes) -> float:
    """Read a float of four bytes."""
    (number,) = struct.unpack("<f", content)
    assert isinstance(number, float)
    return number


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

    The files of one directory belong to one attempt: give the directory of that attempt. A step
    may be there more than once, as where all ranks write; where its values differ the first is
    read, and the metric is among the disagreements. A last record that was not written to its end
    is dropped. Values are float32 widened to float, not rounded.

    Raises:
        MetricsError: There is no event file or no scalar, a file cannot be read, or a record in
            the middle of a file is damaged (with its byte offset).
    """
    paths = find_event_files(path)
    if not paths:
        raise MetricsError(
            str(path), f"no metrics: no file {_PATTERN!r} here or below; did the training start?"
        )
    curves = read_event_files(paths)
    if not len(curves):
        raise MetricsError(str(path), f"no metrics: {len(paths)} event file(s) without a scalar")
    return Observed(metrics=curves.metrics, disagreements=curves.disagreements)


def read_event_files(paths: Iterable[Path]) -> Curves:
    """Return every scalar of some event files, as `read_tensorboard` does.

    Raises:
        MetricsError: A file cannot be read, or is damaged.
    """
    return joined({str(path): _read_file(path) for path in paths})


def _read_file(path: Path) -> Curves:
    """Return the scalars of an event file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MetricsError(str(path), f"cannot be read: {error.strerror}") from error
    scalars: _SCALARS = {}
    odd: Disagreements = {}
    _scan(data, scalars, odd, str(path))
    return Curves.of(scalars, odd)


def _scan(data: bytes, scalars: _SCALARS, odd: Disagreements, where: str) -> None:
    """Walk the records of `data` into `scalars`, up to a last one that is torn.

    This is the hot loop of reading: one dictionary look-up for the length, one for the kind of
    event, one for the step, no function call but the float's.
    """
    lengths: dict[bytes, int] = {}
    kinds: dict[bytes, dict[int, float]] = {}
    unpack_float = _FLOAT.unpack_from
    at, size = 0, len(data)
    while at < size:
        start = at + _NUM_HEADER_BYTES
        header = data[at:start]
        length = lengths.get(header)
        if length is None:
            if len(header) < _NUM_HEADER_BYTES:
                return
            length = lengths[header] = _checked_length(header, f"{where}: byte {at}")
        end = start + length
        if end + _NUM_CRC_BYTES > size:
            return
        head = start + _STEP_AT
        if length > _STEP_AT and data[start] == WALL_TIME_KEY and data[head - 1] == STEP_KEY:
            step = data[head]
            head += 1
            if step >= VARINT_CONTINUES:
                step, head = _rest_of_varint(data, step, head)
            values = kinds.get(data[head : end - 4])
        else:
            step, values = 0, None
        if values is None:
            _decode_slowly(data[start:end], scalars, odd, kinds, f"{where}: byte {at}")
        elif values.setdefault(step, value := unpack_float(data, end - 4)[0]) != value:
            name = next(name for name, known in scalars.items() if known is values)
            _note_if_other(odd, name, step, value, values[step], f"{where}: byte {at}")
        at = end + _NUM_CRC_BYTES


def _rest_of_varint(data: bytes, value: int, at: int) -> tuple[int, int]:
    """Return an int64 whose first byte is `value`, and the place after it.

    Bytes that are no varint give some number here; decoding the event then raises the error.
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
    """Return the length of a record; a wrong checksum is an error."""
    length, crc = _HEADER.unpack(header)
    assert isinstance(length, int)
    if masked_crc32c(header[:8]) != crc:
        raise MetricsError(
            where, "damaged event file: the crc of a record's length does not match; train again"
        )
    return length


def _note_if_other(
    odd: Disagreements, name: str, step: int, value: float, known: float, where: str
) -> None:
    """Note a value of a step that has another one already; nan is nan."""
    if name not in odd and not is_same(known, value):
        odd[name] = (where, two_values(name, step, known, value))


def _decode_slowly(
    payload: bytes,
    scalars: _SCALARS,
    odd: Disagreements,
    kinds: dict[bytes, dict[int, float]],
    where: str,
) -> None:
    """Decode one event field by field; store its key if the next of its kind can be looked up."""
    try:
        event = decode_event(payload)
    except WireError as error:
        raise MetricsError(where, f"damaged event file: {error}; train again") from error
    for tag, value in event.scalars:
        known = scalars.setdefault(tag, {}).setdefault(event.step, value)
        _note_if_other(odd, tag, event.step, value, known, where)
    if event.repeating is not None:
        tag = event.scalars[0][0]
        kinds[event.repeating] = scalars[tag]


def _time_in_name(path: Path) -> int:
    match = re.search(r"tfevents\.(\d+)", path.name)
    return int(match[1]) if match else 0
