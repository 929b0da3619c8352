"""The result of comparing two traces, and its text. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias, cast

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.schema import Count, FormatVersion
from pytest_megatron.base.text import counted, name_ranks, shorten, visible

_MOST_NEXT = 5  # divergences after the first one that the text has
_MOST_REASONS = 3
_WIDTH = 80
_LAYER = re.compile(r"\blayers\.(\d+)\b").search

DivergenceKind: TypeAlias = Literal[
    "value", "replicas", "missing", "extra", "shape", "not_finite", "bits"
]
TraceVerdict: TypeAlias = Literal["equal", "different", "unusable"]

Phase: TypeAlias = Literal["initial", "forward", "backward", "gradient", "update"]
PHASES: tuple[Phase, ...] = ("initial", "forward", "backward", "gradient", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTensor:
    """A tensor of a training, by its place in the execution.

    Attributes:
        order: Number in the execution of its rank, from 0.
        step: Optimizer step, from 1; the parameters before the first have 0.
        microbatch: Call of the model in the step, from 0; 0 for parameters.
        module: Global name, without wrappers; "" is the model itself.
        tensor: `input.0`, `output.0`, `grad_input.0`, `grad_output.0`, or a parameter's name.
    """

    order: Count
    step: Count
    microbatch: Count
    phase: Phase
    module: str
    tensor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDivergence(TracedTensor):
    """A tensor of the reference from which the candidate's differs.

    Attributes:
        parameter: Name of the parameter, or of the buffer, in phases `initial`, `gradient` and
            `update`.
        is_buffer: It is a buffer.
        ranks: Ranks of the candidate that hold the part that differs.
        norm_ratio: Norm of the candidate's tensor, by the reference's.
        error: Norm of the difference, by the norm of the reference's tensor.
        noise: The error that rounding alone makes of this tensor; None where not measured.
        limit: Largest error that does not count.
    """

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
    """How two traces compare.

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


def depth_of(module: str) -> float:
    """Return the place of a module in the model: embeddings, layers, what follows them."""
    if (layer := _LAYER(module)) is not None:
        return float(layer[1])
    return -1.0 if "embedding" in module else math.inf


def comparison_to_json(comparison: TraceComparison) -> JsonValue:
    """Return a comparison as JSON; numbers that are not finite become null."""
    return _plain(asdict(comparison))


def as_text(comparison: TraceComparison) -> str:
    """Return at most a screen below the first divergence: its hint, the next ones, the numbers."""
    return "\n".join(visible(line) for line in _lines(comparison))


def headline(one: TensorDivergence) -> str:
    """Return `forward of decoder.layers.1.mlp.linear_fc2 output.0, step 1, rank 1`."""
    name = one.parameter or f"{one.module or 'the model'} {one.tensor}"
    what = f"{one.phase} of {name}, step {one.step}" if one.step else f"initial value of {name}"
    if one.phase in {"forward", "backward"} and one.microbatch:
        what += f", micro-batch {one.microbatch}"
    return f"{what}, {name_ranks(one.ranks)}" if one.ranks else what


def _lines(comparison: TraceComparison) -> Iterator[str]:
    """Yield the text of a comparison: how the first difference is one, then the others."""
    first, *others = comparison.divergences or (None,)
    if first is not None:
        yield _amount(first)
    if comparison.hint is not None:
        yield f"hint: {comparison.hint}"
    if others:
        yield "then:"
        for one in others[:_MOST_NEXT]:
            yield "  " + shorten(f"{headline(one)}: {_amount(one)}", _WIDTH - 2)
    yield _numbers(comparison)
    reasons = [one.reason for one in comparison.not_compared]
    by_number = sorted(set(reasons), key=reasons.count, reverse=True)
    for reason in by_number[:_MOST_REASONS]:
        yield "  " + shorten(f"{reasons.count(reason)} not compared: {reason}", _WIDTH - 2)


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
    """Describe how many tensors differ."""
    compared = counted(comparison.num_compared, "tensor")
    text = f"{comparison.num_divergences} of {compared} differ"
    num_left_out = len(comparison.not_compared)
    return f"{text}, {num_left_out} not compared, {counted(comparison.steps, 'step')}"


def _plain(value: object) -> JsonValue:
    """Return a value as JSON can hold it: NaN and infinity are null, keys are text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return cast("JsonValue", value)
