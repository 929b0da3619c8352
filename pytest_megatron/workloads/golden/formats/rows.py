"""Readers of metrics as programs write them: rows of JSON, CSV, wandb or printed lines (effects).

Each is read from its first byte to its last and not held, so a long training costs no more memory
than a short one. Must not import the libraries that wrote them.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from pytest_megatron.base.files import open_regular
from pytest_megatron.base.text import counted
from pytest_megatron.errors import MetricsError
from pytest_megatron.workloads.golden.formats.curves import Curves
from pytest_megatron.workloads.golden.formats.tensorboard import WireError, fields_of
from pytest_megatron.workloads.golden.model import MetricMap, to_float32
from pytest_megatron.workloads.recipe.metrics import LinePattern, MetricFormat, to_number

_LONGEST_LINE = 1 << 20
# Names of the step; the first that a row has counts.
_STEPS = (
    *("step", "global_step", "iteration", "iter", "_step", "trainer/global_step"),
    *("train/global_step", "current_step", "epoch"),
)
_EPOCH = "epoch"  # a fraction where a step of its own is missing

# Where it stands, and its values by name, the step among them.
Row: TypeAlias = tuple[str, Mapping[str, float]]


@dataclass(slots=True)
class RowReader:
    """Reads metrics of rows, as many at a time as there are.

    Attributes:
        step: Name of the step; None takes a usual name, and counts rows without one.
    """

    step: str | None
    _found: dict[str | None, Curves] = field(default_factory=dict)
    _has_whole_epochs: bool = True

    def read(self, rows: Iterable[Row]) -> Curves:
        """Add the rows of one file; return the metrics of all that were added.

        Raises:
            MetricsError: A row cannot be read, or a step is no whole number.
        """
        for where, row in rows:
            self._add(where, row)
        named = (key for key in (self.step, *_STEPS) if key in self._found and key is not None)
        return self._found.get(next(named, None), Curves())

    def _add(self, where: str, row: Mapping[str, float]) -> None:
        """Add one row, by the step that it names or by its place."""
        step, found = self.step, self._found
        key = next((k for k in ((step,) if step else _STEPS) if k in row), None)
        number = None if key is None else row[key]
        if number is not None and not (math.isfinite(number) and number.is_integer()):
            if key != _EPOCH or step is not None:
                raise MetricsError(where, f"{key} is {number!r}, expected the number of a step")
            found.pop(_EPOCH, None)
            key, self._has_whole_epochs = None, False
        values = [(n, v) for n, v in row.items() if n not in _STEPS and n != step]
        is_step = key is not None and (key != _EPOCH or step == _EPOCH or self._has_whole_epochs)
        if is_step and number is not None:
            curves = found.setdefault(key, Curves())
            for name, value in values:
                curves.add(name, int(number), value, where)
        if key in (None, _EPOCH) and step is None:
            for name, value in values:
                found.setdefault(None, Curves()).count(name, value, where)


@dataclass(slots=True)
class FilePlace:
    """Where the reading of a file that grows goes on.

    Attributes:
        at: The byte.
        line: The number of the line.
        names: Of the columns there, in a CSV file.
    """

    at: int = 0
    line: int = 1
    names: tuple[str, ...] = ()


def rows_of(
    path: Path, form: MetricFormat, start: int = 0, place: FilePlace | None = None
) -> Iterator[Row]:
    """Yield the rows of a file; the last one is left out where it was not written to its end.

    Args:
        path: The file.
        form: Format of the files.
        start: Where to begin in a file that a program appends to.
        place: Where to go on in a file of lines; it moves behind the rows.

    Raises:
        MetricsError: It cannot be read, or is not of the format.
    """
    try:
        if form in LINES:
            yield from LINES[form](path, start, place)
        else:
            yield from _READERS[form](path)
    except OSError as error:
        raise MetricsError(str(path), f"cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class FileLine:
    """A line of a file: its number from 1, its byte offset, its text, if it has its end."""

    number: int
    at: int
    text: str
    is_whole: bool


def lines_of(path: Path, start: int = 0, place: FilePlace | None = None) -> Iterator[FileLine]:
    """Yield the lines of a file from a byte on; of a very long one only its beginning.

    Args:
        path: The file.
        start: The byte.
        place: Where to begin instead; it moves behind the lines, all of which have their ends.
    """
    with open_regular(path) as file:
        at = file.seek(place.at if place else start)
        for number in itertools.count(place.line if place else 1):
            line = end = file.readline(_LONGEST_LINE)
            while end and not end.endswith(b"\n"):
                end = file.readline(_LONGEST_LINE)
            if not line:
                return
            is_whole = line.endswith(b"\n") or end.endswith(b"\n")
            if place and not is_whole:
                return
            if place:
                place.at, place.line = file.tell(), number + 1
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            yield FileLine(number, at, text if at else text.removeprefix("\ufeff"), is_whole)
            at = file.tell()


def _json_lines(path: Path, start: int, place: FilePlace | None) -> Iterator[Row]:
    """Yield the rows of a file of JSON lines, as `rows_of` does."""
    for line in lines_of(path, start, place):
        where = f"{path}:{line.number}"
        if not line.text.strip():
            continue
        try:
            value = json.loads(line.text)
        except (ValueError, RecursionError) as error:
            if not line.is_whole:
                return
            raise MetricsError(where, f"not JSON: {error}") from error
        yield where, _numbers(value)


def _csv(path: Path, start: int, place: FilePlace | None) -> Iterator[Row]:
    """Yield the rows of a CSV file, as `rows_of` does; a header may come again, with other names.

    Raises:
        MetricsError: A row has more cells than the header above it has names.
    """
    place = FilePlace(at=start) if place is None else place
    if place.at and not place.names:
        begin = place.at
        for _ in _cells(itertools.takewhile(lambda line: line.at < begin, lines_of(path)), place):
            pass
    for cells in _cells(lines_of(path, place=place), place):
        where, names = f"{path}:{place.line - 1}", place.names
        if any(cell.strip() for cell in cells[len(names) :]):
            raise MetricsError(
                where,
                f"has {counted(len(cells), 'cell')}, its header {counted(len(names), 'name')}; "
                f"write a header with every column",
            )
        pairs = zip(names, map(to_number, cells), strict=False)
        yield where, {n: v for n, v in pairs if v is not None}


def _cells(lines: Iterable[FileLine], place: FilePlace) -> Iterator[list[str]]:
    """Yield the cells of each row; move the place behind it, with the names of its header.

    A row without a number that repeats one of the names is a header.
    """

    def texts() -> Iterator[str]:
        for line in lines:
            place.line = line.number + 1
            yield line.text

    for cells in filter(None, csv.reader(texts())):
        names = tuple(cell.strip() for cell in cells)
        has_number = any(to_number(name) is not None for name in names)
        is_again = not has_number and any(name and name in place.names for name in names)
        if is_again or not place.names:
            place.names = names
        else:
            yield cells


def _trainer_state(path: Path) -> Iterator[Row]:
    """Yield the rows of Hugging Face's trainer_state.json."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise MetricsError(str(path), f"not JSON: {error}") from error
    history = value.get("log_history") if isinstance(value, dict) else value
    if not isinstance(history, list):
        raise MetricsError(str(path), "has no list 'log_history', expected Trainer's state")
    for number, entry in enumerate(history):
        yield f"{path}: log_history[{number}]", _numbers(entry)


