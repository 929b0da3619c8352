"""Comparison of two traces of one layout, bit by bit: each rank with itself.

Reads both files of a rank as streams and parses only lines that differ, so that memory is bounded
and equal traces cost little. Must not import torch: the controller and the command compare.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from pytest_megatron.base.text import counted, grouped
from pytest_megatron.errors import TraceError
from pytest_megatron.trace.equivalence import (
    PHASES,
    DivergenceKind,
    TensorDivergence,
    TraceComparison,
    depth_of,
)
from pytest_megatron.trace.files import (
    MOST_DIVERGENCES,
    TraceLayout,
    TraceRecord,
    parse_record,
    rank_files,
    read_end,
    read_header,
    record_lines,
)
from pytest_megatron.trace.hints import hint_of
from pytest_megatron.trace.settings import variables_of
from pytest_megatron.workloads.training.plan.plan import TraceTools

_MOST_WAITING = 20_000  # records of one trace that the other one did not have so far
_STEP = re.compile(rb'"step": ?(\d+)')

_Key: TypeAlias = tuple[int, int, str, str, str]


_Waiting: TypeAlias = dict[_Key, deque[TraceRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordDifference:
    """A record that the traces do not have alike."""

    rank: int
    record: TraceRecord
    place: tuple[float, ...]
    kind: DivergenceKind
    norm_ratio: float | None = None


@dataclass(slots=True)
class _Count:
    """Numbers of records, of all ranks."""

    compared: int = 0
    different: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankFiles:
    """The files of one rank: the reference's and the candidate's.

    Attributes:
        is_cut: Whether it has no end.
        last_step: The last one that is compared; None compares all.
    """

    paths: tuple[Path, Path]
    is_cut: tuple[bool, bool]
    last_step: int | None


def compare_bits(reference: Path, candidate: Path) -> TraceComparison:
    """Compare the traces in two directories.

    Of traces with different numbers of steps, the steps that both have are compared; of one that
    is cut off, all up to there.

    Raises:
        TraceError: A trace cannot be read or is of no training, or they have different layouts; or
            one is cut off, and no difference is before.
    """
    ours, theirs = rank_files(reference), rank_files(candidate)
    layouts = _layouts(ours)
    if layouts != (others := _layouts(theirs)):
        raise TraceError(
            str(candidate),
            f"is of {counted(len(others), 'rank')} in another layout than the reference, which has "
            f"{len(layouts)}: bits are compared rank by rank; to compare layouts, write "
            "pytest-megatron trace compare ROW ROW",
        )
    ends = {path: read_end(path) for path in (*ours.values(), *theirs.values())}
    for path, end in ends.items():
        if end is not None and end.problem is not None:
            raise TraceError(str(path), f"cannot be compared: {end.problem}")
    steps = {end.steps for end in ends.values() if end is not None}
    count = _Count()
    found = (
        one
        for rank, path in ours.items()
        for one in _differences(
            _RankFiles(
                paths=(path, theirs[rank]),
                is_cut=(ends[path] is None, ends[theirs[rank]] is None),
                last_step=min(steps) if len(steps) > 1 else None,
            ),
            rank,
            layouts[rank],
            count,
        )
    )
    first = heapq.nsmallest(MOST_DIVERGENCES, found, key=lambda one: one.place)
    cut = next((path for path, end in ends.items() if end is None), None)
    if not first and cut is not None:
        raise TraceError(
            str(cut),
            "is cut off, and there is no difference before; expected an end in its last line; see "
            "the log of the rank",
        )
    if not first and not count.compared:
        raise TraceError(str(candidate), "holds no tensors, so nothing is compared")
    divergences = tuple(_merged(first))
    return TraceComparison(
        verdict="different" if divergences else "equal",
        steps=min(steps, default=0),
        num_compared=count.compared,
        hint=hint_of(divergences, layouts[0], layouts[0]),
        divergences=divergences,
        num_divergences=count.different,
    )


def _layouts(files: dict[int, Path]) -> dict[int, TraceLayout]:
    return {rank: read_header(path).layout for rank, path in files.items()}


def _differences(
    of: _RankFiles, rank: int, layout: TraceLayout, count: _Count
) -> Iterator[_RecordDifference]:
    """Yield what differs in the traces of one rank."""
    for ours, theirs in _pairs(of, count):
        ratio = None
        if ours is None or theirs is None:
            kind: DivergenceKind | None = "missing" if theirs is None else "extra"
        else:
            count.compared += 1
            kind = _divergence_kind(ours, theirs)
            ratio = theirs.norm / ours.norm if theirs.norm and ours.norm else None
        if kind is None:
            continue
        record = cast("TraceRecord", ours or theirs)
        count.different += 1
        yield _RecordDifference(
            rank=rank, record=record, place=_place_of(record, layout), kind=kind, norm_ratio=ratio
        )


def _pairs(
    of: _RankFiles, count: _Count
) -> Iterator[tuple[TraceRecord | None, TraceRecord | None]]:
    """Yield both records of each tensor whose lines differ, and those of one trace alone.

    A record that the other trace does not have at this place waits for it, so that records of one
    trace alone, or in another order, hide no others.
    """
    waiting: tuple[_Waiting, _Waiting] = ({}, {})
    for pair in itertools.zip_longest(*(_lines(path, of.last_step) for path in of.paths)):
        if any(line is None and cut for line, cut in zip(pair, of.is_cut, strict=True)):
            return
        if pair[0] == pair[1]:
            count.compared += 1
            continue
        for side, line in enumerate(pair):
            if line is not None:
                yield from _matched(parse_record(line, str(of.paths[side])), side, waiting)
        for side, left in enumerate(waiting):
            if len(left) > _MOST_WAITING:
                yield from (_alone(one, side) for one in left.pop(next(iter(left))))
    for side, left in enumerate(waiting):
        yield from (_alone(one, side) for records in left.values() for one in records)


def _matched(
    record: TraceRecord, side: int, waiting: tuple[_Waiting, _Waiting]
) -> Iterator[tuple[TraceRecord, TraceRecord]]:
    """Yield a record with the other trace's; where that is still to come, have it wait."""
    others = waiting[1 - side].get(_key_of(record))
    if others is None:
        waiting[side].setdefault(_key_of(record), deque()).append(record)
        return
    other = others.popleft()
    if not others:
        del waiting[1 - side][_key_of(record)]
    yield (other, record) if side else (record, other)


