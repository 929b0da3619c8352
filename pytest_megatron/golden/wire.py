"""Decodes one serialised TensorBoard event, and the crc of TFRecords. Pure.

Only what a scalar needs: `Event.step`, `Event.summary`, and of each `Summary.Value` the tag and
`simple_value` or a tensor of one float or double. All other fields are stepped over.

Source: the protobuf encoding, and tensorboard/compat/proto/{event,summary,tensor}.proto.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

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
_CRC_POLYNOMIAL, _CRC_MASK_DELTA = 0x82F63B78, 0xA282EAD8
_SIGN_BIT = 1 << 63


class WireError(Exception):
    """The bytes are not a serialised event; the text says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedEvent:
    """What one event says.

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
    for field in _fields(payload):
        if field.number == _EVENT_STEP and field.wire_type == _VARINT:
            step, after_step = field.integer, field.end
        elif field.number == _EVENT_SUMMARY and field.wire_type == _BYTES:
            for value in _fields(field.content):
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


def masked_crc32c(data: bytes) -> int:
    """Return the crc32c of `data`, masked as TFRecord files store it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _CRC_MASK_DELTA) & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Field:
    """One field: its number, its wire type, its content in one of two forms, where it ends."""

    number: int
    wire_type: int
    integer: int
    content: bytes
    end: int


def _fields(data: bytes) -> Iterator[_Field]:
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
        yield _Field(number, wire_type, integer, data[at : at + length], at + length)
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
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
    for field in _fields(data):
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
    for field in _fields(data):
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
    """Whether a `TensorShapeProto` has no dimension, or only dimensions of size 1."""
    sizes = [
        next((f.integer for f in _fields(dim.content) if f.number == _DIM_SIZE), 0)
        for dim in _fields(shape)
        if dim.number == _SHAPE_DIM
    ]
    return math.prod(sizes) == 1


def _ends_with_value(payload: bytes, after_step: int) -> bool:
    """Whether the summary, with its one value, is all that follows the step."""
    fields = list(_fields(payload[after_step:]))
    return len(fields) == 1 and len(list(_fields(fields[0].content))) == 1


def _float(content: bytes) -> float:
    (number,) = struct.unpack("<f", content)
    assert isinstance(number, float)
    return number


def _make_crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_CRC_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


_CRC_TABLE = _make_crc_table()
