"""Compares two traces tensor by tensor and finds the first that differs.

The reference's tensors are cut as the candidate's ranks hold theirs, one tensor of a step at a
time. Reads values with numpy alone.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pytest_megatron.errors import TraceError
from pytest_megatron.trace.equivalence import (
    PHASES,
    DivergenceKind,
    NotCompared,
    Phase,
    TensorDivergence,
    TraceComparison,
    depth_of,
)
from pytest_megatron.trace.files import MOST_DIVERGENCES
from pytest_megatron.trace.hints import hint_of
from pytest_megatron.trace.merge import (
    HeldPart,
    Merge,
    NotMergedError,
    as_rows,
    is_expert,
    is_same_layout,
    sorted_rows,
)
from pytest_megatron.trace.pieces import (
    EPSILONS,
    Piece,
    Samples,
    TensorName,
    Trace,
    TracedStep,
    Values,
    read_samples,
)

_CHUNK_VALUES = 1 << 22  # that are held in double precision at once

# An error counts beyond this multiple of the noise; docs/reference/traces.md has the experiment.
_FACTOR = 6.0
# The least limit, in units of the precision that the run computes in.
_LEAST_LIMIT = 4.0
_ROUNDED = 1.0  # of a parameter, in units of its precision
_DRIFT = 4.0  # times the relative error that parameters may have from the steps before
# An error is relative to the tensor's norm, or to this part of the norm that is usual in the phase:
# rounding is all that is left of a gradient that is zero on paper.
_LEAST_PART = 0.01
_REPLICA_LIMIT = 8.0  # of ranks that hold the same part, in units of the tensor's precision
# Part of a micro-batch's tokens that a router may send elsewhere: two experts are level for them.
_MOST_LEVEL = {"float64": 0.0, "float32": 0.01, "float16": 0.04, "bfloat16": 0.08}
_LEVEL_EFFECT = 2.0
_LEAST_MODULES = 0.5  # part of the reference's modules that has to be compared


@dataclass(slots=True)
class _Difference:
    """The difference of one whole tensor, summed over the parts that ranks hold."""

    first: HeldPart
    squares: float = 0.0  # of the reference
    other_squares: float = 0.0
    error_squares: float = 0.0
    num_values: int = 0
    parts: dict[tuple[object, ...], HeldPart] = field(default_factory=dict)
    ranks: dict[tuple[int, ...], float] = field(default_factory=dict)
    disagreement: float = 0.0  # squares, the largest of all
    disagreeing: set[int] = field(default_factory=set)

    def add(self, part: HeldPart, scale: float) -> None:
        """Add what a rank holds; its values are divided by `scale`."""
        known = self.parts.get(part.region)
        if known is not None and known.digest == part.digest and part.digest is not None:
            self.ranks[part.ranks] = self.ranks[known.ranks]
            return
        sums = _Sums()
        for expected, actual in part.pairs:
            sums.add(expected, actual, scale)
        self.ranks[part.ranks] = max(self.ranks.get(part.ranks, 0.0), sums.error)
        if known is None:
            self.parts[part.region] = part
            self.squares += sums.squares
            self.other_squares += sums.other_squares
            self.error_squares += sums.error
            self.num_values += sums.num_values
            return
        apart = _Sums()
        for (_, first), (_, second) in zip(known.pairs, part.pairs, strict=True):
            apart.add(first, second, 1.0)
        if apart.error:
            self.disagreement = max(self.disagreement, apart.error / (apart.squares or 1.0))
            self.disagreeing.update(known.ranks, part.ranks)
        # Of ranks that should hold the same, the one that is farther off counts.
        self.error_squares = max(self.error_squares, sums.error)


@dataclass(slots=True)
class _Sums:
    """Sums of squares over blocks, in double precision."""

    squares: float = 0.0
    other_squares: float = 0.0
    error: float = 0.0
    num_values: int = 0

    def add(self, expected: Values, actual: Values, scale: float) -> None:
        """Add a block of differences to the sums."""
        rows = max(1, _CHUNK_VALUES // max(1, math.prod(expected.shape[1:])))
        for start in range(0, len(expected) if expected.ndim else 1, rows):
            part = ... if not expected.ndim else slice(start, start + rows)
            a, b = _doubles(expected[part]), _doubles(actual[part])
            if scale != 1:
                b = b / scale
            with np.errstate(invalid="ignore", over="ignore"):
                self.squares += float(np.square(a).sum())
                self.other_squares += float(np.square(b).sum())
                self.error += float(np.square(b - a).sum())
            self.num_values += a.size


def _doubles(values: Values) -> Values:
    """Return values in double precision."""
    return np.asarray(values, np.float64)


class Comparer:
    """Compares the steps of two traces."""

    def __init__(self, reference: Trace, candidate: Trace, noise: Trace | None) -> None:
        self._reference = reference
        self._candidate = candidate
        self._noise = noise
        self._not_compared: dict[tuple[str, str, str], NotCompared] = {}
        self._found: list[tuple[tuple[float, ...], TensorDivergence]] = []  # and their places
        self._num_compared = 0
        self._modules: set[str] = set()
        self._compared_modules: set[str] = set()
        self._num_gradients = 0
        self._scale: float | None = None  # of the candidate's gradients of activations
        self._level = 0.0  # part of the tokens that a router sent elsewhere, up to here
        self._epsilons = (0.0, 0.0)
        self._before: TracedStep | None = None  # the reference's last step
        self._current: TracedStep | None = None
        self._lost: set[int] = set()  # micro-batches of this step that the candidate has not whole
        # Norms of what rounding may change: gradients of this step, parameters by the last one.
        self._of_gradients: dict[TensorName, float] = {}
        self._of_parameters: dict[TensorName, float] = {}
        self._drift = 0.0  # of all parameters by the last step, relative to their norm

    def compare(self) -> TraceComparison:
        """Compare all steps; return the result.

        Raises:
            TraceError: The traces cannot be compared.
        """
        traces = [self._reference, self._candidate, *([self._noise] if self._noise else [])]
        num_steps = min(trace.steps for trace in traces)
        if not num_steps:
            raise TraceError(
                str(min(traces, key=lambda trace: trace.steps).directory),
                "has no whole step, expected at least one; see the log of its ranks",
            )
        if self._noise and not is_same_layout(self._reference.layout, self._noise.layout):
            raise TraceError(
                str(self._noise.directory),
                "has another layout than the reference, expected a second run of it",
            )
        noises = self._noise.each_step() if self._noise else iter(())
        for (number, reference), (_, candidate) in zip(
            self._reference.each_step(), self._candidate.each_step(), strict=False
        ):
            _, noise = next(noises, (number, None))
            if not number:
                self._compare_initial(candidate)
            if number <= num_steps:
                self._compare_step(number, reference, candidate, noise)
                self._end_step(reference)
        self._check_coverage()
        divergences = [one for _, one in sorted(self._found, key=lambda pair: pair[0])]
        layouts = (self._reference.layout, self._candidate.layout)
        return TraceComparison(
            verdict="different" if divergences else "equal",
            steps=num_steps,
            num_compared=self._num_compared,
            not_compared=tuple(self._not_compared.values()),
            hint=hint_of(divergences, *layouts),
            divergences=tuple(divergences[:MOST_DIVERGENCES]),
            num_divergences=len(divergences),
        )

    def _check_coverage(self) -> None:
        """Refuse a result that says next to nothing."""
        where = str(self._candidate.directory)
        reasons = [one.reason for one in self._not_compared.values()]
        reason = f"; most often: {statistics.mode(reasons)}" if reasons else ""
        if not self._num_gradients:
            raise TraceError(
                where,
                f"no gradient of a parameter can be compared with the reference's{reason}; check"
                " that both train the same model",
            )
        share = len(self._compared_modules) / max(1, len(self._modules))
        if share < _LEAST_MODULES:
            raise TraceError(
                where,
                f"only {len(self._compared_modules)} of {len(self._modules)} modules can be"
                f" compared, expected half of them{reason}",
            )

    # Steps

    def _compare_step(
        self, number: int, reference: TracedStep, candidate: TracedStep, noise: TracedStep | None
    ) -> None:
        """Compare all tensors of one step."""
        samples = self._samples(number, reference, candidate) if number else None
        if number and not self._epsilons[0]:
            self._epsilons = (_epsilon(reference), _epsilon(candidate))
        merge = Merge(reference, candidate, samples)
        usual = _usual(reference)
        self._current = reference
        for name, pieces in sorted(reference.tensors.items(), key=_place_of):
            is_activation = name.phase in {"forward", "backward"}
            if is_activation:
                self._modules.add(name.module)
            others = candidate.tensors.get(name)
            if others is None:
                self._miss(name, pieces, candidate)
                continue
            if any(piece.record.not_finite for piece in pieces) and pieces[0].is_float:
                record = pieces[0].record
                if name.phase == "forward" and name.tensor.startswith("input"):
                    self._leave_out(pieces, "it is not finite in the reference, as masks are")
                    continue
                raise TraceError(
                    str(self._reference.directory),
                    f"{record.module}, {record.tensor} of step {record.step} has values that are"
                    " not finite; a reference must train without them",
                )
            try:
                units = self._differences(merge.parts(name, pieces, others), name.phase)
            except NotMergedError as error:
                self._leave_out(pieces, str(error))
                continue
            if is_activation:
                self._compared_modules.add(name.module)
                self._miss_microbatches(name, pieces, units)
            self._num_gradients += name.phase == "gradient" and bool(pieces[0].record.parameter)
            noises = noise.tensors.get(name) if noise else None
            self._judge(name, pieces, others, units, (noises, usual[_group(pieces[0])]))
        for name in candidate.tensors.keys() - reference.tensors.keys():
            self._leave_out(candidate.tensors[name], "the reference has no such tensor")

    def _compare_initial(self, candidate: TracedStep) -> None:
        """Compare what ranks of the candidate began with before the reference's weights came.

        Another layout may draw other numbers, so only ranks that hold the same are compared.
        """
        for name, pieces in candidate.initial.items():
            places: dict[tuple[object, ...], list[Piece]] = defaultdict(list)
            for piece in pieces:
                shard = piece.record.parameter
                assert shard is not None
                places[shard.global_offset, piece.record.shape].append(piece)
            for found in places.values():
                self._num_compared += len(found) > 1
                if len({piece.record.hash for piece in found}) > 1:
                    ranks = tuple(sorted({piece.rank for piece in found}))
                    one = _divergence(found[0], kind="replicas", ranks=ranks)
                    self._found.append((self._position(name, 0, one.order), one))

    def _end_step(self, reference: TracedStep) -> None:
        """Remember the parameters for the next step."""
        self._before = reference
        squares = sum(
            (piece.record.norm or 0.0) ** 2
            for name, pieces in reference.tensors.items()
            if name.phase == "update" and _group(pieces[0]) == "update"
            for piece in pieces
        )
        drift = math.fsum(one**2 for one in self._of_parameters.values())
        self._drift = math.sqrt(drift / squares) if squares else 0.0

    def _samples(
        self, number: int, reference: TracedStep, candidate: TracedStep
    ) -> tuple[Samples, Samples] | None:
        """Match the samples of both.

        Raises:
            TraceError: The candidate trains on others.
        """
        of_reference = read_samples(reference)
        of_candidate = read_samples(candidate)
        if of_reference is None or of_candidate is None:
            return None
        names = [{sample[0] for sample in one.places} for one in (of_reference, of_candidate)]
        if foreign := names[1] - names[0]:
            raise TraceError(
                str(self._candidate.directory),
                f"trains on {len(foreign)} of {len(of_candidate.places)} samples in step {number}"
                " that the reference has not, expected the same data; give both the same data,"
                " seed and global batch size",
            )
        lost = of_reference.places.keys() - of_candidate.places.keys()
        self._lost = {of_reference.places[one][0][1] for one in lost}
        for microbatch in sorted(self._lost):
            one = TensorDivergence(
                order=0, step=number, microbatch=microbatch, phase="forward", module="",
                tensor="samples", kind="missing",
            )  # fmt: skip
            self._found.append(((number, -1), one))
        return of_reference, of_candidate

    def _miss(self, name: TensorName, pieces: Sequence[Piece], candidate: TracedStep) -> None:
        """Note a tensor that the candidate has not; a difference if it must have it."""
        record = pieces[0].record
        is_there = any(
            other.module == name.module and other.phase == name.phase for other in candidate.tensors
        )
        is_needed = record.parameter is not None and _group(pieces[0]) == name.phase
        if not is_needed and (
            record.parameter is not None or name.phase == "backward" or is_there or name.call
        ):
            self._leave_out(pieces, "the candidate has no such tensor")
            return
        one = _divergence(pieces[0], kind="missing")
        position = self._position(name, record.step, record.order)
        self._found.append((position, one))

    def _miss_microbatches(
        self, name: TensorName, pieces: Sequence[Piece], units: Sequence[_Difference]
    ) -> None:
        """Note micro-batches of the reference that no rank of the candidate has for a tensor."""
        if is_expert(name.module) or len({piece.record.hash for piece in pieces}) == 1:
            return
        found = {unit.first.microbatch for unit in units} | self._lost
        for piece in pieces:
            if piece.record.microbatch not in found:
                found.add(piece.record.microbatch)
                position = self._position(name, piece.record.step, piece.record.order)
                self._found.append((position, _divergence(piece, kind="missing")))

    def _leave_out(self, pieces: Sequence[Piece], reason: str) -> None:
        """Note tensors that cannot be compared, with the reason."""
        record = pieces[0].record
        self._not_compared.setdefault(
            (record.module, record.tensor, record.phase),
            NotCompared(
                module=record.module, tensor=record.tensor, phase=record.phase, reason=reason
            ),
        )

    # Tensors

    def _differences(self, parts: Iterable[HeldPart], phase: Phase) -> list[_Difference]:
        """Return the differences of a tensor, one for each micro-batch of the reference."""
        units: dict[tuple[object, ...], _Difference] = {}
        for part in parts:
            scale = self._scale_of(part) if phase == "backward" else 1.0
            units.setdefault(part.unit, _Difference(part)).add(part, scale)
        return list(units.values())

    def _scale_of(self, part: HeldPart) -> float:
        """Return what the candidate's gradients of activations are multiplied with.

        Programs that average losses over a rank's micro-batches have gradients that are larger by
        the number of data-parallel ranks, until they are averaged; others do not. The first
        gradient decides between the two. Gradients of parameters are compared as they are.
        """
        if self._scale is None:
            a, b = self._reference.layout, self._candidate.layout
            ratio = b.dp[1] * b.cp[1] / (a.dp[1] * a.cp[1])
            sums = _Sums()
            for expected, actual in part.pairs:
                sums.add(expected, actual, 1.0)
            if ratio == 1 or not sums.squares or not sums.other_squares:
                return 1.0
            found = math.sqrt(sums.other_squares / sums.squares)
            self._scale = ratio if abs(math.log(found / ratio)) < abs(math.log(found)) else 1.0
        return self._scale

    def _judge(
        self,
        name: TensorName,
        pieces: Sequence[Piece],
        others: Sequence[Piece],
        units: Sequence[_Difference],
        measure: tuple[Sequence[Piece] | None, float],
    ) -> None:
        """Compare a tensor's errors with its limit."""
        noises, usual = measure
        usual = usual if pieces[0].is_float else 0.0
        noise = None if noises is None else _noise(pieces, noises, usual)
        limit = self._limit(name, (pieces, others), noise, usual)
        level = 0.0
        for unit in units:
            error = _relative(unit.error_squares, unit.squares, unit.num_values, usual)
            kind, ranks = self._kind(unit, error, limit, others)
            if kind is not None and self._is_level(name, error):
                level = max(level, error**2)
                kind = None
            self._num_compared += 1
            if kind is None:
                continue
            amounts = {"error": error, "noise": noise, "limit": limit} if kind == "value" else {}
            if kind == "replicas":
                disagreement = math.sqrt(unit.disagreement)
                amounts = {"error": disagreement, "limit": self._replica_limit(others[0])}
            least = usual * math.sqrt(unit.num_values) * 1e-9
            one = _divergence(
                pieces[0],
                kind=kind,
                order=unit.first.order,
                microbatch=unit.first.microbatch,
                ranks=ranks,
                norm_ratio=math.sqrt(unit.other_squares / unit.squares)
                if unit.squares > least**2
                else None,
                **amounts,
            )
            position = self._position(name, one.step, unit.first.order)
            self._found.append((position, one))
        self._level = max(self._level, level)

    def _kind(
        self, unit: _Difference, error: float, limit: float, others: Sequence[Piece]
    ) -> tuple[DivergenceKind | None, tuple[int, ...]]:
        """Return how a tensor differs, None where it does not, and on which ranks."""
        not_finite = [one.rank for one in others if one.is_float and one.record.not_finite]
        if not_finite:
            return "not_finite", tuple(sorted(set(not_finite)))
        if sum(_size(part) for part in unit.parts.values()) < unit.first.num_whole:
            return "missing", tuple(sorted({rank for ranks in unit.ranks for rank in ranks}))
        largest = max(unit.ranks.values(), default=0.0)
        # Of ranks whose parts are as large, those that are as far off as the farthest.
        ranks = {rank for ranks, one in unit.ranks.items() if one > largest / 16 for rank in ranks}
        if math.sqrt(unit.disagreement) > self._replica_limit(others[0]):
            return "replicas", tuple(sorted(unit.disagreeing))
        if error > limit or math.isnan(error):
            return "value", tuple(sorted(ranks))
        return None, ()

    def _replica_limit(self, piece: Piece) -> float:
        """Return the largest disagreement of ranks that hold the same, which get equal bits."""
        own = EPSILONS.get(piece.record.dtype, 0.0)
        if piece.record.phase == "update":
            return _ROUNDED * own
        return _REPLICA_LIMIT * max(own, self._epsilons[1] if own else 0.0)

    def _limit(
        self,
        name: TensorName,
        both: tuple[Sequence[Piece], Sequence[Piece]],
        noise: float | None,
        usual: float,
    ) -> float:
        """Return the largest error that does not count."""
        reference, candidate = both[0][0], both[1][0]
        if not reference.is_float:
            return 0.0
        own = max(EPSILONS[one.record.dtype] for one in (reference, candidate) if one.is_float)
        if not self._epsilons[0]:
            return _ROUNDED * own  # before the first step
        of_reference, of_candidate = self._epsilons
        # The noise is of the reference's precision; that of a coarser one is larger by as much.
        coarser = max(1.0, of_candidate / of_reference)
        learned = _FACTOR * coarser * (noise or 0.0)
        group = _group(reference)
        if group == "update":
            return max(learned, _ROUNDED * own, self._update_limit(name, both[0]))
        least = max(_LEAST_LIMIT * max(self._epsilons), _DRIFT * self._drift)
        limit = max(learned, least, _LEVEL_EFFECT * math.sqrt(2 * self._level))
        if group == "buffer":
            return 2 * limit
        if name.phase == "gradient":
            root = _root_mean_square(both[0])
            self._of_gradients[name] = limit * max(root, _LEAST_PART * usual)
        return limit

    def _update_limit(self, name: TensorName, pieces: Sequence[Piece]) -> float:
        """Return how far a parameter may be off if its gradient is within its limit.

        Adam divides gradients by their size, so where one is as small as its rounding errors the
        parameter may move by a whole step in any direction.
        """
        of_gradient = dataclasses.replace(name, phase="gradient")
        before = {
            _rank_key(one): one
            for one in (self._before.tensors.get(name, ()) if self._before else ())
        }
        step = max(
            (_largest_change(before.get(_rank_key(one)), one) for one in pieces), default=0.0
        )
        error = self._of_gradients.get(of_gradient, 0.0)
        shares = [4.0]
        if error and self._current is not None:
            shares = [
                _undetermined(values, error)
                for piece in self._current.tensors[of_gradient]
                if (values := _doubles(piece.values())).size
            ]
        num_values = sum(one.num_values for one in pieces)
        norm = math.sqrt(math.fsum((one.record.norm or 0.0) ** 2 for one in pieces))
        allowed = step * math.sqrt(num_values * statistics.fmean(shares))
        allowed += self._of_parameters.get(name, 0.0)
        self._of_parameters[name] = allowed
        return allowed / norm if norm else math.inf

    def _is_level(self, name: TensorName, error: float) -> bool:
        """Return whether a router chose otherwise for a few tokens only."""
        if not name.module.endswith("router") or name.phase != "forward":
            return False
        precision = max(self._epsilons)
        most = next(share for kind, share in _MOST_LEVEL.items() if EPSILONS[kind] >= precision)
        return error**2 / 2 <= most

    def _position(self, name: TensorName, step: int, order: int) -> tuple[float, ...]:
        """Return the place of a tensor in the reference's execution, over all its ranks."""
        if self._reference.layout.pp[1] == 1:
            return (step, order)
        # Orders of pipeline stages cannot be compared: each layer comes after those before it.
        phase = PHASES.index(name.phase)
        depth = depth_of(name.module)
        return (step, phase, -depth if name.phase == "backward" else depth, order)


