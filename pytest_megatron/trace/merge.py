"""Maps the reference's tensors to what each rank of the candidate should hold. Pure.

Where a rank's part belongs follows from shapes, from the layout of its rank, and from the axes of
sequence and batch, never from values: parts in the wrong place must show as a difference.
docs/reference/traces.md has the rules.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np

from pytest_megatron.trace.files import TraceLayout
from pytest_megatron.trace.pieces import (
    DTYPES,
    Microbatch,
    Piece,
    Range,
    Samples,
    TensorName,
    TracedStep,
    Values,
    sequence_chunks,
)

Index: TypeAlias = tuple[Range, ...]
_Chunks: TypeAlias = Sequence[tuple[Range, Range]]  # of an axis: where in the whole, in the part

_EXPERTS = re.compile(r"(?:^|\.)experts(?:\.|$)").search
_PADDED = re.compile(r"(?:^|\.)(?:word_embeddings|output_layer)(?:\.weight)?$").search
# Modules whose batch comes before the sequence; with equal sizes nothing else tells them apart.
_BATCH_FIRST = frozenset({"Embedding", "VocabParallelEmbedding", "GPTModel", "Float16Module"})
_BOTH = (True, True)


class Reading(Enum):
    """A way to read the sizes of an activation; the value is the word for its first axes."""

    SEQUENCE_BATCH = "sequence, batch"
    BATCH_SEQUENCE = "batch, sequence"
    SCORES = "batch, heads, sequence"
    SEQUENCE_OUTSIDE = "sequence times batch"
    BATCH_OUTSIDE = "batch times sequence"
    BATCH = "batch"
    SEQUENCE = "sequence"
    NEITHER = "neither"


_ORDERS = (Reading.SEQUENCE_BATCH, Reading.BATCH_SEQUENCE)
_FLATTENED = (Reading.SEQUENCE_OUTSIDE, Reading.BATCH_OUTSIDE)
_COUNTS = "numbers of tokens are not compared, the rows of the experts are"


class NotMergedError(Exception):
    """A tensor cannot be mapped; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a local tensor: sequence first, then batch, then all others.

    Attributes:
        order: Places of its own axes in that order; with `tokens`, after splitting the first one.
        leading: Whether there is a sequence, whether there is a batch.
        tokens: Sequence and batch are one axis, the sequence being the outer one.
        sequence_parts: Number of ranks that share the sequence.
    """

    order: tuple[int, ...]
    leading: tuple[bool, bool] = (False, False)
    tokens: tuple[int, int] | None = None
    sequence_parts: int = 1

    @property
    def has_sequence(self) -> bool:
        """Whether one of the axes is the sequence."""
        return self.leading[0]

    @property
    def has_batch(self) -> bool:
        """Whether one of the axes is the batch."""
        return self.leading[1]

    def view(self, values: Values) -> Values:
        """Return the values with their axes in this order."""
        if self.tokens is not None:
            values = values.reshape(*self.tokens, *values.shape[1:])
        return values.transpose(self.order)


def readings_of(
    shape: Sequence[int], length: int, num_samples: int, layout: TraceLayout
) -> dict[Reading, Axes]:
    """Return the ways in which the sizes of an activation can be read.

    Args:
        shape: Shape of the local tensor.
        length: Length of a whole sequence.
        num_samples: Number of samples of the micro-batch.
        layout: Layout of the rank.
    """
    plain = tuple(range(len(shape)))
    if len(shape) < 2:  # noqa: PLR2004 - neither has a second axis
        return {Reading.NEITHER: Axes(plain)}
    found: dict[Reading, Axes] = {}
    parts = [layout.cp[1], *([layout.cp[1] * layout.tp[1]] if layout.sequence_parallel else ())]
    sizes = {length // one: one for one in reversed(parts)}
    first, second = shape[:2]
    if first in sizes and second == num_samples:
        found[Reading.SEQUENCE_BATCH] = Axes(plain, _BOTH, None, sizes[first])
    if first == num_samples and second in sizes:
        order = (1, 0, *plain[2:])
        found[Reading.BATCH_SEQUENCE] = Axes(order, _BOTH, None, sizes[second])
    if len(shape) == 4 and first == num_samples and shape[2] in sizes:  # noqa: PLR2004 - scores
        found[Reading.SCORES] = Axes((2, 0, 1, 3), _BOTH, None, sizes[shape[2]])
    local, rest = divmod(first, num_samples)
    if not rest and local in sizes:
        after = tuple(range(2, len(shape) + 1))
        found[Reading.SEQUENCE_OUTSIDE] = Axes(
            (0, 1, *after), _BOTH, (local, num_samples), sizes[local]
        )
        found[Reading.BATCH_OUTSIDE] = Axes(
            (1, 0, *after), _BOTH, (num_samples, local), sizes[local]
        )
    if first == num_samples:
        found[Reading.BATCH] = Axes(plain, (False, True))
    if first in sizes and second == 1:
        found[Reading.SEQUENCE] = Axes(plain, (True, False), None, sizes[first])
    return found or {Reading.NEITHER: Axes(plain)}


def is_expert(module: str) -> bool:
    """Return whether rows of a module's tensors are tokens that a router sent to it."""
    return _EXPERTS(module) is not None


