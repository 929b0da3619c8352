"""The files of a trace: one of JSON lines a rank, and one of raw values where they are stored.

`rank_<r>.jsonl` has a header, one line a tensor, and an end; docs/reference/traces.md describes
them. It is written as the training runs, so a trace that was cut off reads up to there. Must not
import torch: the controller reads headers and ends.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

from pytest_megatron.base.schema import Count, FormatVersion, SchemaError, parse
from pytest_megatron.errors import TraceError
from pytest_megatron.trace.equivalence import TracedTensor
from pytest_megatron.trace.settings import TraceValues

MOST_DIVERGENCES = 50  # of one comparison, that are kept
_END = b'{"end"'
_STATE = b'"state":true'  # of an optimizer, which earlier versions recorded
_T = TypeVar("_T")
_RANK = re.compile(r"rank_(\d+)\.jsonl").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLayout:
    """Place of a rank in each parallel dimension: its index and the size.

    Attributes:
        tp: Tensor parallel.
        pp: Pipeline parallel.
        dp: Data parallel, without context parallel.
        cp: Context parallel.
        ep: Expert parallel.
        etp: Tensor parallel of experts.
        edp: Data parallel of experts.
        vpp: Model chunks of a pipeline stage; 1 without virtual pipeline parallelism.
        sequence_parallel: Activations are cut along the sequence over the tensor-parallel ranks.
    """

    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    dp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    etp: tuple[int, int] = (0, 1)
    edp: tuple[int, int] = (0, 1)
    vpp: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """First line of a rank's trace."""

    format_version: FormatVersion = 1
    rank: int
    world_size: int
    device: str
    torch: str
    megatron_core: str | None
    layout: TraceLayout
    values: TraceValues


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShard:
    """Place of a recorded gradient or parameter in the whole one.

    Attributes:
        key: Name in a checkpoint, the same in every parallel layout; None where megatron-core
            knows none for this part, so that it cannot be merged.
        global_shape: Shape of the whole tensor. Its first axes are not in the record's `shape`
            where a checkpoint stacks layers or experts: as many as it is longer.
        global_offset: Where this part begins in it.
        flat: Elements of the flattened part that this rank owns, from and to; the record holds
            these alone, one after the other. None: all of them, in their shape.
        attributes: megatron-core's attributes of the parameter; `buffer` of a buffer.
    """

    key: str | None
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    flat: tuple[int, int] | None = None
    attributes: Mapping[str, bool | int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TensorMeasurement:
    """What is recorded of a tensor's values.

    Attributes:
        norm: In double precision; None where a value is not finite.
        mean: In double precision; None where a value is not finite.
        hash: 16 hex digits, a function of the bits.
        not_finite: Number of values that are NaN or infinite.
    """

    norm: float | None
    mean: float | None
    hash: str
    not_finite: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord(TracedTensor, TensorMeasurement):
    """One tensor, as one rank had it.

    Attributes:
        kind: Class of the module.
        shape: Shape of the local tensor (with `parameter.flat`: of the part that it is taken from).
        at: Offset and number of bytes in `rank_<r>.bin`.
    """

    kind: str
    shape: tuple[Count, ...]
    dtype: str
    at: tuple[int, int] | None = None
    parameter: ParameterShard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEnd:
    """Last line of a rank's trace.

    Attributes:
        steps: Steps that were recorded whole.
        problem: Why the trace cannot be compared, as a clause; None where it can.
    """

    steps: int
    problem: str | None = None


class TraceWriter:
    """Writes the trace of one rank."""

    def __init__(self, directory: Path, rank: int, *, has_values: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._lines = (directory / f"rank_{rank}.jsonl").open("w", encoding="utf-8")
        self._values: IO[bytes] | None = None
        if has_values:
            self._values = (directory / f"rank_{rank}.bin").open("wb")
        self._num_bytes = 0

    def write_header(self, header: TraceHeader) -> None:
        """Write the first line."""
        self._write(dataclasses.asdict(header))

    def write_record(self, record: TraceRecord) -> None:
        """Write the line of one tensor."""
        line: dict[str, object] = dict(zip(_RECORD_FIELDS, _values_of(record), strict=True))
        if record.parameter is not None:
            for name in _PARAMETER_FIELDS:
                line[name] = getattr(record.parameter, name)
        self._write(line)

    def write_values(self, values: bytes | memoryview) -> tuple[int, int]:
        """Append raw values; returns their offset and length."""
        assert self._values is not None
        at = (self._num_bytes, len(values))
        self._values.write(values)
        self._num_bytes += len(values)
        return at

    def flush(self) -> None:
        """Hand what was written to the operating system: the process may be killed."""
        if self._values is not None:
            self._values.flush()
        self._lines.flush()

    def close(self, end: TraceEnd | None) -> None:
        """Write the last line, unless the trace is cut off, and close the files."""
        if end is not None:
            self._write({"end": True, **dataclasses.asdict(end)})
        self.flush()
        self._lines.close()
        if self._values is not None:
            self._values.close()

    def _write(self, line: Mapping[str, object]) -> None:
        self._lines.write(_ENCODER.encode(line) + "\n")


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_RECORD_FIELDS = tuple(
    one.name for one in dataclasses.fields(TraceRecord) if one.name != "parameter"
)
_values_of = operator.attrgetter(*_RECORD_FIELDS)
_PARAMETER_FIELDS = tuple(one.name for one in dataclasses.fields(ParameterShard))


def rank_files(directory: Path) -> dict[int, Path]:
    """Return the file of JSON lines of each rank, in the order of the ranks.

    Raises:
        TraceError: There are none, or some are missing.
    """
    found = {
        int(match[1]): path
        for path in (directory.iterdir() if directory.is_dir() else ())
        if (match := _RANK(path.name))
    }
    if not found:
        raise TraceError(
            str(directory),
            "holds no trace, expected rank_0.jsonl and its like; the program may have ended before"
            " its first forward pass, see its log",
        )
    world_size = read_header(found[min(found)]).world_size
    missing = sorted(set(range(world_size)) - found.keys())
    if missing:
        raise TraceError(
            str(directory), f"has no trace of rank {missing[0]} of {world_size}; see its log"
        )
    return dict(sorted(found.items()))


def read_header(path: Path) -> TraceHeader:
    """Read the first line of a rank's trace.

    Raises:
        TraceError: It is no header, or of another version of the format.
    """
    with path.open("rb") as lines:
        return _parsed(TraceHeader, lines.readline(), f"{path}:1", "header")


def read_records(path: Path) -> Iterator[TraceRecord]:
    """Yield the tensors of a rank's trace, in its order; a torn last line ends it.

    Raises:
        TraceError: A line before the last is no record.
    """
    for number, line in enumerate(record_lines(path), start=2):
        yield parse_record(line, f"{path}:{number}")


def record_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a rank's trace that are of tensors; a torn last line ends them."""
    with path.open("rb") as file:
        file.readline()  # the header
        for line in file:
            if line.startswith(_END) or not line.endswith(b"\n"):
                return
            if _STATE not in line:
                yield line


def parse_record(line: bytes, where: str) -> TraceRecord:
    """Return the tensor of a line.

    Raises:
        TraceError: It is no record; `where` names it.
    """
    record = _parsed(TraceRecord, line, where, "record")
    if b'"key":' not in line:
        return record
    return dataclasses.replace(record, parameter=_parsed(ParameterShard, line, where, "record"))


def _parsed(kind: type[_T], line: bytes, where: str, what: str) -> _T:
    """Return a line of a trace; a TraceError if it is none of its kind."""
    try:
        return parse(kind, line)
    except SchemaError as error:
        problem = error.problems[0].in_output
        raise TraceError(
            where, f"is no {what} of a trace: {problem}; record the trace again"
        ) from None


def read_end(path: Path) -> TraceEnd | None:
    """Read the last line of a rank's trace; None where it is cut off."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 4096))
        last = file.read()
    line = last.rstrip(b"\n").rpartition(b"\n")[2]
    if not line.startswith(_END) or not last.endswith(b"\n"):
        return None
    return _parsed(TraceEnd, line, f"{path}, last line", "end")