def _divergence(piece: Piece, *, kind: DivergenceKind, **values: object) -> TensorDivergence:
    """Return a difference at a piece of a tensor."""
    record = piece.record
    return TensorDivergence(
        **{
            "order": record.order,
            "step": record.step,
            "microbatch": record.microbatch,
            "phase": record.phase,
            "module": record.module,
            "tensor": record.tensor,
            "parameter": f"{record.module}.{record.tensor}".lstrip(".")
            if record.parameter
            else None,
            "is_buffer": _group(piece) == "buffer",
            **values,
        },  # type: ignore[arg-type]
        kind=kind,
    )


def _group(piece: Piece) -> str:
    """Return what a tensor is like: its phase, or a buffer."""
    shard = piece.record.parameter
    return "buffer" if shard is not None and "buffer" in shard.attributes else piece.record.phase


def _size(part: HeldPart) -> int:
    return sum(expected.size for expected, _ in part.pairs)


def _relative(error_squares: float, squares: float, num_values: int, usual: float) -> float:
    """Return the norm of a difference, relative to the tensor's or to the usual one."""
    if not error_squares:
        return 0.0
    scale = max(squares, (_LEAST_PART * usual) ** 2 * num_values)
    return math.sqrt(error_squares / scale) if scale else math.inf


def _root_mean_square(pieces: Sequence[Piece]) -> float:
    squares = math.fsum((one.record.norm or 0.0) ** 2 for one in pieces)
    return math.sqrt(squares / max(1, sum(one.num_values for one in pieces)))


