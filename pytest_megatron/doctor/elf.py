"""Reads what a shared object needs: libraries and symbols. Enough of ELF64 for that, and no more.

Source: System V ABI, chapters 4 and 5 (section headers, symbol table, dynamic section).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little endian
_DYNAMIC, _DYNSYM = 6, 11
_NEEDED = 1
_SYMBOL, _ENTRY = struct.Struct("<IBBHQQ"), struct.Struct("<qQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedObject:
    """What one file says; all empty where it is no ELF64 file.

    Attributes:
        needed: Names of libraries: `libcudart.so.12`.
        missing: Symbols that others must define.
        defined: Symbols that it offers.
    """

    needed: tuple[str, ...] = ()
    missing: frozenset[str] = frozenset()
    defined: frozenset[str] = frozenset()


def read_shared_object(path: Path, prefix: str = "") -> SharedObject:
    """Read a file.

    Args:
        path: The file.
        prefix: Symbols that begin otherwise are left out.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(data, prefix.encode())
    except (OSError, ValueError, OverflowError, struct.error, IndexError):
        return SharedObject()  # empty, cut short, or something else


def _parse(data: mmap.mmap, prefix: bytes) -> SharedObject:
    if data[: len(_MAGIC)] != _MAGIC:
        return SharedObject()
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [_SECTION.unpack_from(data, offset + i * size) for i in range(count)]
    needed: list[str] = []
    missing: set[str] = set()
    defined: set[str] = set()
    for _, kind, _, _, start, length, link, _, _, _ in sections:
        if kind not in (_DYNAMIC, _DYNSYM):
            continue
        texts = sections[link][4]
        block = data[start : start + length]
        if kind == _DYNAMIC:
            needed += [_text(data, texts + at).decode() for at in _needed(block)]
        else:
            for at, place in _symbols(block):
                name = _text(data, texts + at)
                if name.startswith(prefix):
                    (defined if place else missing).add(name.decode(errors="replace"))
    return SharedObject(
        needed=tuple(needed), missing=frozenset(missing), defined=frozenset(defined)
    )


def _needed(block: bytes) -> Iterator[int]:
    for tag, value in _ENTRY.iter_unpack(block[: len(block) // _ENTRY.size * _ENTRY.size]):
        if tag == _NEEDED:
            yield value


def _symbols(block: bytes) -> Iterator[tuple[int, int]]:
    """Yield where the name of each symbol is, and the section that defines it, 0 for none."""
    for name, _, _, section, _, _ in _SYMBOL.iter_unpack(block):
        if name:
            yield name, section


def _text(data: mmap.mmap, at: int) -> bytes:
    return data[at : data.find(b"\0", at)]