def _alone(record: TraceRecord, side: int) -> tuple[TraceRecord | None, TraceRecord | None]:
    return (None, record) if side else (record, None)


def _lines(path: Path, last_step: int | None) -> Iterator[bytes]:
    """Yield the lines of records up to a step; None is all of them."""
    for line in record_lines(path):
        found = None if last_step is None else _STEP.search(line)
        if found is not None and int(found[1]) > cast("int", last_step):
            return
        yield line


def _divergence_kind(reference: TraceRecord, candidate: TraceRecord) -> DivergenceKind | None:
    """Return how two records of one tensor differ; None where their bits are the same.

    Norms are no bits: on a GPU their sums may differ in the last digit.
    """
    if (reference.shape, reference.dtype) != (candidate.shape, candidate.dtype):
        return "shape"
    if reference.hash == candidate.hash:
        return None
    return "not_finite" if candidate.not_finite and not reference.not_finite else "bits"


def _merged(found: Iterable[_RecordDifference]) -> Iterator[TensorDivergence]:
    """Yield one divergence for each tensor, with all ranks that have it."""
    for equal in grouped(((_key_of(one.record), one.kind), one) for one in found).values():
        one, record = equal[0], equal[0].record
        is_parameter = record.phase in ("gradient", "update")
        yield TensorDivergence(
            order=record.order,
            step=record.step,
            microbatch=record.microbatch,
            phase=record.phase,
            module=record.module,
            tensor=record.tensor,
            parameter=".".join(filter(None, (record.module, record.tensor)))
            if is_parameter
            else None,
            ranks=tuple(sorted(other.rank for other in equal)),
            kind=one.kind,
            norm_ratio=one.norm_ratio,
        )


def _key_of(record: TraceRecord) -> _Key:
    """Return what is the same in two traces of one training."""
    return record.step, record.microbatch, record.phase, record.module, record.tensor


def _place_of(record: TraceRecord, layout: TraceLayout) -> tuple[float, ...]:
    """Return a place before those of all tensors that are computed from this one.

    Each rank counts its own records. Stages of a pipeline run one after the other, forward and
    backward; with virtual stages a rank has several of them, and the layer counts.
    """
    stage = 0.0
    if record.phase in ("forward", "backward"):
        stage = layout.pp[0] if layout.vpp == 1 else depth_of(record.module)
        stage = stage if record.phase == "forward" else -stage
    return record.step, PHASES.index(record.phase), stage, record.order


TOOLS = TraceTools(record=("-m", "pytest_megatron.trace.run"), variables=variables_of)
