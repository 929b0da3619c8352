"""Reader of metrics from a JSON-lines file, one object a step (effects: files).

    {"step": 1, "lm loss": 4.8753, "grad-norm": 0.61}

For programs that write no TensorBoard. `NaN` and `Infinity` may stand as numbers: a loss that is
not finite must reach the comparison.
"""

from __future__ import annotations

import json
from pathlib import Path

from pytest_megatron.base.files import JsonValue, read_bytes
from pytest_megatron.base.text import counted
from pytest_megatron.errors import MetricsError
from pytest_megatron.golden.model import MetricsFile, Observed, Value, series_of

_STEP = "step"


def read_json_lines(path: Path) -> Observed:
    """Read the metrics of one file; a last line that was not written to its end is dropped.

    Several lines may have the same step, and the same metric too if its value is the same there.

    Raises:
        MetricsError: The file cannot be read or holds no metric; a line is not a JSON object, has
            no step, has a value that is not a number, or another one than an earlier line has for
            that step (with the line).
    """
    try:
        data = read_bytes(path)
    except OSError as error:
        raise MetricsError(str(path), f"cannot be read: {error.strerror}") from error
    metrics: dict[str, dict[int, Value]] = {}
    lines = data.split(b"\n")
    torn_at = None
    num_records = num_repeated = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        is_unfinished = number == len(lines)
        try:
            record: JsonValue = json.loads(line)
        except (ValueError, RecursionError) as error:
            if is_unfinished:
                torn_at = len(data) - len(line)
                break
            raise MetricsError(f"{path}:{number}", f"not JSON: {error}") from error
        num_repeated += _add(metrics, record, f"{path}:{number}")
        num_records += 1
    if not metrics:
        raise MetricsError(str(path), f"no metrics in {num_records} lines; did the training start?")
    notes = []
    if torn_at is not None:
        notes.append(f"{path}: the last line, at byte {torn_at}, is torn; dropped")
    if num_repeated:
        notes.append(f"{path}: {counted(num_repeated, 'value')} more than once, each time the same")
    return Observed(
        metrics={
            name: series_of(values, is_full_precision=True)
            for name, values in sorted(metrics.items())
        },
        files=(MetricsFile(path=str(path), num_records=num_records, torn_at=torn_at),),
        notes=tuple(notes),
    )


def _add(metrics: dict[str, dict[int, Value]], record: JsonValue, where: str) -> int:
    """Add the values of a line; return how many of its values were there before."""
    if not isinstance(record, dict):
        raise MetricsError(where, f"a {type(record).__name__}, expected an object of metrics")
    step = record.get(_STEP)
    if isinstance(step, bool) or not isinstance(step, int):
        raise MetricsError(where, f"{_STEP!r} is {step!r}, expected the training iteration")
    num_repeated = 0
    for name, value in record.items():
        if name == _STEP:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise MetricsError(where, f"{name!r} is {value!r}, expected a number")
        try:
            number = float(value)
        except OverflowError as error:
            raise MetricsError(where, f"{name!r}: {error}") from error
        series = metrics.setdefault(name, {})
        if step in series:
            num_repeated += 1
            if repr(series[step]) != repr(number):  # nan is nan
                raise MetricsError(
                    where,
                    f"step {step} has {name!r} again, {number!r} and before {series[step]!r}; have "
                    "one rank write it, and each training a file of its own",
                )
        series[step] = number
    return num_repeated
