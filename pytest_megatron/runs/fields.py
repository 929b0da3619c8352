"""Fields of JSON objects that may be of another version, torn or made up: absent is empty.

Read from files by `read_fields` (effects); otherwise pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.files import JsonValue, read_json
from pytest_megatron.errors import ReportError


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a JSON file; what is not of the type that is asked for is not there."""

    values: Mapping[str, JsonValue]

    def text(self, key: str, default: str = "") -> str:
        """Return a text."""
        value = self.values.get(key)
        return value if isinstance(value, str) else default

    def number(self, key: str) -> float | None:
        """Return a finite number."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) else None

    def whole(self, key: str) -> int | None:
        """Return a whole number from 0 up, of the size that steps and ranks have."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            return None
        return value if 0 <= value < 1 << 53 else None

    def flag(self, key: str) -> bool:
        """Return whether it is true."""
        return self.values.get(key) is True

    def inner(self, key: str) -> Fields:
        """Return an object."""
        value = self.values.get(key)
        return Fields(value if isinstance(value, dict) else {})

    def rows(self, key: str) -> list[Fields]:
        """Return the objects of a list."""
        value = self.values.get(key)
        rows = value if isinstance(value, list) else []
        return [Fields(row) for row in rows if isinstance(row, dict)]

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the texts of a list."""
        value = self.values.get(key)
        return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


def read_fields(path: Path) -> Fields:
    """Return the object that a file holds.

    Raises:
        ReportError: It is not there, is too large, or is no JSON object.
    """
    try:
        value = read_json(path, is_lenient=True)
    except OSError as error:
        raise ReportError(str(path), f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ReportError(str(path), f"is no JSON, {error}; was the run cut off?") from error
    if not isinstance(value, dict):
        raise ReportError(str(path), f"holds a {type(value).__name__}, expected an object")
    return Fields(value)


def read_if_there(path: Path) -> Fields:
    """Return the object that a file holds, empty if there is no such file or it is damaged."""
    try:
        return read_fields(path)
    except ReportError:
        return Fields({})
