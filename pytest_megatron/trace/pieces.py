"""Reads the traces of all ranks of a run a step at a time, and the samples of each micro-batch.

A `Piece` is one tensor of one rank; its values stay in the file until they are asked for.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytest_megatron.errors import TraceError
from pytest_megatron.trace.equivalence import Phase
from pytest_megatron.trace.files import (
    TraceHeader,
    TraceLayout,
    TraceRecord,
    rank_files,
    read_end,
    read_header,
    read_records,
)

Range: TypeAlias = "slice[int, int, None]"
Values: TypeAlias = NDArray[np.float64]  # as they are computed with; read as they were recorded

DTYPES = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint8": "u1",
    "bool": "u1",
}
EPSILONS = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorName:
    """A tensor of the model, the same in all layouts.

    Attributes:
        module: Global name; of a parameter, the checkpoint's key and the layer in it.
        call: Number of the call of a module that is called more than once in a micro-batch.
    """

    phase: Phase
    module: str
    tensor: str
    call: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One tensor as one rank recorded it."""

    trace: Trace
    rank: int
    record: TraceRecord

    @property
    def layout(self) -> TraceLayout:
        """The place of its rank."""
        return self.trace.headers[self.rank].layout

    @property
    def is_float(self) -> bool:
        """Whether it has numbers that rounding can change."""
        return self.record.dtype in EPSILONS

    @property
    def wide_type(self) -> str:
        """The type of numpy that can hold its values and sums of them."""
        return "float64" if self.is_float else "int64"

    @property
    def num_values(self) -> int:
        """Number of recorded values."""
        shard = self.record.parameter
        if shard is not None and shard.flat is not None:
            return shard.flat[1] - shard.flat[0]
        return math.prod(self.record.shape)

    def values(self) -> Values:
        """Return the piece's values in its shape; what a rank owns of a parameter is flat.

        Raises:
            TraceError: The file of values is cut off, or the trace has none.
        """
        shard = self.record.parameter
        is_flat = shard is not None and shard.flat is not None
        shape = (self.num_values,) if is_flat else self.record.shape
        return self.trace.read(self.rank, self.record, shape)


class Trace:
    """The traces of all ranks of one run, read a step at a time.

    Raises:
        TraceError: It is missing, damaged, cut off or without values.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = rank_files(directory)
        self.headers: dict[int, TraceHeader] = {}
        self._steps: dict[int, int] = {}
        for rank, path in self._files.items():
            self.headers[rank] = header = read_header(path)
            if header.values != "full":
                raise TraceError(
                    str(path), "has hashes only, expected values; record it with values: full"
                )
            end = read_end(path)
            if end is None:
                raise TraceError(
                    str(path), "is cut off; the program ended within it, see the log of the rank"
                )
            if end.problem is not None:
                raise TraceError(str(path), end.problem)
            self._steps[rank] = end.steps

    @property
    def steps(self) -> int:
        """Number of steps that all ranks recorded whole."""
        return min(self._steps.values())

    @property
    def layout(self) -> TraceLayout:
        """The layout; its indices are those of the first rank."""
        return self.headers[min(self.headers)].layout

    @property
    def is_megatron(self) -> bool:
        """Whether the model is one of megatron-core, whose sequences come first."""
        return self.headers[min(self.headers)].megatron_core is not None

    def each_step(self) -> Iterator[tuple[int, TracedStep]]:
        """Yield the steps in their order; step 0 has the parameters before the first."""
        # A model chunk records its parameters at its first call, within step 1.
        streams = {
            rank: itertools.groupby(read_records(path), key=lambda record: max(1, record.step))
            for rank, path in self._files.items()
        }
        for number in range(1, self.steps + 1):
            found: dict[int, list[TraceRecord]] = {}
            for rank, stream in streams.items():
                step, records = next(stream, (None, iter(())))
                if step != number:
                    raise TraceError(
                        str(self._files[rank]),
                        f"has no step {number}, its next one is {step}; record it again",
                    )
                found[rank] = list(records)
            for one in (0, 1) if number == 1 else (number,):
                traced = TracedStep(self)
                for rank, all_ in found.items():
                    for record in all_:
                        if record.step == one:
                            traced.add(Piece(self, rank, record))
                yield one, traced

    def read(self, rank: int, record: TraceRecord, shape: tuple[int, ...]) -> Values:
        """Return the values of a record, bfloat16 as float32."""
        file, kind = self._files[rank].with_suffix(".bin"), DTYPES.get(record.dtype)
        size = np.dtype(kind).itemsize * math.prod(shape) if kind else 0
        if kind is None or record.at is None or record.at[1] != size:
            raise TraceError(
                str(self._files[rank]),
                f"the values of {record.module}, {record.tensor} are {record.at} of"
                f" {record.dtype}, expected {size} bytes; record it again",
            )
        if not size:
            return np.empty(shape, kind)
        try:
            found = np.fromfile(file, kind, math.prod(shape), offset=record.at[0])
        except OSError as error:
            raise TraceError(str(file), f"cannot be read: {error.strerror}") from error
        if found.nbytes < size:
            raise TraceError(str(file), f"is cut off before {record.tensor}; record it again")
        found = found.reshape(shape)
        if record.dtype == "bfloat16":
            return (found.astype(np.uint32) << 16).view(np.float32)
        return found


class TracedStep:
    """What all ranks recorded in one step.

    Attributes:
        tensors: By name, of all ranks.
        initial: What the program made itself before another run's weights replaced it.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.tensors: dict[TensorName, list[Piece]] = defaultdict(list)
        self.initial: dict[TensorName, list[Piece]] = defaultdict(list)
        self._calls: dict[tuple[object, ...], int] = defaultdict(int)

    def add(self, piece: Piece) -> None:
        """Add a tensor; a rank's tensors in their order."""
        one = piece.record
        if one.parameter is None:
            key = (piece.rank, one.microbatch, one.phase, one.module, one.tensor)
            name = TensorName(
                phase=one.phase, module=one.module, tensor=one.tensor, call=self._calls[key]
            )
            self._calls[key] += 1
        else:
            module, tensor = one.module, one.tensor
            if one.parameter.key is not None:
                num_stacked = len(one.parameter.global_shape) - len(one.shape)
                module, tensor = (
                    one.parameter.key,
                    str(list(one.parameter.global_offset[:num_stacked])),
                )
            name = TensorName(phase=one.phase, module=module, tensor=tensor)
        (self.initial if one.phase == "initial" else self.tensors)[name].append(piece)