def _numbers(value: object, prefix: str = "") -> dict[str, float]:
    """Return the numbers of a JSON object by name; those of an object in it by `name/name`."""
    found: dict[str, float] = {}
    for name, part in value.items() if isinstance(value, dict) else ():
        if isinstance(part, dict):
            found |= _numbers(part, f"{prefix}{name}/")
        elif isinstance(part, str):
            if (number := to_number(part)) is not None:
                found[f"{prefix}{name}"] = number
        elif isinstance(part, int | float) and not isinstance(part, bool):
            found[f"{prefix}{name}"] = float(part)
    return found


# wandb's file: a header of 7 bytes, then blocks as LevelDB's log has them, each record a protobuf.
# Source: wandb sdk/internal/datastore.py and proto/wandb_internal.proto, 0.18 and 0.31.
_BLOCK, _WANDB_HEADER = 1 << 15, b":W&B"
_RECORD = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_HISTORY, _ITEM, _KEY, _NESTED_KEY, _VALUE_JSON = 2, 1, 1, 2, 16
_HISTORY_STEP, _STEP_NUMBER = 2, 1


def _wandb(path: Path) -> Iterator[Row]:
    """Yield the rows of an offline run of wandb."""
    for at, record in _wandb_records(path):
        where = f"{path}: byte {at}"
        try:
            for part in fields_of(record):
                if part.number == _HISTORY:
                    yield where, dict(_history(part.content))
        except (WireError, ValueError) as error:
            raise MetricsError(where, f"damaged wandb file: {error}; train again") from error