def is_padded(module: str) -> bool:
    """Return whether a module has an entry for each token of a vocabulary that may be padded."""
    return _PADDED(module) is not None


def split_sizes(
    reference: Sequence[int],
    candidate: Sequence[int],
    sizes: tuple[int, int],
    *,
    may_be_padded: bool = False,
) -> tuple[bool, ...]:
    """Return of each axis whether tensor-parallel ranks share it, in both layouts.

    Args:
        reference: Local sizes of the axes beside sequence and batch.
        candidate: Those of the other layout, of the same axes.
        sizes: Tensor-parallel sizes of both; they differ.
        may_be_padded: The last axis may be longer in one of them.

    Raises:
        NotMergedError: Sizes differ otherwise than by the tensor-parallel sizes.
    """
    if len(reference) != len(candidate):
        raise NotMergedError(f"axes {list(reference)} and {list(candidate)} do not correspond")
    found = []
    for axis, (a, b) in enumerate(zip(reference, candidate, strict=True)):
        is_last = axis == len(reference) - 1
        if a == b:
            found.append(False)
        elif a * sizes[0] == b * sizes[1] or (may_be_padded and is_last):
            found.append(True)
        else:
            raise NotMergedError(
                f"sizes {list(reference)} and {list(candidate)} do not follow from"
                f" {sizes[0]} and {sizes[1]} tensor-parallel ranks"
            )
    if sum(found) > 1:
        raise NotMergedError(f"tensor-parallel ranks cut more than one axis of {list(reference)}")
    return tuple(found)


def axis_chunks(size: int, tp: tuple[int, int], *, is_gated: bool) -> list[tuple[Range, Range]]:
    """Return the parts of a split axis that a rank has: where in the whole, where in its own.

    Args:
        size: Local size.
        tp: Tensor-parallel rank and size.
        is_gated: The whole is two tensors one after the other, of each of which a rank has a part.
    """
    rank, num_ranks = tp
    if not is_gated:
        return [(slice(rank * size, (rank + 1) * size), slice(0, size))]
    half = size // 2
    return [
        (slice(start * num_ranks + rank * half, start * num_ranks + (rank + 1) * half),
         slice(start, start + half))
        for start in (0, half)
    ]  # fmt: skip


def products(chunks: Iterable[_Chunks]) -> Iterator[tuple[Index, Index]]:
    """Yield the blocks of all axes: where in the whole, where in the local tensor."""
    for block in itertools.product(*chunks):
        yield tuple(to for to, _ in block), tuple(of for _, of in block)


@dataclass(slots=True)
class HeldPart:
    """What one rank holds of a whole tensor, beside what it should hold.

    Attributes:
        unit: The whole tensor: all that has one norm.
        microbatch: Micro-batch of the reference.
        order: The reference's.
        ranks: Ranks of the candidate.
        region: Place in the whole; equal for ranks that hold the same.
        pairs: Blocks of equal shapes, the reference's and the candidate's.
        num_whole: Number of values of the whole tensor that the candidate must hold.
        digest: Digest of the candidate's values.
    """

    order: int
    ranks: tuple[int, ...]
    pairs: list[tuple[Values, Values]]
    num_whole: int
    unit: tuple[object, ...] = ()
    microbatch: int = 0
    region: tuple[object, ...] = ()
    digest: str | None = None


