"""Golden files and the metrics files of runs: places, names, JSON, its lines, reading and writing.

The JSON is Megatron-LM's metric map, one block a metric:

    {"lm loss": {"start_step": 1, "end_step": 2, "step_interval": 1, "values": {"1": 10.9, ...}}}

The output of inference programs is `model.py`'s. Other files under the name of a golden are
recognised and named. A block of ours has two more keys: `value_precision: full` (newer Megatron-LM
writes it too) and, in the metrics of a run only, `non_finite`, which keeps nan and inf apart from
missing and from text; readers that do not know it see those steps as missing.

Source: Megatron-LM, tests/functional_tests/python_test_utils/common.py, d98e8a64dd.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

from pytest_megatron.base.files import (
    JsonValue,
    read_bytes,
    write_json_atomically,
)
from pytest_megatron.base.text import counted
from pytest_megatron.errors import GoldenError, MetricsError
from pytest_megatron.workloads.golden.formats.curves import Curves
from pytest_megatron.workloads.golden.formats.rows import lines_of
from pytest_megatron.workloads.golden.formats.tensorboard import read_tensorboard
from pytest_megatron.workloads.golden.model import (
    AS_BLOCK,
    Generation,
    Golden,
    MetricMap,
    Observed,
    Series,
    Value,
    find_not_finite,
    generation_to_json,
    is_finite,
    is_generation,
    kind_of,
    parse_generation,
    parse_provenance,
    provenance_to_json,
    series_of,
    step_interval,
    to_float32,
)
from pytest_megatron.workloads.recipe.case import (
    GOLDEN_PREFIX,
    golden_paths,
)
from pytest_megatron.workloads.recipe.model import Workload

PROVENANCE_KEY = "_provenance"
_INDENT = "  "
# Containers that are broken into lines: the fields of a request, and provenance with its objects.
_REQUEST_DEPTH = 2
_PROVENANCE_DEPTH = 3


def lay_out(document: Mapping[str, JsonValue]) -> str:
    """Return the text of a golden, with a final newline; keys in the order given.

    It has a line for each metric, each field of a request and each key of the provenance.
    """
    parts = {name: _nested(value, 1, _depth(name, value)) for name, value in document.items()}
    return _braced(parts, 0) + "\n"


def is_block(value: JsonValue) -> bool:
    """Return True if a top-level value is a metric's block."""
    return isinstance(value, dict) and "values" in value


def _depth(name: str, value: JsonValue) -> int:
    """Return how many levels of a key get lines of their own."""
    if name == PROVENANCE_KEY:
        return _PROVENANCE_DEPTH
    return 1 if is_block(value) else _REQUEST_DEPTH


def _nested(value: JsonValue, level: int, depth: int) -> str:
    """Return `value` with its objects broken into lines down to `depth`."""
    if level >= depth or not isinstance(value, dict) or not value:
        return json.dumps(value, allow_nan=False)
    return _braced({k: _nested(v, level + 1, depth) for k, v in value.items()}, level)


def _braced(parts: Mapping[str, str], level: int) -> str:
    """Return an object with a line for each key."""
    outer = _INDENT * level
    lines = [f"{outer}{_INDENT}{json.dumps(name)}: {text}" for name, text in parts.items()]
    return "{\n" + ",\n".join(lines) + f"\n{outer}}}" if lines else "{}"


_STEP = "step"


def read_json_lines(path: Path) -> Observed:
    """Read the metrics of one file; a last line that was not written to its end is dropped.

    Several lines may have the same step; a metric that has two values at one is among the
    disagreements.

    Raises:
        MetricsError: The file cannot be read or holds no metric; a line is not a JSON object, has
            no step or has a value that is not a number (with the line).
    """
    curves, num_records = Curves(), 0
    try:
        for line in lines_of(path):
            if not line.text.strip():
                continue
            where = f"{path}:{line.number}"
            try:
                record: JsonValue = json.loads(line.text)
            except (ValueError, RecursionError) as error:
                if not line.is_whole:
                    break
                raise MetricsError(where, f"not JSON: {error}") from error
            _add(curves, record, where)
            num_records += 1
    except OSError as error:
        raise MetricsError(str(path), f"cannot be read: {error.strerror}") from error
    if not len(curves):
        raise MetricsError(
            str(path), f"no metrics in {counted(num_records, 'line')}; did the training start?"
        )
    return Observed(metrics=curves.metrics, disagreements=curves.disagreements)