def _undetermined(gradient: Values, error: float) -> float:
    """Return the mean square of what Adam may make of an error of a gradient, in steps.

    A gradient of exactly 0, as of a token that does not occur, is 0 in all layouts.
    """
    sizes = np.abs(gradient[gradient != 0])
    return float(np.square(np.minimum(2.0, error / sizes)).sum()) / gradient.size


def _largest_change(before: Piece | None, after: Piece) -> float:
    """Return the largest change of a value of a parameter in a step."""
    if before is None or before.record.shape != after.record.shape or not after.num_values:
        return 0.0
    change = _doubles(after.values()) - _doubles(before.values())
    return float(np.abs(change).max())


def _noise(pieces: Sequence[Piece], noises: Sequence[Piece], usual: float) -> float:
    """Return the largest error that the second run of the reference has in a tensor."""
    found = {_rank_key(one): one for one in noises}
    largest = 0.0
    for piece in pieces:
        other = found.get(_rank_key(piece))
        if other is None or other.record.hash == piece.record.hash:
            continue
        a, b = piece.values(), other.values()
        if is_expert(piece.record.module) and piece.record.parameter is None and a.ndim:
            a, b = sorted_rows(as_rows(a), as_rows(b))
        if a.shape != b.shape:
            continue
        sums = _Sums()
        sums.add(a, b, 1.0)
        largest = max(largest, _relative(sums.error, sums.squares, sums.num_values, usual))
    return largest