class Merge:
    """Merges the tensors of a step of both traces.

    Attributes:
        is_same_layout: Ranks correspond one to one.
    """

    def __init__(
        self, reference: TracedStep, candidate: TracedStep, samples: tuple[Samples, Samples] | None
    ) -> None:
        self._layouts = (reference.trace.layout, candidate.trace.layout)
        self._is_megatron = reference.trace.is_megatron
        self._samples = samples
        self._gated = _gated_modules(reference)
        self.is_same_layout = is_same_layout(*self._layouts) and (
            samples is None or samples[0].rows == samples[1].rows
        )

    def parts(
        self, name: TensorName, reference: Sequence[Piece], candidate: Sequence[Piece]
    ) -> Iterator[HeldPart]:
        """Yield what the candidate's ranks hold of a tensor.

        Raises:
            NotMergedError: No rule maps it.
        """
        shard = reference[0].record.parameter
        for piece in (*reference, *candidate):
            if piece.record.dtype not in DTYPES:
                raise NotMergedError(f"values of {piece.record.dtype} are not read")
        if shard is not None:
            if "buffer" in shard.attributes and name.phase == "update":
                self._require_comparable_buffer(reference)
            return self._parameter(reference, candidate)
        if name.phase in {"gradient", "update"}:
            return _parts_of_all_ranks(reference, candidate)
        if self.is_same_layout:
            return _same(reference, candidate)
        if is_expert(name.module):
            return self._experts(name, reference, candidate)
        return self._activation(name, reference, candidate)

    # Parameters

    def _require_comparable_buffer(self, reference: Sequence[Piece]) -> None:
        """Raise for a buffer of which each rank of the reference has its own, or that counts."""
        by_place = defaultdict(set)
        for piece in reference:
            assert piece.record.parameter is not None
            by_place[piece.record.parameter.global_offset].add(piece.record.hash)
        if any(len(digests) > 1 for digests in by_place.values()):
            raise NotMergedError("it is a buffer of which each rank of the reference has its own")
        if not reference[0].is_float and not self.is_same_layout and reference[0].record.step:
            raise NotMergedError("it is a buffer of integers, which may count calls of a module")

    def _parameter(
        self, reference: Sequence[Piece], candidate: Sequence[Piece]
    ) -> Iterator[HeldPart]:
        """Yield parts of a parameter with the reference's values for them."""
        whole, order = self._whole_parameter(reference)
        for piece in candidate:
            chunks = self._parameter_chunks(piece)
            shard = piece.record.parameter
            assert shard is not None
            if len(chunks) != whole.ndim:
                raise NotMergedError("the numbers of axes differ")
            blocks = _within(whole, chunks)
            if shard.flat is None:
                values = piece.values()
                pairs = [(whole[to], values[of]) for to, of in blocks]
            else:
                expected = np.zeros(piece.record.shape, whole.dtype)
                is_there = np.zeros(piece.record.shape, bool)
                for to, of in blocks:
                    expected[of] = whole[to]
                    is_there[of] = True
                owned = slice(*shard.flat)
                mask = is_there.reshape(-1)[owned]
                pairs = [(expected.reshape(-1)[owned][mask], piece.values()[mask])]
            region = (*(_key(to) for to, _ in blocks), shard.flat)
            yield HeldPart(
                order, (piece.rank,), pairs, whole.size, region=region, digest=piece.record.hash
            )

    def _whole_parameter(self, pieces: Sequence[Piece]) -> tuple[Values, int]:
        """Return the reference's whole tensor, and its order."""
        first = pieces[0]
        shard = first.record.parameter
        assert shard is not None
        order = min(piece.record.order for piece in pieces)
        shape = shard.global_shape[len(shard.global_shape) - len(first.record.shape) :]
        if shape == first.record.shape and shard.flat is None:
            return first.values(), order
        is_there = np.zeros(shape, bool)
        whole = np.zeros(shape, first.wide_type)
        parts: dict[tuple[object, ...], list[Piece]] = defaultdict(list)
        for piece in pieces:
            parts[_key(tuple(of for chunk in self._parameter_chunks(piece) for of, _ in chunk))
                  ].append(piece)  # fmt: skip
        for found in parts.values():
            local = np.zeros(found[0].record.shape, whole.dtype)
            mask = np.zeros(local.shape, bool)
            for piece in found:
                assert piece.record.parameter is not None
                flat = piece.record.parameter.flat
                owned = slice(None) if flat is None else slice(*flat)
                local.reshape(-1)[owned] = piece.values().reshape(-1)
                mask.reshape(-1)[owned] = True
            for to, of in products(self._parameter_chunks(found[0])):
                whole[to] = local[of]
                is_there[to] = mask[of]
        if not is_there.all():
            raise NotMergedError("the reference's ranks do not hold all of it")
        return whole, order

    @staticmethod
    def _parameter_chunks(piece: Piece) -> list[_Chunks]:
        """Return where a rank's part of a parameter belongs."""
        shard, shape = piece.record.parameter, piece.record.shape
        assert shard is not None
        skip = len(shard.global_shape) - len(shape)
        return [
            [(slice(start, start + size), slice(0, size))]
            for start, size in zip(shard.global_offset[skip:], shape, strict=True)
        ]

    # Activations

    def _activation(
        self, name: TensorName, reference: Sequence[Piece], candidate: Sequence[Piece]
    ) -> Iterator[HeldPart]:
        """Yield parts of an activation with the reference's values for them."""
        if self._samples is None:
            raise NotMergedError("the model has no input whose samples could be matched")
        reading = self._reading(reference, candidate)
        wholes = _Wholes(self._samples[0], name, reference, self._gated, reading)
        rows = self._samples[1].rows
        for piece in candidate:
            record, layout = piece.record, piece.layout
            own = rows.get((layout.dp[0], record.microbatch))
            if own is None:
                raise NotMergedError("a micro-batch has no input of the model")
            axes = readings_of(record.shape, self._samples[1].length, len(own), layout)[reading]
            if axes.has_batch:
                units = self._units(own)
            else:
                if name.phase == "backward":
                    self._require_equal_sizes(own)
                units = self._units_without_batch(own, reference, candidate)
            view = axes.view(piece.values())
            for unit, runs in units.items():
                yield from self._blocks(wholes, piece, axes, view, (unit, runs))

    def _require_equal_sizes(self, own: Sequence[tuple[str, int]]) -> None:
        """Refuse a gradient that is a mean over micro-batches of another size."""
        assert self._samples is not None
        if any(len(rows) != len(own) for rows in self._samples[0].rows.values()):
            raise NotMergedError("it is of a micro-batch, and these have other numbers of samples")

    def _common_readings(
        self, reference: Sequence[Piece], candidate: Sequence[Piece]
    ) -> list[Reading]:
        """Return the readings that fit all pieces of a tensor, in both traces."""
        assert self._samples is not None
        common = list(Reading)
        for samples, pieces in zip(self._samples, (reference, candidate), strict=True):
            for piece in pieces:
                rows = samples.rows.get((piece.layout.dp[0], piece.record.microbatch))
                if rows is None:
                    return []
                own = readings_of(piece.record.shape, samples.length, len(rows), piece.layout)
                common = [one for one in common if one in own]
        return common

    def _reading(self, reference: Sequence[Piece], candidate: Sequence[Piece]) -> Reading:
        """Return the reading of a tensor in both traces.

        Raises:
            NotMergedError: None fits both, or two do and nothing tells which is meant.
        """
        assert self._samples is not None
        common = self._common_readings(reference, candidate)
        if not common:
            shapes = [str(list(pieces[0].record.shape)) for pieces in (reference, candidate)]
            raise NotMergedError(
                f"no axes of {' and '.join(dict.fromkeys(shapes))} fit the sequences and the "
                "micro-batches of both"
            )
        first = common[0]
        pair = next((pair for pair in (_ORDERS, _FLATTENED) if first in pair), ())
        if not pair or not set(pair) <= set(common):
            return first
        if self._is_megatron:
            return pair[reference[0].record.kind in _BATCH_FIRST]
        if self._is_read_alike(reference, candidate, pair):
            return first
        raise NotMergedError(
            f"{list(candidate[0].record.shape)} may be {pair[0].value} or {pair[1].value}: "
            "compare sequences that are not as long as a micro-batch is large"
        )

    def _is_read_alike(
        self, reference: Sequence[Piece], candidate: Sequence[Piece], pair: Sequence[Reading]
    ) -> bool:
        """Return True if both readings compare the same values: no axis is cut differently."""
        assert self._samples is not None
        batches = [set(samples.rows.values()) for samples in self._samples]
        if not batches[1] <= batches[0]:
            return False
        return all(
            readings_of(one.record.shape, samples.length, len(rows), one.layout)[
                pair[0]
            ].sequence_parts
            == 1
            for samples, pieces in zip(self._samples, (reference, candidate), strict=True)
            for one in pieces
            for rows in [samples.rows[one.layout.dp[0], one.record.microbatch]]
        )

    def _units(self, own: Sequence[tuple[str, int]]) -> dict[Microbatch, list[tuple[int, int]]]:
        """Return the rows of the reference's micro-batches that a micro-batch has, and its own."""
        assert self._samples is not None
        units: dict[Microbatch, list[tuple[int, int]]] = defaultdict(list)
        for row, sample in enumerate(own):
            if (place := self._samples[0].places.get(sample)) is not None:
                units[place[0]].append((place[1], row))
        return units

    def _units_without_batch(
        self,
        own: Sequence[tuple[str, int]],
        reference: Sequence[Piece],
        candidate: Sequence[Piece],
    ) -> dict[Microbatch, list[tuple[int, int]]]:
        """Return the reference's micro-batch of a tensor that has no rows for samples."""
        assert self._samples is not None
        for unit, rows in self._samples[0].rows.items():
            if set(rows) == set(own):
                return {unit: []}
        for pieces in (reference, candidate):
            by_place = defaultdict(set)
            for piece in pieces:
                by_place[piece.layout.tp, piece.layout.cp].add(piece.record.hash)
            if any(len(digests) > 1 for digests in by_place.values()):
                raise NotMergedError(
                    "it has no axis of samples, and the micro-batches have other samples"
                )
        first = reference[0]
        return {(first.layout.dp[0], first.record.microbatch): []}

    def _blocks(
        self,
        wholes: _Wholes,
        piece: Piece,
        axes: Axes,
        view: Values,
        rows: tuple[Microbatch, list[tuple[int, int]]],
    ) -> Iterator[HeldPart]:
        """Yield what a rank holds of one of the reference's micro-batches."""
        assert self._samples is not None
        unit, runs = rows
        whole = wholes.find(unit, piece, axes, view.shape)
        chunks = _chunks_of(
            self._samples[1],
            (axes, piece.layout),
            view.shape,
            whole.split,
            is_gated=wholes.is_gated,
            batch=[(slice(to, to + 1), slice(of, of + 1)) for to, of in runs],
        )
        blocks = _within(whole.values, chunks)
        num_whole = whole.values.size
        if axes.has_batch:
            sample_axis = int(axes.has_sequence)
            known = [one in self._samples[1].places for one in self._samples[0].rows[unit]]
            num_whole = num_whole // whole.values.shape[sample_axis] * sum(known)
        yield HeldPart(
            unit=(unit, whole.coordinate),
            microbatch=unit[1],
            order=whole.order,
            ranks=(piece.rank,),
            region=tuple(_key(to) for to, _ in blocks),
            pairs=[(whole.values[to], view[of]) for to, of in blocks],
            num_whole=num_whole,
            digest=piece.record.hash,
        )

    # Experts

    def _experts(
        self, name: TensorName, reference: Sequence[Piece], candidate: Sequence[Piece]
    ) -> Iterator[HeldPart]:
        """Yield the rows of an expert in a step, each column sorted: they have no order."""
        if not name.tensor.endswith(".0") and len(reference[0].record.shape) > 1:
            raise NotMergedError(_COUNTS)
        if not reference[0].is_float:
            raise NotMergedError(_COUNTS)
        if name.tensor.endswith(".1") and reference[0].record.kind.endswith("Linear"):
            raise NotMergedError("it is a parameter, which is compared as such")
        etp = (self._layouts[0].etp[1], self._layouts[1].etp[1])
        sizes = [_last(pieces[0]) for pieces in (reference, candidate)]
        if etp[0] == etp[1] or sizes[0] is None or sizes[1] is None:
            is_split = False
        else:
            is_split = split_sizes((sizes[0],), (sizes[1],), etp)[0]
        is_sum = name.tensor.startswith(("output", "grad_input")) and not is_split
        is_gated = name.module in self._gated and is_split
        rows = [
            _expert_rows(pieces, is_split=is_split, is_sum=is_sum, is_gated=is_gated)
            for pieces in (reference, candidate)
        ]
        if rows[0].shape[1:] != rows[1].shape[1:]:
            raise NotMergedError("the experts' rows have other sizes")
        first = reference[0].record
        yield HeldPart(
            microbatch=first.microbatch,
            order=min(piece.record.order for piece in reference),
            ranks=tuple(sorted({piece.rank for piece in candidate})),
            pairs=[sorted_rows(rows[0], rows[1])],
            num_whole=rows[0].size,
        )