def _add(curves: Curves, record: JsonValue, where: str) -> None:
    """Add the values of a line."""
    if not isinstance(record, dict):
        raise MetricsError(where, f"a {type(record).__name__}, expected an object of metrics")
    step = record.get(_STEP)
    if isinstance(step, bool) or not isinstance(step, int):
        raise MetricsError(where, f"{_STEP!r} is {step!r}, expected the training iteration")
    for name, value in record.items():
        if name == _STEP:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise MetricsError(where, f"{name!r} is {value!r}, expected a number")
        try:
            number = float(value)
        except OverflowError as error:
            raise MetricsError(where, f"{name!r}: {error}") from error
        curves.add(name, step, number, where)


def golden_path(root: Path, workload: Workload) -> Path:
    """Return the golden of a workload under the repository `root`; it need not exist.

    Of the places that it may have (`golden_paths`) the first that exists, else the first of all.
    """
    places = golden_paths(root, workload)
    return next((place for place in places if place.is_file()), places[0])


def new_golden_path(root: Path, workload: Workload) -> Path:
    """Return where a golden of the workload is written: always our place, under its own name.

    A golden elsewhere may be read by others, so it stays; the new one comes before it.
    """
    return golden_paths(root, workload)[0]


def read_golden(path: Path) -> Golden:
    """Read a golden file in any of the forms that Megatron-LM's repository holds.

    Raises:
        GoldenError: There is no such file, or it is not a golden; the text names what it is
            instead, with line and column where the JSON is broken.
    """
    return parse_golden(read_text(path), str(path))


def parse_golden(text: str, where: str) -> Golden:
    """Return the golden in a text, wherever that is from: a file, a commit.

    Raises:
        GoldenError: The text is refused, as `read_golden` does; `where` names the place.
    """
    value = _load_object(text, where)
    origin = value.pop(PROVENANCE_KEY, None)
    metrics, generation = _content_of(value, where)
    return Golden(
        path=where,
        metrics=metrics,
        provenance=None if origin is None else parse_provenance(origin, where),
        generation=generation,
    )


def golden_text(golden: Golden) -> str:
    """Return the text of a golden's file, whichever kind it is; it must have a provenance.

    Of a training: metrics sorted, steps ascending, full precision, `_provenance` last. Of an
    inference program: the keys that such a program writes, and `_provenance`.

    Raises:
        GoldenError: There is no metric, a metric has no value, or a value is not a finite number;
            `golden.path` names the place.
    """
    assert golden.provenance is not None
    provenance = provenance_to_json(golden.provenance)
    if golden.generation is not None:
        if problem := find_not_finite(golden.generation):
            raise GoldenError(golden.path, f"{problem}; not written")
        document = generation_to_json(golden.generation)
        document[PROVENANCE_KEY] = provenance
        return lay_out(document)
    if not golden.metrics:
        raise GoldenError(golden.path, "no metric to write")
    for name, series in sorted(golden.metrics.items()):
        if not len(series):
            raise GoldenError(golden.path, f"{name} has no value; not written")
        for step, value in series.items():
            if not is_finite(value):
                raise GoldenError(
                    golden.path, f"{name}, step {step}: {value!r} is not finite; not written"
                )
    document = metrics_to_json(golden.metrics)
    document[PROVENANCE_KEY] = dict(AS_BLOCK) | provenance
    return lay_out(document)


def write_metrics(path: Path, metrics: MetricMap) -> None:
    """Write the metrics of a run (`metrics.json`); nan, inf, text and missing stay apart."""
    write_json_atomically(path, metrics_to_json(metrics))


def read_metrics(path: Path) -> Observed:
    """Read the metrics of a run: TensorBoard files, a `.jsonl` file or a metric map.

    A directory is read as TensorBoard's; it must belong to one attempt.

    Raises:
        MetricsError: There is nothing of the kind, nothing in it, or it is damaged.
    """
    if path.is_dir() or "tfevents" in path.name:
        return read_tensorboard(path)
    if path.suffix == ".jsonl":
        return read_json_lines(path)
    try:
        found = read_golden(path)
    except GoldenError as error:
        raise MetricsError(error.where, error.problem) from error
    return Observed(metrics=found.metrics, generation=found.generation)


