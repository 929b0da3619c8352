"""The result of comparing two traces: `equivalence.json`, its text, its hint. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast

from pytest_megatron.base.files import JsonValue, read_bytes, write_json_atomically
from pytest_megatron.base.schema import Count, FormatVersion, SchemaError, parse
from pytest_megatron.base.text import counted, name_ranks, shorten, visible
from pytest_megatron.errors import TraceError
from pytest_megatron.trace.files import Phase, TraceLayout

MOST_DIVERGENCES = 50
_MOST_NEXT = 5  # divergences after the first one that the text has
_MOST_REASONS = 3
_WIDTH = 80
_NEAR = 0.02  # of a ratio to a size
_EMBEDDING = re.compile(r"embedding|output_layer").search
_EXPERT = re.compile(r"(?:^|\.)experts\.").search
# Parameters of which each tensor-parallel rank has all, and the gradient of a part of a sequence.
_REPLICATED = re.compile(r"norm|router|linear_proj\.bias|linear_fc2\.bias|position_emb").search
_AXES = (
    ("tp", "tensor-parallel"),
    ("dp", "data-parallel"),
    ("cp", "context-parallel"),
    ("ep", "expert-parallel"),
    ("edp", "data-parallel ranks of an expert, that is"),
    ("pp", "pipeline-parallel"),
)

DivergenceKind: TypeAlias = Literal[
    "value", "replicas", "missing", "extra", "shape", "not_finite", "bits"
]
TraceVerdict: TypeAlias = Literal["equal", "different", "unusable"]

PHASES: tuple[Phase, ...] = ("initial", "forward", "backward", "gradient", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDivergence:
    """A tensor that differs from the reference's.

    Attributes:
        order: Number in the execution of the reference, from 0.
        parameter: Name of the parameter, or of the buffer, in phases `initial`, `gradient` and
            `update`.
        is_buffer: It is a buffer.
        ranks: Ranks of the candidate that hold the part that differs.
        norm_ratio: Norm of the candidate's tensor, by the reference's.
        error: Norm of the difference, by the norm of the reference's tensor.
        noise: The error that rounding alone makes of this tensor; None where not measured.
        limit: Largest error that does not count.
    """

    order: int
    step: int
    microbatch: int
    phase: Phase
    module: str
    tensor: str
    parameter: str | None = None
    ranks: tuple[int, ...] = ()
    kind: DivergenceKind = "value"
    is_buffer: bool = False
    norm_ratio: float | None = None
    error: float | None = None
    noise: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCompared:
    """A tensor that both traces may have and that no rule can merge."""

    module: str
    tensor: str
    phase: Phase
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceComparison:
    """All of `equivalence.json`.

    Attributes:
        problem: With `unusable`: where, found, expected, what to do.
        num_compared: Tensors that were compared, equal or not.
        hint: The likely cause of the first divergence, in a sentence.
        divergences: The first ones, in the reference's order of execution.
    """

    verdict: TraceVerdict
    format_version: FormatVersion = 1
    problem: str | None = None
    steps: Count = 0
    num_compared: Count = 0
    not_compared: tuple[NotCompared, ...] = ()
    hint: str | None = None
    divergences: tuple[TensorDivergence, ...] = ()
    num_divergences: Count = 0


def write_comparison(path: Path, comparison: TraceComparison) -> None:
    """Write `equivalence.json`; numbers that are not finite become null.

    Raises:
        OSError: The file cannot be written.
    """
    write_json_atomically(path, comparison_to_json(comparison))


def comparison_to_json(comparison: TraceComparison) -> JsonValue:
    """Return the content of `equivalence.json`."""
    return _plain(asdict(comparison))


def read_comparison(path: Path) -> TraceComparison:
    """Return the content of `equivalence.json`.

    Raises:
        TraceError: It cannot be read, or holds something else.
    """
    try:
        return parse(TraceComparison, read_bytes(path))
    except OSError as error:
        raise TraceError(str(path), f"cannot be read: {error.strerror}") from error
    except SchemaError as error:
        problem = error.problems[0].in_output
        raise TraceError(str(path), f"{problem}; compare the traces again") from None


def as_text(comparison: TraceComparison) -> str:
    """Return at most a screen: the first divergence, its hint, the next ones, the numbers."""
    return "\n".join(visible(line) for line in _lines(comparison))


def _lines(comparison: TraceComparison) -> Iterator[str]:
    if comparison.problem is not None:
        yield f"the traces cannot be compared: {comparison.problem}"
    first, *others = comparison.divergences or (None,)
    if first is not None:
        yield f"first difference: {_subject(first)}"
        yield f"  {_place(first)}" + (f", {name_ranks(first.ranks)}" if first.ranks else "")
        yield f"  {_amount(first)}"
    if comparison.hint is not None:
        yield f"  hint: {comparison.hint}"
    if others:
        yield "then:"
        for one in others[:_MOST_NEXT]:
            yield "  " + shorten(f"{_subject(one)}, {_place(one)}: {_amount(one)}", _WIDTH - 2)
    yield _numbers(comparison)
    reasons = [one.reason for one in comparison.not_compared]
    by_number = sorted(set(reasons), key=reasons.count, reverse=True)
    for reason in by_number[:_MOST_REASONS]:
        yield "  " + shorten(f"{reasons.count(reason)} not compared: {reason}", _WIDTH - 2)


def _subject(one: TensorDivergence) -> str:
    if one.parameter is not None:
        what = "gradient" if one.phase == "gradient" else "value after the step"
        what = what if one.step else "initial value"
        return f"{one.parameter}, {what}"
    return f"{one.module or 'the model'}, {one.phase}, {one.tensor}"


def _place(one: TensorDivergence) -> str:
    is_parameter = one.phase not in {"forward", "backward"}
    return f"step {one.step}" if is_parameter else f"step {one.step}, micro-batch {one.microbatch}"


_KINDS: dict[DivergenceKind, str] = {
    "value": "its values differ",
    "replicas": "ranks that hold the same part disagree",
    "missing": "the candidate has no such tensor",
    "extra": "the reference has no such tensor",
    "shape": "its shape does not fit the reference's",
    "not_finite": "it has values that are not finite, the reference's has none",
    "bits": "its bits differ",
}


def _amount(one: TensorDivergence) -> str:
    """Return how a tensor differs, in a line."""
    numbers = []
    if one.error is not None:
        numbers.append(f"error {one.error:.1e}")
    if one.limit is not None:
        numbers.append(f"limit {one.limit:.1e}")
    if one.noise is not None:
        numbers.append(f"noise {one.noise:.1e}")
    if one.norm_ratio is not None:
        numbers.append(f"norm {one.norm_ratio:.4g} times the reference's")
    return _KINDS[one.kind] + (f": {', '.join(numbers)}" if numbers else "")


def _numbers(comparison: TraceComparison) -> str:
    compared = counted(comparison.num_compared, "tensor")
    text = f"{comparison.num_divergences} of {compared} differ"
    num_left_out = len(comparison.not_compared)
    return f"{text}, {num_left_out} not compared, {counted(comparison.steps, 'step')}"


def _plain(value: object) -> JsonValue:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return cast("JsonValue", value)


def hint_of(
    divergences: Sequence[TensorDivergence],
    reference: TraceLayout,
    candidate: TraceLayout,
    *,
    is_sharded: bool = False,
) -> str | None:
    """Return the likely cause of the first divergence in a sentence; None without a pattern.

    Args:
        divergences: All of them, in the reference's order of execution.
        reference: Layout of the reference; only sizes count.
        candidate: Layout of the candidate.
        is_sharded: Each rank of the candidate has a part of the optimizer.
    """
    if not divergences:
        return None
    first = divergences[0]
    same = [one for one in divergences if (one.step, one.phase) == (first.step, first.phase)]
    if first.kind == "not_finite":
        return "values overflow or are divided by zero here"
    match first.phase:
        case "forward":
            found = _of_forward(first, same, reference, candidate)
        case "backward":
            found = _of_ratio(first, reference, candidate) or _of_ranks(first, candidate)
        case "gradient":
            found = _of_gradients(same, reference, candidate)
        case "update":
            found = _of_update(same, is_sharded=is_sharded)
        case "initial":
            found = (
                f"{name_ranks(first.ranks)} begin with other values of what they share: seeds,"
                " a checkpoint, or weights that are not broadcast; the reference's replaced them"
            )
    return found


def _of_forward(
    first: TensorDivergence,
    same: Sequence[TensorDivergence],
    reference: TraceLayout,
    candidate: TraceLayout,
) -> str | None:
    if first.tensor == "samples":
        numbers = [one.microbatch for one in same if one.tensor == "samples"]
        return (
            f"samples of {name_ranks(numbers, 'micro-batch')} of the reference are not trained on"
        )
    if not first.module and first.tensor.startswith("input"):
        return "the inputs of the model differ: data, labels or position ids"
    if "dropout" in first.module and first.tensor.startswith("output"):
        return "ranks draw other dropout masks than the reference: seeds or the random state"
    if first.tensor.startswith("input") and first.module:
        return (
            _of_ratio(first, reference, candidate)
            or "what this module gets is computed between modules, or in one that is not compared"
        )
    return _of_ratio(first, reference, candidate) or _of_ranks(first, candidate)


def _of_gradients(
    same: Sequence[TensorDivergence], reference: TraceLayout, candidate: TraceLayout
) -> str | None:
    parameters = [one for one in same if one.parameter is not None]
    names = [one.parameter or "" for one in parameters]
    if not names:
        return (
            "gradients agree and their norm does not: the norm counts parameters that ranks share"
            " twice, or misses some"
        )
    first = parameters[0]
    if candidate.pp[1] > 1 and all(map(_EMBEDDING, names)):
        return (
            "only gradients of the embedding differ: first and last pipeline stage have to add"
            " those of the weight that they share"
        )
    if all(map(_EXPERT, names)):
        ratio = _of_ratio(first, reference, candidate)
        return ratio or "only gradients of experts differ: they are reduced over the wrong ranks"
    if candidate.tp[1] > 1 and all(map(_REPLICATED, names)):
        return (
            "only gradients of parameters that tensor-parallel ranks share differ: with sequence"
            " parallelism each rank has a part, which have to be added"
        )
    return _of_ratio(first, reference, candidate) or _of_ranks(first, candidate)


def _of_update(same: Sequence[TensorDivergence], *, is_sharded: bool) -> str:
    first = same[0]
    if first.is_buffer:
        return "the buffer is updated otherwise, or ranks do not add what each of them counts"
    if first.step == 0:
        return "the initial weights differ already: they were not loaded, or cut otherwise"
    if first.kind == "replicas":
        cause = (
            "the optimizer's parts were not gathered"
            if is_sharded
            else "their optimizers differ, by the learning rate, the clipping or the state"
        )
        return (
            f"gradients agree and {name_ranks(first.ranks)} have other parameters after the step:"
            f" {cause}"
        )
    if first.kind == "missing" and is_sharded:
        return "no rank of the distributed optimizer has a part of the parameter"
    return "gradients agree and parameters do not: the optimizer, its state or its share of ranks"


def _of_ratio(one: TensorDivergence, reference: TraceLayout, candidate: TraceLayout) -> str | None:
    """Return the hint for a norm that is off by the size of an axis."""
    ratio = one.norm_ratio
    if ratio is None or ratio <= 0:
        return None
    for axis, words in _AXES:
        sizes: tuple[int, int] = getattr(candidate, axis)
        others: tuple[int, int] = getattr(reference, axis)
        size = sizes[1] / others[1]
        if size == 1:
            continue
        if math.isclose(ratio, size, rel_tol=_NEAR):
            return (
                f"the norm is {size:g} times the reference's, the number of {words} ranks: a sum"
                " over them instead of a mean, or one reduction too many"
            )
        if math.isclose(ratio, 1 / size, rel_tol=_NEAR):
            return (
                f"the norm is 1/{size:g} of the reference's, {size:g} being the number of {words}"
                " ranks: a reduction over them is missing, or they are averaged twice"
            )
    return None


def _of_ranks(one: TensorDivergence, candidate: TraceLayout) -> str | None:
    """Return the hint for a difference of some ranks only."""
    if one.kind == "replicas":
        return (
            f"{name_ranks(one.ranks)} hold the same and disagree: a reduction over them is missing"
            " or has the wrong group"
        )
    axes = ("tp", "cp") if one.parameter is None else ("tp", "dp", "cp")
    num_ranks = math.prod(getattr(candidate, axis)[1] for axis in axes)
    if one.ranks and len(one.ranks) < num_ranks and candidate.pp[1] == 1:
        return f"only {name_ranks(one.ranks)} of {num_ranks} differ: look at their part"
    return None