def _within(whole: Values, chunks: Iterable[_Chunks]) -> list[tuple[Index, Index]]:
    """Return blocks without what is beyond the whole, as padding of a vocabulary is."""
    found = []
    for block in products(chunks):
        to, of = [], []
        for target, source, size in zip(*block, whole.shape, strict=True):
            beyond = max(0, target.stop - size)
            to.append(slice(target.start, target.stop - beyond))
            of.append(slice(source.start, source.stop - beyond))
        if all(one.start < one.stop for one in to):
            found.append((tuple(to), tuple(of)))
    return found


@dataclass(frozen=True, slots=True)
class _Whole:
    """A whole tensor of the reference, for tensor-parallel ranks of one coordinate or for all."""

    values: Values
    split: tuple[bool, ...]
    coordinate: int | None
    order: int


class _Wholes:
    """The whole tensors of the reference's micro-batches, of one name."""

    def __init__(
        self,
        samples: Samples,
        name: TensorName,
        pieces: Sequence[Piece],
        gated: frozenset[str],
        reading: Reading,
    ) -> None:
        self._samples = samples
        self._reading = reading
        self.is_gated = name.module in gated and name.tensor in {"output.0", "grad_output.0"}
        self._may_be_padded = is_padded(name.module)
        self._is_sum = name.phase == "backward"
        self._pieces: dict[Microbatch, list[Piece]] = defaultdict(list)
        for piece in pieces:
            self._pieces[piece.layout.dp[0], piece.record.microbatch].append(piece)
        self._found: dict[tuple[Microbatch, int | None], _Whole] = {}

    def find(
        self, unit: Microbatch, other: Piece, other_axes: Axes, other_shape: tuple[int, ...]
    ) -> _Whole:
        """Return the whole tensor that a piece of the candidate is a part of."""
        pieces = self._pieces.get(unit)
        if pieces is None:
            raise NotMergedError("the reference has it for some micro-batches only")
        first = pieces[0]
        layout, record = first.layout, first.record
        num_samples = len(self._samples.rows[unit])
        axes = readings_of(record.shape, self._samples.length, num_samples, layout)[self._reading]
        if not axes.has_sequence and self._is_sum and (
            _sequence_parts(layout) != _sequence_parts(other.layout)
        ):  # fmt: skip
            raise NotMergedError("it is a sum over a sequence, of which each rank has a part")
        view = _view_shape(axes, record.shape)
        skip = sum(axes.leading)
        tp, other_tp = layout.tp[1], other.layout.tp[1]
        coordinate = None
        if tp == other_tp:
            split = (False,) * (len(view) - skip)
            if view[skip:] != other_shape[skip:]:
                raise NotMergedError(f"sizes {list(view)} and {list(other_shape)} differ")
            is_shared = (
                axes.sequence_parts > layout.cp[1] or other_axes.sequence_parts > other.layout.cp[1]
            )
            coordinate = other.layout.tp[0] if tp > 1 and not is_shared else None
        else:
            split = split_sizes(
                view[skip:], other_shape[skip:], (tp, other_tp), may_be_padded=self._may_be_padded
            )
        key = (unit, coordinate)
        if key not in self._found:
            split = (False,) * skip + split
            self._found[key] = self._build(pieces, axes, view, split, coordinate)
        return self._found[key]

    def _build(
        self,
        pieces: Sequence[Piece],
        axes: Axes,
        view: tuple[int, ...],
        split: tuple[bool, ...],
        coordinate: int | None,
    ) -> _Whole:
        """Put the pieces of the reference's ranks together."""
        first = pieces[0]
        cp, tp = first.layout.cp[1], first.layout.tp[1]
        is_shared = axes.has_sequence and axes.sequence_parts > cp
        if not is_shared:
            # Of ranks that hold the same, the first one.
            wanted = coordinate or 0
            pieces = [one for one in pieces if any(split) or one.layout.tp[0] == wanted]
        order = min(piece.record.order for piece in pieces)
        if len(pieces) == 1 or (axes.sequence_parts == 1 and not any(split)):
            return _Whole(axes.view(pieces[0].values()), split, coordinate, order)
        shape = list(view)
        if axes.has_sequence:
            shape[0] = self._samples.length
        shape = [size * tp if cut else size for size, cut in zip(shape, split, strict=True)]
        whole: Values = np.zeros(shape, first.wide_type)
        num_values = 0
        for piece in pieces:
            chunks = _chunks_of(
                self._samples, (axes, piece.layout), view, split, is_gated=self.is_gated
            )
            values = axes.view(piece.values())
            for to, of in products(chunks):
                whole[to] = values[of]
            num_values += values.size
        if num_values < whole.size:
            raise NotMergedError("the reference's ranks do not hold all of it")
        return _Whole(whole, split, coordinate, order)