def _history(content: bytes) -> Iterator[tuple[str, float]]:
    """Yield names and values of one step in wandb's format."""
    for entry in fields_of(content):
        if entry.number == _HISTORY_STEP:
            steps = [f.integer for f in fields_of(entry.content) if f.number == _STEP_NUMBER]
            yield "_step", float(steps[0] if steps else 0)
        if entry.number != _ITEM:
            continue
        parts = list(fields_of(entry.content))
        keys = [p.content.decode() for p in parts if p.number in (_KEY, _NESTED_KEY) and p.content]
        texts = [p.content for p in parts if p.number == _VALUE_JSON]
        if keys and texts:
            yield from _numbers({"/".join(keys): json.loads(texts[0])}).items()


def _wandb_records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the records of wandb's file with their offsets."""
    with open_regular(path) as file:
        if not file.read(len(_WANDB_HEADER) + 3).startswith(_WANDB_HEADER):
            raise MetricsError(str(path), "is no file of wandb, expected one of an offline run")
        parts = b""
        while True:
            at = file.tell()
            if (left := _BLOCK - at % _BLOCK) < _RECORD.size:
                file.seek(at + left)
                continue
            header = file.read(_RECORD.size)
            if len(header) < _RECORD.size:
                return
            crc, length, kind = _RECORD.unpack(header)
            data = file.read(length)
            if len(data) < length:
                return  # torn
            if zlib.crc32(data, zlib.crc32(bytes((kind,)))) != crc or kind > _LAST:
                raise MetricsError(f"{path}: byte {at}", "damaged wandb file; train again")
            parts = data if kind in (_FULL, _FIRST) else parts + data
            if kind in (_FULL, _LAST):
                yield at, parts


LINES: Mapping[MetricFormat, Callable[[Path, int, FilePlace | None], Iterator[Row]]] = {
    MetricFormat.JSONL: _json_lines,
    MetricFormat.CSV: _csv,
}
_READERS: Mapping[MetricFormat, Callable[[Path], Iterator[Row]]] = {
    MetricFormat.TRAINER_STATE: _trainer_state,
    MetricFormat.WANDB: _wandb,
}


@dataclass(slots=True)
class PrintedReader:
    """Reads the metrics that one rank prints, going on in its logs.

    Attributes:
        pattern: How its lines are read.
    """

    pattern: LinePattern
    curves: Curves = field(default_factory=Curves)
    _places: dict[Path, FilePlace] = field(default_factory=dict)

    def read(self, logs: Sequence[Path]) -> Curves:
        """Add the lines that logs have by now, if they are there; return all metrics."""
        for log in filter(Path.is_file, logs):
            for line in lines_of(log, place=self._places.setdefault(log, FilePlace())):
                text = line.text.rpartition("\r")[2]  # before it is what a progress bar replaced
                step, values = self.pattern.read(text)
                for name, value in values.items():
                    if step is None:
                        self.curves.count(name, value, f"{log}:{line.number}")
                    else:
                        self.curves.add(name, step, value, f"{log}:{line.number}")
        return self.curves


def find_disagreement(one: MetricMap, other: MetricMap) -> tuple[str, int, float, float] | None:
    """Return metric, step and both values where two sources differ as float32; None if nowhere."""
    for name in sorted(one.keys() & other.keys()):
        theirs = other[name].finite()
        for step, value in one[name].finite().items():
            if step in theirs and to_float32(value) != to_float32(theirs[step]):
                return name, step, value, theirs[step]
    return None
