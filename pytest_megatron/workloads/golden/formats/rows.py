"""Readers of metrics as programs write them: rows of JSON, CSV or printed lines (effects).

Each is read from its first byte to its last and not held, so a long training costs no more memory
than a short one. Must not import the libraries that wrote them.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pytest_megatron.base.files import open_regular
from pytest_megatron.base.text import counted
from pytest_megatron.errors import MetricsError
from pytest_megatron.workloads.golden.formats.curves import Curves
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


def read_rows(rows: Iterable[Row], step: str | None) -> Curves:
    """Return the metrics of the rows of one file.

    Args:
        rows: All of them.
        step: Name of the step; None takes a usual name, and counts rows without one.

    Raises:
        MetricsError: A row cannot be read, or a step is no whole number.
    """
    found: dict[str | None, Curves] = {}
    has_whole_epochs = True
    for where, row in rows:
        key = next((k for k in ((step,) if step else _STEPS) if k in row), None)
        number = None if key is None else row[key]
        if number is not None and not (math.isfinite(number) and number.is_integer()):
            if key != _EPOCH or step is not None:
                raise MetricsError(where, f"{key} is {number!r}, expected the number of a step")
            found.pop(_EPOCH, None)
            key, has_whole_epochs = None, False
        values = [(n, v) for n, v in row.items() if n not in _STEPS and n != step]
        is_step = key is not None and (key != _EPOCH or step == _EPOCH or has_whole_epochs)
        if is_step and number is not None:
            curves = found.setdefault(key, Curves())
            for name, value in values:
                curves.add(name, int(number), value, where)
        if key in (None, _EPOCH) and step is None:
            for name, value in values:
                found.setdefault(None, Curves()).count(name, value, where)
    named = (key for key in (step, *_STEPS) if key in found and key is not None)
    return found.get(next(named, None), Curves())


def rows_of(path: Path, form: MetricFormat, start: int = 0) -> Iterator[Row]:
    """Yield the rows of a file; the last one is left out where it was not written to its end.

    Args:
        path: The file.
        form: Format of the files.
        start: Where to begin in a file that a program appends to.

    Raises:
        MetricsError: It cannot be read, or is not of the format.
    """
    try:
        if form is MetricFormat.TRAINER_STATE:
            yield from _trainer_state(path)
        elif form is MetricFormat.CSV:
            yield from _csv(path, start)
        else:
            yield from _json_lines(path, start)
    except OSError as error:
        raise MetricsError(str(path), f"cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class FileLine:
    """A line of a file: its number from 1, its byte offset, its text, if it has its end."""

    number: int
    at: int
    text: str
    is_whole: bool


def lines_of(path: Path, start: int = 0) -> Iterator[FileLine]:
    """Yield the lines of a file from a byte on; of a very long one only its beginning."""
    with open_regular(path) as file:
        at = file.seek(start)
        for number in itertools.count(1):
            line = end = file.readline(_LONGEST_LINE)
            while end and not end.endswith(b"\n"):
                end = file.readline(_LONGEST_LINE)
            if not line:
                return
            is_whole = line.endswith(b"\n") or end.endswith(b"\n")
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            yield FileLine(number, at, text if at else text.removeprefix("\ufeff"), is_whole)
            at = file.tell()


def _json_lines(path: Path, start: int) -> Iterator[Row]:
    """Yield the rows of a file of JSON lines, as `rows_of` does."""
    for line in lines_of(path, start):
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


def _csv(path: Path, start: int) -> Iterator[Row]:
    """Yield the rows of a CSV file, as `rows_of` does; a header may come again, with other names.

    A row without a number that repeats one of the names is a header.

    Raises:
        MetricsError: A row has more cells than the header above it has names.
    """
    line = FileLine(0, 0, "", is_whole=True)

    def texts() -> Iterator[str]:
        nonlocal line
        for line in itertools.takewhile(lambda one: one.is_whole, lines_of(path)):
            yield line.text

    names: tuple[str, ...] = ()
    for cells in filter(None, csv.reader(texts())):
        stripped = tuple(cell.strip() for cell in cells)
        has_number = any(to_number(cell) is not None for cell in stripped)
        if not names or (not has_number and any(name and name in names for name in stripped)):
            names = stripped
        elif line.at >= start:
            where = f"{path}:{line.number}"
            if any(stripped[len(names) :]):
                raise MetricsError(
                    where,
                    f"has {counted(len(cells), 'cell')}, its header {counted(len(names), 'name')}; "
                    f"write a header with every column",
                )
            pairs = zip(names, map(to_number, cells), strict=False)
            yield where, {n: v for n, v in pairs if v is not None}


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


def read_printed(pattern: LinePattern, logs: Iterable[Path]) -> Curves:
    """Return the metrics that one rank printed into its logs, where they are there."""
    curves = Curves()
    for log in filter(Path.is_file, logs):
        for line in lines_of(log):
            # Before the last return is what a progress bar replaced.
            text = line.text.rpartition("\r")[2] if line.is_whole else ""
            step, values = pattern.read(text)
            for name, value in values.items():
                if step is None:
                    curves.count(name, value, f"{log}:{line.number}")
                else:
                    curves.add(name, step, value, f"{log}:{line.number}")
    return curves


def find_disagreement(one: MetricMap, other: MetricMap) -> tuple[str, int, float, float] | None:
    """Return metric, step and both values where two sources differ as float32; None if nowhere."""
    for name in sorted(one.keys() & other.keys()):
        theirs = other[name].finite()
        for step, value in one[name].finite().items():
            if step in theirs and to_float32(value) != to_float32(theirs[step]):
                return name, step, value, theirs[step]
    return None
