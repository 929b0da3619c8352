"""Reads `error.json`, which torch writes for a rank whose main function is decorated `@record`.

Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py, torch 2.11.
"""

from __future__ import annotations

import math
from pathlib import Path

from pytest_megatron.files import JsonValue
from pytest_megatron.triage.fatal import classify_message, fatal_of_lines
from pytest_megatron.triage.lines import parse_line
from pytest_megatron.triage.recorded import read_json
from pytest_megatron.triage.signature import Table
from pytest_megatron.triage.story import Fatal

_MOST_BYTES = 1 << 20


def read_error_file(path: Path | None, table: Table) -> Fatal | None:
    """Return the exception of an error file; None where it is of another make.

    Raises:
        OSError: It cannot be read.
        TriageError: It is no JSON: torn, or not what torch writes.
    """
    if path is None:
        return None
    content = read_json(path, _MOST_BYTES)
    found = content.get("message") if isinstance(content, dict) else None
    if isinstance(found, str):
        return Fatal(signature=classify_message(table, found), message=found)
    if not isinstance(found, dict) or not isinstance(found.get("message"), str):
        return None
    extra = found.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    message = str(found["message"])
    stack = str(extra.get("py_callstack", ""))
    of_stack = fatal_of_lines([parse_line(text) for text in stack.split("\n")], table)
    return Fatal(
        signature=classify_message(table, message) if of_stack is None else of_stack.signature,
        message=message,
        frame=None if of_stack is None else of_stack.frame,
        frames=() if of_stack is None else of_stack.frames,
        epoch_s=_seconds(extra.get("timestamp")),
    )


def _seconds(value: JsonValue) -> float | None:
    try:
        seconds = float(str(value))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None