Microbatch: TypeAlias = tuple[int, int]  # data-parallel rank, number in the step


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a step.

    Attributes:
        length: Length of a whole sequence.
        rows: An identity of each sample of each micro-batch: its hash and its number among equals.
    """

    length: int
    rows: Mapping[Microbatch, tuple[tuple[str, int], ...]]
    places: dict[tuple[str, int], tuple[Microbatch, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for microbatch, rows in self.rows.items():
            self.places.update((one, (microbatch, row)) for row, one in enumerate(rows))


def read_samples(step: TracedStep) -> Samples | None:
    """Return the samples of a step by the first integer input of the model, or its first input.

    The first axis of the input is the batch, the second one the sequence. None without an input.
    """
    inputs = {
        name.tensor: pieces
        for name, pieces in step.tensors.items()
        if name.phase == "forward"
        and not name.module
        and name.tensor.startswith("input")
        and len(pieces[0].record.shape) > 1
    }
    names = sorted(inputs, key=lambda tensor: (inputs[tensor][0].is_float, tensor))
    if not names:
        return None
    pieces: dict[Microbatch, dict[int, Piece]] = defaultdict(dict)
    for piece in inputs[names[0]]:
        at = piece.layout
        if not piece.layout.tp[0]:
            pieces[at.dp[0], piece.record.microbatch].setdefault(at.cp[0], piece)
    counts: dict[str, int] = defaultdict(int)
    rows: dict[Microbatch, tuple[tuple[str, int], ...]] = {}
    length = 0
    for microbatch in sorted(pieces, key=lambda one: (one[1], one[0])):
        parts = [pieces[microbatch][cp] for cp in sorted(pieces[microbatch])]
        num_ranks = len(parts)
        local = [np.asarray(part.values()) for part in parts]
        length = local[0].shape[1] * num_ranks
        whole = np.empty((len(local[0]), length, *local[0].shape[2:]), local[0].dtype)
        for cp, part in enumerate(local):
            for to, of in sequence_chunks(length, (cp, num_ranks), (0, 1)):
                whole[:, to] = part[:, of]
        samples = []
        for row in whole:
            digest = hashlib.sha256(row.tobytes()).hexdigest()[:16]
            samples.append((digest, counts[digest]))
            counts[digest] += 1
        rows[microbatch] = tuple(samples)
    return Samples(length=length, rows=rows)


def sequence_chunks(
    length: int, cp: tuple[int, int], tp: tuple[int, int]
) -> list[tuple[Range, Range]]:
    """Return the parts of a sequence that a rank has: where in the whole, where in its own.

    Context-parallel ranks hold a part of the beginning and one of the end.

    Args:
        length: Length of the whole sequence.
        cp: Context-parallel rank and size.
        tp: Tensor-parallel rank and size, if these cut the sequence of a context-parallel rank.
    """
    chunks = (cp[0], 2 * cp[1] - 1 - cp[0]) if cp[1] > 1 else (cp[0],)
    size = length // (cp[1] * len(chunks))
    places = np.concatenate([np.arange(chunk * size, (chunk + 1) * size) for chunk in chunks])
    num_local = len(places) // tp[1]
    places = places[tp[0] * num_local : (tp[0] + 1) * num_local]
    breaks = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), num_local]
    return [
        (slice(int(places[a]), int(places[a]) + b - a), slice(a, b))
        for a, b in itertools.pairwise(breaks)
        if b > a
    ]
