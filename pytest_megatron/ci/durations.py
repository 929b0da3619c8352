"""How long test files took: from a history, a JUnit file, or a JSON object of seconds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from pytest_megatron.errors import SelectionError
from pytest_megatron.files import JsonValue, parse_json, read_text
from pytest_megatron.history import read

MAX_RUNS = 5  # of an item, the latest: what it costs now
_WHERE = "--durations"


def read_durations(paths: Iterable[Path], files: Sequence[str]) -> dict[str, float]:
    """Return seconds for each test file that something was recorded of.

    Args:
        paths: A history of runs (`history.jsonl`), JUnit XML, or a JSON object of node ids and
            seconds; of an item that several have, the mean counts.
        files: The test files, from the project's root.

    Raises:
        SelectionError: A file cannot be read as one of these.
    """
    samples: dict[str, list[float]] = defaultdict(list)
    for path in paths:
        for item, seconds in _samples(path, files):
            samples[item].append(seconds)
    totals: dict[str, float] = defaultdict(float)
    known = set(files)
    for item, found in samples.items():
        file = item.partition("::")[0]
        if file in known:
            latest = found[-MAX_RUNS:]
            totals[file] += sum(latest) / len(latest)
    return dict(totals)


def _samples(path: Path, files: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield node ids, or files, and seconds."""
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as problem:
        raise SelectionError(f"{_WHERE} {path}", f"cannot be read: {problem}") from None
    if text.lstrip().startswith("<"):
        yield from _of_junit(path, text, files)
        return
    try:
        value: JsonValue = parse_json(text)
    except ValueError:
        value = None
    if isinstance(value, dict) and "schema" not in value:  # a history of one line is an object
        yield from _of_mapping(path, value)
        return
    history = read(path)
    if text.strip() and not history.entries:
        raise SelectionError(
            f"{_WHERE} {path}",
            "holds no durations, expected a history, JUnit XML or a JSON object of node ids and "
            "seconds; give another file",
        )
    for entry in history.entries:
        if entry.kind == "test" and entry.duration_s >= 0:
            yield entry.node_id, entry.duration_s


def _of_mapping(path: Path, value: Mapping[str, JsonValue]) -> Iterator[tuple[str, float]]:
    for name, seconds in value.items():
        number = seconds if isinstance(seconds, int | float) else math.nan
        if isinstance(seconds, bool) or not 0 <= number < math.inf:
            raise SelectionError(
                f"{_WHERE} {path}", f"{name}: found {seconds!r}, expected seconds from 0 on"
            )
        yield name, float(number)


def _of_junit(path: Path, text: str, files: Sequence[str]) -> Iterator[tuple[str, float]]:
    modules = {file.removesuffix(".py").replace("/", "."): file for file in files}
    try:
        cases = ET.fromstring(text).iter("testcase")  # noqa: S314 - a file of the user's own CI
    except ET.ParseError as problem:
        raise SelectionError(f"{_WHERE} {path}", f"is no XML: {problem}") from None
    for case in cases:
        file = case.get("file") or _file_of(case.get("classname", ""), modules)
        try:
            seconds = float(case.get("time", "0"))
        except ValueError:
            continue
        if file and math.isfinite(seconds) and seconds >= 0:
            yield f"{file}::{case.get('classname')}::{case.get('name')}", seconds


def _file_of(classname: str, modules: dict[str, str]) -> str | None:
    """Return the file of `tests.test_x` or of `tests.test_x.TestClass`."""
    while classname:
        if classname in modules:
            return modules[classname]
        classname = classname.rpartition(".")[0]
    return None
