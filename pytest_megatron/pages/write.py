"""Writes the pages of runs (effects: files)."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pytest_megatron.base.files import write_text_atomically
from pytest_megatron.errors import ReportError, RunError
from pytest_megatron.pages.index_page import (
    IndexRow,
    IndexRun,
    damaged_run,
    index_page,
    index_row,
)
from pytest_megatron.pages.item_page import item_page
from pytest_megatron.pages.read import RunReader, open_runs

INDEX, CURVES = "index.html", "curves.html"
_UNSAFE = re.compile(r"[^\w.+=-]+", re.ASCII)


def write_in_place(reader: RunReader) -> Path:
    """Write the pages of a run into its own directory; return its index.

    Raises:
        ReportError: They cannot be written.
    """
    try:
        rows = _write_items(reader, reader.directory, files="", page="")
        index = reader.directory / INDEX
        _write_index([_index_run(reader, rows, files="")], index)
    except OSError as error:
        raise _cannot_write(error) from error
    return index


def write_report(paths: Sequence[Path], output: Path | None = None) -> tuple[Path, list[RunError]]:
    """Write the pages of runs; return the index, and an error for each run that it lacks.

    The index has a broken row for each of these.

    Args:
        paths: Run directories, artifacts, folders of either.
        output: A directory; None writes into that of a single run, else into `report`.

    Raises:
        ReportError: Nothing can be written.
        RunError: There is no run, or none can be read.
    """
    with tempfile.TemporaryDirectory(prefix="pytest-megatron-report-") as workspace:
        readers, damaged = open_runs(paths, Path(workspace))
        if output is None and not damaged and len(readers) == 1 and not readers[0][0].is_unpacked:
            return write_in_place(readers[0][1]), []
        output = output or Path("report")
        index = output / INDEX
        runs: list[IndexRun] = []
        used: set[str] = set()
        try:
            for run, reader in readers:
                target = output / _new_name(run.name, used)
                where = None if run.is_unpacked else run.directory
                from_page = None if where is None else _relative(where, target / "item")
                from_index = None if where is None else _relative(where, output)
                back = _relative(output, target / "item") + INDEX
                page = _relative(target, output)
                rows = _write_items(reader, target, files=from_page, page=page, index=back)
                runs.append(_index_run(reader, rows, files=from_index))
            output.mkdir(parents=True, exist_ok=True)
            _write_index([*runs, *map(damaged_run, damaged)], index)
        except OSError as error:
            raise _cannot_write(error) from error
    return index, damaged


def _write_items(
    reader: RunReader,
    target: Path,
    *,
    files: str | None,
    page: str,
    index: str = f"../{INDEX}",
) -> tuple[IndexRow, ...]:
    """Write the page of every workload; return the rows of an index.

    Args:
        reader: Reader of the run.
        target: Where its items get a directory each.
        files: Path from such a directory to the run's; "" where they are the same.
        page: Path from the index to `target`.
        index: Path from a page to the index.
    """
    facts = reader.facts
    rows = []
    for item in reader.items():
        if not (reader.directory / item.directory).is_dir():  # nothing of it was started
            rows.append(index_row(item, None, facts.name))
            continue
        directory = target / item.directory
        to_files = files if not files else f"{files}{item.directory}/"
        content = item_page(item, facts, files=to_files, index=index)
        directory.mkdir(parents=True, exist_ok=True)
        write_text_atomically(directory / CURVES, content)
        rows.append(index_row(item, f"{page}{item.directory}/{CURVES}", facts.name))
    return tuple(rows)


def _index_run(reader: RunReader, rows: tuple[IndexRow, ...], files: str | None) -> IndexRun:
    counts, tests = reader.tests()
    return IndexRun(facts=reader.facts, rows=rows, num_tests=counts, tests=tests, files=files)


def _write_index(runs: Sequence[IndexRun], path: Path) -> None:
    write_text_atomically(path, index_page(runs))


def _relative(target: Path, start: Path) -> str:
    """Return the path from a directory to another, with a slash at its end; "" for the same."""
    path = Path(os.path.relpath(target.resolve(), start.resolve())).as_posix()
    return "" if path == "." else f"{path}/"


def _new_name(name: str, used: set[str]) -> str:
    """Return a name for the directory of a run that no other has."""
    plain = _UNSAFE.sub("-", name).strip("-.") or "run"
    chosen, number = plain, 1
    while chosen in used:
        number += 1
        chosen = f"{plain}-{number}"
    used.add(chosen)
    return chosen


def _cannot_write(error: OSError) -> ReportError:
    """Return the error for a page that could not be written."""
    reason = error.strerror or str(error)
    return ReportError(
        str(error.filename or "--output"), f"{reason}; make room, or give another --output"
    )
