"""The checksum of TFRecord files."""

from __future__ import annotations

_CRC_POLYNOMIAL, _CRC_MASK_DELTA = 0x82F63B78, 0xA282EAD8


def masked_crc32c(data: bytes) -> int:
    """Return the crc32c of `data`, masked as TFRecord files store it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _CRC_MASK_DELTA) & 0xFFFFFFFF


def _make_crc_table() -> list[int]:
    """Return the checksum of each byte."""
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_CRC_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


_CRC_TABLE = _make_crc_table()