def read_text(path: Path) -> str:
    """Return the text of a golden or metrics file.

    Raises:
        GoldenError: There is no such file, or it is no text.
    """
    try:
        return read_bytes(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise GoldenError(str(path), "no such file") from None
    except OSError as error:
        raise GoldenError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GoldenError(str(path), f"not UTF-8 text, at byte {error.start}") from error


PATTERN = f"{GOLDEN_PREFIX}*.json"


def _load_object(text: str, where: str) -> dict[str, JsonValue]:
    """Return the JSON object in a text.

    The object may stand in a JSON string, as some of Megatron-LM's tools write it.

    Raises:
        GoldenError: There is nothing in the text, or it is no JSON (with line and column), has a
            key twice, or is no object. `where` names the file.
    """
    value = _load(text, where)
    if isinstance(value, str):
        value = _load(value, where)
    if not isinstance(value, dict):
        raise GoldenError(where, f"holds a JSON {_shown(value)}, expected an object of metrics")
    return value


def _shown(value: JsonValue) -> str:
    return f"list of {len(value)}" if isinstance(value, list) else kind_of(value)


def _load(text: str, where: str) -> JsonValue:
    """Parse the JSON of a golden."""
    if not text.strip():
        size = len(text.encode())
        raise GoldenError(where, f"empty file ({size} bytes), expected JSON; record it again")

    def refuse_duplicates(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
        """Refuse an object that has a key twice."""
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise GoldenError(where, f"the key {twice!r} is there twice; keep one of them")
        return found

    try:
        value: JsonValue = json.loads(text, object_pairs_hook=refuse_duplicates)
    except json.JSONDecodeError as error:
        place = f"{where}:{error.lineno}:{error.colno}"
        raise GoldenError(place, f"not JSON: {error.msg[:1].lower()}{error.msg[1:]}") from error
    except ValueError as error:  # a whole number of thousands of digits
        raise GoldenError(where, f"not JSON of numbers: {error}") from error
    except RecursionError as error:
        raise GoldenError(where, "JSON nested too deeply, expected an object of metrics") from error
    return value


_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAX_STEP_DIGITS = 18
_IS_STEP = re.compile(rf"[0-9]{{1,{_MAX_STEP_DIGITS}}}").fullmatch
_VALUE_TYPES = {float, str}


def _content_of(
    value: dict[str, JsonValue], where: str
) -> tuple[dict[str, Series], Generation | None]:
    """Return the metrics, or the output of an inference program, in the JSON object of a golden.

    Args:
        value: Without its provenance.
        where: The file, for messages.

    Raises:
        GoldenError: The value is refused, see `read_golden`.
    """
    blocks = {k: v for k, v in value.items() if isinstance(v, dict) and is_block(v)}
    if not blocks and is_generation(value):
        return {}, parse_generation(value, where)
    if not value:
        raise GoldenError(
            where, "holds no metric ({}), expected an object of metrics; record it again"
        )
    if not blocks:
        some = ", ".join(repr(key) for key in sorted(value)[:3])
        raise GoldenError(where, f"no metric block with 'values' in it, found {some}; no golden")
    metrics: dict[str, Series] = {}
    for name, other in value.items():
        block = blocks.get(name)
        if block is not None:
            metrics[name] = _parse_block(block, name, where)
        elif not isinstance(other, int | float):  # one number is no metric
            raise GoldenError(where, f"{name!r} is no metric block: it has no 'values'")
    return metrics, None


def metrics_to_json(metrics: MetricMap) -> dict[str, JsonValue]:
    """Return the metric map of a run or a golden: metrics sorted, steps ascending.

    A value that is a float32 is written as the shortest decimal that gives that float32 again,
    except whole numbers, which are written as they are. Not finite ones go to `non_finite`.
    """
    return {name: _block_to_json(series) for name, series in sorted(metrics.items())}


def shortest(value: float) -> float:
    """Return the float with the fewest digits that rounds to the same float32 as `value`.

    A value that is no float32, or a whole number, comes back as it is.
    """
    if value.is_integer() or to_float32(value) != value:
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if to_float32(short) == value:
            return short
    return value


def _parse_block(block: Mapping[str, JsonValue], name: str, where: str) -> Series:
    """Return the series of a metric's block."""
    raw = block["values"]
    for key in ("start_step", "end_step", "step_interval"):
        if key in block and (isinstance(block[key], bool) or not isinstance(block[key], int)):
            raise GoldenError(
                where, f"{name}: {key!r} is {_shown(block[key])}, expected a whole number"
            )
    if isinstance(raw, dict):
        values = _parse_map(raw, name, where)
    elif isinstance(raw, list):
        start = _number(block, "start_step", name, where)
        interval = _number(block, "step_interval", name, where)
        values = {
            start + i * interval: _value(v, name, str(start + i * interval), where)
            for i, v in enumerate(raw)
        }
    else:
        raise GoldenError(where, f"{name}: 'values' is {_shown(raw)}, expected step to number")
    values |= _parse_non_finite(block.get("non_finite", {}), name, where)
    precision = block.get("value_precision")
    if precision not in (None, "full"):
        raise GoldenError(where, f"{name}: 'value_precision' is {_shown(precision)}, expected full")
    return series_of(values, is_full_precision=precision == "full")


def _parse_map(raw: Mapping[str, JsonValue], name: str, where: str) -> dict[int, Value]:
    """Return step to value; valid values are not checked one by one, since they are many."""
    values: dict[int, Value]
    if set(map(type, raw.values())) <= _VALUE_TYPES and all(map(_IS_STEP, raw)):
        values = dict(zip(map(int, raw), raw.values(), strict=True))  # type: ignore[arg-type] # types are those
    else:
        values = {_step(k, name, where): _value(v, name, k, where) for k, v in raw.items()}
    if len(values) != len(raw):
        steps = [int(key) for key in raw]
        twice = next(step for step in steps if steps.count(step) > 1)
        raise GoldenError(where, f"{name}: step {twice} is there twice; keep one of them")
    return values


def _parse_non_finite(raw: JsonValue, name: str, where: str) -> dict[int, Value]:
    """Return the values that are not finite."""
    if not isinstance(raw, dict):
        raise GoldenError(where, f"{name}: 'non_finite' is {_shown(raw)}, expected an object")
    values: dict[int, Value] = {}
    for key, text in raw.items():
        if not isinstance(text, str) or text not in _NON_FINITE:
            expected = ", ".join(sorted(_NON_FINITE))
            raise GoldenError(where, f"{name}, step {key}: {text!r}, expected one of {expected}")
        values[_step(key, name, where)] = _NON_FINITE[text]
    return values


def _number(block: Mapping[str, JsonValue], key: str, name: str, where: str) -> int:
    """Return a whole number that a list of values needs."""
    value = block.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < (key == "step_interval"):
        raise GoldenError(
            where, f"{name}: {key!r} is {value!r}, a list of values needs it to be a step number"
        )
    return value


def _step(key: str, name: str, where: str) -> int:
    """Parse a step."""
    if not _IS_STEP(key):
        raise GoldenError(
            where, f"{name}: step {key!r}, expected a decimal number of at most 18 digits"
        )
    return int(key)


def _value(value: JsonValue, name: str, step: str, where: str) -> Value:
    """Return the value of a step, a number or a text."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GoldenError(where, f"{name}, step {step}: {_shown(value)}, expected a number")
    try:
        return float(value)
    except OverflowError as error:
        raise GoldenError(where, f"{name}, step {step}: {error}") from error


def _block_to_json(series: Series) -> dict[str, JsonValue]:
    """Return a series as the block of a metric."""
    block: dict[str, JsonValue] = {
        "start_step": series.steps[0] if series.steps else 0,
        "end_step": series.steps[-1] if series.steps else 0,
        "step_interval": step_interval(series.steps),
    }
    if series.is_full_precision:
        block["value_precision"] = "full"
    non_finite: dict[str, JsonValue] = {}
    values: dict[str, JsonValue] = {}
    for step, value in series.items():
        if isinstance(value, str):
            values[str(step)] = value
        elif math.isfinite(value):
            values[str(step)] = shortest(value)
        else:
            non_finite[str(step)] = str(value)
    block["values"] = values
    if non_finite:
        block["non_finite"] = non_finite
    return block