def _rank_key(piece: Piece) -> tuple[object, ...]:
    """Sort pieces by rank, micro-batch and place."""
    shard = piece.record.parameter
    place = () if shard is None else (shard.global_offset, shard.flat)
    return (piece.rank, piece.record.microbatch, place)


def _usual(step: TracedStep) -> dict[str, float]:
    """Return the median of the tensors' root mean squares, of each group."""
    found: dict[str, list[float]] = defaultdict(list)
    for pieces in step.tensors.values():
        for piece in pieces:
            norm = piece.record.norm
            if piece.is_float and norm and piece.num_values > 1:
                found[_group(piece)].append(norm / math.sqrt(piece.num_values))
    return defaultdict(float, {phase: statistics.median(all_) for phase, all_ in found.items()})


def _epsilon(step: TracedStep) -> float:
    """Return the coarsest precision of what modules compute."""
    return max(
        (
            EPSILONS[piece.record.dtype]
            for name, pieces in step.tensors.items()
            if name.phase == "forward"
            for piece in pieces
            if piece.is_float
        ),
        default=EPSILONS["float32"],
    )


def _place_of(item: tuple[TensorName, Sequence[Piece]]) -> tuple[int, int]:
    name, pieces = item
    return PHASES.index(name.phase), min(piece.record.order for piece in pieces)


def compare(reference: Path, candidate: Path, noise: Path | None) -> TraceComparison:
    """Return the result of comparing directories of traces; never raises for what they hold."""
    try:
        traces = [Trace(one) for one in (reference, candidate)]
        return Comparer(traces[0], traces[1], Trace(noise) if noise else None).compare()
    except TraceError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename}: cannot be read: {error.strerror}"
    except Exception as error:  # noqa: BLE001 - the code is written for sound traces
        problem = (
            f"{candidate}: {type(error).__name__} while it was compared: {error}; record both"
            " again, and report it to pytest-megatron if it stays"
        )
    return TraceComparison(verdict="unusable", problem=problem)
