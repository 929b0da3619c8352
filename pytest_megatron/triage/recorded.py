"""What our run directory recorded beside logs: a golden that disagrees, a GPU that failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pytest_megatron.errors import TriageError
from pytest_megatron.files import JsonValue, parse_json, read_bytes
from pytest_megatron.triage.root import Root
from pytest_megatron.triage.signature import Table
from pytest_megatron.triage.story import LogLine
from pytest_megatron.triage.unit import LogFile, Stream, Unit

COMPARISON_FILE = "comparison.json"
HEALTH_FILE = "health.json"
_MOST_BYTES = 64 << 20


def with_records(unit: Unit, root: Root | None, table: Table) -> Root | None:
    """Return the root cause as the records see it, which know more than logs.

    What NVML and the kernel saw on the attempt's own GPUs is why it failed, if it failed. A golden
    that disagrees is a failure of its own, of a training that ended well.
    """
    record = unit.known.record
    if record is None:
        return root
    if record.path.name == COMPARISON_FILE:
        return _mismatch(record, table)
    return None if root is None else _with_fault(record, root, table)


def is_mismatch(path: Path) -> bool:
    """Whether a file is a comparison with a golden that failed."""
    return path.name == COMPARISON_FILE and read_record(path).get("passed") is False


def _mismatch(record: LogFile, table: Table) -> Root | None:
    failed = [_say(found) for found in _failed(read_record(record.path))]
    if not failed:
        return None
    return Root(
        signature=table["golden_mismatch"],
        ranks=(),
        what=f"trained to the end, but its metrics disagree: {'; '.join(dict.fromkeys(failed))}",
        places=(_place(record, b'"passed": false', failed[0]),),
    )


def _failed(content: dict[str, JsonValue]) -> Iterator[dict[str, JsonValue]]:
    """Yield the comparisons of one metric each that failed."""
    repeats = content.get("repeats")
    for repeat in repeats if isinstance(repeats, list) else []:
        rows = repeat.get("comparisons") if isinstance(repeat, dict) else None
        for row in rows if isinstance(rows, list) else []:
            if isinstance(row, dict) and row.get("passed") is False:
                yield row


def _say(row: dict[str, JsonValue]) -> str:
    step = row.get("first_step")
    return f"{row.get('metric')}" + ("" if step is None else f" from step {step} on")


def _with_fault(record: LogFile, root: Root, table: Table) -> Root:
    """Return a root cause with the first failure of the hardware in its place."""
    faults = read_record(record.path).get("faults")
    first = faults[0] if isinstance(faults, list) and faults else None
    if not isinstance(first, dict):
        return root
    row = next((row for row in table.signatures if row.id == first.get("signature")), None)
    if row is None:
        return root
    text = str(first.get("text"))
    place = _place(record, b'"faults"', text)
    return replace(root, signature=row, places=(place, *root.places), also=(text, *root.also))


def _place(record: LogFile, mark: bytes, text: str) -> LogLine:
    try:
        offset = record.path.read_bytes().find(mark)
    except OSError:
        offset = 0
    return LogLine(log=record, offset=max(0, offset), text=text)


def read_record(path: Path) -> dict[str, JsonValue]:
    """Return a JSON object, empty where the file is missing, torn or something else."""
    try:
        content = read_json(path, _MOST_BYTES)
    except (OSError, TriageError):
        return {}
    return content if isinstance(content, dict) else {}


def read_json(path: Path, most_bytes: int) -> JsonValue:
    """Return the content of a JSON file of anybody's; a number that is none is None.

    Raises:
        OSError: The file cannot be read, is no regular one, or is longer than expected.
        TriageError: It is no JSON of a sensible depth.
    """
    text = read_bytes(path, most_bytes).decode("utf-8", errors="replace")
    try:
        return parse_json(text, is_lenient=True)
    except ValueError as error:
        raise TriageError(str(path), f"is no JSON that can be read: {error}") from None


def record_of(path: Path, shown: str) -> LogFile:
    """Return a record as something that evidence can point to."""
    return LogFile(path=path, shown=shown, stream=Stream.LAUNCHER)