def _parts_of_all_ranks(
    reference: Sequence[Piece], candidate: Sequence[Piece]
) -> Iterator[HeldPart]:
    """Yield a number that each rank has, as the norm of all gradients."""
    first = reference[0]
    for piece in candidate:
        yield HeldPart(
            order=first.record.order,
            ranks=(piece.rank,),
            pairs=[(first.values(), piece.values())],
            num_whole=first.num_values,
            digest=piece.record.hash,
        )


def _same(reference: Sequence[Piece], candidate: Sequence[Piece]) -> Iterator[HeldPart]:
    """Yield the tensors of ranks that correspond one to one."""
    found = {(one.rank, one.record.microbatch): one for one in reference}
    for piece in candidate:
        other = found.get((piece.rank, piece.record.microbatch))
        if other is None:
            raise NotMergedError("the reference has it on other ranks only")
        expected, actual = other.values(), piece.values()
        if expected.shape != actual.shape:
            if not is_expert(piece.record.module) or not piece.is_float:
                raise NotMergedError(
                    f"shapes {list(expected.shape)} and {list(actual.shape)} differ"
                )
            expected, actual = sorted_rows(as_rows(expected), as_rows(actual))
        yield HeldPart(
            unit=(piece.rank, piece.record.microbatch),
            microbatch=piece.record.microbatch,
            order=other.record.order,
            ranks=(piece.rank,),
            pairs=[(expected, actual)],
            num_whole=expected.size,
            digest=piece.record.hash,
        )


