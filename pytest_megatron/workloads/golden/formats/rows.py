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
from pytest_megatron.workloads.golden.formats.tensorboard import WireError, fields_of
from pytest_megatron.workloads.golden.model import MetricMap, series_of, to_float32
from pytest_megatron.workloads.recipe.metrics import LinePattern, MetricFormat, to_number

MOST_STEPS = 1 << 17  # of a metric; of a longer one every 2nd, 4th, ... is kept
_MOST_ODD = 1000  # values that are not finite, kept whatever their step
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
class _Points:
    values: dict[int, float] = field(default_factory=dict)
    odd: dict[int, float] = field(default_factory=dict)
    stride: int = 1
    num_values: int = 0
    last: int = 0

    def add(self, step: int, value: float) -> float | None:
        """Add a value; return the one that the step already has, which stays."""
        self.num_values += 1
        self.last = max(self.last, step)
        known = self.values.get(step, self.odd.get(step))
        if known is not None:
            return known
        if not math.isfinite(value):
            if len(self.odd) < _MOST_ODD:
                self.odd[step] = value
        elif step % self.stride == 0:
            self.values[step] = value
            if len(self.values) > MOST_STEPS:
                self.stride *= 2
                self.values = {s: v for s, v in self.values.items() if s % self.stride == 0}
        return None


class Curves:
    """Metrics that are read value by value; of very long ones every 2nd, 4th, ... step is kept.

    Attributes:
        disagreements: Metric to place and text of its first step with two values, which `require`
            raises.
    """

    def __init__(self) -> None:
        self.disagreements: dict[str, tuple[str, str]] = {}
        self._curves: dict[str, _Points] = {}

    def __len__(self) -> int:
        return len(self._curves)

    def add(self, name: str, step: int, value: float, where: str) -> bool:
        """Add a value; return if the step has one already, which stays."""
        curve = self._curves.setdefault(name, _Points())
        last, known = curve.last, curve.add(step, value)
        if known is None:
            return False
        if repr(known) == repr(value) or name in self.disagreements:  # nan is nan
            return True
        again, mend = "again", ""
        if step < last:
            again, mend = f"again after step {last}", ", or a resumed one go on counting"
        text = (
            f"step {step} has {name!r} {again}, {value!r} and before {known!r}; have one rank "
            f"write it, and each training a file of its own{mend}"
        )
        self.disagreements[name] = (where, text)
        return True

    def require(self, names: Iterable[str] | None = None) -> None:
        """Refuse metrics that have two values at a step.

        Args:
            names: Those that matter; None is all.

        Raises:
            MetricsError: One of them has.
        """
        for name in self.disagreements if names is None else names:
            if name in self.disagreements:
                raise MetricsError(*self.disagreements[name])

    def merge(self, other: Curves, where: str) -> None:
        """Add the metrics of another file, and where it disagrees with itself."""
        self.add_all(other.metrics, where)
        self.disagreements = {**other.disagreements, **self.disagreements}

    def add_all(self, metrics: MetricMap, where: str) -> None:
        """Add metrics of another file."""
        for name, series in metrics.items():
            for step, value in series.items():
                assert isinstance(value, float)
                self.add(name, step, value, where)

    def count(self, name: str, value: float, where: str) -> None:
        """Add the next value of a metric without steps, counted from 1."""
        known = self._curves.get(name)
        self.add(name, 1 if known is None else known.num_values + 1, value, where)

    @property
    def metrics(self) -> MetricMap:
        """The metrics that were read."""
        return {
            name: series_of({**curve.values, **curve.odd}, is_full_precision=True)
            for name, curve in sorted(self._curves.items())
        }

    @property
    def notes(self) -> list[str]:
        """Notes on rows that were left out."""
        long = [(n, c.stride) for n, c in sorted(self._curves.items()) if c.stride > 1]
        if not long:
            return []
        name, stride = long[0]
        more = f" and {counted(len(long) - 1, 'other')}" if len(long) > 1 else ""
        return [f"{name}{more}: too long to keep, every {stride}th step is"]


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


def read_rows(rows: Iterable[Row], step: str | None) -> Curves:
    """Return the metrics of rows, see `RowReader`."""
    return RowReader(step).read(rows)


@dataclass(slots=True)
class FilePlace:
    """Where the reading of a file that grows goes on.

    Attributes:
        at: The byte.
        line: The number of the line.
    """

    at: int = 0
    line: int = 1


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
            yield from LINES[form](path, lines_of(path, start, place), place.at if place else start)
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
            yield FileLine(number, at, line.decode("utf-8", "replace").rstrip("\r\n"), is_whole)
            at = file.tell()


def _json_lines(path: Path, lines: Iterable[FileLine], _: int) -> Iterator[Row]:
    """Yield the rows of a file of JSON lines."""
    for line in lines:
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


def _csv(path: Path, lines: Iterable[FileLine], start: int) -> Iterator[Row]:
    """Yield the rows of a CSV file; `lines` begin at the offset `start`, maybe after its header."""
    number = 1

    def texts(lines: Iterable[FileLine]) -> Iterator[str]:
        """Yield the lines that were written to their end; note the number of each."""
        nonlocal number
        for line in lines:
            if line.is_whole:
                number = line.number
                yield line.text

    rows = csv.reader(texts(lines))
    names = next(csv.reader(texts(lines_of(path))) if start else rows, [])
    for cells in rows:
        pairs = zip(names, map(to_number, cells), strict=False)
        yield f"{path}:{number}", {n: v for n, v in pairs if v is not None}


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


LINES: Mapping[MetricFormat, Callable[[Path, Iterable[FileLine], int], Iterator[Row]]] = {
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


def read_printed(logs: Sequence[Path], pattern: LinePattern) -> Curves:
    """Return the metrics that one rank printed.

    Args:
        logs: Logs of the program; one that is not there is left out.
        pattern: How its lines are read.
    """
    return PrintedReader(pattern).read(logs)


def find_disagreement(one: MetricMap, other: MetricMap) -> tuple[str, int, float, float] | None:
    """Return metric, step and both values where two sources differ as float32; None if nowhere."""
    for name in sorted(one.keys() & other.keys()):
        theirs = other[name].finite()
        for step, value in one[name].finite().items():
            if step in theirs and to_float32(value) != to_float32(theirs[step]):
                return name, step, value, theirs[step]
    return None