def sorted_rows(reference: Values, candidate: Values) -> tuple[Values, Values]:
    """Return both with each column sorted, and the candidate's as long as the reference's.

    Routers may send tokens that two experts are level for elsewhere, so numbers of rows differ; a
    column is then compared by its quantiles.
    """
    a = np.sort(np.asarray(reference, np.float64), axis=0)
    b = np.sort(np.asarray(candidate, np.float64), axis=0)
    if len(a) == len(b):
        return a, b
    if not len(b):
        return a, np.zeros_like(a)
    if not len(a):
        return np.zeros_like(b), b
    places = np.linspace(0, len(b) - 1, len(a))
    low = np.floor(places).astype(int)
    high = np.minimum(low + 1, len(b) - 1)
    share = (places - low)[:, None]
    return a, b[low] * (1 - share) + b[high] * share


def as_rows(values: Values) -> Values:
    """Return values as one row for each entry of the first axis, which may have none."""
    return values.reshape(len(values) if values.ndim else 1, math.prod(values.shape[1:]))


def _expert_rows(
    pieces: Sequence[Piece], *, is_split: bool, is_sum: bool, is_gated: bool
) -> Values:
    """Return the rows that all ranks have of an expert's tensor.

    Args:
        pieces: Pieces of all ranks and micro-batches.
        is_split: Tensor-parallel ranks of an expert have a part of each row.
        is_sum: They have a part of the sum.
        is_gated: Whether the layer is gated, see `axis_chunks`.
    """
    groups: dict[tuple[object, ...], list[Piece]] = defaultdict(list)
    for piece in pieces:
        at = piece.layout
        # Ranks that share an expert get the same tokens.
        groups[at.ep, at.edp, at.pp, piece.record.microbatch].append(piece)
    rows = []
    for found in groups.values():
        found.sort(key=lambda piece: piece.layout.etp[0])
        values = [as_rows(piece.values()) for piece in found]
        if len(found) == 1:
            rows.append(values[0])
        elif is_split:
            whole = np.zeros((len(values[0]), sum(part.shape[1] for part in values)), np.float64)
            for piece, part in zip(found, values, strict=True):
                size = part.shape[1]
                for to, of in axis_chunks(size, piece.layout.etp, is_gated=is_gated):
                    whole[:, to] = part[:, of]
            rows.append(whole)
        elif is_sum:
            rows.append(np.sum([np.asarray(part, np.float64) for part in values], axis=0))
        else:
            rows.append(values[0])
    return np.concatenate([np.asarray(part, np.float64) for part in rows])


def _last(piece: Piece) -> int | None:
    """Return the length of a row; None of one value a row."""
    return piece.record.shape[-1] if len(piece.record.shape) > 1 else None


def _gated_modules(step: TracedStep) -> frozenset[str]:
    """Return the first linear modules of MLPs whose output has a value and its gate."""
    widths: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, pieces in step.tensors.items():
        record = pieces[0].record
        head, _, tail = record.module.rpartition(".")
        if name.phase == "forward" and (tail, record.tensor) in {
            ("linear_fc1", "output.0"),
            ("linear_fc2", "input.0"),
        }:
            widths[head][tail] = record.shape
    return frozenset(
        f"{head}.linear_fc1"
        for head, found in widths.items()
        if len(found) == 2  # noqa: PLR2004 - both
        and found["linear_fc1"][-1] == 2 * found["linear_fc2"][-1]
    )


def _view_shape(axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = shape if axes.tokens is None else (*axes.tokens, *shape[1:])
    return tuple(sizes[axis] for axis in axes.order)


def _sequence(samples: Samples, axes: Axes, layout: TraceLayout) -> _Chunks:
    """Return where a rank's part of the sequence belongs."""
    if axes.sequence_parts == 1:
        return [(slice(0, samples.length), slice(0, samples.length))]
    tp = layout.tp if axes.sequence_parts > layout.cp[1] else (0, 1)
    return sequence_chunks(samples.length, layout.cp, tp)


def _chunks_of(
    samples: Samples,
    place: tuple[Axes, TraceLayout],
    shape: Sequence[int],
    split: Sequence[bool],
    *,
    is_gated: bool,
    batch: _Chunks | None = None,
) -> list[_Chunks]:
    """Return where a rank's part of an activation belongs, of each axis; None is a whole batch."""
    axes, layout = place
    chunks: list[_Chunks] = []
    for axis, size in enumerate(shape):
        if axis == 0 and axes.has_sequence:
            chunks.append(_sequence(samples, axes, layout))
        elif batch is not None and axes.has_batch and axis == int(axes.has_sequence):
            chunks.append(batch)
        elif split[axis]:
            is_last = axis == len(shape) - 1
            chunks.append(axis_chunks(size, layout.tp, is_gated=is_gated and is_last))
        else:
            chunks.append([(slice(0, size), slice(0, size))])
    return chunks


def _key(index: Index) -> tuple[object, ...]:
    return tuple((one.start, one.stop) for one in index)


def _sizes(layout: TraceLayout) -> tuple[object, ...]:
    sizes = [getattr(layout, axis)[1] for axis in ("tp", "pp", "dp", "cp", "ep", "etp", "edp")]
    return (*sizes, layout.vpp, layout.sequence_parallel)


def is_same_layout(one: TraceLayout, other: TraceLayout) -> bool:
    """Return whether the sizes of two layouts are equal."""
    return _sizes(one) == _sizes(other)


def _sequence_parts(layout: TraceLayout) -> int:
    return layout.cp[1] * (layout.tp[1] if layout.sequence_parallel else 1)
